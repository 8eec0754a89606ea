"""Plain causal or full attention by MLX's own op."""

from typing import Final

import mlx.core as mx

MLX_HEADS: Final = (64, 72, 80, 96, 128)
"""Head sizes for which MLX 0.32.4 has Metal kernels that are the faster way, its tests of use_fallback say."""

_CPU_BLOCKS: Final = 4
_CPU_MIN_QUERIES: Final = 128


def plain_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool) -> mx.array:
    """softmax(scale q k^T) v, in causal order or of everything: `mx.fast.scaled_dot_product_attention`.

    MLX's CPU back end computes every score and then hides half of them, and the exponentials are most of its time;
    there, 128 queries or more in causal order are taken in four blocks that read no key past their own end (forward and
    backward take 15 to 35 % less time).

    Args:
        q: Queries `[B, H, T, D]`.
        k: Keys `[B, Hkv, S, D]`, S >= T.
        v: Values `[B, Hkv, S, Dv]`.
        scale: Factor on the scores.
        causal: Whether query i sees keys 0 to S - T + i alone.

    Returns:
        `[B, H, T, Dv]` in the dtype of q.
    """
    queries, keys = q.shape[2], k.shape[2]
    # A single query sees everything, and MLX has a kernel for that.
    mask = "causal" if causal and queries > 1 else None
    if mask is None or mx.default_device() == mx.gpu or queries < _CPU_MIN_QUERIES:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    size = -(-queries // _CPU_BLOCKS)
    blocks = []
    for start in range(0, queries, size):
        end = start + size
        seen = keys - queries + end
        block = mx.fast.scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, :seen], v[:, :, :seen], scale=scale, mask=mask
        )
        blocks.append(block)
    return mx.concatenate(blocks, axis=2)
