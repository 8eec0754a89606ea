"""The config of a decoder in the words of Hugging Face's Llama, Qwen3, Mixtral and Qwen3-MoE."""

from typing import Any, Final

from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig

_TRAINING_ONLY: Final = {"dropout", "init_std", "zero_init_residual", "aux_loss_weight", "router_z_loss_weight"}
# What these layouts have a key for.
_WRITTEN: Final = {
    *("arch", "vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    *("max_seq_len", "norm_eps", "rope_base", "rope_scale", "bias", "qk_norm", "tie_embeddings"),
    *("num_experts", "experts_per_token", "expert_intermediate_size", "normalize_gates", "dense_layers"),
}
# What they compute without saying so. Any other field must have its default, which changes nothing.
_IMPLIED: Final = {"norm": "rms_norm", "norm_weight": True, "position": "rope", "mlp": "swiglu"}
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def model_type_of(config: DecoderConfig) -> str:
    """The layout that is nearest: qwen3 for a norm over each head of q and k, mixtral or qwen3_moe for experts.

    Args:
        config: of a GPT or an MoE.
    """
    if isinstance(config, MoEConfig):
        return "qwen3_moe" if config.qk_norm else "mixtral"
    return "qwen3" if config.qk_norm else "llama"


def llama_config(config: DecoderConfig) -> dict[str, Any]:
    """The keys of `config.json` that say the model's shape.

    Args:
        config: of a GPT or an MoE, with vocab_size set.

    Raises:
        ValueError: the layout cannot say what the config says; every such field is named.
    """
    model_type = model_type_of(config)
    problems = _problems(config, model_type)
    if problems:
        raise ValueError(
            f"[export_llama] the model must be one that the layout of {model_type} can say but has "
            f"{'; '.join(problems)}. Train with other settings, or keep forge_mlx's own folder."
        )
    values: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_ARCHITECTURES[model_type]],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_scaling": None,
        "attention_bias": config.bias,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }
    if model_type == "llama":
        values["mlp_bias"] = config.bias
    if config.rope_scale != 1:
        values["rope_scaling"] = {"rope_type": "linear", "factor": 1 / config.rope_scale}
    if isinstance(config, MoEConfig):
        values |= _expert_keys(config, model_type)
    return values


def _expert_keys(config: MoEConfig, model_type: str) -> dict[str, Any]:
    common = {"num_experts_per_tok": config.experts_per_token, "router_aux_loss_coef": config.aux_loss_weight}
    if model_type == "mixtral":
        return {**common, "num_local_experts": config.num_experts, "intermediate_size": config.expert_size}
    return {
        **common,
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.normalize_gates,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.dense_layers)),
    }


def _problems(config: DecoderConfig, model_type: str) -> list[str]:
    """Each field whose value the layout cannot say, with what it would have to be."""
    if not isinstance(config, (GPTConfig, MoEConfig)):
        return [f"arch: {config.arch} (must be gpt or moe)"]
    wanted: dict[str, Any] = {
        name: _IMPLIED.get(name, field.default)
        for name, field in type(config).model_fields.items()
        if name not in _WRITTEN | _TRAINING_ONLY
    }
    if config.qk_norm == "joint":
        wanted["qk_norm"] = True
    if model_type != "llama":
        wanted["bias"] = False
    if isinstance(config, MoEConfig):
        wanted["rope_scale"] = 1.0
    if model_type == "mixtral":
        wanted |= {"normalize_gates": True, "dense_layers": 0}
    problems = [
        f"{name}: {getattr(config, name)} (must be {value})"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if model_type == "mixtral" and config.head_size * config.num_heads != config.hidden_size:
        problems.append(f"head_dim: {config.head_size} (must be hidden_size / num_heads)")
    return problems
