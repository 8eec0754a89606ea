"""Gemma 2: soft-capped scores and logits, every other layer with a sliding window, norms behind each half-block."""

from typing import Any, Final

from forge_mlx.hub.families.family import Family
from forge_mlx.hub.families.gemma import CONSTANTS, FIELDS, IMPLIED, NORMS, ONLY, read_scales, write_scales
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.layout import Layout
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.hub.families.windows import read_windows
from forge_mlx.models.gpt import GPTConfig


def _read(keys: Keys) -> dict[str, Any]:
    windows = read_windows(keys, list(range(0, keys.count("num_hidden_layers"), 2)), 4096)
    return {**read_rope(keys, 10000.0), **read_scales(keys), **windows}


def _write(config: GPTConfig) -> dict[str, Any]:
    return {**write_rope(config), **write_scales(config)}


GEMMA2: Final = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    config_type=GPTConfig,
    fields={**FIELDS, "attn_logit_softcapping": "attention_softcap"},
    layout=Layout(NORMS),
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": True, "initializer_range": 0.02, "attention_bias": False},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    implied=IMPLIED,
    only=ONLY,
    constants=CONSTANTS,
    irrelevant=("sliding_window_size",),
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("sliding_window", "sliding_layers", "rope_scale", "rope_scaling"),
    fixed_in_mlx_lm={"attention_bias": False, "tie_embeddings": True},
)
