"""How the rows of embedding are shared out over threads. README.md has the reasons for the numbers."""

from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels._common.rows import round_up, vector_size
from forge_mlx.metal.limits import SIMDGROUP
import mlx.core as mx

THREADS: Final = 256
LEAST_CHUNK: Final = 64


@dataclass(frozen=True)
class Tiling:
    """One launch over `[M, C]`: each thread has one vector of a row.

    Attributes:
        lanes: Neighbouring lanes that share a row, or a part of it: a power of two.
        grid: Threads along rows times lanes, and parts of a row.
        threadgroup: Threads of a threadgroup along the same, whole simdgroups.
    """

    lanes: int
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def tiling(rows: int, columns: int, dtype: mx.Dtype) -> Tiling:
    """Share out rows.

    Args:
        rows: M, at least 1.
        columns: C, at least 1.
        dtype: Of the rows.
    """
    vectors = -(-columns // vector_size(dtype))
    lanes = min(SIMDGROUP, 1 << (vectors - 1).bit_length())
    across = round_up(rows * lanes, SIMDGROUP)
    return Tiling(lanes, (across, -(-vectors // lanes), 1), (min(THREADS, across), 1, 1))


def chunk_size(count: int) -> int:
    """Ids in a chunk of the sorted order: a power of two near the root of their number, so that no thread adds up
    more than about four times that root however often an id occurs.

    Args:
        count: N, the number of ids.
    """
    return max(LEAST_CHUNK, 1 << (count.bit_length() // 2))
