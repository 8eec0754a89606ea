"""Rows sorted by expert, filled up to whole blocks of one expert each: what makes `mx.gather_mm` fast on a CPU."""

from typing import Final, NamedTuple

from forge_mlx.kernels import expert_counts
from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, map_batches
import mlx.core as mx

BLOCK_ROWS: Final = 16
"""Rows of a block on a CPU. There `mx.gather_mm` calls the BLAS once for each block: with one row it multiplies a
vector and reads the whole matrix for it. Measured in scripts/bench/LOG.md, 2026-12-01."""


class ExpertBlocks(NamedTuple):
    """Where the rows of the sorted order stand in blocks.

    Attributes:
        experts: The expert of each block, int32 `[M]`, not falling.
        targets: The place of each row among all rows of all blocks, int32 `[N k]`.
        sources: The row in each of these places, int32 `[M R]`; -1 where there is none.
    """

    experts: mx.array
    targets: mx.array
    sources: mx.array


def block_rows(count: int, num_experts: int) -> int:
    """How many rows of one expert one product should take: 1 where MLX's kernel takes sorted rows as they are.

    Args:
        count: Rows in all, N k.
        num_experts: Number of experts E.
    """
    # With few rows most of the blocks would be empty.
    return BLOCK_ROWS if mx.default_device().type == mx.cpu and count >= 4 * num_experts else 1


def make_blocks(experts: mx.array, num_experts: int, size: int) -> ExpertBlocks:
    """Plan N k // size + E blocks of `size` rows: as many as the worst split needs, so that shapes are constant.

    Args:
        experts: The expert of each row, int32 `[N k]`, ascending.
        num_experts: Number of experts E.
        size: Rows R of a block.
    """
    count = experts.size
    blocks = count // size + num_experts
    loads = expert_counts(experts, num_experts)
    own_blocks = (loads + size - 1) // size
    last_blocks = mx.cumsum(own_blocks)
    first_rows, first_blocks = mx.cumsum(loads) - loads, last_blocks - own_blocks
    shifts = first_blocks * size - first_rows
    rows = mx.arange(count, dtype=mx.int32)
    targets = rows + mx.take(shifts, experts)
    sources = mx.put_along_axis(mx.full((blocks * size,), -1, mx.int32), targets, rows, axis=0)
    # How many experts end at or before a block: its own expert's index. Blocks that nobody needs go to the last.
    ended = (last_blocks <= mx.arange(blocks, dtype=mx.int32)[:, None]).sum(axis=1)
    return ExpertBlocks(mx.minimum(ended, num_experts - 1).astype(mx.int32), targets, sources)


def into_blocks(rows: mx.array, blocks: ExpertBlocks) -> mx.array:
    """places[p] = rows[sources[p]], zeros where there is none: `[N k, C]` to `[M R, C]`.

    Args:
        rows: `[N k, C]`, sorted by expert.
        blocks: Of these rows.
    """
    (out,) = _spread(rows[None], blocks.targets[None], blocks.sources[None])
    return out[0]


def out_of_blocks(places: mx.array, blocks: ExpertBlocks) -> mx.array:
    """rows[r] = places[targets[r]]: `[M R, C]` to `[N k, C]`.

    Args:
        places: `[M R, C]`.
        blocks: As `into_blocks` took it.
    """
    (out,) = _gather(places[None], blocks.targets[None], blocks.sources[None])
    return out[0]


# All arrays below have an axis of batches in front, which `mx.vmap` makes longer.


def _spread_rows(rows: mx.array, _targets: mx.array, sources: mx.array) -> Arrays:
    return (mx.where(sources[..., None] < 0, 0, _rows_at(rows, mx.maximum(sources, 0))),)


def _gather_places(places: mx.array, targets: mx.array, _sources: mx.array) -> Arrays:
    return (_rows_at(places, targets),)


def _rows_at(x: mx.array, indices: mx.array) -> mx.array:
    """x[b, indices[b, i]] as `[B, I, C]`."""
    batches, count, width = x.shape
    starts = count * mx.arange(batches, dtype=mx.int32)
    return mx.take(x.reshape(batches * count, width), indices + starts[:, None], axis=0)


# Each is the gradient of the other: two reads, where MLX's own gradient of a read adds row by row.


def _spread_gradient(_rows: mx.array, targets: mx.array, sources: mx.array, dplaces: mx.array) -> Arrays:
    return _gather(dplaces, targets, sources)


def _gather_gradient(_places: mx.array, targets: mx.array, sources: mx.array, drows: mx.array) -> Arrays:
    return _spread(drows, targets, sources)


_spread = differentiable(_spread_rows, _spread_gradient, _spread_gradient, constants=(1, 2), vmap=map_batches)
_gather = differentiable(_gather_places, _gather_gradient, _gather_gradient, constants=(1, 2), vmap=map_batches)
