"""DeepSeek-V3 with its latent attention; layers for multi-token prediction are left out."""

from typing import Any, Final

from forge_mlx.hub.families.family import SILU, SIZES, Family
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.latent_layout import LatentLayout
from forge_mlx.hub.families.rope import read_latent_rope, write_latent_rope
from forge_mlx.models.moe import MoEConfig

ROUTING: Final = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_intermediate_size",
    "n_group": "expert_groups",
    "topk_group": "groups_per_token",
    "norm_topk_prob": "normalize_gates",
    "routed_scaling_factor": "routed_scaling",
}
"""Keys of DeepSeek's routing -> fields."""
ROUTING_IMPLIED: Final = {"router_scores": "sigmoid", "selection_bias": True}
"""Fields of DeepSeek's routing that its config.json does not say."""
ROUTING_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "scoring_func": ("sigmoid", "noaux_tc"),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
"""Keys of DeepSeek's routing that may have only these values."""
CONSTANTS: Final = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Keys that DeepSeek's routing always has."""


def read_dense(keys: Keys) -> dict[str, Any]:
    """Fields of a config: how many layers are dense, and how wide these and the shared experts are.

    Args:
        keys: Those of a config.json.

    Raises:
        HubError: A key is no such number.
    """
    dense = keys.count("first_k_dense_replace", 0)
    width = keys.take("intermediate_size")
    return {
        "dense_layers": dense,
        "intermediate_size": width if dense else None,
        "shared_experts": keys.count("n_shared_experts", 0),
    }


def write_dense(config: MoEConfig) -> dict[str, Any]:
    """What `read_dense` reads.

    Args:
        config: A model's config.
    """
    return {
        "first_k_dense_replace": config.dense_layers,
        "intermediate_size": config.mlp_size,
        "n_shared_experts": config.shared_experts or None,
    }


def _read(keys: Keys) -> dict[str, Any]:
    head_size = keys.count("qk_nope_head_dim") + keys.count("qk_rope_head_dim")
    return {**read_latent_rope(keys, 10000.0, head_size), **read_dense(keys)}


def _write(config: MoEConfig) -> dict[str, Any]:
    return {**write_latent_rope(config), **write_dense(config), "num_key_value_heads": config.num_heads}


DEEPSEEK_V3: Final = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config_type=MoEConfig,
    fields={
        **SIZES,
        **ROUTING,
        "kv_lora_rank": "kv_lora_rank",
        "q_lora_rank": "q_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
    layout=LatentLayout(),
    defaults={
        **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "n_group": 1},
        **{"initializer_range": 0.02, "q_lora_rank": None, "topk_group": 1, "norm_topk_prob": True},
        "routed_scaling_factor": 1.0,
    },
    # Whatever rms_norm_eps says.
    implied={**ROUTING_IMPLIED, "latent_norm_eps": 1e-6},
    only={**SILU, **ROUTING_ONLY, "attention_bias": (False,), "rope_interleave": (True,)},
    constants={**CONSTANTS, "num_nextn_predict_layers": 0},
    irrelevant=(
        *("head_dim", "qk_head_dim", "num_key_value_heads", "num_nextn_predict_layers"),
        *("ep_size", "aux_loss_alpha", "seq_aux"),
    ),
    drops_layers_behind=True,
    read=_read,
    write=_write,
    fixed_in_mlx_lm={"tie_embeddings": False},
)
