"""Atomic operations: what they do, and what is checked of them."""

from forge_mlx.metal.emulator.errors import AlignmentError, BoundsError, MetalError, ScheduleError, UninitialisedError
import numpy as np
import pytest
from runtime_launch import ALL, result, start


def run(body: str, dtype: type, first: list[float], *, atomic: bool = True, **options) -> np.ndarray:
    """Contents of an atomic output after a launch of 96 threads in two groups."""
    outputs = {"out": np.array(first, dtype)}
    options = {"grid": 96, "threadgroup": 64, "schedules": 1, **options}
    outcome = start(body, {}, outputs, atomic_outputs=atomic, initialised=["out"], **options)
    assert outcome.warnings == ()
    return result(outcome, 0, dtype)


@pytest.mark.parametrize(
    ("operation", "dtype", "first", "want"),
    [
        ("add", np.int32, 5, 5 + sum(range(96))),
        ("sub", np.int32, 5, 5 - sum(range(96))),
        ("add", np.uint32, 2**32 - 1, sum(range(96)) - 1),
        ("add", np.float32, 0.5, 0.5 + sum(range(96))),
        ("sub", np.float32, 0.5, 0.5 - sum(range(96))),
        ("min", np.int32, 50, -45),
        ("max", np.int32, -99, 50),
        ("min", np.uint32, 70, 0),
        ("max", np.uint32, 7, 95),
        ("and", np.uint32, 0xFF, 0),
        ("or", np.uint32, 0x100, 0x17F),
        ("xor", np.uint32, 1, 1),
    ],
)
@pytest.mark.parametrize("schedules", [1, 3])
def test_fetch_operations(operation: str, dtype: type, first: float, want: float, schedules: int):
    value = "i"
    if dtype == np.int32 and operation in ("min", "max"):
        value = "50 - int(i)"
    element = {np.int32: "int", np.uint32: "uint", np.float32: "float"}[dtype]
    body = "uint i = thread_position_in_grid.x;\n"
    body += f"atomic_fetch_{operation}_explicit(&out[0], {element}({value}), memory_order_relaxed);"
    assert run(body, dtype, [first], schedules=schedules)[0] == want


@pytest.mark.parametrize(("operation", "want"), [("min", 3), ("max", 2**63 + 95)])
def test_fetch_operations_of_64_bits(operation: str, want: int):
    body = f"""
    ulong i = thread_position_in_grid.x;
    ulong v = i % 2 ? i + 0x8000000000000000ul : i + 3;
    atomic_{operation}_explicit((device atomic_ulong*)out, v, memory_order_relaxed);
    """
    assert run(body, np.uint64, [50], atomic=False)[0] == want


def test_the_value_before_is_returned():
    body = """
    uint i = thread_position_in_grid.x;
    int place = atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed);
    atomic_store_explicit(&out[1 + place], int(i), memory_order_relaxed);
    """
    got = run(body, np.int32, [0] + [-1] * 96)
    assert got[0] == 96
    np.testing.assert_array_equal(got[1:], np.arange(96))


def test_exchange_and_load():
    body = """
    uint i = thread_position_in_grid.x;
    float before = atomic_exchange_explicit(&out[0], float(i + 1), memory_order_relaxed);
    float now = atomic_load_explicit(&out[0], memory_order_relaxed);
    atomic_store_explicit(&out[i + 1], now - before, memory_order_relaxed);
    """
    got = run(body, np.float32, [0.0] + [9.0] * 96)
    assert got[0] == 96
    np.testing.assert_array_equal(got[1:], np.ones(96))


def test_compare_and_exchange():
    body = """
    uint i = thread_position_in_grid.x;
    uint seen = 7;
    bool stored = atomic_compare_exchange_weak_explicit(&out[0], &seen, i, memory_order_relaxed, memory_order_relaxed);
    atomic_store_explicit(&out[i + 1], stored ? 1000u : seen, memory_order_relaxed);
    """
    got = run(body, np.uint32, [7] + [0] * 96)
    # The first thread finds 7 and stores 0; all others find that 0.
    assert got.tolist() == [0, 1000] + [0] * 95


def test_a_loop_of_compare_and_exchange_multiplies():
    body = """
    float seen = atomic_load_explicit(&out[0], memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(
        &out[0], &seen, seen * 2.0f, memory_order_relaxed, memory_order_relaxed)) {}
    """
    assert run(body, np.float32, [1.0])[0] == 2.0**96


def test_atomics_in_threadgroup_memory():
    body = """
    threadgroup atomic_uint count;
    uint i = thread_position_in_threadgroup.x;
    if (i == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&count, i, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[thread_position_in_grid.x] = float(atomic_load_explicit(&count, memory_order_relaxed));
    """
    outcome = start(body, grid=64, threadgroup=32, schedules=3)
    np.testing.assert_array_equal(result(outcome), np.full(64, 31 * 16))
    (count,) = outcome.counts.arrays
    # Two groups: one store, 32 additions and 32 loads each.
    assert (count.atomics, count.reads, count.writes) == (130, 128, 66)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("atomic_fetch_add_explicit(&out[1], 1.0f, memory_order_relaxed);", BoundsError),
        (
            "atomic_fetch_add_explicit((device atomic<float>*)((device uchar*)out + 2), 1.0f, memory_order_relaxed);",
            BoundsError,
        ),
        ("atomic_fetch_add_explicit((device atomic<float>*)64ul, 1.0f, memory_order_relaxed);", BoundsError),
        ("atomic_fetch_add_explicit((device atomic<float>*)x, 1.0f, memory_order_relaxed);", BoundsError),
    ],
    ids=["past the end", "across the end", "wild", "an input"],
)
def test_bounds(body: str, error: type[MetalError]):
    with pytest.raises(error) as info:
        start(
            body,
            {"x": np.zeros(9, np.float32)},
            {"out": np.zeros(1, np.float32)},
            grid=1,
            atomic_outputs=True,
            initialised=["out"],
        )
    assert type(info.value) is error
    assert info.value.locations[0].line == 1


def test_alignment():
    body = "atomic_fetch_add_explicit((device atomic<float>*)((device uchar*)out + 2), 1.0f, memory_order_relaxed);"
    with pytest.raises(AlignmentError):
        start(body, {}, {"out": np.zeros(2, np.float32)}, grid=1, atomic_outputs=True, initialised=["out"])


def test_an_output_without_a_value():
    add = "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);"
    outputs = {"out": np.zeros(1, np.float32)}
    with pytest.raises(UninitialisedError, match="before anything is written"):
        start(add, {}, outputs, grid=1, atomic_outputs=True)
    store = "atomic_store_explicit(&out[0], 1.0f, memory_order_relaxed);\n"
    assert result(start(store + add, {}, outputs, grid=1, atomic_outputs=True))[0] == 2
    outcome = start(add, {}, outputs, grid=1, atomic_outputs=True, checks=ALL - {"uninitialised"})
    assert np.isnan(result(outcome)[0])


def test_a_sum_of_floats_depends_on_the_order():
    # Exactly what a second schedule is for.
    body = "float v = thread_position_in_grid.x == 0 ? 1e8f : 1.0f;\n"
    body += "atomic_fetch_add_explicit(&out[0], v, memory_order_relaxed);"
    outputs = {"out": np.zeros(1, np.float32)}
    with pytest.raises(ScheduleError, match="'out'"):
        start(body, {}, outputs, grid=64, atomic_outputs=True, initialised=["out"], schedules=2)
