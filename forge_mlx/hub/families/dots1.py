"""dots.llm1: DeepSeek-V3's routing with Qwen3's attention."""

from typing import Any, Final

from forge_mlx.hub.families.deepseek_v3 import (
    CONSTANTS,
    ROUTING,
    ROUTING_IMPLIED,
    ROUTING_ONLY,
    read_dense,
    write_dense,
)
from forge_mlx.hub.families.expert_layout import ExpertLayout
from forge_mlx.hub.families.family import HEADS, SILU, SIZES, Family
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.hub.families.windows import layer_types, read_windows, slides
from forge_mlx.models.moe import MoEConfig


def _read(keys: Keys) -> dict[str, Any]:
    layers = list(range(keys.count("max_window_layers", 62), keys.count("num_hidden_layers")))
    return {**read_rope(keys, 10000.0), **read_dense(keys), **read_windows(keys, layers, 4096)}


def _write(config: MoEConfig) -> dict[str, Any]:
    layers = slides(config)
    return {
        **write_rope(config),
        **write_dense(config),
        "sliding_window": config.sliding_window,
        "max_window_layers": layers[0] if layers else config.num_layers,
        "layer_types": layer_types(config),
    }


DOTS1: Final = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    config_type=MoEConfig,
    fields={**SIZES, **HEADS, **ROUTING},
    layout=ExpertLayout(stacked="experts"),
    defaults={
        **{"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "n_group": 1, "topk_group": 1},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    },
    implied={**ROUTING_IMPLIED, "qk_norm": True},
    only={**SILU, **ROUTING_ONLY, "attention_bias": (False,), "mlp_bias": (False,)},
    constants=CONSTANTS,
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("sliding_window", "sliding_layers"),
)
