"""OLMoE: a norm over all of q and over all of k, and many small experts."""

from typing import Any, Final

from forge_mlx.hub.families.expert_layout import ExpertLayout
from forge_mlx.hub.families.family import SILU, SIZES, Family
from forge_mlx.hub.families.head_dim import read_head_dim, write_head_dim
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.models.moe import MoEConfig


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("clip_qkv")
    return {**read_rope(keys, 10000.0), **read_head_dim(keys)}


def _write(config: MoEConfig) -> dict[str, Any]:
    return {**write_rope(config), **write_head_dim(config), "router_aux_loss_coef": config.aux_loss_weight}


OLMOE: Final = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config_type=MoEConfig,
    fields={
        **SIZES,
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "expert_intermediate_size",
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "normalize_gates",
    },
    layout=ExpertLayout(),
    defaults={
        **{"num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "num_experts": 64, "num_experts_per_tok": 8},
        "norm_topk_prob": False,
    },
    implied={"qk_norm": "joint"},
    only={**SILU, "attention_bias": (False,)},
    constants={"hidden_act": "silu"},
    read=_read,
    write=_write,
)
