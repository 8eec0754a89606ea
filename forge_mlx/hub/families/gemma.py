"""What Gemma 2 and 3 have in common."""

from typing import Any, Final

from forge_mlx.hub.families.family import BIAS, HEADS, SIZES
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.windows import layer_types
from forge_mlx.models.gpt import GPTConfig

FIELDS: Final = {
    **SIZES,
    **HEADS,
    "intermediate_size": "intermediate_size",
    "attention_bias": "attention_bias",
    "final_logit_softcapping": "logit_softcap",
}
"""Keys -> fields."""
IMPLIED: Final = {"mlp": "geglu_tanh", "norm_offset": True, "post_norms": True}
"""Fields that both have without saying so."""
ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
    **BIAS,
}
"""Keys that may have only these values."""
CONSTANTS: Final = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
"""Keys that both always have."""
NORMS: Final = {
    "attention_output_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}
"""Our names of a block's norms -> Gemma's."""


def read_scales(keys: Keys) -> dict[str, Any]:
    """Fields of a config: the factors of the scores and of the embedding.

    Args:
        keys: Those of a config.json.

    Raises:
        HubError: A key is no number.
    """
    scalar = keys.number("query_pre_attn_scalar", 256.0) or 256.0
    return {"attention_scale": abs(scalar) ** -0.5, "embedding_scale": keys.count("hidden_size") ** 0.5 or None}


def write_scales(config: GPTConfig) -> dict[str, Any]:
    """Keys of config.json that say the factor of the scores, and which layers slide.

    Args:
        config: A model's config.
    """
    scalar = config.score_scale**-2
    nearest = round(scalar)
    return {
        "query_pre_attn_scalar": nearest if abs(scalar - nearest) < 1e-6 * scalar else scalar,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }
