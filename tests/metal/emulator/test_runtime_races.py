"""The race clock: which accesses a barrier orders, for every pair of accesses and every kind of memory."""

from forge_mlx.metal.emulator.errors import MetalError, RaceError, UninitialisedError
import numpy as np
import pytest
from runtime_launch import ALL, result, start

X = np.arange(64, dtype=np.float32)
INDEX = "uint i = thread_position_in_threadgroup.x;\n"
TILE = INDEX + "threadgroup float tile[64];\n"
THREADGROUP = "mem_flags::mem_threadgroup"
DEVICE = "mem_flags::mem_device"
NONE = "mem_flags::mem_none"
BOTH = "mem_flags::mem_device | mem_flags::mem_threadgroup"


def race(body: str, *arguments, **settings) -> RaceError:
    """The race that a launch is refused for."""
    with pytest.raises(RaceError) as info:
        start(body, *arguments, **settings)
    return info.value


def told(error: MetalError) -> tuple:
    """Buffer, index, threads and lines that an exception names."""
    threads = [thread.index for thread in error.threads]
    return error.buffer, error.index, threads, [place.line for place in error.locations]


def clean(body: str, *arguments, **settings):
    """A launch without finding and without warning under several schedules."""
    outcome = start(body, *arguments, **{"schedules": 4, **settings})
    assert outcome.warnings == ()
    return outcome


def barrier(flags: str) -> str:
    return f"threadgroup_barrier({flags});\n"


def test_write_then_read():
    body = TILE + "tile[i] = x[i];\n{}out[i] = tile[63 - i];"
    assert told(race(body.format(""), {"x": X})) == ("tile", 32, [32, 31], [3, 4])
    assert told(race(body.format(barrier(NONE)), {"x": X})) == ("tile", 63, [0, 63], [5, 3])
    clean(body.format(barrier(THREADGROUP)), {"x": X})


def test_read_then_write():
    # Every thread writes where the other simdgroup has read.
    body = TILE + "tile[i] = x[i];\n" + barrier(THREADGROUP) + "float v = tile[(i + 32) % 64];\n{}tile[i] = v;\n"
    body += barrier(THREADGROUP) + "out[i] = tile[i];"
    assert told(race(body.format(""), {"x": X})) == ("tile", 0, [32, 0], [5, 6])
    clean(body.format(barrier(THREADGROUP)), {"x": X})


def test_write_then_write():
    body = TILE + "tile[i] = 1.0f;\n{}tile[(i + 32) % 64] = 2.0f;\n" + barrier(THREADGROUP) + "out[i] = tile[i];"
    assert told(race(body.format(""))) == ("tile", 32, [32, 0], [3, 4])
    clean(body.format(barrier(THREADGROUP)))


def test_a_write_after_a_read_across_the_back_edge_of_a_loop():
    body = TILE + "float sum = 0.0f;\nfor (uint k = 0; k < 3; k++) {\ntile[i] = x[i] + k;\n" + barrier(THREADGROUP)
    body += "sum += tile[63 - i];\n// end\n}\nout[i] = sum;"
    for schedules in (1, 4):
        error = race(body, {"x": X}, schedules=schedules)
        assert sorted(place.line for place in error.locations) == [5, 7]
    clean(body.replace("// end\n", barrier(THREADGROUP)), {"x": X})


@pytest.mark.parametrize(
    ("flags", "threadgroup", "device"),
    [(NONE, False, False), (THREADGROUP, True, False), (DEVICE, False, True), (BOTH, True, True)],
    ids=["none", "threadgroup", "device", "both"],
)
def test_a_barrier_orders_only_the_memory_it_names(flags: str, threadgroup: bool, device: bool):
    shared = TILE + "tile[i] = x[i];\n" + barrier(flags) + "out[i] = tile[63 - i];"
    outer = INDEX + "out[i] = x[i];\n" + barrier(flags) + "also[i] = out[63 - i];"
    outputs = {"out": np.zeros(64, np.float32), "also": np.zeros(64, np.float32)}
    for body, ordered, name in ((shared, threadgroup, "tile"), (outer, device, "out")):
        taken = outputs if name == "out" else {"out": outputs["out"]}
        if ordered:
            clean(body, {"x": X}, taken)
        else:
            error = race(body, {"x": X}, taken)
            assert error.buffer == name
            assert ("mem_device" if name == "out" else "mem_threadgroup") in str(error)


def test_an_earlier_reader_of_another_simdgroup_is_not_forgotten():
    # Threads 0, 32, 33, ... read in this order, then 63 writes: of another simdgroup is thread 0 alone.
    body = TILE + "tile[i] = x[i];\n" + barrier(THREADGROUP) + "float v = i == 0 || i >= 32 ? tile[0] : 0.0f;\n"
    body += "if (i == 63) tile[0] = v + 1.0f;\nout[i] = v;"
    for schedules in (1, 4):
        error = race(body, {"x": X}, schedules=schedules)
        assert told(error) == ("tile", 0, [63, 0], [6, 5])


@pytest.mark.parametrize("reader", [0, 5, 37])
def test_any_one_reader_is_found(reader: int):
    # All others are ordered by the barrier; only `reader` reads after it.
    body = f"""
    uint i = thread_position_in_threadgroup.x;
    threadgroup float one[1];
    if (i == 0) one[0] = 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float v = one[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == {reader}) v += one[0];
    if (i == 64) one[0] = 2.0f;
    out[i] = v;
    """
    error = race(body, grid=96, schedules=1)
    assert sorted(thread.index for thread in error.threads) == [reader, 64]
    clean(body.replace("if (i == 64)", f"if (i == {reader})"), grid=96)


def test_readers_of_one_simdgroup_and_a_writer_among_them():
    # A warning, whichever lane writes; also when the lane itself was the last to read.
    for writer in (0, 3, 31):
        body = (
            TILE
            + "tile[i] = 0.0f;\n"
            + barrier(THREADGROUP)
            + f"float v = tile[1];\nif (i == {writer}) tile[1] = 2.0f;\n"
        )
        body += "out[i] = v;"
        outcome = start(body, grid=32)
        assert len(outcome.warnings) == 1
        assert "lockstep" in outcome.warnings[0]


def test_lanes_of_one_simdgroup():
    body = TILE + "tile[i] = x[i];\n{}out[i] = tile[i ^ 1];"
    outcome = start(body.format(""), {"x": X})
    assert len(outcome.warnings) == 1
    (warning,) = outcome.warnings
    assert "k body:3" in warning
    assert "k body:4" in warning
    assert "simdgroup_barrier(mem_threadgroup)" in warning
    clean(body.format("simdgroup_barrier(mem_flags::mem_threadgroup);\n"), {"x": X})
    assert start(body.format("simdgroup_barrier(mem_flags::mem_device);\n"), {"x": X}).warnings
    assert start(body.format("simdgroup_barrier(mem_flags::mem_none);\n"), {"x": X}).warnings
    assert (
        start(body.format("simdgroup_barrier(mem_flags::mem_none);\n"), {"x": X}, checks=ALL - {"lockstep"}).warnings
        == ()
    )


def test_a_simdgroup_barrier_does_not_order_two_simdgroups():
    body = TILE + "tile[i] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = tile[63 - i];"
    assert race(body, {"x": X}).buffer == "tile"


def test_a_simdgroup_function_orders_nothing():
    body = TILE + "tile[i] = x[i];\nfloat s = simd_sum(1.0f);\nout[i] = tile[i ^ 1] + s;"
    assert start(body, {"x": X}).warnings


def test_lanes_that_write_the_same_value_rely_on_nothing():
    # Each lane stores the simdgroup's sum: which one comes last does not show.
    same = INDEX + "out[i / 32] = simd_sum(1.0f);"
    outputs = {"out": np.zeros(2, np.float32)}
    assert clean(same, {}, outputs).outputs
    different = INDEX + "out[i / 32] = float(i);"
    assert "lockstep" in start(different, {}, outputs).warnings[0]
    with pytest.raises(RaceError):
        start(INDEX + "out[0] = 1.0f;", {}, {"out": np.zeros(1, np.float32)})


def test_two_threadgroups_write_one_element():
    body = "out[thread_position_in_grid.x / 64] = 1.0f;"
    error = race(body, {}, {"out": np.zeros(1, np.float32)}, grid=2, threadgroup=1)
    assert [thread.group for thread in error.threads] == [(1, 0, 0), (0, 0, 0)]
    assert "two threadgroups" in str(error)


def test_a_threadgroup_reads_what_another_one_wrote():
    body = "uint g = thread_position_in_grid.x;\nout[g] = 1.0f;\nif (g == 40) also[0] =\nout[3];"
    outputs = {"out": np.zeros(64, np.float32), "also": np.zeros(1, np.float32)}
    error = race(body, {}, outputs, grid=64, threadgroup=1)
    assert told(error) == ("out", 3, [0, 0], [4, 2])
    assert [thread.group[0] for thread in error.threads] == [40, 3]


def test_a_threadgroup_overwrites_what_another_one_read():
    body = "uint g = thread_position_in_grid.x;\nfloat v = out[3];\nif (g == 40) out[3] = v + 1.0f;\n"
    body += "else if (g != 3) out[g] = v;"
    outputs = {"out": np.zeros(64, np.float32)}
    error = race(body, {}, outputs, grid=64, threadgroup=1, initialised=["out"])
    assert told(error) == ("out", 3, [0, 0], [3, 2])
    assert error.threads[0].group[0] == 40
    assert error.threads[1].group[0] < 40


def test_a_barrier_does_not_order_two_threadgroups():
    body = INDEX + "if (threadgroup_position_in_grid.x == 0) out[i] = 1.0f;\n" + barrier(BOTH)
    body += "if (threadgroup_position_in_grid.x == 1) also[i] = out[i];\nelse if (i == 0) also[40] = 0.0f;"
    outputs = {"out": np.zeros(32, np.float32), "also": np.zeros(41, np.float32)}
    with pytest.raises(RaceError) as info:
        start(body, {}, outputs, grid=64, threadgroup=32, checks=ALL - {"uninitialised"})
    assert info.value.buffer == "out"


def test_threadgroup_memory_of_two_groups_is_not_one():
    body = INDEX + "threadgroup float a[1];\nif (i == 0) a[0] = 1.0f;\n" + barrier(THREADGROUP)
    clean(body + "out[thread_position_in_grid.x] = a[0];", grid=128, threadgroup=32)


@pytest.mark.parametrize(
    "accesses",
    [
        "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);",
        "atomic_store_explicit(&out[0], 1.0f, memory_order_relaxed);",
    ],
)
def test_atomic_operations_may_meet(accesses: str):
    outputs = {"out": np.zeros(1, np.float32)}
    clean(accesses, {}, outputs, grid=128, threadgroup=64, atomic_outputs=True, initialised=["out"])


@pytest.mark.parametrize("plain", ["v = *p;", "*p = 1.0f;"])
@pytest.mark.parametrize("atomic_first", [True, False])
def test_a_plain_access_meets_an_atomic_one(plain: str, atomic_first: bool):
    atomic = "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);"
    first, second = (atomic, plain) if atomic_first else (plain, atomic)
    body = INDEX + f"device float* p = (device float*)out;\nfloat v = 0.0f;\nif (i == 0) {{\n{first}\n}}\n// between\n"
    body += f"if (i == 32) {{\n{second}\n}}\n"
    body += "if (v < -1.0f) *p = v + 1.0f;"
    options = {"atomic_outputs": True, "initialised": ["out"], "schedules": 1}
    outputs = {"out": np.zeros(1, np.float32)}
    error = race(body, {}, outputs, **options)
    assert sorted(place.line for place in error.locations) == [5, 9]
    assert "atomically" in str(error)
    clean(body.replace("// between\n", barrier(DEVICE)), {}, outputs, **{**options, "schedules": 1})


def test_an_atomic_load_and_a_plain_read_may_meet():
    body = INDEX + "device float* p = (device float*)out;\n"
    body += "also[i] = i < 32 ? atomic_load_explicit(&out[0], memory_order_relaxed) : *p;"
    body = body.replace("also[i] =", "float v =") + "\nif (v < -1.0f) *p = v + 1.0f;"
    clean(body, {}, {"out": np.zeros(1, np.float32)}, atomic_outputs=True, initialised=["out"])


def test_without_the_check_races_pass():
    body = TILE + "tile[i] = 1.0f;\ntile[(i + 32) % 64] = 2.0f;\n" + barrier(THREADGROUP) + "out[i] = tile[i];"
    outcome = start(body, checks=ALL - {"races"})
    assert set(result(outcome)) <= {1, 2}


def test_a_race_on_part_of_an_element():
    body = INDEX + "device ushort* p = (device ushort*)out;\np[i] = 1;\nif (i == 40) {\np[3] = 2;\n}"
    error = race(body, {}, {"out": np.zeros(32, np.float32)})
    assert told(error) == ("out", 1, [40, 3], [5, 3])
    # Neighbouring halves of one element are two locations.
    clean(INDEX + "device ushort* p = (device ushort*)out;\np[i] = 1;", {}, {"out": np.zeros(32, np.float32)})


def test_a_vector_races_with_one_of_its_elements():
    body = (
        INDEX + "device float4* p = (device float4*)out;\nif (i < 16) p[i] = 1.0f;\nif (i == 40) {\nout[6] = 2.0f;\n}"
    )
    assert told(race(body)) == ("out", 6, [40, 1], [5, 3])


def test_registers_do_not_hide_a_threadgroup_array_across_a_barrier():
    # The optimiser must read again what another thread may have written.
    body = TILE + "tile[i] = 1.0f;\n" + barrier(THREADGROUP) + "float a = tile[0];\n" + barrier(THREADGROUP)
    body += "if (i == 5) tile[0] = 7.0f;\n" + barrier(THREADGROUP) + "out[i] = a + tile[0];"
    for checks in (ALL, frozenset()):
        assert (result(start(body, checks=checks)) == 8).all()


def test_a_reader_after_a_simdgroup_barrier_counts_anew():
    # Lanes 0 and 1 fill what is kept of readers; lane 7 reads later, and lane 0 overwrites what it read.
    body = TILE + "tile[i] = 0.0f;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nfloat v = i < 2 ? tile[5] : 0.0f;\n"
    body += "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (i == {reader}) v += tile[5];\n"
    body += "if (i == {writer}) tile[5] = 1.0f;\nout[i] = v;"
    for reader, writer in ((7, 9), (7, 0), (0, 7)):
        text = body.replace("{reader}", str(reader)).replace("{writer}", str(writer))
        assert "lockstep" in start(text, grid=32).warnings[0]
        assert start(text.replace(f"i == {reader}", "i == 99"), grid=32).warnings == ()


def test_an_atomic_that_writes_is_not_forgotten_among_loads():
    body = """
    uint i = thread_position_in_threadgroup.x;
    device float* p = (device float*)out;
    float v = 0.0f;
    if (i < 64) v = atomic_load_explicit(&out[0], memory_order_relaxed);
    if (i == 64) atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);
    if (i == 96) v = *p;
    if (v < -1.0f) *p = v + 1.0f;
    """
    outputs = {"out": np.zeros(1, np.float32)}
    options = {"grid": 128, "atomic_outputs": True, "initialised": ["out"]}
    error = race(body, {}, outputs, **options)
    assert [thread.index for thread in error.threads] == [96, 64]
    # Without it, loads and a plain read are no race.
    clean(body.replace("i == 64", "i == 999"), {}, outputs, **options)


def test_a_reader_of_another_simdgroup_takes_its_place_beside_two_of_one():
    # Barriers without flags put the accesses in this order and order nothing.
    wait = barrier(NONE)
    body = TILE + "tile[i] = 0.0f;\n" + barrier(THREADGROUP) + "float v = i < 2 ? tile[5] : 0.0f;\n" + wait
    body += "if (i == 33) v = tile[5];\n" + wait + "if (i == 3) tile[5] = 1.0f;\nout[i] = v;"
    for schedules in (1, 4):
        assert told(race(body, schedules=schedules)) == ("tile", 5, [3, 33], [9, 7])


def test_two_readers_after_a_simdgroup_barrier_count_both():
    body = TILE + "tile[i] = 0.0f;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nfloat v = i < 2 ? tile[5] : 0.0f;\n"
    body += "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (i == 3 || i == 7) v += tile[5];\n"
    body += "if (i == 7) tile[5] = 1.0f;\nout[i] = v;"
    assert "lockstep" in start(body, grid=32).warnings[0]


def test_device_memory_read_before_the_write_that_follows_a_barrier_for_other_memory():
    body = INDEX + "float v = i < 32 ? out[i + 32] : 0.0f;\n{}out[i] = v;"
    assert told(race(body.format(barrier(THREADGROUP)))) == ("out", 32, [32, 0], [4, 2])
    # With a barrier for it, nobody can have written in time: the read comes too early.
    with pytest.raises(UninitialisedError):
        start(body.format(barrier(DEVICE)))
