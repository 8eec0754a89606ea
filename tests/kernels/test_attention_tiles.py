"""The tile table of attention: within the limits for every head size, as the README says, as the kernels need."""

from pathlib import Path

from forge_mlx import kernels
from forge_mlx.kernels.attention import launch
from forge_mlx.kernels.attention.options import Options
from forge_mlx.kernels.attention.tiles import LONG_HEAD, estimate, part_width, tiles
from forge_mlx.metal import emulator
import mlx.core as mx
import pytest

KERNELS = ("forward", "dq", "dkv")
DTYPES = {"float32": mx.float32, "16 bits": mx.bfloat16}
HEADS = range(8, 257, 8)
RANGES = ((8, 64), (72, 128), (136, 256))


def rows_of_readme():
    text = (Path(kernels.__file__).parent / "attention" / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {tuple(row[:3]): row[3:] for row in rows if row[0] in KERNELS and len(row) == 9}


def some(numbers):
    return " or ".join(map(str, sorted(set(numbers))))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", RANGES, ids=str)
def test_every_row_keeps_the_limits_and_is_in_the_readme(kernel, dtype, sizes):
    first, last = sizes
    heads = [(d, dv) for d in HEADS for dv in HEADS if first <= max(d, dv) <= last]
    found = [tiles(kernel, *head, DTYPES[dtype]) for head in heads]
    costs = [estimate(kernel, *head, DTYPES[dtype]) for head in heads]
    for head, tile, cost in zip(heads, found, costs, strict=True):
        assert cost.values <= 96, head
        assert cost.bytes <= 30_000, head
        # Two threadgroups have 208 KB of registers and 60 KB of threadgroup memory between them.
        assert 2 * tile.threads * 4 * cost.values <= 208 * 1024, head
        assert tile.threads <= 256, head
        assert tile.own >= (32 if max(head) <= LONG_HEAD else 16), head
        assert tile.step <= 32, head
        assert part_width(max(head), tile.split) * tile.split < max(head) + 8 * tile.split, head
    (shape,) = {f"{tile.rows} x {tile.groups}" for tile in found}
    row = [shape, some(tile.step for tile in found), some(tile.split for tile in found)]
    row += [some(tile.threads for tile in found), str(max(cost.values for cost in costs))]
    assert rows_of_readme()[kernel, dtype, f"{first} to {last}"] == [*row, f"{max(cost.bytes for cost in costs):,}"]


@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "head", [(64, 64), *(pytest.param(head, marks=pytest.mark.slow) for head in [(128, 72), (256, 200)])], ids=str
)
def test_threadgroup_memory_is_what_the_table_says(head, dtype):
    queries = mx.ones((1, 1, 9, head[0]), dtype)
    values, ids = mx.ones((1, 1, 9, head[1]), dtype), mx.zeros((1, 9), mx.int32)
    options = Options(1.0, causal=True, window=None, softcap=None)
    arrays = (queries, queries, values, ids, ids, None)
    emulator.reset()
    out, lse = launch.forward("emulator", None, *arrays, options)
    mx.eval(launch.backward("emulator", None, *arrays, out, lse, values, lse, options))
    launches = {each.name.removeprefix("flash_attention_"): each for each in emulator.report().launches}
    for kernel in KERNELS:
        used = sum(each.size for each in launches[kernel].counts.arrays)
        assert used == pytest.approx(estimate(kernel, *head, dtype).bytes, abs=16), kernel
