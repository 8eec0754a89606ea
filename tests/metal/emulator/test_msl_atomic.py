"""Atomic types and functions: every operation, type and address space, and what Metal does not allow."""

from typing import Any

from forge_mlx.metal.emulator import BoundsError
from lane_kernels import launch, refusals
import mlx.core as mx
import numpy as np
import pytest

FETCH: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
DTYPES = {"int": mx.int32, "uint": mx.uint32, "float": mx.float32}
NUMPY: dict[str, Any] = {"int": np.int32, "uint": np.uint32, "float": np.float32}
COMBINATIONS = [
    *((name, kind, space) for name in FETCH for kind in ("int", "uint") for space in ("device", "threadgroup")),
    ("add", "float", "device"),
    ("sub", "float", "device"),
]
# 64 threads in two simdgroups change one location. The output: what each was given, and what each finds at the end.
FETCHES = {
    "threadgroup": """
    uint i = thread_position_in_grid.x;
    threadgroup atomic<T> cell;
    if (i == 0) atomic_store_explicit(&cell, start[0], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    T old = {call}(&cell, x[i], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_store_explicit(&y[i], old, memory_order_relaxed);
    atomic_store_explicit(&y[64 + i], atomic_load_explicit(&cell, memory_order_relaxed), memory_order_relaxed);
""",
    "device": """
    uint i = thread_position_in_grid.x;
    volatile device atomic<T>* cell = y + 128;
    if (i == 0) atomic_store_explicit(cell, start[0], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_device);
    T old = {call}(cell, x[i], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_device);
    atomic_store_explicit(&y[i], old, memory_order_relaxed);
    atomic_store_explicit(&y[64 + i], atomic_load_explicit(cell, memory_order_relaxed), memory_order_relaxed);
""",
}


def values(kind: str) -> np.ndarray:
    """65 values whose sum wraps; of floats one that is exact."""
    rng = np.random.default_rng(4)
    if kind == "float":
        return rng.integers(-100, 100, 65).astype(np.float32)
    info = np.iinfo(NUMPY[kind])
    return rng.integers(info.min, info.max, 65, dtype=NUMPY[kind], endpoint=True)


@pytest.mark.parametrize(("name", "kind", "space"), COMBINATIONS, ids=[" ".join(each) for each in COMBINATIONS])
def test_fetch(name: str, kind: str, space: str):
    x = values(kind)
    got = launch(
        FETCHES[space].format(call=f"atomic_fetch_{name}_explicit"),
        {"start": np.repeat(x[:1], 8), "x": x[1:]},
        (129,),
        DTYPES[kind],
        threads=64,
        template=(("T", DTYPES[kind]),),
        init_value=0,
        atomic_outputs=True,
    )
    with np.errstate(over="ignore"):
        steps = FETCH[name].accumulate(x, dtype=x.dtype)
    # Threads run in order between two barriers.
    np.testing.assert_array_equal(got[:64], steps[:-1])
    np.testing.assert_array_equal(got[64:128], np.repeat(steps[-1:], 64))


def test_a_float_is_added_to_without_being_rounded_to_less():
    body = """
    device atomic<float>* cell = &y[thread_position_in_grid.x % 8];
    for (int i = 0; i < 3; i++) atomic_fetch_add_explicit(cell, x[i], memory_order_relaxed);
"""
    x = np.array([0.1, 1e-8, 3e7, *[0] * 5], np.float32)
    want = np.float32(0)
    for each in [*x[:3]] * 4:
        want += each
    got = launch(body, {"x": x}, (8,), mx.float32, init_value=0, atomic_outputs=True)
    np.testing.assert_array_equal(got, np.full(8, want))


@pytest.mark.parametrize("kind", ["int", "uint", "bool"])
@pytest.mark.parametrize("space", ["device", "threadgroup"])
def test_load_store_exchange_and_compare_exchange(space: str, kind: str):
    cell = (
        "threadgroup atomic<T> cell;"
        if space == "threadgroup"
        else "device atomic<T>& cell = *(device atomic<T>*)&y[8];"
    )
    body = f"""
    using T = {kind};
    {cell}
    T one = T(1), zero = T(0), expected;
    atomic_store_explicit(&cell, one, memory_order_relaxed);
    uint r[8];
    r[0] = atomic_load_explicit(&cell, memory_order_relaxed);
    r[1] = atomic_exchange_explicit(&cell, zero, memory_order_relaxed);
    r[2] = atomic_load_explicit(&cell, memory_order_relaxed);
    expected = one;
    r[3] = atomic_compare_exchange_weak_explicit(
        &cell, &expected, one, memory_order_relaxed, memory_order_relaxed);
    r[4] = expected;
    r[5] = atomic_compare_exchange_weak_explicit(
        &cell, &expected, one, memory_order_relaxed, memory_order_relaxed);
    r[6] = expected;
    r[7] = atomic_load_explicit(&cell, memory_order_relaxed);
    for (int i = 0; i < 8; i++) atomic_store_explicit(&y[i], r[i], memory_order_relaxed);
"""
    got = launch(body, {"x": np.zeros(8)}, (9,), mx.uint32, threads=1, init_value=7, atomic_outputs=True)
    np.testing.assert_array_equal(got[:8], [1, 1, 0, 0, 0, 1, 0, 1])


def test_compare_exchange_of_floats_makes_any_operation():
    body = """
    // A wrong guess: the first comparison must fail and tell the value.
    float old = -7.0f;
    while (!atomic_compare_exchange_weak_explicit(
        &y[0], &old, old * x[thread_position_in_grid.x], memory_order_relaxed, memory_order_relaxed)) {}
"""
    x = np.tile(np.array([2, 0.5, -1, 4], np.float32), 8)
    got = launch(body, {"x": x}, (1,), mx.float32, init_value=1, atomic_outputs=True)
    assert got[0] == x.prod()


def test_the_least_and_greatest_of_ulong():
    body = """
    device atomic_ulong* cells = (device atomic_ulong*)y;
    ulong mine = ulong(x[thread_position_in_grid.x]) << 33;
    atomic_max_explicit(&cells[0], mine, memory_order_relaxed);
    atomic_min_explicit(&cells[1], mine, memory_order_relaxed);
"""
    x = np.random.default_rng(2).integers(1, 1000, 32).astype(np.int32)
    got = launch(body, {"x": x}, (2,), mx.uint64, init_value=1 << 35)
    np.testing.assert_array_equal(got, [max(int(x.max()), 4) << 33, min(int(x.min()), 4) << 33])


def test_named_types_volatile_pointers_literals_and_members():
    header = """
struct Counters { atomic_uint first; metal::atomic_int second; };
uint bump(volatile device atomic_uint* counter) {
  return metal::atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}
"""
    body = """
    device Counters* counters = (device Counters*)y;
    bump(&counters[1].first);
    atomic_fetch_sub_explicit(&(counters[1].second), 2u, metal::memory_order_relaxed);
    const device atomic_uint* seen = &counters[1].first;
    uint now = atomic_load_explicit(seen, memory_order_relaxed);
    if (now > 100) atomic_store_explicit(&counters[0].first, now, memory_order_relaxed);
"""
    got = launch(body, {"x": np.zeros(8)}, (4,), mx.int32, header=header, init_value=0)
    np.testing.assert_array_equal(got, [0, 0, 32, -64])


def test_an_atomic_outside_its_array():
    with pytest.raises(BoundsError) as raised:
        launch(
            "\n\natomic_fetch_add_explicit(&y[8], 1u, memory_order_relaxed);",
            {"x": np.zeros(8)},
            (8,),
            mx.uint32,
            init_value=0,
            atomic_outputs=True,
        )
    assert (raised.value.buffer, raised.value.index) == ("y", 8)
    assert raised.value.locations[0].line == 3


MISSING = {
    "a plain read": "uint z = y[0];",
    "a plain write": "y[0] = 1u;",
    "a copy": "atomic_uint z = y[0];",
    "without an order": "atomic_fetch_add_explicit(&y[0], 1u);",
    "another order": "atomic_fetch_add_explicit(&y[0], 1u, memory_order_seq_cst);",
    "the short form": "atomic_fetch_add(&y[0], 1u);",
    "a fence": "atomic_thread_fence(mem_flags::mem_device, memory_order_relaxed);",
    "a barrier with an order": "threadgroup_barrier(mem_flags::mem_device, memory_order_relaxed);",
    "a barrier without flags": "threadgroup_barrier();",
    "a barrier with a number": "threadgroup_barrier(2);",
    "a flag without its class": "threadgroup_barrier(mem_threadgroup);",
    "an ordinary pointer": "atomic_fetch_add_explicit((device uint*)y, 1u, memory_order_relaxed);",
    "a constant pointer": "constant atomic_uint* p = 0; atomic_load_explicit(p, memory_order_relaxed);",
    "a thread's variable": "thread atomic_uint* p = 0; atomic_load_explicit(p, memory_order_relaxed);",
    "least of float": "atomic_fetch_min_explicit((device atomic_float*)y, 1.0f, memory_order_relaxed);",
    "bits of float": "atomic_fetch_and_explicit((device atomic_float*)y, 1.0f, memory_order_relaxed);",
    "sum of shared float": "threadgroup atomic_float p; atomic_fetch_add_explicit(&p, 1, memory_order_relaxed);",
    "shared float": "threadgroup atomic_float p; atomic_load_explicit(&p, memory_order_relaxed);",
    "sum of ulong": "atomic_fetch_add_explicit((device atomic_ulong*)y, 1ul, memory_order_relaxed);",
    "load of ulong": "atomic_load_explicit((device atomic_ulong*)y, memory_order_relaxed);",
    "least of ulong, as a value": "ulong z = atomic_min_explicit((device atomic_ulong*)y, 1ul, memory_order_relaxed);",
    "least of uint, as of ulong": "atomic_min_explicit(&y[0], 1u, memory_order_relaxed);",
    "shared ulong": "threadgroup atomic_ulong p; atomic_max_explicit(&p, 1ul, memory_order_relaxed);",
    "bits of bool": "atomic_fetch_or_explicit((device atomic_bool*)y, true, memory_order_relaxed);",
    "half": "atomic_load_explicit((device atomic<half>*)y, memory_order_relaxed);",
}


@pytest.mark.parametrize("preamble", [True, False], ids=["with MLX's header", "without"])
def test_what_metal_does_not_have(preamble: bool):
    refusals(list(MISSING.values()), atomic_outputs=True, mlx_preamble=preamble)


def test_flags_of_barriers_combine():
    body = """
    constexpr mem_flags both = mem_flags::mem_device | mem_flags::mem_threadgroup;
    threadgroup uint cell[32];
    cell[thread_position_in_grid.x] = thread_position_in_grid.x;
    threadgroup_barrier(both);
    simdgroup_barrier(mem_flags::mem_none | metal::mem_flags::mem_texture);
    y[thread_position_in_grid.x] = cell[31 - thread_position_in_grid.x];
"""
    np.testing.assert_array_equal(launch(body, {"x": np.zeros(8)}, (32,), mx.uint32), np.arange(31, -1, -1))


def test_what_an_atomic_holds():
    said = refusals(
        [f"volatile device atomic<{kind}>* p = 0; p->emu_value = 0;" for kind in ("long", "half", "float2")]
    )
    assert all("an atomic holds int, uint, bool, float or ulong" in each for each in said)
