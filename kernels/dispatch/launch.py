"""How the kernels of this room are launched. README.md has the reasons for the numbers."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels._common.rows import round_up, vector_size
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import MAX_THREADS, SIMDGROUP
import mlx.core as mx

THREADS: Final = 256


@dataclass(frozen=True)
class Tiling:
    """One launch over tokens `[N, C]`.

    Attributes:
        lanes: Neighbouring lanes that share a token or a part of it, a power of two; 0: a threadgroup shares it.
        grid: Threads along tokens times lanes, and parts of a token.
        threadgroup: Threads of a threadgroup along the same, whole simdgroups.
    """

    lanes: int
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def part_tiling(tokens: int, columns: int, vector: int) -> Tiling:
    """Share out tokens of which every vector stands for itself: each thread has one.

    Args:
        tokens: N, at least 1.
        columns: C, at least 1.
        vector: Elements of a thread.
    """
    vectors = -(-columns // vector)
    lanes = _lanes(vectors)
    across = round_up(tokens * lanes, SIMDGROUP)
    return Tiling(lanes, (across, -(-vectors // lanes), 1), (min(THREADS, across), 1, 1))


def whole_tiling(tokens: int, columns: int, vector: int) -> Tiling:
    """Share out tokens that are summed: a simdgroup has whole ones, or a threadgroup has one.

    Args:
        tokens: N, at least 1.
        columns: C, at least 1.
        vector: Elements that a thread holds at once.
    """
    vectors = -(-columns // vector)
    if vectors <= SIMDGROUP:
        return part_tiling(tokens, columns, vector)
    threads = min(MAX_THREADS, round_up(vectors, SIMDGROUP))
    return Tiling(0, (tokens * threads, 1, 1), (threads, 1, 1))


def _lanes(vectors: int) -> int:
    return min(SIMDGROUP, 1 << (vectors - 1).bit_length())


@cache
def kernel(name: str) -> MetalKernel:
    """The kernel of a file.

    Args:
        name: The file's, without its ending.
    """
    return MetalKernel(Path(__file__).parent / f"{name}.metal")


def row_scale(engine: EngineName, dst: mx.array | None, x: mx.array, gates: mx.array, e: int) -> mx.array:
    """x gates[:, e], or dst + x gates[:, e] in the dtype of dst.

    Args:
        engine: One that runs kernels.
        dst: `[N, C]`, or None.
        x: `[N, C]` with an element or more.
        gates: `[N, E]`.
        e: A column of gates.
    """
    # What is not read needs a buffer all the same.
    first = x if dst is None else dst
    tiles = part_tiling(x.shape[0], x.shape[1], max(vector_size(first.dtype), vector_size(x.dtype)))
    (out,) = kernel("row_scale_forward")(
        {"dst": first, "x": x, "gates": gates, "expert": e, "lanes_per_token": tiles.lanes},
        output_shapes=[x.shape],
        output_dtypes=[first.dtype],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"X": x.dtype, "G": gates.dtype, "T": first.dtype, "ADD": dst is not None},
        engine=engine,
    )
    return out


def row_scale_backward(engine: EngineName, x: mx.array, gates: mx.array, e: int, dout: mx.array) -> Arrays:
    """dx and dgates, each in the dtype of what it is the gradient of.

    Args:
        engine: One that runs kernels.
        x: `[N, C]` with an element or more.
        gates: `[N, E]`.
        e: A column of gates.
        dout: `[N, C]`, the cotangent of the result.
    """
    tiles = whole_tiling(x.shape[0], x.shape[1], max(vector_size(dout.dtype), vector_size(x.dtype)))
    return tuple(
        kernel("row_scale_backward")(
            {"x": x, "gates": gates, "dout": dout, "expert": e, "lanes_per_token": tiles.lanes},
            output_shapes=[x.shape, gates.shape],
            output_dtypes=[x.dtype, gates.dtype],
            grid=tiles.grid,
            threadgroup=tiles.threadgroup,
            template={"X": x.dtype, "G": gates.dtype, "T": dout.dtype, "NARROW": tiles.lanes > 0},
            engine=engine,
        )
    )


def dispatch_forward(engine: EngineName, x: mx.array, positions: mx.array) -> mx.array:
    """Each token in all of its rows, `[N k, C]`.

    Args:
        engine: One that runs kernels.
        x: `[N, C]` with an element or more.
        positions: `[N, k]`, k at least 1.
    """
    return _slots("moe_dispatch_forward", engine, {"x": x, "positions": positions}, (positions.size, x.shape[1]))


def dispatch_backward(engine: EngineName, drows: mx.array, positions: mx.array) -> mx.array:
    """The sum of each token's rows, `[N, C]`.

    Args:
        engine: One that runs kernels.
        drows: `[N k, C]` with an element or more.
        positions: `[N, k]`.
    """
    shape = (positions.shape[0], drows.shape[1])
    return _slots("moe_dispatch_backward", engine, {"drows": drows, "positions": positions}, shape)


def combine_forward(
    engine: EngineName, y: mx.array, gates: mx.array, positions: mx.array, indices: mx.array
) -> mx.array:
    """The sum of each token's rows, each times its gate, `[N, C]`.

    Args:
        engine: One that runs kernels.
        y: `[N k, C]` with an element or more.
        gates: `[N, E]`, E at least 1.
        positions: `[N, k]`.
        indices: `[N, k]`.
    """
    arrays = {"y": y, "gates": gates, "positions": positions, "indices": indices}
    return _slots("moe_combine_forward", engine, arrays, (positions.shape[0], y.shape[1]))


def _slots(name: str, engine: EngineName, arrays: dict[str, mx.array], shape: tuple[int, int]) -> mx.array:
    """One result of a shape in the dtype of the first array; a thread has one vector of a token and goes through k."""
    first = next(iter(arrays.values()))
    tiles = part_tiling(arrays["positions"].shape[0], shape[1], vector_size(first.dtype))
    template = {"T": first.dtype} | ({"G": arrays["gates"].dtype} if "gates" in arrays else {})
    (out,) = kernel(name)(
        {**arrays, "lanes_per_token": tiles.lanes},
        output_shapes=[shape],
        output_dtypes=[first.dtype],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template=template,
        engine=engine,
    )
    return out


def combine_backward(
    engine: EngineName, y: mx.array, gates: mx.array, positions: mx.array, indices: mx.array, dout: mx.array
) -> Arrays:
    """dy and dgates, each in the dtype of what it is the gradient of.

    Args:
        engine: One that runs kernels.
        y: `[N k, C]` with an element or more.
        gates: `[N, E]`, E at least 1.
        positions: `[N, k]`.
        indices: `[N, k]`.
        dout: `[N, C]`, the cotangent of the result.
    """
    tiles = whole_tiling(dout.shape[0], dout.shape[1], vector_size(y.dtype))
    dy, dgates = kernel("moe_combine_backward")(
        {
            "y": y,
            "gates": gates,
            "positions": positions,
            "indices": indices,
            "dout": dout,
            "lanes_per_token": tiles.lanes,
        },
        output_shapes=[y.shape, gates.shape],
        # What a token's slots add to a gate is added up in memory: rounded once, at the end.
        output_dtypes=[y.dtype, mx.float32],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": y.dtype, "G": gates.dtype, "NARROW": tiles.lanes > 0},
        engine=engine,
    )
    return dy, dgates.astype(gates.dtype)
