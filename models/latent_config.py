"""What a config says of DeepSeek's latent attention."""

from typing import Final

from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.rope_scaling import scaled_periods
from forge_mlx.nn.latent_attention import LatentAttention, impossible_heads
from pydantic import Field, model_validator

_SIZES: Final = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OF_ORDINARY_ATTENTION: Final = (
    *("num_kv_heads", "head_dim", "bias", "attention_bias", "qk_norm"),
    *("sliding_window", "attention_softcap", "attention_sinks", "norm_offset"),
)


class LatentConfig(DecoderConfig):
    """A decoder whose attention is `LatentAttention` where kv_lora_rank is set."""

    kv_lora_rank: int | None = Field(
        None,
        ge=1,
        description="Size of the latent that keys and values are made of, as in DeepSeek-V3; null: ordinary attention.",
    )
    q_lora_rank: int | None = Field(
        None, ge=1, description="Size of the latent that queries are made of; null: none. For kv_lora_rank."
    )
    qk_nope_head_dim: int | None = Field(
        None, ge=1, description="Elements of a query or key that do not rotate; for kv_lora_rank."
    )
    qk_rope_head_dim: int | None = Field(
        None,
        ge=2,
        multiple_of=2,
        description="Elements of a query or key that rotate; for kv_lora_rank. Both together at most 256.",
    )
    v_head_dim: int | None = Field(None, ge=1, description="Size of a head of values, at most 256; for kv_lora_rank.")
    latent_norm_eps: float | None = Field(
        None,
        gt=0,
        description="Added to the mean square in the norms over latents, 1e-6 in DeepSeek-V3; null: norm_eps. For "
        "kv_lora_rank.",
    )

    @property
    def divides_width(self) -> bool:
        """Whether a head has its share of hidden_size."""
        return self.kv_lora_rank is None and super().divides_width

    @property
    def head_size(self) -> int:
        """Size of a head of queries and keys, the default filled in."""
        if self.kv_lora_rank is None:
            return super().head_size
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)

    @property
    def rotary_size(self) -> int:
        """How many elements of a query or key rotate."""
        return super().rotary_size if self.kv_lora_rank is None else self.qk_rope_head_dim or 0

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """Sizes of a head of queries and keys, and of a head of values."""
        return self.head_size, self.head_size if self.kv_lora_rank is None else self.v_head_dim or 0

    @property
    def latent_eps(self) -> float:
        """Added to the mean square in the norms over latents, the default filled in."""
        return self.norm_eps if self.latent_norm_eps is None else self.latent_norm_eps

    @model_validator(mode="after")
    def _check_latent(self) -> "LatentConfig":
        if self.kv_lora_rank is None:
            options = ("q_lora_rank", *_SIZES, "latent_norm_eps")
            unused = [name for name in options if getattr(self, name) is not None]
            if unused:
                raise ValueError(
                    f"{' and '.join(unused)} must be null without kv_lora_rank: ordinary attention takes head_dim. "
                    "Remove it or set kv_lora_rank."
                )
            return self
        missing = [name for name in _SIZES if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{' and '.join(missing)} must be set with kv_lora_rank but got null. Set it.")
        fields = type(self).model_fields
        refused = [name for name in _OF_ORDINARY_ATTENTION if getattr(self, name) != fields[name].default]
        if refused:
            raise ValueError(
                f"{' and '.join(refused)} must be left out with kv_lora_rank: latent attention has no such thing. "
                "Remove it or kv_lora_rank."
            )
        if self.position != "rope":
            raise ValueError(
                f"position must be rope with kv_lora_rank but got {self.position}: a part of each query and key "
                "rotates. Set it."
            )
        problem = impossible_heads(self.head_size - self.rotary_size, self.rotary_size, self.attention_sizes[1])
        if problem is not None:
            raise ValueError(problem)
        return self


def latent_attention_of(config: LatentConfig) -> LatentAttention:
    """The latent attention of a block.

    Args:
        config: The model's config, with kv_lora_rank.
    """
    assert config.kv_lora_rank is not None
    scaling = config.rope_scaling
    return LatentAttention(
        config.hidden_size,
        num_heads=config.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_nope_head_dim=config.head_size - config.rotary_size,
        qk_rope_head_dim=config.rotary_size,
        v_head_dim=config.attention_sizes[1],
        scale=config.score_scale,
        rope_base=config.rope_base,
        rope_scale=config.rope_scale,
        rope_periods=None if scaling is None else scaled_periods(scaling, config.rotary_size, config.rope_base),
        rope_factor=1.0 if scaling is None else scaling.rotation_factor,
        norm_eps=config.latent_eps,
        norm_weight=config.norm_weight,
    )
