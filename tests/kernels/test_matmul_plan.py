"""How matmul goes through batches, chooses a variant and splits the depth, and what its kernels read, write and do."""

from itertools import product as combinations
import math

from forge_mlx.kernels.matmul import launch
from forge_mlx.kernels.matmul.cases import TRAFFIC, MatmulCase
from forge_mlx.kernels.matmul.plan import plan
from forge_mlx.kernels.matmul.tiles import GROUPS, LONGEST_ROW, TILES, VARIANTS, choose, split
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest

# Batch axes of a, b, c and the result; where the result has 1 and an operand has not, it is summed over.
BATCHES = [
    ((), (), None, ()),
    ((4,), (1,), None, (4,)),
    ((1,), (4,), (4,), (4,)),
    ((4,), (4,), (1,), (4,)),
    ((2, 3), (2, 3), (2, 3), (2, 3)),
    ((2, 3), (1, 3), None, (2, 3)),
    ((2, 1), (1, 3), (2, 1), (2, 3)),
    ((2, 3), (1, 1), (1, 3), (2, 3)),
    ((2, 3), (1, 1), (2, 3), (2, 3)),
    ((2, 3), (2, 3), None, (1, 1)),
    ((2, 3), (2, 3), None, (2, 1)),
    ((2, 3), (2, 3), (1, 3), (1, 3)),
    ((2, 1, 3), (1, 4, 1), (2, 4, 3), (2, 4, 3)),
    ((2, 4, 3), (2, 4, 3), None, (1, 4, 1)),
    ((2, 4, 3), (1, 4, 1), (1, 4, 1), (1, 4, 1)),
    ((2, 1, 3, 1), (1, 4, 1, 5), None, (2, 4, 3, 5)),
]


def by_strides(engine, _variant, a, b, c, planned, transpose_a, transpose_b, dtype):
    """What the kernels do with a plan, in NumPy: matrices are found by strides alone."""
    assert engine == "metal"
    kept = [1] * (2 - len(planned.kept)) + [group.size for group in planned.kept]
    parts = math.prod(group.size for group in planned.summed)
    rows, columns, depth = planned.rows, planned.columns, planned.depth

    def matrices(x, operand, shape, row_stride):
        strides = [4 * each for each in (*planned.strides(operand), row_stride, 1)]
        flat = np.ascontiguousarray(np.array(x)).reshape(-1)
        last = sum((size - 1) * stride // 4 for size, stride in zip((*kept, parts, *shape), strides, strict=True))
        assert last < flat.size
        return np.lib.stride_tricks.as_strided(flat, (*kept, parts, *shape), strides)

    left = matrices(a, "a", (depth, rows) if transpose_a else (rows, depth), rows if transpose_a else depth)
    right = matrices(b, "b", (columns, depth) if transpose_b else (depth, columns), depth if transpose_b else columns)
    y = (np.swapaxes(left, -1, -2) if transpose_a else left) @ (np.swapaxes(right, -1, -2) if transpose_b else right)
    y = y.sum(2)
    if c is not None:
        assert planned.c_rows in (1, rows)
        added = matrices(c, "c", (rows, columns), columns if planned.c_rows == rows else 0)
        y = y + added[:, :, 0]
    return mx.array(np.ascontiguousarray(y)).astype(dtype)


@pytest.mark.parametrize("transposes", list(combinations((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_every_batch_is_multiplied_with_its_own(batches, rows, transposes, monkeypatch):
    monkeypatch.setattr(launch, "_launch", by_strides)
    random = np.random.default_rng(0)
    a_batch, b_batch, c_batch, batch = batches
    columns, depth = 4, 5
    a, b = random.normal(size=(*a_batch, rows, depth)), random.normal(size=(*b_batch, depth, columns))
    full = np.broadcast_shapes(a_batch, b_batch, batch)
    want = np.broadcast_to(a @ b, (*full, rows, columns))
    summed = tuple(axis for axis, (has, wants) in enumerate(zip(full, batch, strict=True)) if has != wants)
    want = want.sum(axis=summed, keepdims=True)
    for c_rows in (1, rows):
        c = None if c_batch is None else random.normal(size=(*c_batch, c_rows, columns))
        swapped = [np.swapaxes(x, -1, -2) if swap else x for x, swap in zip((a, b), transposes, strict=True)]
        got = launch.product(
            "metal",
            None,
            *(None if x is None else mx.array(x.astype(np.float32)) for x in (*swapped, c)),
            transpose_a=transposes[0],
            transpose_b=transposes[1],
            batch=batch,
            dtype=mx.float32,
        )
        assert got.shape == (*batch, rows, columns)
        np.testing.assert_allclose(np.array(got), want + (0 if c is None else c), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 0, 3), (0, 4, 3), (2, 4, 0)], ids=str)
@pytest.mark.parametrize("batch", [(), (5,), (0,)], ids=str)
def test_nothing_is_launched_where_nothing_is_multiplied(batch, sizes):
    (rows, depth, columns), options = sizes, {"transpose_a": False, "transpose_b": False, "dtype": mx.float16}
    a, b, c = mx.ones((*batch, rows, depth)), mx.ones((depth, columns)), mx.ones((columns,))[None]
    shape = (*batch, rows, columns)
    # No engine is called so: a launch would raise.
    for added in (None, c):
        y = launch.product("none", None, a, b, added, batch=batch, **options)
        assert (y.shape, y.dtype) == (shape, mx.float16)
        assert mx.array_equal(y, mx.full(shape, 0 if added is None else 1))
    # Summed over no batches.
    y = launch.product("none", None, mx.ones((0, rows, 4)), mx.ones((0, 4, 3)), None, batch=(1,), **options)
    assert mx.array_equal(y, mx.zeros((1, rows, 3)))


def shape_of(found):
    return found.rows, found.columns, found.depth, [(group.size, group.is_kept) for group in found.groups]


def test_batches_of_a_alone_become_rows():
    assert shape_of(plan([(2, 3), (1, 1), None], (2, 3), (5, 7, 11), 1, False, True)) == (30, 7, 11, [])
    assert shape_of(plan([(2, 3), (1, 1), (1, 1)], (2, 3), (5, 7, 11), 1, False, True)) == (30, 7, 11, [])
    assert shape_of(plan([(2, 3), (1, 1), (2, 3)], (2, 3), (5, 7, 11), 5, False, True)) == (30, 7, 11, [])
    # Here the rows of a lie apart, or c has the same matrix for all.
    assert shape_of(plan([(2, 3), (1, 1), None], (2, 3), (5, 7, 11), 1, True, True)) == (5, 7, 11, [(6, True)])
    assert shape_of(plan([(2, 3), (1, 1), (1, 1)], (2, 3), (5, 7, 11), 5, False, True)) == (5, 7, 11, [(6, True)])


def test_batches_that_are_summed_become_depth():
    assert shape_of(plan([(2, 3), (2, 3), None], (1, 1), (5, 7, 11), 1, True, False)) == (5, 7, 66, [])
    assert shape_of(plan([(2, 3), (2, 3), None], (2, 1), (5, 7, 11), 1, True, False)) == (5, 7, 33, [(2, True)])
    assert shape_of(plan([(2, 3), (2, 3), None], (1, 1), (5, 7, 11), 1, True, True)) == (5, 7, 11, [(6, False)])


@pytest.mark.parametrize(
    ("sizes", "transposes", "want"),
    [
        ((64, 64, 16), (False, False), "simdgroup"),
        ((63, 64, 16), (False, False), "tiled"),
        ((64, 63, 16), (False, False), "tiled"),
        ((64, 64, 15), (False, False), "tiled"),
        ((64, LONGEST_ROW, 16), (False, False), "simdgroup"),
        ((64, LONGEST_ROW + 1, 16), (False, False), "tiled"),
        ((LONGEST_ROW + 1, 64, 16), (True, False), "tiled"),
        ((LONGEST_ROW + 1, 64, 16), (False, False), "simdgroup"),
        ((64, 64, LONGEST_ROW + 1), (False, False), "tiled"),
        ((1, 4096, 512), (False, False), "naive"),
        ((1, 4096, 512), (False, True), "tiled"),
        ((1, 4096, 8), (False, True), "naive"),
        ((4096, 1, 512), (False, False), "tiled"),
        ((4096, 1, 512), (True, False), "naive"),
        ((8, 4096, 512), (False, False), "tiled"),
        ((7, 4096, 512), (False, False), "naive"),
    ],
)
def test_variant_of_a_size(sizes, transposes, want):
    assert choose(*sizes, *transposes) == want


@pytest.mark.parametrize("depth", [1, 63, 64, 1000, 2047, 2048, 100_003])
@pytest.mark.parametrize("planes", [1, 3, 100, 128, 1000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_splits_cover_the_depth_once(variant, planes, depth):
    count, each = split(variant, planes, depth)
    assert count * each >= depth > (count - 1) * each
    assert each % TILES[variant].step == 0
    assert count == 1 or each >= TILES[variant].split_depth
    assert count == 1 or planes * count <= GROUPS


def test_few_threadgroups_share_a_long_depth():
    assert split("simdgroup", 4, 8192) == (8, 1024)
    assert split("simdgroup", 128, 8192) == (2, 4096)
    assert split("simdgroup", 129, 8192) == (1, 8192)
    assert split("naive", 1, 100_000)[0] == GROUPS


def test_rows_that_are_too_long_raise():
    with pytest.raises(ValueError, match=r"\[matmul\] variant simdgroup takes rows of at most 33554431 elements"):
        MatmulCase((1, LONGEST_ROW + 1), (LONGEST_ROW + 1, 1), mx.float16, variant="simdgroup").function("emulator")(
            mx.zeros((1, LONGEST_ROW + 1), mx.float16), mx.zeros((LONGEST_ROW + 1, 1), mx.float16)
        )


def launches(case, checks=("bounds",)):
    """Counts of the launches of a forward pass."""
    inputs = list(case.inputs().values())
    mx.eval(inputs)
    with emulator.settings(checks=checks):
        emulator.reset()
        mx.eval(case.function("emulator")(*inputs))
    return {launch.name: launch.counts for launch in emulator.report().launches}


@pytest.mark.parametrize(
    "sizes", [(64, 64, 16), (128, 64, 80), (65, 64, 16), (96, 40, 20), (33, 1, 1), (130, 70, 50)], ids=str
)
def test_matrix_products_are_those_of_blocks_with_elements(sizes):
    rows, columns, depth = sizes
    case = MatmulCase((rows, depth), (depth, columns), variant="simdgroup")
    counts = launches(case, checks=())["matmul_simdgroup"]
    blocks = -(-rows // 32) * -(-columns // 32) * -(-depth // 16)
    assert counts.matrix_multiply_accumulates == blocks * 32
    ideal = -(-rows // 8) * -(-columns // 8) * -(-depth // 8)
    if rows % 32 == columns % 32 == depth % 16 == 0:
        assert counts.matrix_multiply_accumulates == ideal
    assert counts.threadgroup_barriers == 2 * -(-rows // 64) * -(-columns // 64) * -(-depth // 16)


@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_whole_blocks_are_read_in_16_bytes_once_a_block(dtype, transpose):
    case = MatmulCase((128, 32), (32, 192), dtype, transpose=transpose, variant="simdgroup")
    counts = launches(case)["matmul_simdgroup"]
    buffers = {each.name: each for each in counts.buffers}
    for name, elements in (("a", 128 * 32 * 3), ("b", 32 * 192 * 2)):
        assert (buffers[name].bytes_read, buffers[name].reads) == (elements * dtype.size, elements * dtype.size // 16)
    assert buffers["y"].bytes_written == 128 * 192 * dtype.size
    # The table in README.md, where 64 rows of 16 elements are padded more often than 16 of 64.
    transposed = {"": 0, "a": -1, "b": 1, "ab": 0}[transpose]
    want = (9472 + 768 * transposed) if dtype == mx.float32 else (5376 + 768 * transposed)
    assert sum(each.size for each in counts.arrays) == want
    # One batch, nothing summed: no offsets.
    assert buffers["strides"].bytes_read == 0


def test_repeated_operands_are_read_where_they_are():
    case = MatmulCase((3, 64, 16), (16, 64), c=(64,), transpose="a", variant="simdgroup")
    buffers = {each.name: each for each in launches(case)["matmul_simdgroup"].buffers}
    assert (buffers["b"].size, buffers["c"].size) == (16 * 64 * 4, 64 * 4)


@pytest.mark.parametrize("case", TRAFFIC, ids=lambda case: case.name)
def test_bytes_of_the_forward_pass_are_those_of_the_blocks(case):
    moved = sum(
        each.bytes_read + each.bytes_written
        for name, counts in launches(case).items()
        for each in counts.buffers
        if name != "sum_parts" and each.name != "strides" and each.space == "device" and each.name != "y"
    )
    written = case.cotangents()["y"].nbytes
    assert moved + written == case.ideal_bytes()["forward"]
