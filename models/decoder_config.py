"""The config that every decoder of this folder shares."""

import math
from typing import Final, Literal

from forge_mlx._config import Section
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.nn.activations import GATED_ACTIVATIONS
from pydantic import Field, model_validator

_INTERMEDIATE_MULTIPLE: Final = 64


class DecoderConfig(Section):
    """What the decoders have in common: all of it but the feed-forward layers of some."""

    arch: str = Field(description="Architecture; each has a config of its own.")
    vocab_size: int | None = Field(None, ge=1, description="Number of tokens V; null: the tokenizer's.")
    num_layers: int = Field(4, ge=1, description="Number of blocks.")
    hidden_size: int = Field(256, ge=1, description="Width C of the residual stream.")
    num_heads: int = Field(4, ge=1, description="Query heads of each attention.")
    num_kv_heads: int | None = Field(
        None, ge=1, description="Key and value heads, a divisor of num_heads (GQA); null: num_heads."
    )
    head_dim: int | None = Field(
        None,
        ge=1,
        description="Size of a head; null: hidden_size / num_heads. At most 256 with sliding_window, "
        "attention_softcap, attention_sinks or packed documents.",
    )
    intermediate_size: int | None = Field(
        None,
        ge=1,
        description="Width inside the MLP; null: 4 hidden_size, or for a gated MLP 8/3 hidden_size, rounded "
        "up to a multiple of 64, which has about as many parameters.",
    )
    max_seq_len: int = Field(
        256,
        ge=1,
        description="Longest sequence of training; for learned positions the limit of any sequence.",
    )
    norm: Literal["rms_norm", "layer_norm"] = Field("rms_norm", description="Normalisation before each half-block.")
    norm_eps: float = Field(1e-5, gt=0, description="Added to the variance or mean square in every norm.")
    norm_weight: bool = Field(
        True, description="Whether norms have a learnable scale (and, with bias, a LayerNorm's shift)."
    )
    position: Literal["rope", "learned", "none"] = Field(
        "rope", description="Positions: rotary in q and k, a learned table added to the embedding, or none."
    )
    rope_base: float = Field(10000.0, gt=1, description="Base of the rotary frequencies; for position: rope.")
    rope_scale: float = Field(
        1.0,
        gt=0,
        description="Factor on rotary positions; 0.5 stretches the context twofold; for position: rope.",
    )
    sliding_window: int | None = Field(
        None, ge=1, description="How many tokens attention sees, the one it is at included; null: all before it."
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="Bound c of the attention scores, c tanh(score / c), as in Gemma 2; null: none."
    )
    attention_sinks: bool = Field(
        False,
        description="Whether each head has a learnable logit that takes a share of its attention, as in gpt-oss.",
    )
    token_shift: bool = Field(
        False,
        description="Whether each embedding gets a learnable share of the one before it (modded-nanogpt's smear).",
    )
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "silu", "relu2"] = Field(
        "swiglu",
        description="MLP: gated (swiglu, geglu) or plain with this activation (gelu is the erf form).",
    )
    bias: bool = Field(False, description="Whether projections and LayerNorms have a bias; the head never has.")
    qk_norm: bool | Literal["joint"] = Field(
        False,
        description="Whether each head of q and k passes an RMSNorm, as in Qwen3; joint: all heads of q together, and "
        "all of k, as in OLMoE.",
    )
    tie_embeddings: bool = Field(True, description="Whether the output head is the embedding table.")
    logit_softcap: float | None = Field(
        None, gt=0, description="Bound c of the logits, c tanh(logits / c); null: none."
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability of dropping an element of the embedding and of each half-block.",
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial matrices.")
    zero_init_residual: bool = Field(
        False,
        description="Whether o_proj and down_proj start at 0, so that each block starts as the identity.",
    )

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def divides_width(self) -> bool:
        """Whether a head has its share of hidden_size."""
        return self.head_dim is None

    @property
    def head_size(self) -> int:
        """Size of a head of queries and keys, the default filled in."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_size(self) -> int:
        """How many elements of a query or key rotate."""
        return self.head_size

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """Sizes of a head of queries and keys, and of a head of values."""
        return self.head_size, self.head_size

    @property
    def mlp_size(self) -> int:
        """Width inside the MLP, the default filled in."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.mlp in GATED_ACTIVATIONS:
            return math.ceil(8 * self.hidden_size / 3 / _INTERMEDIATE_MULTIPLE) * _INTERMEDIATE_MULTIPLE
        return 4 * self.hidden_size

    @model_validator(mode="after")
    def _check_heads(self) -> "DecoderConfig":
        if self.divides_width and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads, {self.num_heads}, but got {self.hidden_size}. "
                "Change one of them or set head_dim."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, {self.kv_heads}, but got {self.num_heads}. "
                "Change one of them; null takes as many key and value heads as query heads."
            )
        asked = {
            "sliding_window": self.sliding_window is not None,
            "attention_softcap": self.attention_softcap is not None,
            "attention_sinks": self.attention_sinks,
        }
        features = [name for name, is_asked in asked.items() if is_asked]
        if features and self.head_size > LARGEST_HEAD:
            raise ValueError(
                f"head_dim must be at most {LARGEST_HEAD} with {' and '.join(features)} but the head size is "
                f"{self.head_size}. Set it or raise num_heads."
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> "DecoderConfig":
        if self.position == "rope":
            if self.rotary_size % 2:
                raise ValueError(
                    f"position: rope needs an even head size but got {self.head_size}. "
                    "Set head_dim to an even number or change num_heads."
                )
            return self
        # Values, not model_fields_set: a dumped config spells out every default and must load again.
        unused = [
            name for name in ("rope_base", "rope_scale") if getattr(self, name) != type(self).model_fields[name].default
        ]
        if unused:
            raise ValueError(
                f"{' and '.join(unused)} must not be set with position: {self.position}, which does not "
                "rotate. Remove it or set position: rope."
            )
        return self
