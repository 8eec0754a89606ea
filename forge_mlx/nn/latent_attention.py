"""DeepSeek's attention: keys and values made of one small latent a token, which is all that a cache holds."""

from numbers import Integral
from typing import cast

from forge_mlx.kernels._common.checks import given, is_number
from forge_mlx.kernels.attention import flash_attention
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.kernels.rope import rope
from forge_mlx.kernels.softmax import softmax
from forge_mlx.nn.attention import padded_head
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.norms import RMSNorm
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 (arXiv:2405.04434) and V3, causal.

    In plain operations, for each head, with [a, b] a concatenation and k_rope the same in all heads::

        latent, k_rope = kv_a_proj_with_mqa(x)
        k_nope, v = kv_b_proj(kv_a_layernorm(latent))
        q_nope, q_rope = q_b_proj(q_a_layernorm(q_a_proj(x)))  # or q_proj(x) without q_lora_rank
        q, k = [q_nope, rope(q_rope)], [k_nope, rope(k_rope)]
        out = o_proj(softmax(scale q k^T) v)

    Elements 2i and 2i + 1 of what rotates are a pair, as in DeepSeek's checkpoints, whose names the projections have.
    YaRN (arXiv:2309.00071), which stretched DeepSeek-V3, is other frequencies, a factor on what rotates and a scale.

    A cache holds kv_lora_rank + qk_rope_head_dim numbers a token for all heads together: the rotated k_rope as keys,
    the normalised latent as values. A call with several tokens makes keys and values of all positions again. For a
    single token kv_b_proj is absorbed instead, its part for keys into the query and its part for values into the
    result, so that heads attend to the latents themselves; where it has been replaced, as by a quantised layer, they
    are made for a single token too.

    Args:
        hidden_size: Width C of input and output.
        num_heads: Heads H.
        kv_lora_rank: Size of the latent.
        q_lora_rank: Size of the latent that queries are made of; None: they are made of x.
        qk_nope_head_dim: Elements of a query or key that know no position.
        qk_rope_head_dim: Elements of a query or key that rotate, even; both together at most 256.
        v_head_dim: Size of a head of values, at most 256.
        scale: Factor on the scores; None: 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).
        rope_base: Base of the rotary frequencies, base^(-2i / qk_rope_head_dim).
        rope_scale: Factor on the position before it is rotated in.
        rope_periods: `[qk_rope_head_dim / 2]`, what takes the place of base^(2i / qk_rope_head_dim); None: that.
        rope_factor: Factor on what rotates of a query and on what rotates of a key.
        norm_eps: eps of the RMSNorms over the latents.
        norm_weight: Whether they have a learnable scale.

    Raises:
        ValueError: When an argument is out of its range.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        scale: float | None = None,
        rope_base: float = 10000.0,
        rope_scale: float = 1.0,
        rope_periods: NDArray[np.float32] | None = None,
        rope_factor: float = 1.0,
        norm_eps: float = 1e-6,
        norm_weight: bool = True,
    ) -> None:
        super().__init__()
        _check_counts(
            hidden_size=hidden_size,
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            **({} if q_lora_rank is None else {"q_lora_rank": q_lora_rank}),
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
        )
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        scale = head_dim**-0.5 if scale is None else scale
        _check_numbers(
            scale=scale, rope_base=rope_base, rope_scale=rope_scale, rope_factor=rope_factor, norm_eps=norm_eps
        )
        if rope_periods is not None and np.shape(rope_periods) != (qk_rope_head_dim // 2,):
            raise ValueError(
                "[LatentAttention] rope_periods must have one number for each pair that rotates, "
                f"{qk_rope_head_dim // 2}, but got the shape {np.shape(rope_periods)}."
            )
        problem = impossible_heads(qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        if problem is not None:
            raise ValueError(f"[LatentAttention] {problem}")
        self.num_heads = num_heads
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.v_head_dim = v_head_dim
        self.rope_base = rope_base
        self.rope_scale = rope_scale
        self.rope_factor = rope_factor
        # The underscore keeps it out of the parameters.
        self._rope_periods = None if rope_periods is None else mx.array(rope_periods, mx.float32)
        self.scale = scale
        if q_lora_rank is None:
            self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=False)
        else:
            self.q_a_proj = Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=norm_eps, weight=norm_weight)
            self.q_b_proj = Linear(q_lora_rank, num_heads * head_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps=norm_eps, weight=norm_weight)
        self.kv_b_proj = Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = Linear(num_heads * v_head_dim, hidden_size, bias=False)

    def __call__(
        self,
        x: mx.array,
        cache: KVCache | None = None,
        *,
        segment_ids: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Map `[B, T, C]` to `[B, T, C]`; with a cache, x continues what the cache holds.

        Args:
            x: `[B, T, C]`.
            cache: Latents of the positions before x, which x is added to.
            segment_ids: As `Attention` takes them.
            positions: As `Attention` takes them.

        Raises:
            ValueError: When there are segment ids or positions together with a cache, whose latents have none.
        """
        names = list(given(segment_ids=segment_ids, positions=positions))
        if cache is not None and names:
            raise ValueError(
                f"[LatentAttention] {' and '.join(names)} must be left out with a cache, which holds one text a row. "
                "Give the rows without a cache, or each document a row of its own."
            )
        q_nope, q_rope = mx.split(self._heads(self._queries(x)), [self.qk_nope_head_dim], axis=-1)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        latent = self.kv_a_layernorm(latent)
        offset = 0 if cache is None else cache.offset
        if self.rope_factor != 1:
            # Both factors meet in the product, and a cache need not know of them.
            q_rope = q_rope * self.rope_factor**2
        q_rope, k_rope = (self._rotate(each, offset, positions) for each in (q_rope, k_rope[:, None]))
        batch, length, _ = x.shape
        if cache is not None:
            k_rope, held = cache.update(k_rope, latent[:, None])
            latent = held[:, 0]
        # The class itself: its subclasses and what replaces it compute something else than x W^T.
        if cache is not None and length == 1 and type(self.kv_b_proj) is Linear:
            out = self._absorbed(q_nope, q_rope, latent, k_rope)
        else:
            out = self._expanded(q_nope, q_rope, latent, k_rope, segment_ids)
        projected: mx.array = self.o_proj(
            out.transpose(0, 2, 1, 3).reshape(batch, length, self.num_heads * self.v_head_dim)
        )
        return projected

    def _queries(self, x: mx.array) -> mx.array:
        """`[B, T, C]` to `[B, T, H * (qk_nope_head_dim + qk_rope_head_dim)]`."""
        if "q_proj" in self:
            q: mx.array = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q

    def _rotate(self, x: mx.array, offset: int, positions: mx.array | None) -> mx.array:
        scale = self.rope_scale
        if self._rope_periods is not None:
            return rope(x, self._rope_periods, scale=scale, offset=offset, positions=positions, traditional=True)
        return rope(x, base=self.rope_base, scale=scale, offset=offset, positions=positions, traditional=True)

    def _expanded(
        self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, segment_ids: mx.array | None
    ) -> mx.array:
        """Attention `[B, H, T, v_head_dim]` to keys and values made of latents `[B, S, rank]`."""
        k_nope, v = mx.split(self._heads(self.kv_b_proj(latent)), [self.qk_nope_head_dim], axis=-1)
        k_rope = mx.broadcast_to(k_rope, (*k_nope.shape[:3], k_rope.shape[3]))
        q, k, v = _padded(q_nope, q_rope), _padded(k_nope, k_rope), _padded(v)
        out = flash_attention(q, k, v, scale=self.scale, segment_ids=segment_ids)
        return cast(mx.array, out)[..., : self.v_head_dim]

    def _absorbed(self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array) -> mx.array:
        """The same for one query, `[B, H, 1, v_head_dim]`, without keys and values.

        (W_k c) q = c (W_k^T q) and sum_s p_s W_v c_s = W_v sum_s p_s c_s. Scores, probabilities and sums are float32,
        as in `flash_attention`.
        """
        weight = self.kv_b_proj.weight.reshape(self.num_heads, -1, self.kv_lora_rank)
        of_keys, of_values = mx.split(weight, [self.qk_nope_head_dim], axis=1)
        latent, k_rope, q_rope = (each.astype(mx.float32) for each in (latent, k_rope[:, 0], q_rope[:, :, 0]))
        q_latent = (q_nope.astype(mx.float32) @ of_keys.astype(mx.float32))[:, :, 0]
        scores = q_latent @ latent.swapaxes(1, 2) + q_rope @ k_rope.swapaxes(1, 2)
        seen = softmax(self.scale * scores) @ latent
        out = seen[:, :, None] @ of_values.astype(mx.float32).swapaxes(1, 2)
        return out.astype(q_nope.dtype)

    def _heads(self, x: mx.array) -> mx.array:
        """`[B, T, H * D]` to `[B, H, T, D]`."""
        batch, length, width = x.shape
        return x.reshape(batch, length, self.num_heads, width // self.num_heads).transpose(0, 2, 1, 3)


def impossible_heads(qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int) -> str | None:
    """Why heads cannot be of these sizes, in a sentence with a way out; None when they can.

    Args:
        qk_nope_head_dim: Elements of a query or key that know no position.
        qk_rope_head_dim: Elements of a query or key that rotate.
        v_head_dim: Size of a head of values.
    """
    if qk_rope_head_dim % 2:
        return f"qk_rope_head_dim must be even, as pairs rotate, but got {qk_rope_head_dim}. Add one or take one off."
    sizes = {"qk_nope_head_dim + qk_rope_head_dim": qk_nope_head_dim + qk_rope_head_dim, "v_head_dim": v_head_dim}
    for name, size in sizes.items():
        if size > LARGEST_HEAD:
            return f"{name} must be at most {LARGEST_HEAD} but got {size}. Take more and smaller heads."
    return None


def _padded(*parts: mx.array) -> mx.array:
    """One array `[B, H, T, D]` of the parts of its heads and of the zeros that `flash_attention` needs behind them."""
    size = sum(part.shape[-1] for part in parts)
    missing = padded_head(size) - size
    zeros = [mx.zeros((*parts[0].shape[:-1], missing), parts[0].dtype)] if missing else []
    return parts[0] if len(parts) + len(zeros) == 1 else mx.concatenate([*parts, *zeros], axis=-1)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"[LatentAttention] {name} must be a whole number of 1 or more but got {value!r}.")


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (is_number(value) and value > 0):
            raise ValueError(f"[LatentAttention] {name} must be a number greater than 0 but got {value!r}.")
