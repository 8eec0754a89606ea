"""Plain causal or full attention by MLX's own op, and where that is the better way."""

from typing import Final

import mlx.core as mx

MLX_HEADS: Final = (64, 72, 80, 96, 128)
"""Head sizes for which MLX 0.32.4 has Metal kernels."""

_PREFER_MLX: Final = "MLX's own op does plain attention with a backward pass of its own; impl= asks for the kernels"
_FEW_QUERIES: Final = 128


def is_better(queries: int, dtype: mx.Dtype, device: mx.DeviceType) -> bool:
    """Whether MLX's op does plain attention better than blocks of queries in plain operations.

    On a GPU it is fused. On a CPU it holds all scores, in the dtype of q, computes those that are hidden too, and takes
    its time with exponentials: there it is better for few queries in float32 alone.

    Args:
        queries: T.
        dtype: Of q, k and v.
        device: Where they are.
    """
    return device == mx.gpu or (queries < _FEW_QUERIES and dtype == mx.float32)


def reason_for_mlx(head_dim: int, v_head_dim: int) -> str | None:
    """Why automatic takes MLX's op for plain attention where our kernels could run too; None where it does not.

    Args:
        head_dim: Size of the heads of q and k.
        v_head_dim: Size of the heads of v.
    """
    return _PREFER_MLX if head_dim == v_head_dim and head_dim in MLX_HEADS else None


def plain_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool) -> mx.array:
    """softmax(scale q k^T) v, in causal order or of everything: `mx.fast.scaled_dot_product_attention`.

    Args:
        q: Queries `[B, H, T, D]`.
        k: Keys `[B, Hkv, S, D]`, S >= T.
        v: Values `[B, Hkv, S, Dv]`.
        scale: Factor on the scores.
        causal: Whether query i sees keys 0 to S - T + i alone.

    Returns:
        `[B, H, T, Dv]` in the dtype of q.
    """
    # A single query sees everything, and MLX has a kernel for that.
    mask = "causal" if causal and q.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
