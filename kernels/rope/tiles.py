"""How the elements of rope are shared out over threads. README.md has the reasons for the numbers."""

from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels._common.rows import vector_size
import mlx.core as mx

THREADS: Final = 256
MAX_COLUMNS: Final = 64
MAX_HEADS: Final = 8
ENOUGH_THREADS: Final = 16384


@dataclass(frozen=True)
class Tiling:
    """One launch over `[B, H, T, D]`.

    Attributes:
        columns: Threads for each token: vectors of pairs, then vectors behind the pairs.
        heads: Heads that a thread goes through.
        grid: Threads along columns, tokens, and batches times blocks of heads.
        threadgroup: Threads of a threadgroup along the same.
    """

    columns: int
    heads: int
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def tiling(
    shape: tuple[int, ...],
    dims: int,
    dtype: mx.Dtype,
    *,
    max_heads: int = MAX_HEADS,
    enough_threads: int = ENOUGH_THREADS,
) -> Tiling:
    """Share out x.

    Args:
        shape: B, H, T and D of x, each at least 1.
        dims: Elements of each head that are rotated.
        dtype: Of x.
        max_heads: Heads that a thread goes through at most.
        enough_threads: Fewer heads are taken, down to 1, as long as the launch has fewer threads than this.
    """
    batches, heads, length, size = shape
    vector = vector_size(dtype)
    columns = -(-dims // (2 * vector)) - (-(size - dims) // vector)
    each = min(max_heads, heads)
    while each > 1 and columns * length * batches * -(-heads // each) < enough_threads:
        each = -(-each // 2)
    across = min(columns, MAX_COLUMNS)
    return Tiling(
        columns,
        each,
        (columns, length, batches * -(-heads // each)),
        (across, min(length, max(1, THREADS // across)), 1),
    )
