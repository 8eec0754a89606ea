"""Mixtral: a Mistral with experts, whose gates add up to 1."""

from typing import Any, Final

from forge_mlx.hub.families.expert_layout import ExpertLayout
from forge_mlx.hub.families.family import HEADS, SILU, SIZES, Family
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.models.moe import MoEConfig


def _read(keys: Keys) -> dict[str, Any]:
    return {**read_rope(keys, 1e6), "sliding_window": keys.take("sliding_window")}


def _write(config: MoEConfig) -> dict[str, Any]:
    return {
        **write_rope(config),
        "sliding_window": config.sliding_window,
        "router_aux_loss_coef": config.aux_loss_weight,
    }


MIXTRAL: Final = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config_type=MoEConfig,
    fields={
        **SIZES,
        **HEADS,
        "intermediate_size": "expert_intermediate_size",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
    },
    layout=ExpertLayout("block_sparse_moe", matrices={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}),
    defaults={
        **{"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "num_local_experts": 8, "num_experts_per_tok": 2},
    },
    only={**SILU, "attention_bias": (False,)},
    constants={"hidden_act": "silu"},
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("sliding_window", "rope_scale", "rope_scaling"),
    fixed_in_mlx_lm={"head_dim": None},
)
