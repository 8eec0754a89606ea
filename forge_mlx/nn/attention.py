"""Causal self-attention: grouped heads, rotary positions, normalised queries and keys, a cache."""

from typing import Final

from forge_mlx.kernels.rope import rope
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.norms import RMSNorm
import mlx.core as mx
import mlx.nn as nn

_CPU_BLOCKS: Final = 4
_CPU_MIN_QUERIES: Final = 128


def causal_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float) -> mx.array:
    """softmax(scale * q k^T + mask) v, where query i of T sees keys 0 to S - T + i of S.

    The last query sees the last key, as a cache needs::

        T = 2, S = 4:   1 1 1 .
                        1 1 1 1

    This is `mx.fast.scaled_dot_product_attention`. MLX's CPU back end computes every score and then hides
    half of them, and the exponentials are most of its time; there, 128 queries or more are taken in four
    blocks that read no key past their own end (forward and backward take 15 to 35 % less time).

    Args:
        q: Queries `[B, H, T, D]`.
        k: Keys `[B, H_kv, S, D]`, H a multiple of H_kv and S >= T.
        v: Values `[B, H_kv, S, D]`.
        scale: Factor on the scores, commonly 1 / sqrt(D).

    Returns:
        `[B, H, T, D]` in the dtype of q.

    Raises:
        ValueError: When there are more queries than keys: the first would see none.
    """
    queries, keys = q.shape[2], k.shape[2]
    if queries > keys:
        raise ValueError(f"[causal_attention] k must hold at least as many positions as q, {queries}, but got {keys}.")
    if mx.default_device() == mx.gpu or queries < _CPU_MIN_QUERIES:
        mask = "causal" if queries > 1 else None
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    size = -(-queries // _CPU_BLOCKS)
    blocks = []
    for start in range(0, queries, size):
        end = start + size
        seen = keys - queries + end
        block = mx.fast.scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, :seen], v[:, :, :seen], scale=scale, mask="causal"
        )
        blocks.append(block)
    return mx.concatenate(blocks, axis=2)


class Attention(nn.Module):
    """o(attention(rope(norm(q(x))), rope(norm(k(x))), v(x))), causal.

    Args:
        hidden_size: Width C of input and output.
        num_heads: Query heads H.
        num_kv_heads: Key and value heads; a divisor of num_heads.
        head_dim: Size D of a head.
        bias: Whether the four projections have a bias.
        rope_base: Base of the rotary frequencies, base^(-2i/D); None for no rotary positions. The halves of
            a head rotate against each other (element i with i + D/2), as in Llama.
        rope_scale: Factor on the position before it is rotated in.
        qk_norm_eps: eps of an RMSNorm over each head of q and k before the rotation; None for no norm.
        qk_norm_weight: Whether that norm has a learnable scale `[D]`, shared by the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        rope_base: float | None = 10000.0,
        rope_scale: float = 1.0,
        qk_norm_eps: float | None = None,
        qk_norm_weight: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.rope_base = rope_base
        self.rope_scale = rope_scale
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias)
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, eps=qk_norm_eps, weight=qk_norm_weight)
            self.k_norm = RMSNorm(head_dim, eps=qk_norm_eps, weight=qk_norm_weight)

    def __call__(self, x: mx.array, cache: KVCache | None = None) -> mx.array:
        """Map `[B, T, C]` to `[B, T, C]`; with a cache, x continues what the cache holds."""
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            offset = 0 if cache is None else cache.offset
            q, k = (rope(each, base=self.rope_base, scale=self.rope_scale, offset=offset) for each in (q, k))
        if cache is not None:
            k, v = cache.update(k, v)
        out = causal_attention(q, k, v, scale=self.scale)
        batch, length, _ = x.shape
        projected: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        return projected

    def _heads(self, x: mx.array) -> mx.array:
        """`[B, T, H * D]` to `[B, H, T, D]`."""
        batch, length, width = x.shape
        return x.reshape(batch, length, width // self.head_dim, self.head_dim).transpose(0, 2, 1, 3)
