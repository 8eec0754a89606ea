"""embedding: rows of a table by their ids, and the sum of the rows' gradients for each id."""

from functools import cache
import math
from pathlib import Path

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Axes, Function
from forge_mlx.kernels.embedding import reference
from forge_mlx.kernels.embedding.tiles import chunk_size, tiling
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx

_ROOM = Path(__file__).parent


def embedding(weight: mx.array, ids: mx.array, *, impl: str | None = None) -> mx.array:
    """weight[ids]: a row of the table for each id, and a row of zeros for an id out of range.

    In plain operations::

        known = (ids >= 0) & (ids < V)
        y = mx.where(known[..., None], weight[mx.where(known, ids, 0)], 0)

    Negative ids are out of range too. Nothing can raise inside a compiled step, and MLX's own `weight[ids]` then reads
    beside the table.

    Differentiable in weight: the rows of an id's gradient are summed in float32 in an order that follows from the ids
    alone and rounded once, so that the result has the same bits every time, however often an id occurs. An id out of
    range has no gradient, a row that no id names has a gradient of 0. Second derivatives are those of the gradient's
    formula in plain MLX operations. Engine "reference": plain MLX operations; on a GPU their sums are atomic, and
    their bits may differ from run to run.

    Args:
        weight: `[V, C]`, float32, float16 or bfloat16.
        ids: `[...]`, integers of any dtype.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        `[..., C]` in the dtype of weight.

    Raises:
        ValueError: weight of another dtype or without two axes, ids that are no integers, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_arguments(weight, ids)
    engine = resolve("embedding", impl)
    shape = (*ids.shape, weight.shape[1])
    if weight.size == 0 or ids.size == 0:
        return mx.zeros(shape, weight.dtype)
    (rows,) = _lookup(engine.name)(weight, reference.flat_ids(ids, weight.shape[0]))
    return rows.reshape(shape)


@cache
def _lookup(engine: EngineName) -> Function:
    """The differentiable function weight `[V, C]`, ids `[N]` -> rows `[N, C]`."""

    def forward(weight: mx.array, ids: mx.array) -> Arrays:
        return (_gather(engine, weight, ids),)

    def backward(weight: mx.array, ids: mx.array, dy: mx.array) -> Arrays:
        return (_sum_rows(engine, weight, ids, dy),)

    def formula(weight: mx.array, ids: mx.array, dy: mx.array) -> Arrays:
        return (reference.backward(weight, ids, dy),)

    return differentiable(forward, backward, formula, constants={1}, vmap=_map_ids, backward_vmap=_map_tables)


def _map_ids(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of the forward: more ids, and where the table is mapped, a longer table."""
    weight, ids = inputs
    if axes[0] is not None or axes[1] is None:
        return _map_tables(function, inputs, axes)
    ids = mx.moveaxis(ids, axes[1], 0)
    (rows,) = function(weight, ids.reshape(-1))
    return (rows.reshape(*ids.shape, -1),), (0,)


def _map_tables(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of functions with one table for each element of the axis: the tables below each other are one."""
    size = next(each.shape[axis] for each, axis in zip(inputs, axes, strict=True) if axis is not None)
    weight, ids, *rest = (
        mx.broadcast_to(each[None], (size, *each.shape)) if axis is None else mx.moveaxis(each, axis, 0)
        for each, axis in zip(inputs, axes, strict=True)
    )
    rows = weight.shape[1]
    if size * rows >= 2**31:
        raise ValueError(f"[embedding] vmap must keep the tables together below 2^31 rows but got {size} of {rows}.")
    ids = mx.where(ids < 0, -1, ids + rows * mx.arange(size, dtype=mx.int32)[:, None])
    (found,) = function(*(each.reshape(-1, *each.shape[2:]) for each in (weight, ids, *rest)))
    return (found.reshape(size, -1, found.shape[-1]),), (0,)


@cache
def _kernel(name: str) -> MetalKernel:
    return MetalKernel(_ROOM / f"{name}.metal")


def _gather(engine: EngineName, weight: mx.array, ids: mx.array) -> mx.array:
    """The rows of the ids."""
    if engine == "reference":
        return _take_rows(weight, ids)
    count, columns = ids.size, weight.shape[1]
    tiles = tiling(count, columns, weight.dtype)
    (rows,) = _kernel("embedding_forward")(
        {"weight": weight, "ids": ids, "lanes_per_row": tiles.lanes},
        output_shapes=[(count, columns)],
        output_dtypes=[weight.dtype],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": weight.dtype},
        engine=engine,
    )
    return rows


def _sum_rows(engine: EngineName, weight: mx.array, ids: mx.array, dy: mx.array) -> mx.array:
    """The gradient of weight, of which only shape and dtype count."""
    if engine == "reference":
        return _scatter_rows(weight, ids, dy)
    rows, columns = weight.shape
    sorted_ids, order = _sorted(ids)
    first, end = _segments(engine, sorted_ids, rows)
    chunk = chunk_size(ids.size)
    tiles = tiling(rows, columns, weight.dtype)
    (dweight,) = _kernel("embedding_backward")(
        {
            "order": order,
            "first": first,
            "end": end,
            "dy": dy,
            "chunk_sums": _chunk_sums(engine, sorted_ids, order, dy, chunk),
            "chunk_size": chunk,
            "lanes_per_row": tiles.lanes,
        },
        output_shapes=[(rows, columns)],
        output_dtypes=[weight.dtype],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": weight.dtype},
        engine=engine,
    )
    return dweight


def _sorted(ids: mx.array) -> tuple[mx.array, mx.array]:
    """ids in ascending order, and where each was.

    An id and its place are one number, so that equal ids keep their order whatever the sort does with equal numbers.
    """
    keys = mx.sort(mx.left_shift(ids.astype(mx.int64), 32) + mx.arange(ids.size, dtype=mx.int64))
    return mx.right_shift(keys, 32).astype(mx.int32), mx.bitwise_and(keys, 2**31 - 1).astype(mx.int32)


def _segments(engine: EngineName, sorted_ids: mx.array, rows: int) -> Arrays:
    """For each row of the table where its ids begin and end in the order; 0 and 0 without any."""
    threads = min(256, sorted_ids.size)
    return tuple(
        _kernel("embedding_segments")(
            {"sorted_ids": sorted_ids},
            output_shapes=[(rows,), (rows,)],
            output_dtypes=[mx.int32, mx.int32],
            grid=(sorted_ids.size, 1, 1),
            threadgroup=(threads, 1, 1),
            init_value=0,
            engine=engine,
        )
    )


def _chunk_sums(engine: EngineName, sorted_ids: mx.array, order: mx.array, dy: mx.array, chunk: int) -> mx.array:
    """The sum of each whole chunk of the order that has one id only: `[chunks, C]`, the others undefined."""
    chunks, columns = sorted_ids.size // chunk, dy.shape[1]
    if chunks == 0:
        return mx.zeros((1, 1))
    tiles = tiling(chunks, columns, dy.dtype)
    (sums,) = _kernel("embedding_chunks")(
        {
            "sorted_ids": sorted_ids,
            "order": order,
            "dy": dy,
            "chunk_size": chunk,
            "lanes_per_row": tiles.lanes,
        },
        output_shapes=[(chunks, columns)],
        output_dtypes=[mx.float32],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": dy.dtype},
        engine=engine,
    )
    return sums


def _take_rows(weight: mx.array, ids: mx.array) -> mx.array:
    """The rows of the ids in plain MLX operations: zeros by a mask of bits, 8 bytes at a time where rows have those.

    `mx.where` goes element by element on a CPU, and takes two to three times as long.
    """
    rows = mx.take(weight, mx.maximum(ids, 0), axis=0)
    size = math.gcd(8, weight.shape[1] * weight.dtype.size)
    bits = {8: mx.int64, 4: mx.int32, 2: mx.int16}[size]
    mask = mx.negative((ids >= 0).astype(bits))
    return mx.bitwise_and(rows.view(bits), mask[:, None]).view(weight.dtype)


def _scatter_rows(weight: mx.array, ids: mx.array, dy: mx.array) -> mx.array:
    """The gradient of weight in plain MLX operations; in 16 bits, for few ids, without a float32 array of its size."""
    rows, columns = weight.shape
    count = ids.size
    if weight.dtype == mx.float32 or count >= rows:
        return reference.backward(weight, ids, dy)
    # The first n of an id stands for it: the sums take N rows in float32, not V.
    target, number = mx.where(ids < 0, rows, ids), mx.arange(count, dtype=mx.int32)
    owner = mx.full((rows + 1,), count, mx.int32).at[target].minimum(number)[target]
    sums = mx.zeros((count, columns)).at[owner].add(dy.astype(mx.float32)).astype(weight.dtype)
    place = mx.where(owner == number, target, rows)
    return mx.zeros((rows + 1, columns), weight.dtype).at[place].add(sums)[:rows]
