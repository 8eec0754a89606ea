"""The blocks of every decoder, and the modules of one as its config has them."""

from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.rope_scaling import scaled_periods
from forge_mlx.nn.activations import GATED_ACTIVATIONS
from forge_mlx.nn.attention import Attention
from forge_mlx.nn.dropout import Dropout
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.mlp import MLP, GatedMLP
from forge_mlx.nn.norms import LayerNorm, RMSNorm
import mlx.core as mx
import mlx.nn as nn


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with post_norms what is added passes a norm of its own.

    Args:
        config: The model's config.
        attention: Called as `Attention` is.
        mlp: Maps `[..., C]` to `[..., C]`.
    """

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config)
        self.self_attn = attention
        self.post_attention_layernorm = norm_of(config)
        self.mlp = mlp
        if config.post_norms:
            self.attention_output_layernorm = norm_of(config)
            self.mlp_output_layernorm = norm_of(config)
        self.dropout = Dropout(config.dropout)

    def __call__(
        self,
        x: mx.array,
        cache: KVCache | None = None,
        *,
        segment_ids: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Map `[B, T, C]` to `[B, T, C]`; arguments as those of `Attention`."""
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, cache, segment_ids=segment_ids, positions=positions)
        if "attention_output_layernorm" in self:
            attended = self.attention_output_layernorm(attended)
        normed, x = self.post_attention_layernorm.of_sum(self.dropout(attended), x)
        added = self.feed_forward(normed, segment_ids)
        if "mlp_output_layernorm" in self:
            added = self.mlp_output_layernorm(added)
        return x + self.dropout(added)

    def feed_forward(self, normed: mx.array, _segment_ids: mx.array | None) -> mx.array:
        """What the second half adds, before dropout and its norm: `[B, T, C]` of `[B, T, C]`.

        Args:
            normed: The normalised residual stream.
            _segment_ids: Integers `[B, T]`, negative for padding; None: no padding. A plain MLP, which maps each token
                alone, does not need them.
        """
        out: mx.array = self.mlp(normed)
        return out


def attention_of(config: DecoderConfig, layer: int) -> nn.Module:
    """The attention of a block, as the config has it.

    Args:
        config: The model's config.
        layer: The block's place, 0 to num_layers - 1.
    """
    window = config.window_of(layer)
    # Where a layer has a base of its own, nothing else changes its frequencies.
    is_local = config.rope_local_base is not None and window is not None
    base = config.rope_local_base if is_local else config.rope_base
    scaling = None if is_local else config.rope_scaling
    return Attention(
        config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        bias=config.projection_bias,
        # Both factors on rotated queries and keys, which all of a head is, are one on the scores.
        scale=config.score_scale * (1 if scaling is None else scaling.rotation_factor**2),
        rope_base=base if config.position == "rope" else None,
        rope_scale=1.0 if is_local else config.rope_scale,
        rope_periods=None if scaling is None else scaled_periods(scaling, config.rotary_size, config.rope_base),
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        qk_norm_weight=config.norm_weight,
        qk_norm_offset=config.norm_offset,
        qk_norm_joint=config.qk_norm == "joint",
        window=window,
        softcap=config.attention_softcap,
        sinks=config.attention_sinks,
    )


def mlp_of(config: DecoderConfig, intermediate_size: int) -> MLP | GatedMLP:
    """A feed-forward layer of the config's kind.

    Args:
        config: The model's config.
        intermediate_size: Width inside.
    """
    mlp = GatedMLP if config.mlp in GATED_ACTIVATIONS else MLP
    return mlp(config.hidden_size, intermediate_size, activation=config.mlp, bias=config.feed_forward_bias)


def norm_of(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """A norm over the residual stream's width, of the config's kind.

    Args:
        config: The model's config.
    """
    if config.norm == "rms_norm":
        return RMSNorm(config.hidden_size, eps=config.norm_eps, weight=config.norm_weight, offset=config.norm_offset)
    shift = config.bias and config.norm_weight
    return LayerNorm(config.hidden_size, eps=config.norm_eps, weight=config.norm_weight, bias=shift)
