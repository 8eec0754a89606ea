"""How the kernels of this room are launched."""

from functools import cache
from pathlib import Path
from typing import Final

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels._common.partial_sums import sum_parts
from forge_mlx.kernels._common.rows import COLUMN_THREADS, Sharing, column_tiling, round_up, vector_size
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import SIMDGROUP
import mlx.core as mx

THREADS: Final = 256
ROWS: Final = Sharing(groups=512, passes=16)
"""Of add_bias."""
COLUMNS: Final = Sharing(groups=256, passes=32)
"""Of the sums over rows."""
PRODUCTS: Final = Sharing(groups=256, passes=4)
"""Of the sum for the gradient of s."""


@cache
def kernel(name: str) -> MetalKernel:
    """The kernel of a file.

    Args:
        name: The file's, without its ending.
    """
    return MetalKernel(Path(__file__).parent / f"{name}.metal")


def elementwise(engine: EngineName, x: mx.array, y: mx.array, dtype: mx.Dtype, product: bool) -> mx.array:
    """x + y or x y.

    Args:
        engine: One that runs kernels.
        x: Any shape with an element or more.
        y: The same shape.
        dtype: Of the result.
        product: Whether it is the product.
    """
    threads = -(-x.size // _vector(x, y))
    (out,) = kernel("elementwise")(
        {"x": _with_axis(x), "y": _with_axis(y), "size": x.size},
        output_shapes=[x.shape or (1,)],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(min(THREADS, threads), 1, 1),
        template={"X": x.dtype, "Y": y.dtype, "T": dtype, "PRODUCT": product},
        engine=engine,
    )
    return out.reshape(x.shape)


def mul_backward(engine: EngineName, x: mx.array, y: mx.array, dout: mx.array) -> Arrays:
    """dout y and dout x, each in the dtype of what it is the gradient of.

    Args:
        engine: One that runs kernels.
        x: Any shape with an element or more.
        y: The same shape.
        dout: Cotangent of x y.
    """
    threads = -(-x.size // _vector(x, y))
    dx, dy = kernel("mul_backward")(
        {"x": _with_axis(x), "y": _with_axis(y), "dout": _with_axis(dout), "size": x.size},
        output_shapes=[x.shape or (1,)] * 2,
        output_dtypes=[x.dtype, y.dtype],
        grid=(threads, 1, 1),
        threadgroup=(min(THREADS, threads), 1, 1),
        template={"X": x.dtype, "Y": y.dtype, "T": dout.dtype},
        engine=engine,
    )
    return dx.reshape(x.shape), dy.reshape(x.shape)


def scaled(engine: EngineName, dst: mx.array | None, src: mx.array, s: mx.array, dtype: mx.Dtype) -> mx.array:
    """dst + s src, or s src.

    Args:
        engine: One that runs kernels.
        dst: `[B, ...]`, or None.
        src: `[B, ...]` with an element or more, the same shape.
        s: `[B]` in float32.
        dtype: Of the result.
    """
    size = src.size // src.shape[0]
    # What is not read needs a buffer all the same.
    first = src if dst is None else dst
    threads = -(-size // _vector(first, src))
    (out,) = kernel("scaled")(
        {"dst": first, "src": src, "s": s, "size": size},
        output_shapes=[src.shape],
        output_dtypes=[dtype],
        grid=(threads, src.shape[0], 1),
        threadgroup=(min(THREADS, threads), 1, 1),
        template={"D": first.dtype, "S": src.dtype, "T": dtype, "ADD": dst is not None},
        engine=engine,
    )
    return out


def scaled_backward(engine: EngineName, x: mx.array, s: mx.array, dout: mx.array) -> Arrays:
    """s dout in the dtype of x, and the sum of x dout over each batch.

    Args:
        engine: One that runs kernels.
        x: `[B, ...]` with an element or more.
        s: `[B]` in float32.
        dout: Cotangent of s x.

    Returns:
        dx, and ds `[B]` in float32.
    """
    batches, size = x.shape[0], x.size // x.shape[0]
    vectors = -(-size // _vector(x, dout))
    threads = min(THREADS, round_up(vectors, SIMDGROUP))
    passes = -(-vectors // threads)
    passes = max(-(-passes // max(1, PRODUCTS.groups // batches)), min(passes, PRODUCTS.passes))
    per_group = passes * threads * _vector(x, dout)
    groups = -(-size // per_group)
    dx, parts = kernel("scaled_backward")(
        {"x": x, "dout": dout, "s": s, "size": size, "elements_per_group": per_group},
        output_shapes=[x.shape, (batches, groups, 1)],
        output_dtypes=[x.dtype, mx.float32],
        grid=(groups * threads, batches, 1),
        threadgroup=(threads, 1, 1),
        template={"X": x.dtype, "T": dout.dtype},
        engine=engine,
    )
    return dx, sum_parts(engine, parts, mx.float32)[:, 0]


def add_bias(engine: EngineName, x: mx.array, b: mx.array, dtype: mx.Dtype) -> mx.array:
    """x + b.

    Args:
        engine: One that runs kernels.
        x: `[B, M, C]` with an element or more.
        b: `[B, C]`.
        dtype: Of the result.
    """
    lanes, threads, blocks, rows, groups = _shared_out(x, ROWS)
    (out,) = kernel("add_bias")(
        {"x": x, "b": b, "lanes": lanes, "rows_per_group": rows},
        output_shapes=[x.shape],
        output_dtypes=[dtype],
        grid=(blocks * threads, groups, x.shape[0]),
        threadgroup=(threads, 1, 1),
        template={"X": x.dtype, "B": b.dtype, "T": dtype},
        engine=engine,
    )
    return out


def column_sums(engine: EngineName, x: mx.array, dtype: mx.Dtype) -> mx.array:
    """The sums over rows, `[B, C]`.

    Args:
        engine: One that runs kernels.
        x: `[B, M, C]` with an element or more.
        dtype: Of the result.
    """
    lanes, threads, blocks, rows, groups = _shared_out(x, COLUMNS)
    (parts,) = kernel("column_sums")(
        {"x": x, "lanes": lanes, "rows_per_group": rows},
        output_shapes=[(x.shape[0], groups, x.shape[2])],
        output_dtypes=[mx.float32],
        grid=(blocks * threads, groups, x.shape[0]),
        threadgroup=(threads, 1, 1),
        template={"T": x.dtype},
        engine=engine,
    )
    return sum_parts(engine, parts, dtype)


def _shared_out(x: mx.array, sharing: Sharing) -> tuple[int, int, int, int, int]:
    """Threads beside each other and in all, threadgroups for all columns, rows of each and threadgroups for all rows.

    Columns are shared out evenly, so that no threadgroup is half empty; rows that are short lie above each other.
    """
    batches, rows, columns = x.shape
    vectors = -(-columns // vector_size(x.dtype))
    lanes = -(-vectors // -(-vectors // COLUMN_THREADS))
    high = min(rows, COLUMN_THREADS // lanes)
    tiles = column_tiling(batches, -(-rows // high), columns, x.dtype, sharing)
    return lanes, lanes * high, tiles.blocks, tiles.rows_per_group * high, tiles.groups


def _vector(x: mx.array, y: mx.array) -> int:
    """Elements that a thread takes at once: 16 bytes of the narrower array."""
    return max(vector_size(x.dtype), vector_size(y.dtype))


def _with_axis(x: mx.array) -> mx.array:
    """A kernel sees one element without an axis as a reference."""
    return x.reshape(x.shape or (1,))
