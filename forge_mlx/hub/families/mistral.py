"""Mistral: a Llama whose layers may all have a sliding window."""

from typing import Any, Final

from forge_mlx.hub.families.family import HEADS, SILU, SIZES, Family
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.models.gpt import GPTConfig


def _read(keys: Keys) -> dict[str, Any]:
    return {**read_rope(keys, 10000.0), "sliding_window": keys.take("sliding_window", 4096)}


def _write(config: GPTConfig) -> dict[str, Any]:
    return {**write_rope(config), "sliding_window": config.sliding_window}


MISTRAL: Final = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config_type=GPTConfig,
    fields={**SIZES, **HEADS, "intermediate_size": "intermediate_size"},
    defaults={
        **{"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "initializer_range": 0.02},
    },
    only={**SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    constants={"hidden_act": "silu"},
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("sliding_window",),
)
