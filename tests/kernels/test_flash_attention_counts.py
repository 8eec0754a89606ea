"""What the kernels of flash_attention multiply, read, write and hold: counts beside the least that it has to be."""

from dataclasses import replace
from functools import cache

from forge_mlx.kernels.attention import ideal
from forge_mlx.kernels.attention.flash_case import FlashCase
from forge_mlx.kernels.attention.tiles import tiles
from forge_mlx.metal import emulator
import mlx.core as mx
import pytest

BF16 = mx.bfloat16
SHORT = FlashCase(1, 1, 1, 512, 512, 64, dtype=BF16)
LONG = replace(SHORT, queries=2048, keys=2048)
SLOW = pytest.mark.slow


def named(case):
    return case.name


@cache
def counted(case):
    """Kernel -> counts of its launch, in the names of `ideal`."""
    inputs, cotangents = list(case.inputs().values()), list(case.cotangents().values())
    # One check is enough to have the accesses counted.
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(mx.vjp(case.function("emulator"), inputs, cotangents))
    return {each.name.removeprefix("flash_attention_"): each.counts for each in emulator.report().launches}


def device_bytes(counts):
    return sum(each.bytes_read + each.bytes_written for each in counts.buffers if each.space == "device")


def products(case):
    return {name: each.matrix_multiply_accumulates for name, each in counted(case).items() if name != "delta"}


WORK = [
    (replace(SHORT, segments="documents-64"), 1.15),
    *(
        pytest.param(case, limit, marks=SLOW)
        for case, limit in (
            (replace(SHORT, window=64), 1.15),
            (SHORT, 1.15),
            (replace(SHORT, causal=False), 1.0),
            (replace(SHORT, dtype=mx.float32, segments="documents-64"), 1.15),
            (replace(SHORT, dtype=mx.float32, window=64), 1.15),
            (replace(SHORT, head_dim=128, segments="documents-64"), 1.15),
            (replace(SHORT, head_dim=128, window=64), 1.15),
            (replace(SHORT, head_dim=256, window=64), 1.15),
            (replace(SHORT, head_dim=192, v_head_dim=128, segments="documents-64"), 1.15),
            (replace(SHORT, heads=4, kv_heads=2, window=64), 1.15),
            (replace(LONG, segments="documents-400"), 1.05),
            (replace(LONG, window=256), 1.05),
        )
    ),
]


@pytest.mark.parametrize(("case", "limit"), WORK, ids=lambda each: getattr(each, "name", ""))
def test_products_are_those_of_tiles_that_hold_a_pair(case, limit):
    least = ideal.products(case)
    for name, count in products(case).items():
        assert least[name] <= count <= limit * least[name], name


def test_least_work_and_traffic_of_small_numbers():
    case = FlashCase(1, 2, 1, 64, 64, 8, 24, dtype=BF16, segments="documents-32")
    # Two documents of 4 x 4 tiles, of which 10 are on or under the diagonal.
    assert ideal.products(case) == {"forward": 2 * 20 * 4, "dq": 2 * 20 * 5, "dkv": 2 * 20 * 8}
    tile = tiles("forward", 8, 24, BF16)
    assert (tile.own, tile.step) == (64, 32)
    rows, size = 2 * 64, (8 + 24) * 2
    assert ideal.device_bytes(case)["forward"] == rows * (size + 4) + 2 * 64 * size
    assert ideal.device_bytes(case)["delta"] == rows * (2 * 48 + 8)
    few = replace(case, window=1, segments=None, queries=8, keys=8)
    assert ideal.products(few) == {"forward": 2 * 4, "dq": 2 * 5, "dkv": 2 * 8}


MOVED = [
    replace(SHORT, segments="documents-64"),
    *(
        pytest.param(case, marks=SLOW)
        for case in (
            replace(SHORT, window=64),
            SHORT,
            replace(SHORT, dtype=mx.float32, segments="documents-64"),
            replace(SHORT, head_dim=128, window=64),
            replace(SHORT, head_dim=256, segments="documents-64"),
            replace(SHORT, heads=4, kv_heads=2, segments="documents-64", layout="heads"),
            replace(SHORT, queries=500, keys=500, window=64, sinks=True, softcap=20.0),
            replace(LONG, segments="documents-400"),
            replace(LONG, window=256),
        )
    ),
]


@pytest.mark.parametrize("case", MOVED, ids=named)
def test_bytes_are_own_rows_once_and_visited_blocks(case):
    least = ideal.device_bytes(case)
    counts = counted(case)
    assert counts.keys() == least.keys()
    for name, each in counts.items():
        # Nothing is cached: a pair of blocks that is not visited can not be made up for elsewhere.
        assert 0.99 * least[name] <= device_bytes(each) <= 1.05 * least[name], name


def test_blocks_have_32_rows_up_to_128_and_16_above():
    for kernel in ("forward", "dq", "dkv"):
        for size in range(8, 257, 8):
            for dtype in (mx.float32, mx.float16, BF16):
                assert tiles(kernel, size, size, dtype).own >= (32 if size <= 128 else 16)


# What an option costs that hides nothing: numbers of products and bytes, in the same kernel without it.
UNUSED = {
    "window": {"window": 512},
    "one segment": {"segments": "documents-512"},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW) for each in UNUSED])
def test_options_that_hide_nothing_cost_no_product(name):
    assert products(replace(SHORT, **UNUSED[name])) == products(SHORT)


@SLOW
def test_what_is_left_out_is_not_read():
    for name, counts in counted(SHORT).items():
        for each in counts.buffers:
            if each.name in ("q_segments", "k_segments", "q_ranges", "k_ranges", "sinks"):
                assert (each.reads, each.writes) == (0, 0), (name, each.name)


@SLOW
def test_unsorted_ids_visit_more_and_no_less_than_they_must():
    case = replace(SHORT, queries=128, keys=128, segments="unsorted")
    for name, count in products(case).items():
        assert ideal.products(case)[name] <= count <= products(replace(case, segments=None))[name]


def peak(case, impl):
    """Bytes of a forward and a backward pass beside their inputs and results."""
    inputs, cotangents = list(case.inputs().values()), list(case.cotangents().values())
    function = case.function(impl)

    def run():
        mx.eval(mx.vjp(function, inputs, cotangents))

    mx.eval(inputs, cotangents)
    # What is compiled or cached is there.
    run()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


EVERY = FlashCase(1, 1, 1, head_dim=16, softcap=5.0, segments="documents-100", sinks=True, with_lse=True)
# Engine, case, the shortest of three lengths.
HELD = {
    "reference": ("reference", EVERY, 1024),
    "reference, window": ("reference", replace(EVERY, window=100), 1024),
    "scalar": ("emulator", replace(EVERY, variant="scalar"), 128),
    "mma": ("emulator", replace(EVERY, variant="mma"), 512),
}


@pytest.mark.parametrize("name", [*list(HELD)[:2], *(pytest.param(each, marks=SLOW) for each in list(HELD)[2:])])
def test_peak_grows_linearly(name):
    impl, case, shortest = HELD[name]
    lengths = (shortest, 2 * shortest, 4 * shortest)
    with emulator.settings(checks=()):
        peaks = [peak(replace(case, queries=length, keys=length), impl) for length in lengths]
    # Four times as long: four times as much if it is linear, up to sixteen times with anything of T x S.
    assert peaks[1] <= 2.2 * peaks[0]
    assert peaks[2] <= 4.4 * peaks[0]
    assert peaks[2] < 4 * lengths[2] ** 2
