"""The attention modules of mlx-lm's models, with `flash_attention` where there is no cache."""

from typing import Any, cast

from forge_mlx.kernels.attention import flash_attention
from forge_mlx.patching.modules import Patched, rotated, same_dtype
from forge_mlx.patching.rows import Rows, Sight
import mlx.core as mx


class PatchedAttention(Patched):
    """o(attention(rope(norm(q(x))), rope(norm(k(x))), v(x))) with documents, windows and softcaps, in O(T) memory.

    With a KV cache, or without the decoder that hands it `Rows`, the original runs.
    """

    by = "kernels.flash_attention"

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Map `[B, T, C]` to `[B, T, C]`.

        Args:
            x: `[B, T, C]`.
            mask: A `Sight` where there are rows; else what mlx-lm takes.
            cache: `Rows`, or what mlx-lm takes.
        """
        if not isinstance(cache, Rows):
            return cast(mx.array, super().__call__(x, mask, cache))
        q, k, v = self._heads(x)
        q, k, v = same_dtype(rotated(self.rope, q, cache), rotated(self.rope, k, cache), v)
        out = _attend(
            q,
            k,
            v,
            scale=float(self.scale),
            window=cast(Sight, mask).window,
            softcap=getattr(self, "attn_logit_softcapping", None),
            segment_ids=cache.segment_ids,
        )
        batch, _, length, _ = q.shape
        return cast(mx.array, self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1)))

    def _heads(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """q `[B, H, T, D]`, k and v `[B, Hkv, T, D]`, normalised where the module has norms for them."""
        is_mixtral = "num_heads" in vars(self)
        heads, kv_heads = (self.num_heads, self.num_key_value_heads) if is_mixtral else (self.n_heads, self.n_kv_heads)
        if "qkv_proj" in self:
            of_query, of_keys = heads * self.head_dim, (heads + kv_heads) * self.head_dim
            q, k, v = mx.split(self.qkv_proj(x), [of_query, of_keys], axis=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        # OLMoE's norms are over all heads at once.
        is_joint = "q_norm" in self and self.q_norm.weight.size == q.shape[-1]
        if is_joint:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = _split(q, heads), _split(k, kv_heads), _split(v, kv_heads)
        if "q_norm" in self and not is_joint:
            q, k = self.q_norm(q), self.k_norm(k)
        return q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def head_size(attention: Any) -> int:
    """Size D of the heads of an attention module of mlx-lm.

    Args:
        attention: The module.
    """
    size = getattr(attention, "head_dim", None)
    return int(attention.rope.dims if size is None else size)


def _split(x: mx.array, heads: int) -> mx.array:
    """`[B, T, H * D]` to `[B, T, H, D]`."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, heads, -1)


def _attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    """`flash_attention`, heads of other sizes than multiples of 8 filled up with zeros for it."""
    size = q.shape[3]
    missing = -size % 8
    if missing:
        q, k, v = (mx.pad(each, [(0, 0), (0, 0), (0, 0), (0, missing)]) for each in (q, k, v))
    return cast(mx.array, flash_attention(q, k, v, **options))[..., :size]
