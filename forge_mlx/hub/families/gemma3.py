"""Gemma 3's text model: norms over each head of q and k, five layers with a window to one without, two rotary bases.

A `gemma3` of text and images has it as its `text_config`; the vision tower is left out.
"""

from typing import Any, Final

from forge_mlx.hub.families.family import Family
from forge_mlx.hub.families.gemma import CONSTANTS, FIELDS, IMPLIED, NORMS, ONLY, read_scales, write_scales
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.layout import Layout
from forge_mlx.hub.families.rope import read_local_rope, write_rope
from forge_mlx.hub.families.windows import read_windows, slides
from forge_mlx.models.gpt import GPTConfig


def _read(keys: Keys) -> dict[str, Any]:
    # transformers 5 and mlx-lm have the key, or leave it out, but cap no scores.
    keys.without_effect("attn_logit_softcapping")
    # transformers 5 writes the first, and a copy with an underscore.
    pattern = keys.count("_sliding_window_pattern", 6)
    pattern = keys.count("sliding_window_pattern", pattern)
    layers = [layer for layer in range(keys.count("num_hidden_layers")) if (layer + 1) % max(pattern, 1)]
    fields = {**read_local_rope(keys, 1e6, 1e4), **read_scales(keys), **read_windows(keys, layers, 4096)}
    if fields.get("sliding_layers") is None:
        local = fields.pop("rope_local_base")
        if "sliding_window" in fields:
            # All layers slide: their base is the only one.
            fields |= {"rope_base": local, "rope_scale": 1.0, "rope_scaling": None}
    return fields


def _write(config: GPTConfig) -> dict[str, Any]:
    local = config.rope_base if config.rope_local_base is None else config.rope_local_base
    full = [layer for layer in range(config.num_layers) if layer not in slides(config)]
    return {
        **write_rope(config),
        **write_scales(config),
        "rope_local_base_freq": local,
        # mlx-lm counts by it; one past the last layer where all of them slide.
        "sliding_window_pattern": (full[0] if full else config.num_layers) + 1,
    }


GEMMA3: Final = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config_type=GPTConfig,
    fields=FIELDS,
    layout=Layout(
        NORMS,
        prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
        dropped=(
            *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
            "model.embed_vision.",
        ),
    ),
    defaults={
        **{"vocab_size": 262208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8},
        **{"num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "initializer_range": 0.02, "attention_bias": False},
        "final_logit_softcapping": None,
    },
    implied={**IMPLIED, "qk_norm": True},
    only=ONLY,
    constants=CONSTANTS,
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("logit_softcap",),
    fixed_in_mlx_lm={"attention_bias": False},
)
