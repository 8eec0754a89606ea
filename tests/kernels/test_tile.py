"""kernels/_common/tile.h on the emulator against NumPy: every shape and dtype, in Apple's lane order and in NVIDIA's.

Elements are small integers, so that every product and sum is exact and results are compared to the bit.
"""

from forge_mlx.metal import emulator
from forge_mlx.metal.check import SIGNATURE_TYPES
from forge_mlx.metal.emulator.settings import current_settings
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import resource

SIZES = range(8, 65, 8)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
LAYOUTS = {"apple": "1", "nvidia": "2"}
# Those that are run every time, with the emulator's checks; all others are for CI's slow run, without.
SHAPES = [(8, 8), (8, 24), (16, 40), (40, 16)]


def launch(name, inputs, shapes, *, layout, **template):
    """The outputs of one simdgroup, poisoned with NaN first."""
    defines = (*current_settings().defines, ("FORGE_TILE_LAYOUT", LAYOUTS[layout]))
    with emulator.settings(defines=defines):
        outputs = resource(name)(
            inputs,
            output_shapes=shapes,
            output_dtypes=[mx.float32] * len(shapes),
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            template=template,
            init_value=float("nan"),
            engine="emulator",
        )
        mx.eval(outputs)
    return [np.array(each) for each in outputs]


def integers(shape, seed):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def check_load(rows, cols, dtype, transposed, layout, limits, whole):
    source = integers((64, 64), seed=0)
    placed = source.T if transposed else source
    for limit_rows, limit_cols in limits:
        inputs = {"source": mx.array(source).astype(dtype), "rows": limit_rows, "cols": limit_cols}
        template = {"T": dtype, "R": rows, "C": cols, "TRANSPOSED": transposed, "WHOLE": whole}
        (out,) = launch("tile_load", inputs, [(3, 2, 64, 64)], layout=layout, **template)
        want = np.full((2, 64, 64), np.nan, np.float32)
        want[0, :rows, :cols] = 0
        inside = np.s_[: 1 if whole else 2, : min(rows, limit_rows), : min(cols, limit_cols)]
        want[inside] = placed[inside[1:]]
        np.testing.assert_array_equal(out, np.broadcast_to(want, out.shape))


def check_product(rows, cols, dtype, transposed, layout):
    a, b, v = integers((rows, 16), 1), integers((16, cols), 2), integers((cols, 8), 3)
    arrays = {"a": a, "b": b.T.copy() if transposed else b, "v": v}
    for limit_rows, depth, limit_cols in ((64, 16, 64), (64, 9, cols), (rows - 1, 16, 3), (0, 8, 64), (5, 0, 5)):
        inputs = {name: mx.array(each).astype(dtype) for name, each in arrays.items()}
        inputs |= {"rows": limit_rows, "depth": depth, "cols": limit_cols}
        template = {"T": dtype, "R": rows, "C": cols, "TRANSPOSED": transposed}
        shapes = [(rows, cols), (2, 2, rows), (rows, 8)]
        product, row_results, chained = launch("tile_product", inputs, shapes, layout=layout, **template)
        left, right = np.zeros_like(a), np.zeros_like(b)
        left[:limit_rows, :depth] = a[:limit_rows, :depth]
        right[:depth, :limit_cols] = b[:depth, :limit_cols]
        want = 1 + left @ right
        np.testing.assert_array_equal(product, want)
        np.testing.assert_array_equal(row_results[0], np.broadcast_to(want.max(1), (2, rows)))
        np.testing.assert_array_equal(row_results[1], np.broadcast_to(want.sum(1), (2, rows)))
        np.testing.assert_array_equal(chained, want @ v)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["row-major", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_load_and_store_of_whole_tiles(dtype, order, layout):
    check_load(16, 24, dtype, order == "transposed", layout, [(64, 64)], whole=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_load_and_store_at_every_limit(rows, cols, layout):
    turn = (rows + cols) // 8
    limits = [(r, c) for r in (0, 1, 7, 8, rows - 1, rows, 64) for c in (0, 1, 7, 8, cols - 1, cols, 64)]
    check_load(rows, cols, DTYPES[turn % 3], turn % 2 == 1, layout, limits, whole=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(8, 24), (24, 16)])
def test_product_row_reductions_and_reuse(rows, cols, dtype, layout):
    check_product(rows, cols, dtype, (rows + cols) // 8 % 2 == 1, layout)


# Each dtype meets every number of rows and every number of columns.
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", SIZES)
def test_every_shape(rows, layout):
    with emulator.settings(checks=()):
        for cols in SIZES:
            turn = (rows + cols) // 8
            limits = [(rows - 3, cols), (rows, cols - 5)]
            check_load(rows, cols, DTYPES[turn % 3], turn % 2 == 1, layout, limits, whole=False)
            check_product(rows, cols, DTYPES[(turn + 1) % 3], turn % 2 == 0, layout)


def test_kernel_that_assumes_apples_order_is_caught():
    a, b = integers((8, 8), 5), integers((8, 8), 6)
    right, wrong = (
        launch("tile_assumes_apple", [mx.array(a), mx.array(b)], [(8, 8)], layout=layout)[0] for layout in LAYOUTS
    )
    np.testing.assert_array_equal(right, a @ b)
    assert (wrong != a @ b).any()


def test_headers_need_nothing_of_mlx():
    with emulator.settings(mlx_preamble=False, defines=SIGNATURE_TYPES):
        check_product(8, 16, mx.bfloat16, False, "apple")
        check_load(8, 16, mx.float16, True, "apple", [(3, 5)], whole=False)
