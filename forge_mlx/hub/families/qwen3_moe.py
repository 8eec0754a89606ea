"""Qwen3 with experts, behind dense layers where there are any."""

from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.expert_layout import ExpertLayout
from forge_mlx.hub.families.family import HEADS, SILU, SIZES, Family
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.rope import read_rope, write_rope
from forge_mlx.models.moe import MoEConfig


def _read(keys: Keys) -> dict[str, Any]:
    # transformers 5 writes the first, every other reader knows the second.
    experts = keys.count("num_local_experts", 128)
    fields = {**read_rope(keys, 10000.0), "num_experts": keys.count("num_experts", experts)}
    keys.only("decoder_sparse_step", 1)
    dense = keys.take("mlp_only_layers") or []
    if not isinstance(dense, list) or any(layer not in dense for layer in range(len(dense))):
        raise HubError(f"{keys.where}: mlp_only_layers must be the first layers but got {dense!r}.")
    width = keys.take("intermediate_size")
    window = keys.take("sliding_window")
    return {
        **fields,
        "dense_layers": len(dense),
        "intermediate_size": width if dense else None,
        "sliding_window": window if keys.take("use_sliding_window", False) else None,
    }


def _write(config: MoEConfig) -> dict[str, Any]:
    return {
        **write_rope(config),
        "num_experts": config.num_experts,
        "intermediate_size": config.mlp_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.dense_layers)),
        "router_aux_loss_coef": config.aux_loss_weight,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }


QWEN3_MOE: Final = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config_type=MoEConfig,
    fields={
        **SIZES,
        **HEADS,
        "moe_intermediate_size": "expert_intermediate_size",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "normalize_gates",
    },
    layout=ExpertLayout(),
    defaults={
        **{"num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768, "norm_topk_prob": False},
    },
    implied={"qk_norm": True},
    only={**SILU, "attention_bias": (False,)},
    constants={"hidden_act": "silu"},
    irrelevant=("max_window_layers",),
    read=_read,
    write=_write,
    ignored_by_mlx_lm=("sliding_window", "rope_scale", "rope_scaling"),
)
