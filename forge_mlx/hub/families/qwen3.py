"""Qwen3: a norm over each head of q and k."""

from typing import Any, Final

from forge_mlx.hub.families.family import BIAS, HEADS, SILU, SIZES, Family
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.hub.families.windows import read_switched_windows, write_switched_windows
from forge_mlx.models.gpt import GPTConfig


def _read(keys: Keys) -> dict[str, Any]:
    return {**read_rope(keys, 10000.0), **read_switched_windows(keys)}


def _write(config: GPTConfig) -> dict[str, Any]:
    return {**write_rope(config), **write_switched_windows(config)}


QWEN3: Final = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config_type=GPTConfig,
    fields={**SIZES, **HEADS, "intermediate_size": "intermediate_size", "attention_bias": "attention_bias"},
    defaults={
        **{"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False},
    },
    implied={"qk_norm": True},
    only={**SILU, **BIAS},
    constants={"hidden_act": "silu"},
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("sliding_window", "sliding_layers"),
    fixed_in_mlx_lm={"attention_bias": False},
)
