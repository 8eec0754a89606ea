"""The formulas of reference.py through blocks of queries, one after the other: memory grows with T, not with T S.

Of a block's keys only those between its causal and window bounds are read. Which documents meet is known only once the
ids are computed, so that they hide pairs but save no work.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
import math
from typing import Final

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels.attention import reference
from forge_mlx.kernels.attention.options import Options
import mlx.core as mx

BLOCK_BYTES: Final = {mx.cpu: 2 * 2**20, mx.gpu: 256 * 2**20}
"""By device, the bytes that the scores of a block take at most if it has more than the fewest rows."""
FEWEST_ROWS: Final = 16
MOST_ROWS: Final = 512


@dataclass(frozen=True)
class Block:
    """Queries, and the keys that any of them may see by causal order and window.

    Attributes:
        queries: Indices from start to stop.
        keys: Indices from start to stop, at least one.
    """

    queries: slice
    keys: slice


def block_rows(batch_heads: int, keys: int, options: Options, device: mx.DeviceType) -> int:
    """How many queries a block has: a power of 2 whose scores keep within BLOCK_BYTES.

    Args:
        batch_heads: B times H.
        keys: S.
        options: What is seen.
        device: Where the blocks are computed.
    """
    rows = MOST_ROWS
    while rows > FEWEST_ROWS:
        width = keys if options.window is None else min(keys, rows + options.window - 1)
        if 4 * batch_heads * rows * width <= BLOCK_BYTES[device]:
            break
        rows //= 2
    return rows


def forward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    sinks: mx.array | None,
    options: Options,
) -> tuple[mx.array, mx.array]:
    """out and lse of `reference.forward`.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, Dv]`.
        q_segments: int32 `[B, T]`, or None.
        k_segments: int32 `[B, S]`, or None.
        sinks: float32 `[B, H]`, or None.
        options: What is seen, and how scores are made.

    Returns:
        out `[B, H, T, Dv]` in the dtype of q, and lse `[B, H, T]` in float32.
    """
    offset = k.shape[2] - q.shape[2]
    found: list[Arrays] = []
    blocks = list(_blocks(q, k, options))
    for block in blocks:
        zero = _zero_after(found[-1] if found else ())
        s = reference.scores(_rows(q, block.queries) + zero, _rows(k, block.keys), options)
        seen = _visible(block, q_segments, k_segments, options, offset, zero)
        out, lse = reference.attend(s, _rows(v, block.keys), seen, sinks)
        found.append((out.astype(q.dtype), lse))
    blind = _blind(q, blocks)
    empty = mx.zeros((*q.shape[:2], blind, v.shape[3]), q.dtype)
    least = mx.array(-math.inf) if sinks is None else sinks[..., None]
    lse = mx.broadcast_to(least, (*q.shape[:2], blind))
    return _concatenated_tokens([empty, *(out for out, _ in found)]), _concatenated([lse, *(each for _, each in found)])


def backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    sinks: mx.array | None,
    out: mx.array,
    lse: mx.array,
    dout: mx.array,
    dlse: mx.array,
    options: Options,
) -> Arrays:
    """The gradients of `reference.backward`; those of k and v are summed over the blocks in float32, the last first.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, Dv]`.
        q_segments: int32 `[B, T]`, or None.
        k_segments: int32 `[B, S]`, or None.
        sinks: float32 `[B, H]`, or None.
        out: As `forward` returned it.
        lse: As `forward` returned it.
        dout: Cotangent of out.
        dlse: Cotangent of lse; where lse is -inf it counts as 0.
        options: What is seen, and how scores are made.

    Returns:
        dq, dk and dv in the dtype of q, and with sinks dsinks `[B, H]` in float32.
    """
    offset = k.shape[2] - q.shape[2]
    delta = reference.row_delta(out, lse, dout, dlse)
    dq: list[mx.array] = []
    sums = [_SumFromTheEnd(k), _SumFromTheEnd(v)]
    blocks = list(_blocks(q, k, options))
    for block in reversed(blocks):
        rows, keys = block.queries, block.keys
        zero = _zero_after([*dq[-1:], *sums[0].newest(), *sums[1].newest()])
        block_dq, block_dk, block_dv = reference.gradients(
            _rows(q, rows) + zero,
            _rows(k, keys),
            _rows(v, keys),
            _visible(block, q_segments, k_segments, options, offset, zero),
            lse[:, :, rows],
            delta[:, :, rows],
            _rows(dout, rows) + zero,
            options,
        )
        dq.append(block_dq.astype(q.dtype))
        sums[0].add(block_dk, keys)
        sums[1].add(block_dv, keys)
    dq.append(mx.zeros((*q.shape[:2], _blind(q, blocks), q.shape[3]), q.dtype))
    found = (_concatenated(dq[::-1]), *(each.result() for each in sums))
    return found if sinks is None else (*found, reference.sink_gradient(sinks, lse, delta))


class _SumFromTheEnd:
    """The sum of arrays that each cover a range of keys: the first up to the end, the bounds of each next no higher.

    What a range has left behind is final, and rounded.

    Args:
        like: `[B, Hkv, S, D]`: shape and dtype of the sum.
    """

    def __init__(self, like: mx.array) -> None:
        self._like = like
        self._final: list[mx.array] = []
        self._sum: mx.array | None = None
        self._start = like.shape[2]

    def add(self, part: mx.array, keys: slice) -> None:
        """Add float32 `[B, Hkv, keys, D]`; ranges that follow each other touch or overlap."""
        if self._sum is not None:
            shared = keys.stop - self._start
            self._leave(shared)
            old, fresh = self._sum[:, :, :shared], self._start - keys.start
            if shared and fresh:
                part = mx.concatenate([part[:, :, :fresh], part[:, :, fresh:] + old], axis=2)
            elif shared:
                part = part + old
        self._sum, self._start = part, keys.start

    def newest(self) -> Iterable[mx.array]:
        """What has to be computed before the arrays of the next range, or they would wait in memory."""
        return [*self._final[-1:], *([] if self._sum is None else [self._sum])]

    def result(self) -> mx.array:
        """The sum for all keys, `[B, Hkv, S, D]`."""
        self._leave(0)
        return _concatenated([self._zeros(self._start), *self._final[::-1]])

    def _leave(self, kept: int) -> None:
        if self._sum is not None and kept < self._sum.shape[2]:
            # A copy: a view would keep the whole range.
            self._final.append(mx.contiguous(self._sum[:, :, kept:].astype(self._like.dtype)))

    def _zeros(self, keys: int) -> mx.array:
        batch, heads, _, size = self._like.shape
        return mx.zeros((batch, heads, keys, size), self._like.dtype)


def _blocks(q: mx.array, k: mx.array, options: Options) -> Iterator[Block]:
    """All blocks but the first ones whose queries are too early to see a key."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    rows = block_rows(batch * heads, keys, options, mx.default_device().type)
    if not (batch and heads and keys):
        return
    # Of more queries than keys, under causal order.
    blind = max(0, queries - keys) if options.causal else 0
    for start in range(blind, queries, rows):
        stop = min(start + rows, queries)
        first, last = 0, keys
        if options.causal:
            last = stop + keys - queries
            if options.window is not None:
                first = max(0, start + keys - queries - options.window + 1)
        yield Block(slice(start, stop), slice(first, last))


def _blind(q: mx.array, blocks: list[Block]) -> int:
    """How many queries come before the first block."""
    return blocks[0].queries.start if blocks else q.shape[2]


def _visible(
    block: Block,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    options: Options,
    offset: int,
    zero: mx.array,
) -> mx.array:
    """What the queries of a block see of its keys, computed no sooner than `zero`."""
    return reference.visible(
        block.queries.stop - block.queries.start,
        block.keys.stop - block.keys.start,
        None if q_segments is None else q_segments[:, block.queries],
        None if k_segments is None else k_segments[:, block.keys],
        options,
        first_query=block.queries.start,
        first_key=block.keys.start,
        offset=offset,
        zero=zero.astype(mx.int32),
    )


def _rows(x: mx.array, rows: slice) -> mx.array:
    return x[:, :, rows].astype(mx.float32)


def _zero_after(before: Iterable[mx.array]) -> mx.array:
    """A 0 that is there once some arrays are: MLX would compute the scores of all blocks before it uses the first.

    A choice that is never made, because mx.depends has no vmap.
    """
    zero, never = mx.array(0.0), mx.array(False)
    for array in before:
        zero = mx.where(never, array.flatten()[0].astype(mx.float32), zero)
    return zero


def _concatenated_tokens(parts: list[mx.array]) -> mx.array:
    """As `_concatenated`, with the heads of a token side by side in memory.

    So the projection behind it needs no copy, which would be kept for the backward pass beside this.
    """
    return mx.concatenate([mx.swapaxes(part, 1, 2) for part in parts], axis=1).swapaxes(1, 2)


def _concatenated(parts: list[mx.array]) -> mx.array:
    return mx.concatenate(parts, axis=2)
