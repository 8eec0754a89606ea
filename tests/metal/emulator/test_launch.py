"""Launches as a whole: ids, partial threadgroups, schedules, counts, limits, messages."""

from forge_mlx.metal.emulator.errors import LimitError, MetalError, RaceError, ScheduleError
from forge_mlx.metal.emulator.findings import Geometry
from forge_mlx.metal.emulator.launch import Buffer, Outcome, _lock, _opened, _Order, launch
from forge_mlx.metal.emulator.settings import Settings
import numpy as np
import pytest
from runtime_launch import ALL, compiled, result, start

X = np.arange(64, dtype=np.float32)
INDEX = "uint i = thread_position_in_threadgroup.x;\n"
PLACE = """
    uint3 at = thread_position_in_grid;
    uint place = at.x + threads_per_grid.x * (at.y + threads_per_grid.y * at.z);
"""


def check_ints(
    expected: dict[str, np.ndarray], grid: tuple[int, int, int], threadgroup: tuple[int, int, int], **settings
) -> None:
    """Each expression has the expected value, given by place in the grid, in every thread."""
    body = PLACE + "".join(f"out[place * {len(expected)} + {k}] = int({each});\n" for k, each in enumerate(expected))
    shape = (*grid[::-1], len(expected))
    outcome = start(body, {}, {"out": np.zeros(shape, np.int32)}, grid=grid, threadgroup=threadgroup, **settings)
    got = result(outcome, 0, np.int32).reshape(shape)
    for k, (each, want) in enumerate(expected.items()):
        np.testing.assert_array_equal(got[..., k], np.broadcast_to(want, shape[:-1]), err_msg=each)


@pytest.mark.parametrize(
    ("grid", "threadgroup"),
    [
        ((1, 1, 1), (1, 1, 1)),
        ((64, 1, 1), (64, 1, 1)),
        ((70, 1, 1), (32, 1, 1)),
        ((10, 6, 4), (4, 4, 2)),
        ((5, 1, 3), (8, 8, 8)),
        ((33, 31, 1), (32, 32, 1)),
    ],
)
@pytest.mark.parametrize("schedules", [1, 3])
def test_positions_and_sizes(grid: tuple[int, int, int], threadgroup: tuple[int, int, int], schedules: int):
    z, y, x = np.indices(grid[::-1])
    at = (x, y, z)
    part = [min(a, b) for a, b in zip(grid, threadgroup, strict=True)]
    groups = [-(-a // b) for a, b in zip(grid, part, strict=True)]
    expected = {}
    for axis, name in enumerate("xyz"):
        group, inside = at[axis] // part[axis], at[axis] % part[axis]
        size = np.minimum(part[axis], grid[axis] - group * part[axis])
        expected |= {
            f"thread_position_in_grid.{name}": at[axis],
            f"thread_position_in_threadgroup.{name}": inside,
            f"threadgroup_position_in_grid.{name}": group,
            f"threads_per_threadgroup.{name}": size,
            f"dispatch_threads_per_threadgroup.{name}": part[axis],
            f"threads_per_grid.{name}": grid[axis],
            f"threadgroups_per_grid.{name}": groups[axis],
        }
    check_ints(expected, grid, threadgroup, schedules=schedules)


def test_indices_in_a_partial_threadgroup():
    # A threadgroup of 5 x 2 at the edge: its simdgroups are formed of the threads that there are.
    grid, threadgroup = (13, 10, 1), (8, 8, 1)
    _, y, x = np.indices(grid[::-1])
    width = np.where(x < 8, 8, 5)
    height = np.where(y < 8, 8, 2)
    index = x % 8 + y % 8 * width
    threads = width * height
    expected = {
        "thread_index_in_threadgroup": index,
        "thread_index_in_simdgroup": index % 32,
        "thread_index_in_quadgroup": index % 4,
        "simdgroup_index_in_threadgroup": index // 32,
        "quadgroup_index_in_threadgroup": index // 4,
        "simdgroups_per_threadgroup": -(-threads // 32),
        "quadgroups_per_threadgroup": -(-threads // 4),
        "dispatch_simdgroups_per_threadgroup": 2,
        "dispatch_quadgroups_per_threadgroup": 16,
        "threads_per_simdgroup": 32,
        "thread_execution_width": 32,
        "simd_sum(1)": np.minimum(32, threads - index // 32 * 32),
    }
    check_ints(expected, grid, threadgroup)


ORDER = "device uint* n = (device uint*)next;\nout[{}] = n[0];\nn[0] = n[0] + 1;"


def every_order(
    body: str, outputs: dict[str, np.ndarray], grid: int, threadgroup: int, seed: int = 0, number: int = 4
) -> list[Outcome]:
    """What each order gives by itself: forward, reverse, then random ones."""
    chosen = Settings(checks=frozenset({"bounds"}), seed=seed)
    kernel = compiled(body, {}, outputs, settings=chosen)
    buffers = [Buffer(name, array, 4, "uint32", writable=True) for name, array in outputs.items()]
    geometry = Geometry((grid, 1, 1), (threadgroup, 1, 1))
    orders = [_Order(0), _Order(1), *(_Order(2, seed + i) for i in range(number - 2))]
    with _lock, _opened(kernel, buffers, geometry, chosen) as run:
        return [run.once(order) for order in orders]


def turns(body: str, grid: int, threadgroup: int, seed: int = 0) -> list[list[int]]:
    """The turn at which each thread ran, for each order."""
    outputs = {"out": np.zeros(grid, np.uint32), "next": np.zeros(1, np.uint32)}
    outcomes = every_order(body, outputs, grid, threadgroup, seed)
    return [result(outcome, 0, np.uint32).tolist() for outcome in outcomes]


def test_orders_of_threads():
    body = INDEX + ORDER.format("i")
    forward, reverse, first, second = turns(body, 96, 96)
    assert forward == list(range(96))
    assert reverse == forward[::-1]
    assert sorted(first) == sorted(second) == forward
    assert first != second
    assert first not in (forward, reverse)
    # Not the simdgroups alone and not the lanes alone.
    assert [first[i] // 32 for i in (0, 32, 64)] != [0, 1, 2] or [second[i] // 32 for i in (0, 32, 64)] != [0, 1, 2]
    assert turns(body, 96, 96) == [forward, reverse, first, second]
    assert turns(body, 96, 96, seed=1)[2] == second


def test_orders_of_threadgroups():
    forward, reverse, first, second = turns("uint g = thread_position_in_grid.x;\n" + ORDER.format("g"), 40, 1)
    assert forward == list(range(40))
    assert reverse == forward[::-1]
    assert sorted(first) == sorted(second) == forward
    assert len({tuple(each) for each in (forward, reverse, first, second)}) == 4


def test_threads_have_a_new_order_in_every_threadgroup():
    found = np.array(turns("uint g = thread_position_in_grid.x;\n" + ORDER.format("g"), 128, 32)[2])
    inside = {tuple(np.argsort(found[group * 32 : group * 32 + 32])) for group in range(4)}
    assert len(inside) == 4


def test_a_result_that_depends_on_the_order_of_threads():
    body = (
        INDEX
        + "threadgroup int last[1];\nlast[0] = int(i);\n"
        + "threadgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = last[0];"
    )
    checks = ALL - {"races", "lockstep"}
    with pytest.raises(ScheduleError) as info:
        start(body, checks=checks, schedules=2)
    assert (info.value.buffer, info.value.index) == ("out", 0)
    assert "63.0 when they run forward and 0.0 in reverse" in str(info.value)
    start(body, checks=checks, schedules=1)


def test_lanes_that_rely_on_lockstep_are_named_where_the_result_depends_on_it():
    body = INDEX + "threadgroup float shared[32];\nshared[i] = x[i];\nout[i] = shared[31 - i];"
    with pytest.raises(ScheduleError, match=r"lanes of one simdgroup rely on lockstep.*'shared'"):
        start(body, {"x": X[:32]}, {"out": np.zeros(32, np.float32)}, grid=32, threadgroup=32, schedules=2)


def test_a_result_that_depends_on_the_order_of_threadgroups():
    body = "atomic_store_explicit(&out[2], thread_position_in_grid.x, memory_order_relaxed);"
    outputs = {"out": np.zeros(3, np.uint32)}
    with pytest.raises(ScheduleError, match="at index 2 it is 7 when they run forward and 0 in reverse"):
        start(body, {}, outputs, grid=8, threadgroup=1, schedules=2, atomic_outputs=True, initialised=["out"])


def test_only_a_random_order_shows_it():
    # Threads that a forward and a reverse run order alike: the middle one first.
    body = (
        "uint g = thread_position_in_grid.x;\nif (g == 1) atomic_store_explicit(&out[0], 5u, memory_order_relaxed);\n"
    )
    body += "else { uint s = atomic_load_explicit(&out[0], memory_order_relaxed);\n"
    body += "if (s == 0) atomic_store_explicit(&out[1], 1u, memory_order_relaxed);\n"
    body += "else atomic_store_explicit(&out[2], 1u, memory_order_relaxed); }"
    outputs = {"out": np.zeros(3, np.uint32)}
    options = {"grid": 3, "threadgroup": 1, "atomic_outputs": True, "initialised": ["out"]}
    start(body, {}, outputs, schedules=2, **options)
    with pytest.raises(ScheduleError, match=r"random order \(seed 0\)|random order \(seed [1-9]\)"):
        start(body, {}, outputs, schedules=10, **options)


def test_nan_outputs_of_two_schedules_are_equal():
    outcome = start(INDEX + "out[i] = NAN;", schedules=3)
    assert np.isnan(result(outcome)).all()


def test_all_counts():
    body = """
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    tile[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float4 v = ((threadgroup float4*)tile)[i / 4];
    simdgroup_barrier(mem_flags::mem_none);
    out[thread_position_in_grid.x] = v.x + c[0] + simd_sum(1.0f);
    """
    c = np.ones(1, np.float32)
    counts = start(body, {"x": X, "c": c}, {"out": np.zeros(128, np.float32)}, grid=128, threadgroup=64).counts
    x, constant, out = counts.buffers
    (tile,) = counts.arrays
    assert (x.name, x.space, x.size) == ("x", "device", 256)
    assert (x.reads, x.bytes_read, x.distinct_bytes_read) == (128, 512, 256)
    assert (x.writes, x.bytes_written, x.distinct_bytes_written, x.atomics) == (0, 0, 0, 0)
    assert (constant.space, constant.reads, constant.distinct_bytes_read) == ("constant", 128, 4)
    assert (out.writes, out.bytes_written, out.distinct_bytes_written, out.reads) == (128, 512, 512, 0)
    assert (tile.name, tile.space, tile.size) == ("tile", "threadgroup", 256)
    assert (tile.reads, tile.bytes_read, tile.distinct_bytes_read) == (128, 2048, 512)
    assert (tile.writes, tile.bytes_written, tile.distinct_bytes_written) == (128, 512, 512)
    assert counts.instrumented
    assert (counts.threads, counts.threadgroups) == (128, 2)
    assert (counts.threadgroup_barriers, counts.simdgroup_barriers, counts.simdgroup_functions) == (2, 4, 4)
    assert counts.matrix_multiply_accumulates == 0
    assert counts.steps > 128
    assert counts.device_bytes == 512 + 512 + 512
    assert counts.distinct_device_bytes == 256 + 4 + 512


def test_counts_are_of_one_schedule():
    body = INDEX + "out[i] = x[i] + simd_sum(1.0f);"
    once, thrice = (start(body, {"x": X}, schedules=schedules).counts for schedules in (1, 3))
    assert once == thrice
    outputs = {"out": np.zeros(64, np.uint32)}
    outcomes = every_order(INDEX + "out[i] = out[i] + simd_sum(1);", outputs, 64, 64)
    assert all(outcome.counts == outcomes[0].counts for outcome in outcomes)


def test_counts_without_instrumentation():
    counts = start(INDEX + "out[i] = simd_sum(x[i]);", {"x": X}, checks=frozenset()).counts
    assert not counts.instrumented
    assert counts.device_bytes == 0
    assert counts.simdgroup_functions == 2


def test_a_copy_of_a_struct_is_counted():
    header = "struct Big { float v[9]; };"
    body = "device Big* to = (device Big*)out;\nto[0] = ((const device Big*)x)[0];"
    counts = start(body, {"x": X}, {"out": np.zeros(9, np.float32)}, grid=1, header=header).counts
    assert counts.buffers[0].bytes_read == counts.buffers[1].bytes_written == 36
    assert counts.buffers[0].distinct_bytes_read == 36


def test_limits():
    for threadgroup in ((1025, 1, 1), (32, 33, 1)):
        with pytest.raises(LimitError, match="1024"):
            start("out[0] = 0.0f;", grid=(2048, 64, 1), threadgroup=threadgroup)
    # Cut to the grid first.
    start(PLACE + "out[place] = 0.0f;", grid=(8, 4, 1), threadgroup=(1024, 1024, 1))
    kernel = compiled("out[0] = 0.0f;", {}, {"out": np.zeros(1, np.float32)}, settings=Settings())
    buffers = [Buffer(f"b{i}", np.zeros(1, np.float32), 4, "float32", writable=not i) for i in range(32)]
    with pytest.raises(LimitError, match="31"):
        launch(kernel, buffers, (1, 1, 1), (1, 1, 1), Settings())
    launch(kernel, buffers, (1, 1, 1), (1, 1, 1), Settings(checks=ALL - {"limits"}))


@pytest.mark.parametrize(
    ("grid", "threadgroup"), [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (1, 0, 1)), ((2**32, 1, 1), (1, 1, 1))]
)
def test_impossible_sizes(grid: tuple[int, int, int], threadgroup: tuple[int, int, int]):
    kernel = compiled("out[0] = 0.0f;", {}, {"out": np.zeros(1, np.float32)}, settings=Settings())
    buffers = [Buffer("out", np.zeros(1, np.float32), 4, "float32", writable=True)]
    with pytest.raises(ValueError, match="every axis"):
        launch(kernel, buffers, grid, threadgroup, Settings())


def test_inputs_are_not_changed_and_outputs_are_new():
    x = X.copy()
    first = start(INDEX + "out[i] = x[i];", {"x": x})
    second = start(INDEX + "out[i] = x[i] + 1.0f;", {"x": x})
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(result(first), X)
    np.testing.assert_array_equal(result(second), X + 1)


def test_initialised_outputs_begin_anew_in_every_schedule():
    outcome = start(INDEX + "out[i] += 1.0f;", {}, {"out": X}, initialised=["out"], schedules=3)
    np.testing.assert_array_equal(result(outcome), X + 1)


def test_a_message_for_a_kernels_author():
    body = (
        INDEX + "threadgroup float shared[64];\nshared[i] = 0.0f;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
    )
    body += "shared[i / 2] = 1.0f;\nout[i] = shared[i];"
    with pytest.raises(RaceError) as info:
        start(body, checks=ALL - {"lockstep"})
    message = str(info.value)
    assert message.startswith("[k] race on threadgroup array 'shared' at index ")
    assert "k body:5" in message
    assert "no threadgroup_barrier(mem_threadgroup) between" in message
    assert info.value.kernel == "k"


def test_the_threadgroup_is_named_where_there_are_several():
    body = "if (thread_position_in_grid.x == 5 && thread_position_in_grid.y == 2) out[900] = 0.0f;\nelse out[0] = 0.0f;"
    with pytest.raises(MetalError) as info:
        start(
            body,
            {},
            {"out": np.zeros(4, np.float32)},
            grid=(8, 4, 1),
            threadgroup=(4, 2, 1),
            checks=frozenset({"bounds"}),
        )
    (thread,) = info.value.threads
    assert (thread.group, thread.position, thread.index) == ((1, 1, 0), (1, 0, 0), 1)
    assert "thread 1 of threadgroup (1, 1, 0)" in str(info.value)


def test_many_threadgroups():
    outcome = start("out[thread_position_in_grid.x] = 1.0f;", grid=20_000, threadgroup=8)
    assert result(outcome).sum() == 20_000
