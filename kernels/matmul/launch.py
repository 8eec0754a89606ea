"""One product on an engine that runs kernels: batches planned, variant chosen, depth split, kernel launched."""

from collections.abc import Sequence
from functools import cache
import math
from pathlib import Path

from forge_mlx.kernels._common.partial_sums import sum_parts
from forge_mlx.kernels.matmul.plan import Batch, Plan, plan
from forge_mlx.kernels.matmul.tiles import LONGEST_ROW, TILES, Variant, choose, groups, split
from forge_mlx.metal.checked_launch import Scalar
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx

_ROOM = Path(__file__).parent


def product(
    engine: EngineName,
    variant: Variant | None,
    a: mx.array,
    b: mx.array,
    c: mx.array | None,
    *,
    transpose_a: bool,
    transpose_b: bool,
    batch: Batch,
    dtype: mx.Dtype,
) -> mx.array:
    """op(a) op(b) + c, summed over the batch axes that the result has not.

    Args:
        engine: "metal", "cuda" or "emulator".
        variant: Which kernel; None for the one that suits the sizes.
        a: `[..., M, K]`, or `[..., K, M]` if transposed. All arrays broadcast along their batch axes.
        b: `[..., K, N]`, or `[..., N, K]` if transposed.
        c: `[..., M, N]` or `[..., 1, N]`; None for nothing.
        transpose_a: Whether op swaps the last axes of a.
        transpose_b: Whether op swaps the last axes of b.
        batch: The batch axes of the result, at least as many as any array has; 1 for an axis that is summed over.
        dtype: Of the result.

    Returns:
        `[*batch, M, N]`.

    Raises:
        ValueError: The variant cannot have rows of this length.
    """
    depth, rows = a.shape[-2:] if transpose_a else a.shape[:-3:-1]
    columns = b.shape[-2] if transpose_b else b.shape[-1]
    shape = (*batch, rows, columns)
    if 0 in shape:
        return mx.zeros(shape, dtype)
    if a.size == 0 or b.size == 0:
        return mx.zeros(shape, dtype) if c is None else mx.broadcast_to(c.astype(dtype), shape)
    batches = [None if each is None else _padded(each.shape[:-2], len(batch)) for each in (a, b, c)]
    c_rows = 1 if c is None else c.shape[-2]
    found = plan(batches, batch, (rows, columns, depth), c_rows, transpose_a, transpose_b)
    if found is None:
        full = mx.broadcast_shapes(*(each for each in batches if each is not None), batch)
        a, b = (_laid_anew(each, full, batch) for each in (a, b))
        if c is not None:
            c = _laid_anew(c, batch, batch)
        batches = [each and (math.prod(batch), math.prod(full) // math.prod(batch)) for each in batches]
        batches[2] = batches[2] and (math.prod(batch), 1)
        found = plan(batches, (math.prod(batch), 1), (rows, columns, depth), c_rows, transpose_a, transpose_b)
        assert found is not None
    return _launch(engine, variant, a, b, c, found, transpose_a, transpose_b, dtype).reshape(shape)


def _padded(batch: Sequence[int], axes: int) -> Batch:
    return (1,) * (axes - len(batch)) + tuple(batch)


def _laid_anew(x: mx.array, full: Batch, batch: Batch) -> mx.array:
    """x repeated along all batch axes, those that stay before those that are summed over."""
    x = mx.broadcast_to(x, (*full, *x.shape[-2:]))
    order = sorted(range(len(full)), key=lambda axis: batch[axis] == 1 != full[axis])
    return x.transpose(*order, len(full), len(full) + 1)


@cache
def _kernel(variant: Variant) -> MetalKernel:
    return MetalKernel(_ROOM / f"matmul_{variant}.metal")


def _launch(
    engine: EngineName,
    variant: Variant | None,
    a: mx.array,
    b: mx.array,
    c: mx.array | None,
    planned: Plan,
    transpose_a: bool,
    transpose_b: bool,
    dtype: mx.Dtype,
) -> mx.array:
    """`[batches, rows * columns]` as planned."""
    rows, columns, depth = planned.rows, planned.columns, planned.depth
    variant = variant or choose(rows, columns, depth, transpose_a, transpose_b)
    longest = max(rows if transpose_a else depth, depth if transpose_b else columns, columns)
    if variant == "simdgroup" and longest > LONGEST_ROW:
        raise ValueError(
            f"[matmul] variant simdgroup takes rows of at most {LONGEST_ROW} elements but got {longest}. Ask for tiled."
        )
    batches = math.prod(group.size for group in planned.kept)
    across, down = groups(variant, rows, columns)
    # What is added must be added once.
    splits, split_depth = (1, depth) if c is not None else split(variant, across * down * batches, depth)
    y_dtype = dtype if splits == 1 else mx.float32
    template: dict[str, mx.Dtype | int | bool] = {
        **{"A": a.dtype, "B": b.dtype, "C": a.dtype if c is None else c.dtype, "Y": y_dtype},
        "ACCUMULATE": c is not None,
    }
    inputs = _inputs(planned, a, b, c) | {"splits": splits, "split_depth": split_depth}
    if variant == "simdgroup":
        template |= {"TRANSPOSE_A": transpose_a, "TRANSPOSE_B": transpose_b}
    else:
        inputs |= {"transpose_a": transpose_a, "transpose_b": transpose_b}
    threads = TILES[variant].threads
    (y,) = _kernel(variant)(
        inputs,
        output_shapes=[(batches, splits, rows * columns)],
        output_dtypes=[y_dtype],
        grid=(across * threads[0], down * threads[1], batches * splits),
        threadgroup=(*threads, 1),
        template=template,
        engine=engine,
    )
    return y if splits == 1 else sum_parts(engine, y, dtype)


def _inputs(planned: Plan, a: mx.array, b: mx.array, c: mx.array | None) -> dict[str, mx.array | Scalar]:
    """What all kernels take."""
    strides = [*planned.strides("a"), *planned.strides("b"), *planned.strides("c")[:2]]
    return {
        **{"a": a, "b": b, "c": a if c is None else c},
        "strides": mx.array(strides, mx.int64),
        "inner_batches": planned.kept[-1].size if planned.kept else 1,
        "parts": math.prod(group.size for group in planned.summed),
        **{"rows": planned.rows, "columns": planned.columns, "depth": planned.depth},
        "c_stride": planned.columns if planned.c_rows == planned.rows else 0,
    }
