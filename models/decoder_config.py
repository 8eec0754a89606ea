"""The config that every decoder of this folder shares."""

import math
from typing import Annotated, Final, Literal

from forge_mlx._config import Section
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.models.rope_scaling import RopeScaling
from forge_mlx.nn.activations import GATED_ACTIVATIONS
from pydantic import Field, model_validator

_INTERMEDIATE_MULTIPLE: Final = 64
_OF_ROTATION: Final = ("rope_base", "rope_scale", "rope_scaling", "rope_local_base")


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
    norm_offset: bool = Field(
        False, description="Whether norms scale by 1 + weight, those of q and k too, as in Gemma; for rms_norm."
    )
    post_norms: bool = Field(
        False,
        description="Whether the output of each half-block passes a norm before it is added, as in Gemma 2 and 3.",
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
    rope_scaling: RopeScaling | None = Field(
        None,
        description="Frequencies of a stretched context, as in Llama 3.1 or by YaRN; for position: rope with "
        "rope_scale: 1. null: those of rope_base.",
    )
    sliding_window: int | None = Field(
        None, ge=1, description="How many tokens attention sees, the one it is at included; null: all before it."
    )
    sliding_layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        min_length=1,
        description="Layers that sliding_window holds for, counted from 0, as in Gemma 2; null: all of them.",
    )
    rope_local_base: float | None = Field(
        None,
        gt=1,
        description="Base of the rotary frequencies in sliding_layers, which then have neither rope_scale nor "
        "rope_scaling, as in Gemma 3; null: as in the others.",
    )
    attention_scale: float | None = Field(
        None, gt=0, description="Factor on the attention scores; null: 1 / sqrt(size of a head)."
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
    mlp: Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "silu", "relu2"] = Field(
        "swiglu",
        description="MLP: gated (swiglu, geglu, geglu_tanh) or plain with this activation. gelu and geglu take the erf "
        "form.",
    )
    bias: bool = Field(False, description="Whether projections and LayerNorms have a bias; the head never has.")
    attention_bias: bool | Literal["qkv"] | None = Field(
        None,
        description="Whether the projections of attention have a bias; qkv: all but the last, as in Qwen2; null: as "
        "bias says.",
    )
    mlp_bias: bool | None = Field(
        None, description="Whether the projections of the MLP have a bias; null: as bias says."
    )
    qk_norm: bool | Literal["joint"] = Field(
        False,
        description="Whether each head of q and k passes an RMSNorm, as in Qwen3; joint: all heads of q together, and "
        "all of k, as in OLMoE.",
    )
    embedding_scale: float | None = Field(
        None,
        gt=0,
        description="Factor on the embedding, rounded to its dtype: sqrt(hidden_size) in Gemma; null: none.",
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

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores, the default filled in."""
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def projection_bias(self) -> bool | Literal["qkv"]:
        """Which projections of attention have a bias, the default filled in."""
        return self.bias if self.attention_bias is None else self.attention_bias

    @property
    def feed_forward_bias(self) -> bool:
        """Whether the projections of the MLP have a bias, the default filled in."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    def window_of(self, layer: int) -> int | None:
        """How many tokens attention sees in a layer, the one it is at included; None: all before it.

        Args:
            layer: Its place, 0 to num_layers - 1.
        """
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides else None

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
            if self.rope_scaling is not None and self.rope_scale != 1:
                raise ValueError(
                    f"rope_scale must be 1 with rope_scaling, which has its own factor, but got {self.rope_scale}. "
                    "Remove one of them."
                )
            return self
        # Values, not model_fields_set: a dumped config spells out every default and must load again.
        unused = [name for name in _OF_ROTATION if getattr(self, name) != type(self).model_fields[name].default]
        if unused:
            raise ValueError(
                f"{' and '.join(unused)} must not be set with position: {self.position}, which does not "
                "rotate. Remove it or set position: rope."
            )
        return self

    @model_validator(mode="after")
    def _check_sliding_layers(self) -> "DecoderConfig":
        if self.sliding_layers is None:
            if self.rope_local_base is not None:
                raise ValueError(
                    f"rope_local_base must be null without sliding_layers but got {self.rope_local_base}: no layer is "
                    "told from the others. Set sliding_layers or rope_base."
                )
            return self
        if self.sliding_window is None:
            raise ValueError(
                f"sliding_layers must be null without sliding_window but got {self.sliding_layers}. Set the window or "
                "remove the layers."
            )
        outside = [layer for layer in self.sliding_layers if layer >= self.num_layers]
        if outside:
            raise ValueError(
                f"sliding_layers must be less than num_layers, {self.num_layers}, but got {outside[0]}. The first "
                "layer is 0."
            )
        repeated = [layer for layer in self.sliding_layers if self.sliding_layers.count(layer) > 1]
        if repeated:
            raise ValueError(f"sliding_layers must name each layer once but got {repeated[0]} twice. Remove one.")
        return self

    @model_validator(mode="after")
    def _check_norms(self) -> "DecoderConfig":
        if self.norm_offset and (self.norm != "rms_norm" or not self.norm_weight):
            found = f"norm: {self.norm}" if self.norm != "rms_norm" else "norm_weight: false"
            raise ValueError(
                f"norm_offset must be false with {found} but got true: only an RMSNorm's weight is offset. Set it to "
                "false."
            )
        return self
