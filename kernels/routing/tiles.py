"""How routing is shared out over threads. README.md has the reasons for the numbers."""

from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels._common.rows import round_up, vector_size
from forge_mlx.metal.limits import SIMDGROUP
import mlx.core as mx

THREADS: Final = 256
MAX_EXPERTS: Final = 1024
"""Of topk_renorm: 32 elements a lane, and a bit for each of them."""
COUNTED_AT_ONCE: Final = 1024
"""Experts that a threadgroup counts in its own memory; the source says the same."""
_COUNT_GROUPS: Final = 512


@dataclass(frozen=True)
class RowTiling:
    """One launch over `[M, E]`: some lanes share a row.

    Attributes:
        lanes: Neighbouring lanes of a row, a power of two.
        vectors: Vectors of 16 bytes that each of them holds, a power of two.
        grid: Threads, whole simdgroups.
        threadgroup: Threads of a threadgroup.
    """

    lanes: int
    vectors: int
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def row_tiling(rows: int, experts: int, dtype: mx.Dtype) -> RowTiling:
    """Share out rows.

    Args:
        rows: M, at least 1.
        experts: E, from 1 to MAX_EXPERTS.
        dtype: Of the rows.
    """
    total = 1 << (-(-experts // vector_size(dtype)) - 1).bit_length()
    lanes = min(SIMDGROUP, total)
    threads = round_up(rows * lanes, SIMDGROUP)
    return RowTiling(lanes, total // lanes, (threads, 1, 1), (min(THREADS, threads), 1, 1))


@dataclass(frozen=True)
class CountTiling:
    """One launch that counts: threadgroups beside each other for the items, below each other for the experts.

    Attributes:
        per_group: Items that a threadgroup goes through.
        grid: Threads.
        threadgroup: Threads of a threadgroup.
    """

    per_group: int
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def count_tiling(items: int, experts: int, least: int) -> CountTiling:
    """Share out items.

    Args:
        items: Indices or rows of gates, at least 1.
        experts: E, at least 1.
        least: Items of a threadgroup if there are as many.
    """
    per_group = min(items, max(least, -(-items // _COUNT_GROUPS)))
    groups = -(-items // per_group)
    return CountTiling(per_group, (groups * THREADS, -(-experts // COUNTED_AT_ONCE), 1), (THREADS, 1, 1))


def indices_per_group(experts: int) -> int:
    """The least indices of a threadgroup: many for each count that it adds at its end."""
    return max(8 * THREADS, 32 * min(experts, COUNTED_AT_ONCE))


def rows_per_group(experts: int, dtype: mx.Dtype) -> int:
    """The least rows of gates of a threadgroup: some passes of all its threads, and many for each count."""
    at_once = THREADS // -(-min(experts, COUNTED_AT_ONCE) // vector_size(dtype))
    return max(512 // dtype.size, 8 * at_once)
