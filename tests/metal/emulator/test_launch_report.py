"""What `emulator.report()` counts, and the floors that it puts under a launch's time."""

from dataclasses import replace
from itertools import pairwise

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.chips import CHIPS, Chip
from forge_mlx.metal.emulator.counts import BufferCounts, Counts
from forge_mlx.metal.emulator.report import KEPT, LaunchRecord, Report, totals
from forge_mlx.metal.emulator.report import record as keep
import mlx.core as mx
import pytest

# Every thread reads one element and its neighbour's sum, the first also a constant: known traffic.
KERNEL = """
threadgroup float shared[64];
uint i = thread_position_in_grid.x;
uint t = thread_position_in_threadgroup.x;
shared[t] = x[i] * few[0];
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = simd_sum(shared[63 - t]);
"""


@pytest.fixture(autouse=True)
def fresh():
    emulator.reset()
    yield
    emulator.reset()


def launch(name="shared", groups=2, **options):
    kernel = emulator.metal_kernel(name, ["x", "few"], ["out"], KERNEL, **options)
    return kernel(
        inputs=[mx.ones((groups * 64,)), mx.ones((2,))],
        output_shapes=[(groups * 64,)],
        output_dtypes=[mx.float32],
        grid=(groups * 64, 1, 1),
        threadgroup=(64, 1, 1),
    )


def record(**changes):
    counts = Counts((BufferCounts("x", "device", 4000, 10, 0, 0, 40, 0, 40, 0),), (), True)
    return LaunchRecord("k", (1, 1, 1), (1, 1, 1), replace(counts, **changes))


def test_counts_of_a_known_kernel():
    launch()
    (found,) = emulator.report().launches
    assert (found.name, found.grid, found.threadgroup) == ("shared", (128, 1, 1), (64, 1, 1))
    counts = found.counts
    x, few, out = counts.buffers
    assert [each.name for each in counts.buffers] == ["x", "few", "out"]
    assert [each.space for each in counts.buffers] == ["device", "constant", "device"]
    assert (x.reads, x.bytes_read, x.distinct_bytes_read, x.writes) == (128, 512, 512, 0)
    assert (few.reads, few.bytes_read, few.distinct_bytes_read) == (128, 512, 4)
    assert (out.writes, out.bytes_written, out.distinct_bytes_written, out.reads) == (128, 512, 512, 0)
    (shared,) = counts.arrays
    assert (shared.name, shared.space, shared.size) == ("shared", "threadgroup", 256)
    assert (shared.reads, shared.writes, shared.bytes_read, shared.bytes_written) == (128, 128, 512, 512)
    assert (counts.threads, counts.threadgroups) == (128, 2)
    assert (counts.threadgroup_barriers, counts.simdgroup_barriers) == (2, 0)
    assert (counts.simdgroup_functions, counts.matrix_multiply_accumulates) == (4, 0)


def test_launches_are_kept_in_order_and_forgotten():
    before = totals()
    for name in "abc":
        launch(name)
    found = emulator.report()
    assert [each.name for each in found.launches] == ["a", "b", "c"]
    assert (found.started, found.warnings) == (3, 0)
    emulator.reset()
    assert emulator.report() == Report((), 0, 0)
    assert totals() == (before[0] + 3, before[1])


def test_a_launch_that_raises_is_counted_and_not_kept():
    kernel = emulator.metal_kernel("f", ["x"], ["out"], "out[0] = x[8];")
    with pytest.raises(emulator.BoundsError):
        kernel(
            inputs=[mx.ones((8,))],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
    assert (emulator.report().started, emulator.report().launches) == (1, ())


def test_warnings_are_counted():
    kernel = emulator.metal_kernel(
        "f", [], ["out"], "uint i = thread_position_in_grid.x; out[i] = 0; if (i < 5) { out[i] = simd_sum(1); }"
    )
    with pytest.warns(emulator.MetalWarning):
        kernel(
            inputs=[],
            output_shapes=[(32,)],
            output_dtypes=[mx.float32],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
        )
    assert emulator.report().warnings == 1


def test_only_the_last_launches_are_kept():
    for number in range(KEPT + 3):
        keep(replace(record(), name=str(number)))
    assert [each.name for each in emulator.report().launches] == [str(number) for number in range(3, KEPT + 3)]


def test_floor_is_the_larger_of_memory_and_matrix_products():
    chip = Chip("fast", 100.0, 2.0)
    buffers = (
        BufferCounts("x", "device", 10**6, distinct_bytes_read=300_000, bytes_read=10**9),
        BufferCounts("y", "device", 10**6, distinct_bytes_written=700_000),
    )
    assert record(buffers=buffers).floor(chip) == pytest.approx(1e6 / 100e9)
    # 2 * 8^3 operations each.
    assert record(matrix_multiply_accumulates=10**6).floor(chip) == pytest.approx(1024e6 / 2e12)
    assert record(buffers=buffers, matrix_multiply_accumulates=10).floor(chip) == pytest.approx(1e-5)


def test_chips_are_all_there_and_never_slower_than_the_next_smaller():
    names = [f"M{generation}{model}" for generation in "123" for model in ("", " Pro", " Max", " Ultra")]
    assert [chip.name for chip in CHIPS] == [*names, "M4", "M4 Pro", "M4 Max"]
    for smaller, larger in pairwise(CHIPS):
        if smaller.name[:2] == larger.name[:2]:
            assert larger.bandwidth > smaller.bandwidth
            assert larger.float32 > smaller.float32
    # A core does 128 multiply-adds a cycle: the clocks that the rates come to are plausible.
    cores = dict(
        zip((chip.name for chip in CHIPS), (8, 16, 32, 64, 10, 19, 38, 76, 10, 18, 40, 80, 10, 20, 40), strict=True)
    )
    for chip in CHIPS:
        assert 1.2 < chip.float32 * 1e3 / (cores[chip.name] * 256) < 1.85


def test_text_is_a_table():
    launch()
    lines = str(emulator.report()).splitlines()
    assert lines[0] == "1 launches on the emulator, 0 warnings"
    assert lines[1] == "shared: grid (128, 1, 1), threadgroup (64, 1, 1); 128 threads in 2 threadgroups"
    assert lines[2] == (
        "  barriers: 2 of a threadgroup, 0 of a simdgroup; simdgroup functions: 4; 8x8x8 matrix products: 0"
    )
    cells = [line.split() for line in lines[3:8]]
    assert cells[0] == [
        "buffer",
        "space",
        "size",
        "reads",
        "bytes",
        "distinct",
        "writes",
        "bytes",
        "distinct",
        "atomics",
    ]
    assert cells[1] == ["x", "device", "512", "128", "512", "512", "0", "0", "0", "0"]
    assert cells[4][:3] == ["shared", "threadgroup", "256"]
    assert len({len(line) for line in lines[3:8]}) == 1
    assert [line.split()[0] for line in lines[9:]] == ["chip", "M1", "M2", "M3", "M4"]
    # 512 + 4 + 512 bytes at 68.3 GB/s.
    assert float(lines[10].split()[1]) == pytest.approx(1028 / 68.3e3, rel=0.01)


def test_equal_launches_are_told_once():
    for name in "aaab":
        launch(name)
    text = str(emulator.report())
    assert text.splitlines()[0] == "4 launches on the emulator, 0 warnings"
    assert text.count("a: grid") == 1
    assert text.count("b: grid") == 1
    assert "  the same 3 times" in text


def test_without_checks_of_accesses_there_are_no_bytes():
    with emulator.settings(checks=["barriers"]):
        launch()
    (found,) = emulator.report().launches
    assert not found.counts.instrumented
    assert found.counts.threadgroup_barriers == 2
    assert "not counted" in str(found)
    assert "M1" not in str(found)


def test_counts_are_those_of_the_first_schedule():
    with emulator.settings(schedules=3):
        launch()
    (found,) = emulator.report().launches
    assert found.counts.buffers[0].reads == 128
