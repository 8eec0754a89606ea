"""A model's shape as the metadata of a GGUF file: what `gguf_config` reads."""

import math
from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_config import FIXED, gemma_scale, sliding_layers
from forge_mlx.hub.gguf_experts import (
    SIZES,
    TRAINING_ONLY,
    architecture_with_experts,
    expert_keys,
    expert_problems,
    said_of_routing,
)
from forge_mlx.hub.gguf_rope import rope_keys
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.moe import MoEConfig

_TRAINING_ONLY: Final = {"dropout", "init_std", "zero_init_residual", *TRAINING_ONLY}
# What a key, or the presence of a tensor, says in every architecture that rotates.
_SAID: Final = frozenset(
    {
        *("arch", "vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"),
        *("intermediate_size", "max_seq_len", "norm_eps", "tie_embeddings", "rope_base", "rope_scale", "rope_scaling"),
        *("bias", "attention_bias", "mlp_bias"),
    }
)
_OF_GEMMA: Final = {"sliding_window", "sliding_layers", "attention_softcap", "logit_softcap", "rope_local_base"}


def architecture_of(config: DecoderConfig) -> str:
    """The architecture that is nearest: one of `FIXED`.

    Args:
        config: A model's config.
    """
    if isinstance(config, MoEConfig):
        return architecture_with_experts(config)
    if config.position == "learned":
        return "gpt2"
    if config.post_norms:
        return "gemma3" if config.qk_norm else "gemma2"
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.projection_bias == "qkv" else "llama"


def config_keys(config: DecoderConfig) -> dict[str, Any]:
    """The metadata that says a model's shape; the first key is `general.architecture`.

    Args:
        config: A model's config, with vocab_size set.

    Raises:
        HubError: llama.cpp would compute something else; every field that it cannot be told is named.
    """
    if isinstance(config, MoEConfig) and config.kv_lora_rank is not None:
        raise HubError(
            "[write_gguf] the model must have ordinary attention but has latent attention (kv_lora_rank: "
            f"{config.kv_lora_rank}), as DeepSeek-V3: llama.cpp's deepseek2 is not written. Export a Hugging Face "
            "folder, or keep forge_mlx's own."
        )
    name = architecture_of(config)
    problems = _problems(name, config)
    if problems:
        raise HubError(
            f"[write_gguf] the model must be one that llama.cpp's {name} computes but has {'; '.join(problems)}. "
            "Export a Hugging Face folder, or keep forge_mlx's own."
        )
    norm = "layer_norm" if name == "gpt2" else "layer_norm_rms"
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.mlp_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_heads,
        f"attention.{norm}_epsilon": config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if name != "gpt2":
        keys |= {"attention.key_length": config.head_size, "attention.value_length": config.head_size}
        keys |= rope_keys(config)
    if isinstance(config, MoEConfig):
        keys |= expert_keys(name, config)
    if name.startswith("gemma"):
        keys |= {
            "attention.sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
            "rope.freq_base_swa": _base_in_windows(config),
        }
    own = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": name, **own}


def _problems(name: str, config: DecoderConfig) -> list[str]:
    """Each field whose value llama.cpp cannot be told, with what it would have to be."""
    said = _SAID - {"rope_base", "rope_scale", "rope_scaling"} if name == "gpt2" else _SAID
    if name.startswith("gemma"):
        said = said | _OF_GEMMA
    if isinstance(config, MoEConfig):
        said = said | SIZES | said_of_routing(name)
    wanted = {
        field: about.default
        for field, about in type(config).model_fields.items()
        if field not in said | _TRAINING_ONLY | {"attention_scale", "embedding_scale"}
    }
    wanted |= {field: value for field, value in FIXED[name].items() if field not in said}
    problems = [
        f"{field}: {getattr(config, field)} (must be {value})"
        for field, value in wanted.items()
        if getattr(config, field) != value
    ]
    of_name = _gpt2_problems(name, config) + _gemma_problems(name, config)
    if isinstance(config, MoEConfig):
        of_name += expert_problems(name, config)
    return problems + of_name + _scale_problems(name, config) + _yarn_problems(config)


def _yarn_problems(config: DecoderConfig) -> list[str]:
    """llama.cpp has keys for the limits of YaRN's ramp but takes the paper's, whatever they say."""
    if config.rope_scaling is None:
        return []
    wanted = {"beta_fast": 32.0, "beta_slow": 1.0}
    return [
        f"rope_scaling.{field}: {getattr(config.rope_scaling, field)} (must be {value})"
        for field, value in wanted.items()
        if getattr(config.rope_scaling, field) != value
    ]


def _gpt2_problems(name: str, config: DecoderConfig) -> list[str]:
    if name != "gpt2":
        return []
    found = {
        "attention_bias": (config.projection_bias, True),
        "mlp_bias": (config.feed_forward_bias, True),
        "bias": (config.bias, True),
        "num_kv_heads": (config.kv_heads, config.num_heads),
        "head_dim": (config.head_size, config.hidden_size // config.num_heads),
    }
    return [f"{field}: {value} (must be {wanted})" for field, (value, wanted) in found.items() if value != wanted]


def _scale_problems(name: str, config: DecoderConfig) -> list[str]:
    wanted = {"attention_scale": config.head_size**-0.5}
    found = {"attention_scale": config.score_scale, "embedding_scale": config.embedding_scale or 1.0}
    wanted["embedding_scale"] = 1.0
    if name.startswith("gemma"):
        wanted["attention_scale"] = gemma_scale(
            name, config.num_layers, config.head_size, config.hidden_size / config.num_heads
        )
        wanted["embedding_scale"] = math.sqrt(config.hidden_size)
    return [
        f"{field}: {found[field]:.6g} (must be {value:.6g})"
        for field, value in wanted.items()
        if not math.isclose(found[field], value, rel_tol=1e-6)
    ]


def _gemma_problems(name: str, config: DecoderConfig) -> list[str]:
    if not name.startswith("gemma"):
        return []
    layers = sliding_layers(name, config.num_layers)
    found = [layer for layer in range(config.num_layers) if config.window_of(layer) is not None]
    problems = [] if found == layers else [f"sliding_layers: {found} (must be {layers})"]
    caps = {"attention_softcap": config.attention_softcap, "logit_softcap": config.logit_softcap}
    if name == "gemma2":
        # Without the keys llama.cpp takes those of the published models.
        problems += [f"{field}: null (must be a number)" for field, value in caps.items() if value is None]
        if config.rope_local_base is not None:
            problems.append(f"rope_local_base: {config.rope_local_base} (must be null)")
        return problems
    if config.attention_softcap is not None:
        problems.append(f"attention_softcap: {config.attention_softcap} (must be null)")
    return problems + ([] if _base_in_windows(config) else ["rope_local_base: null (must be a number)"])


def _base_in_windows(config: DecoderConfig) -> float | None:
    """The rotary base of layers with a window; None where those rotate as the others do, which is scaled."""
    is_scaled = config.rope_scale != 1 or config.rope_scaling is not None
    return config.rope_base if config.rope_local_base is None and not is_scaled else config.rope_local_base
