"""How rows are shared out over threads. The reasons for the numbers are in the README.md of `kernels/norms`."""

from dataclasses import dataclass
from typing import Final

from forge_mlx.metal.limits import MAX_THREADS, SIMDGROUP
import mlx.core as mx

NARROW_THREADS: Final = 256
COLUMN_THREADS: Final = 256


@dataclass(frozen=True)
class Sharing:
    """How many threadgroups share the rows of a launch.

    Attributes:
        groups: At most so many for all batches, except that each batch has one.
        passes: At least so many rows, or sets of rows that are held at once, for each of them if there are enough.
    """

    groups: int
    passes: int


FORWARD: Final = Sharing(groups=1024, passes=1)
BACKWARD: Final = Sharing(groups=512, passes=4)


def vector_size(dtype: mx.Dtype) -> int:
    """Elements in the 16 bytes that a thread holds of a row."""
    return 16 // dtype.size


def is_long(columns: int, dtype: mx.Dtype) -> bool:
    """Whether a row is more than the threads of one threadgroup hold."""
    return columns > MAX_THREADS * vector_size(dtype)


@dataclass(frozen=True)
class Tiling:
    """One launch over rows that fit into a threadgroup.

    Attributes:
        threads: Threads of a threadgroup.
        lanes: Neighbouring lanes that share a row, a power of two; 0: the whole threadgroup shares it.
        rows_per_group: Rows that a threadgroup goes through.
        groups: Threadgroups for all rows of a batch.
    """

    threads: int
    lanes: int
    rows_per_group: int
    groups: int

    @property
    def is_narrow(self) -> bool:
        """Whether a simdgroup holds whole rows."""
        return self.lanes > 0


def tiling(batches: int, rows: int, columns: int, dtype: mx.Dtype, sharing: Sharing) -> Tiling:
    """Share out `[B, M, C]`.

    Args:
        batches: B.
        rows: M, at least 1.
        columns: C, at least 1 and not too long.
        dtype: Dtype of the rows.
        sharing: How many threadgroups to make.
    """
    vectors = -(-columns // vector_size(dtype))
    if vectors <= SIMDGROUP:
        lanes = 1 << (vectors - 1).bit_length()
        threads = min(NARROW_THREADS, round_up(rows * lanes, SIMDGROUP))
        at_once = threads // lanes
    else:
        lanes, at_once = 0, 1
        threads = round_up(vectors, SIMDGROUP)
    per_group = _passes(-(-rows // at_once), batches, sharing) * at_once
    return Tiling(threads, lanes, per_group, -(-rows // per_group))


@dataclass(frozen=True)
class ColumnTiling:
    """One launch in which a thread goes down a vector of columns.

    Attributes:
        threads: Threads of a threadgroup.
        blocks: Threadgroups beside each other, for all columns.
        rows_per_group: Rows that a threadgroup goes through.
        groups: Threadgroups below each other, for all rows of a batch.
    """

    threads: int
    blocks: int
    rows_per_group: int
    groups: int


def column_tiling(batches: int, rows: int, columns: int, dtype: mx.Dtype, sharing: Sharing) -> ColumnTiling:
    """Share out `[B, M, C]` by columns.

    Args:
        batches: B.
        rows: M, at least 1.
        columns: C, at least 1.
        dtype: Dtype of the rows.
        sharing: How many threadgroups to make, except that every block of columns has one in each batch.
    """
    blocks = -(-columns // (COLUMN_THREADS * vector_size(dtype)))
    per_group = _passes(rows, blocks * batches, sharing)
    return ColumnTiling(COLUMN_THREADS, blocks, per_group, -(-rows // per_group))


def _passes(total: int, parts: int, sharing: Sharing) -> int:
    """Passes of each threadgroup when each of `parts` equal parts has `total` of them."""
    return max(-(-total // max(1, sharing.groups // parts)), min(total, sharing.passes))


def round_up(number: int, multiple: int) -> int:
    """The next multiple from `number` on."""
    return -(-number // multiple) * multiple
