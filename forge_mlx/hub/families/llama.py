"""Llama 1 to 3, and what has its layout: SmolLM2, TinyLlama, Yi, DeepSeek's distilled Llamas."""

from typing import Any, Final

from forge_mlx.hub.families.family import BIAS, HEADS, SILU, SIZES, Family
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.models.gpt import GPTConfig


def _read(keys: Keys) -> dict[str, Any]:
    return read_rope(keys, 10000.0)


LLAMA: Final = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config_type=GPTConfig,
    fields={
        **SIZES,
        **HEADS,
        "intermediate_size": "intermediate_size",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    defaults={
        **{"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False, "mlp_bias": False},
    },
    only={**SILU, **BIAS, "rope_interleaved": (False,)},
    constants={"hidden_act": "silu"},
    read=_read,
    write=write_rope,
)
