"""The tile table of the matrix kernels: what a threadgroup of each works on. The reasons are in README.md."""

from dataclasses import dataclass
from typing import Final, Literal

import mlx.core as mx

Kernel = Literal["forward", "dq", "dkv"]

LONG_HEAD: Final = 128
"""The largest head size with 32 own rows or more in every kernel; above, 16."""

_WIDEST_PART: Final = 64


@dataclass(frozen=True)
class Tiles:
    """What a threadgroup works on: its own rows, queries or for dkv keys, and rows of the other side.

    Attributes:
        rows: Own rows of a simdgroup.
        step: Rows of the other side that lie in threadgroup memory at a time, at most 32.
        split: Simdgroups that share own rows, each with a part of the head's columns.
        groups: Row groups, each of `split` simdgroups.
    """

    rows: int
    step: int
    split: int
    groups: int

    @property
    def own(self) -> int:
        """Own rows of a threadgroup."""
        return self.rows * self.groups

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.split * self.groups


@dataclass(frozen=True)
class Estimate:
    """What a threadgroup needs of a core.

    Attributes:
        values: 32-bit values that live in a lane at the same time: own operands, sums, scores, the operand that is
            being multiplied, and statistics of rows.
        bytes: Of threadgroup memory.
    """

    values: int
    bytes: int


def part_width(size: int, split: int) -> int:
    """Columns of a head that a simdgroup holds.

    Args:
        size: Of the head.
        split: Simdgroups that share it.
    """
    return -(-size // 8 // split) * 8


def tiles(kernel: Kernel, head_dim: int, v_head_dim: int, dtype: mx.Dtype) -> Tiles:
    """The row of the table for a kernel.

    Args:
        kernel: Which.
        head_dim: Size of the heads of q and k.
        v_head_dim: Size of the heads of v.
        dtype: Of q, k and v.
    """
    size, is_wide = max(head_dim, v_head_dim), dtype == mx.float32
    if kernel == "forward":
        if size <= _WIDEST_PART:
            return Tiles(rows=16, step=16 if is_wide else 32, split=1, groups=4)
        if size <= LONG_HEAD:
            return Tiles(rows=8, step=16, split=1, groups=4)
        return Tiles(rows=8, step=8 if is_wide else 16, split=2, groups=4)
    split = _split(size)
    groups = 4 if size <= LONG_HEAD else 2
    if kernel == "dq":
        step = (16 if is_wide else 32) if size <= _WIDEST_PART else 8 if is_wide else 16
        return Tiles(rows=8, step=step if size <= LONG_HEAD else 8, split=split, groups=groups)
    return Tiles(rows=8, step=16 if size <= LONG_HEAD else 8, split=split, groups=groups)


def _split(size: int) -> int:
    """In how many parts of at most 64 columns a head is cut, with the fewest columns that are none."""
    if size <= LONG_HEAD:
        return -(-size // _WIDEST_PART)
    return min((3, 4), key=lambda split: (part_width(size, split) > _WIDEST_PART, part_width(size, split) * split))


def estimate(kernel: Kernel, head_dim: int, v_head_dim: int, dtype: mx.Dtype) -> Estimate:
    """What a row of the table needs: 8 x 8 elements are 2 values of a lane in float32, 1 in 16 bits.

    Args:
        kernel: Which.
        head_dim: Size of the heads of q and k.
        v_head_dim: Size of the heads of v.
        dtype: Of q, k and v.
    """
    tile = tiles(kernel, head_dim, v_head_dim, dtype)
    width, v_width = part_width(head_dim, tile.split), part_width(v_head_dim, tile.split)
    blocks, packed = tile.rows // 8, 2 if dtype == mx.float32 else 1
    scores = blocks * tile.step // 8 * 2
    # Of 8 rows and 16 columns.
    operand = 2 * packed
    # Padded rows, as block.h lays them.
    row, v_row = (size * dtype.size + 16 for size in (head_dim, v_head_dim))
    exchanged = 4 * tile.groups * tile.split * tile.rows * tile.step if tile.split > 1 else 0
    ids = 4 * (tile.own + tile.step)
    if kernel == "forward":
        values = blocks * (width // 8 * packed + v_width // 8 * 2) + scores + operand + 4 * blocks
        return Estimate(values, tile.step * max(row, v_row) + exchanged + ids)
    own = (width + v_width) // 8 * packed
    sums = width // 8 * 2 + (v_width // 8 * 2 if kernel == "dkv" else 0)
    # lse and delta of the queries.
    statistics = 8 * (tile.step if kernel == "dkv" else tile.own)
    return Estimate(own + sums + 2 * scores + operand + 4, tile.step * (row + v_row) + 2 * exchanged + ids + statistics)
