"""Causal self-attention: grouped heads, rotary positions, normalised queries and keys, documents, windows, a cache."""

from numbers import Integral
from typing import Literal, cast

from forge_mlx.kernels._common.checks import given, is_number
from forge_mlx.kernels.attention import flash_attention
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.kernels.attention.plain import plain_attention
from forge_mlx.kernels.rope import rope
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.norms import RMSNorm
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray


def padded_head(head_dim: int) -> int:
    """The head size with which `Attention` calls `flash_attention`: the next multiple of 8.

    Args:
        head_dim: Size of a head.
    """
    return head_dim + -head_dim % 8


class Attention(nn.Module):
    """o(attention(rope(norm(q(x))), rope(norm(k(x))), v(x))), causal.

    The attention is `flash_attention`. Heads whose size is no multiple of 8 are filled up with zeros for it. Larger
    heads than it takes, of more than 256 elements, can attend in causal order alone, by MLX's own op.

    Args:
        hidden_size: Width C of input and output.
        num_heads: Query heads H.
        num_kv_heads: Key and value heads; a divisor of num_heads.
        head_dim: Size D of a head; at most 256 with a window, softcap, sinks or segment ids.
        bias: Whether the four projections have a bias; "qkv": all but the last, as in Qwen2.
        scale: Factor on the scores; None: 1 / sqrt(head_dim).
        rope_base: Base of the rotary frequencies, base^(-2i/D); None for no rotary positions. The halves of
            a head rotate against each other (element i with i + D/2), as in Llama.
        rope_scale: Factor on the position before it is rotated in.
        rope_periods: `[D / 2]`, what takes the place of base^(2i/D): rope_base then only says that there are rotary
            positions. None: that.
        qk_norm_eps: eps of an RMSNorm over each head of q and k before the rotation; None for no norm.
        qk_norm_weight: Whether that norm has a learnable scale: `[D]`, shared by the heads, or a joint one's as wide as
            all of them.
        qk_norm_offset: Whether that scale is 1 plus what is learnt, as in Gemma 3.
        qk_norm_joint: Whether that norm is over all heads of q together, and all of k, as in OLMoE.
        window: How many positions a query sees, its own included; None: all before it.
        softcap: Bound c of the scores, c tanh(score / c); None: none.
        sinks: Whether each head has a learnable logit in the denominator of its softmax, `sinks` `[H]`, as in gpt-oss:
            a head can then attend to nothing. They start at 0.

    Raises:
        ValueError: When an argument is out of its range, or a head too large for what is asked of it.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool | Literal["qkv"] = False,
        scale: float | None = None,
        rope_base: float | None = 10000.0,
        rope_scale: float = 1.0,
        rope_periods: NDArray[np.float32] | None = None,
        qk_norm_eps: float | None = None,
        qk_norm_weight: bool = True,
        qk_norm_offset: bool = False,
        qk_norm_joint: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        _check_heads(num_heads, num_kv_heads, head_dim)
        _check_options(head_dim, window, softcap, sinks)
        _check_scores(bias, scale)
        _check_periods(head_dim, rope_base, rope_periods)
        if qk_norm_joint and qk_norm_eps is None:
            raise ValueError(
                "[Attention] qk_norm_joint must be left out without a norm but qk_norm_eps is None. Set it."
            )
        self.qk_norm_joint = qk_norm_joint
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rope_base = rope_base
        self.rope_scale = rope_scale
        # The underscore keeps it out of the parameters.
        self._rope_periods = None if rope_periods is None else mx.array(rope_periods, mx.float32)
        self.window = window
        self.softcap = softcap
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=bool(bias))
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bool(bias))
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bool(bias))
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias is True)
        if qk_norm_eps is not None:
            for name, heads in {"q_norm": num_heads, "k_norm": num_kv_heads}.items():
                dims = heads * head_dim if qk_norm_joint else head_dim
                self[name] = RMSNorm(dims, eps=qk_norm_eps, weight=qk_norm_weight, offset=qk_norm_offset)
        if sinks:
            self.sinks = mx.zeros((num_heads,))

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
            cache: Keys and values of the positions before x, which x is added to.
            segment_ids: Integers `[B, T]`: a position sees those of its own id alone, and with a negative id none. Ids
                above 2^31 - 1 wrap around: they become negative, or meet another document's.
            positions: Integers `[B, T]` for the rotation; None: as they follow each other. Without effect with
                rope_base=None.

        Raises:
            ValueError: When there are segment ids or positions together with a cache, whose keys have none, or segment
                ids with heads of more than 256 elements.
        """
        names = list(given(segment_ids=segment_ids, positions=positions))
        if cache is not None and names:
            raise ValueError(
                f"[Attention] {' and '.join(names)} must be left out with a cache, which holds one text a row. "
                "Give the rows without a cache, or each document a row of its own."
            )
        if segment_ids is not None:
            _check_largest(self.head_dim, ["segment_ids"])
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if "q_norm" in self and self.qk_norm_joint:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        if "q_norm" in self and not self.qk_norm_joint:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            offset = 0 if cache is None else cache.offset
            q, k = (self._rotate(each, offset, positions) for each in (q, k))
        if cache is not None:
            k, v = cache.update(k, v)
        out = self._attend(q, k, v, segment_ids)
        batch, length, _ = x.shape
        projected: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        return projected

    def _rotate(self, x: mx.array, offset: int, positions: mx.array | None) -> mx.array:
        if self._rope_periods is not None:
            return rope(x, self._rope_periods, scale=self.rope_scale, offset=offset, positions=positions)
        return rope(x, base=cast(float, self.rope_base), scale=self.rope_scale, offset=offset, positions=positions)

    def _attend(self, q: mx.array, k: mx.array, v: mx.array, segment_ids: mx.array | None) -> mx.array:
        if self.head_dim > LARGEST_HEAD:
            return plain_attention(q, k, v, scale=self.scale, causal=True)
        missing = padded_head(self.head_dim) - self.head_dim
        if missing:
            q, k, v = (mx.pad(each, [(0, 0), (0, 0), (0, 0), (0, missing)]) for each in (q, k, v))
        out = flash_attention(
            q,
            k,
            v,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            segment_ids=segment_ids,
            sinks=self.sinks if "sinks" in self else None,
        )
        return cast(mx.array, out)[..., : self.head_dim]

    def _heads(self, x: mx.array) -> mx.array:
        """`[B, T, H * D]` to `[B, H, T, D]`."""
        batch, length, width = x.shape
        return x.reshape(batch, length, width // self.head_dim, self.head_dim).transpose(0, 2, 1, 3)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    for name, value in {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}.items():
        _check_count(name, value)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"[Attention] num_heads must be a multiple of num_kv_heads, {num_kv_heads}, but got {num_heads}."
        )


def _check_options(head_dim: int, window: int | None, softcap: float | None, sinks: bool) -> None:
    if window is not None:
        _check_count("window", window)
    if softcap is not None and not (is_number(softcap) and softcap > 0):
        raise ValueError(f"[Attention] softcap must be a number greater than 0 but got {softcap!r}.")
    asked = {"window": window is not None, "softcap": softcap is not None, "sinks": sinks}
    _check_largest(head_dim, [name for name, is_asked in asked.items() if is_asked])


def _check_scores(bias: bool | Literal["qkv"], scale: float | None) -> None:
    if bias not in (True, False, "qkv"):
        raise ValueError(f'[Attention] bias must be True, False or "qkv" but got {bias!r}.')
    if scale is not None and not (is_number(scale) and scale > 0):
        raise ValueError(f"[Attention] scale must be a number greater than 0 but got {scale!r}.")


def _check_periods(head_dim: int, rope_base: float | None, periods: NDArray[np.float32] | None) -> None:
    if periods is None:
        return
    if rope_base is None:
        raise ValueError("[Attention] rope_periods must be left out without rotary positions but rope_base is None.")
    if np.shape(periods) != (head_dim // 2,):
        raise ValueError(
            f"[Attention] rope_periods must have one number for each pair of a head, {head_dim // 2}, but got the "
            f"shape {np.shape(periods)}."
        )


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"[Attention] {name} must be a whole number of 1 or more but got {value!r}.")


def _check_largest(head_dim: int, features: list[str]) -> None:
    """Raise where a head is too large for what only `flash_attention` does."""
    if features and head_dim > LARGEST_HEAD:
        raise ValueError(
            f"[Attention] head_dim must be at most {LARGEST_HEAD} with {' and '.join(features)} but got {head_dim}. "
            "Take more and smaller heads."
        )
