"""Qwen2 and 2.5: a Llama with biases of q, k and v, and sliding windows in its upper layers where they are used."""

from typing import Any, Final

from forge_mlx.hub.families.family import SILU, SIZES, Family
from forge_mlx.hub.families.head_dim import read_head_dim, write_head_dim
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.hub.families.windows import read_switched_windows, write_switched_windows
from forge_mlx.models.gpt import GPTConfig


def _read(keys: Keys) -> dict[str, Any]:
    return {**read_rope(keys, 10000.0), **read_switched_windows(keys), **read_head_dim(keys)}


def _write(config: GPTConfig) -> dict[str, Any]:
    return {**write_rope(config), **write_switched_windows(config), **write_head_dim(config)}


QWEN2: Final = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config_type=GPTConfig,
    fields={**SIZES, "num_key_value_heads": "num_kv_heads", "intermediate_size": "intermediate_size"},
    defaults={
        **{"num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "initializer_range": 0.02},
    },
    implied={"attention_bias": "qkv"},
    only={**SILU, "use_mrope": (False,)},
    constants={"hidden_act": "silu"},
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("sliding_window", "sliding_layers"),
    fixed_in_mlx_lm={"head_dim": None},
)
