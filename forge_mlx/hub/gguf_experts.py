"""Mixtures of experts in a GGUF file's metadata: how many there are and how tokens choose, as llama.cpp has it."""

from collections.abc import Mapping
from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_file import GGUFFile
from forge_mlx.hub.gguf_metadata import Metadata
from forge_mlx.models.moe import MoEConfig

SIZES: Final = frozenset({"num_experts", "experts_per_token", "expert_intermediate_size"})
"""Fields of an `MoEConfig` that every architecture with experts has keys for."""
TRAINING_ONLY: Final = frozenset({"bias_rate", "aux_loss_weight", "router_z_loss_weight"})
"""Fields of an `MoEConfig` that change nothing of what a model computes."""

_ALWAYS: Final = ("olmoe", "qwen3moe", "dots1")
_MAY_HAVE: Final = ("llama", *_ALWAYS)
# What llama.cpp is told in dots1 alone.
_SAID_IN_DOTS1: Final = frozenset(
    {"normalize_gates", "routed_scaling", "shared_experts", "dense_layers", "expert_groups", "groups_per_token"}
)
_ROUTING: Final = _SAID_IN_DOTS1 | {"router_scores"}
_GATINGS: Final = {1: "softmax", 2: "sigmoid"}
_TOO_LARGE: Final = 1 << 31


def said_of_routing(architecture: str) -> frozenset[str]:
    """Fields of an `MoEConfig` beside `SIZES` that an architecture has keys for.

    Args:
        architecture: One that may have experts.
    """
    return _SAID_IN_DOTS1 if architecture == "dots1" else frozenset()


def has_experts(metadata: Metadata, file: GGUFFile) -> bool:
    """Whether a file holds a mixture of experts, by its architecture, its count of them or its tensors.

    Args:
        metadata: The file's.
        file: The header.

    Raises:
        HubError: It has experts in an architecture that has none here.
    """
    name = metadata.architecture
    count = metadata.integer(metadata.own("expert_count"), 0)
    found = bool(count) or any("_exps." in tensor for tensor in file.tensors)
    if found and name not in _MAY_HAVE:
        raise HubError(
            f"{file.path}: {name}.expert_count must be 0 but got {count}: experts are read in {', '.join(_MAY_HAVE)}. "
            "Open the Hugging Face folder."
        )
    return found or name in _ALWAYS


def read_experts(metadata: Metadata, file: GGUFFile, fixed: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Fields of an `MoEConfig` that a GPT's config has not, and intermediate_size, which is that of dense layers.

    Args:
        metadata: The file's.
        file: The header.
        fixed: What the architecture computes without saying so.
        width: `feed_forward_length`.

    Raises:
        HubError: The numbers fit neither each other nor the router, or llama.cpp would compute something else.
    """
    own, name = metadata.own, metadata.architecture
    dense = metadata.integer(own("leading_dense_block_count"), 0)
    count = _count(metadata, file, dense)
    used = metadata.integer(own("expert_used_count"))
    if not 1 <= used <= count:
        raise HubError(
            f"{file.path}: {own('expert_used_count')} must be 1 to {own('expert_count')}, {count}, but got {used}. "
            "Convert the model anew."
        )
    inside = metadata.integer(own("expert_feed_forward_length"), width // used if name == "qwen3moe" else width)
    routing = {**_routing(metadata, file, fixed), "dense_layers": dense}
    for key, size in {"expert_feed_forward_length": inside, "expert_shared_count": routing["shared_experts"]}.items():
        # Of the largest sizes not even an array without values can be made.
        if not (size == 0 and key == "expert_shared_count") and not 0 < size * max(1, inside) < _TOO_LARGE:
            raise HubError(f"{file.path}: {own(key)} must be that of a model that can be but got {size}.")
    computed = _computed(fixed)
    for field in routing.keys() - said_of_routing(name):
        if routing[field] != computed[field]:
            raise HubError(
                f"{file.path}: {field} must be {computed[field]}, as llama.cpp computes it in {name}, but the metadata "
                f"says {routing[field]}. Open the Hugging Face folder."
            )
    return {
        "num_experts": count,
        "experts_per_token": used,
        "expert_intermediate_size": inside,
        "intermediate_size": width if dense else None,
        **routing,
    }


def _computed(fixed: Mapping[str, Any]) -> dict[str, Any]:
    return {field: fixed.get(field, MoEConfig.model_fields[field].default) for field in _ROUTING}


def _count(metadata: Metadata, file: GGUFFile, dense: int) -> int:
    """How many experts there are, by the key and the first router alike."""
    name = f"blk.{dense}.ffn_gate_inp.weight"
    router = file.tensors.get(name)
    if router is None:
        raise HubError(f"{file.path}: the tensor {name}, which chooses among experts, must be there but is missing.")
    count = metadata.integer(metadata.own("expert_count"))
    if count != router.shape[0]:
        raise HubError(
            f"{file.path}: {metadata.own('expert_count')} must be {router.shape[0]}, the rows of {name}, but got "
            f"{count}. Convert the model anew."
        )
    return count


def _routing(metadata: Metadata, file: GGUFFile, fixed: Mapping[str, Any]) -> dict[str, Any]:
    own, computed = metadata.own, _computed(fixed)
    default = next(number for number, name in _GATINGS.items() if name == computed["router_scores"])
    gating = metadata.integer(own("expert_gating_func"), default)
    if gating not in _GATINGS:
        raise HubError(
            f"{file.path}: {own('expert_gating_func')} must be 1 (softmax) or 2 (sigmoid) but got {gating}. Open the "
            "Hugging Face folder."
        )
    return {
        "router_scores": _GATINGS[gating],
        "normalize_gates": metadata.flag(own("expert_weights_norm"), computed["normalize_gates"]),
        # Of both 0 says that there is none.
        "routed_scaling": metadata.number(own("expert_weights_scale"), 0.0) or 1.0,
        "expert_groups": metadata.integer(own("expert_group_count"), 0) or 1,
        "groups_per_token": metadata.integer(own("expert_group_used_count"), 0) or 1,
        "shared_experts": metadata.integer(own("expert_shared_count"), 0),
    }


def architecture_with_experts(config: MoEConfig) -> str:
    """The architecture that is nearest.

    Args:
        config: A model's config.
    """
    if config.qk_norm == "joint":
        return "olmoe"
    if config.selection_bias or config.shared_experts or config.dense_layers:
        return "dots1"
    return "qwen3moe" if config.qk_norm else "llama"


def expert_keys(architecture: str, config: MoEConfig) -> dict[str, Any]:
    """What the metadata says of a model's feed-forward layers, keys without the architecture's name.

    Args:
        architecture: The file's.
        config: A model's config.
    """
    keys: dict[str, Any] = {
        "feed_forward_length": config.mlp_size if config.dense_layers else config.expert_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
    }
    if architecture in ("qwen3moe", "dots1"):
        keys["expert_feed_forward_length"] = config.expert_size
    if architecture == "dots1":
        keys |= {
            "leading_dense_block_count": config.dense_layers,
            "expert_shared_count": config.shared_experts,
            "expert_weights_scale": config.routed_scaling,
            "expert_weights_norm": config.normalize_gates,
            "expert_gating_func": next(key for key, name in _GATINGS.items() if name == config.router_scores),
        }
    if config.expert_groups > 1:
        keys |= {"expert_group_count": config.expert_groups, "expert_group_used_count": config.groups_per_token}
    return keys


def expert_problems(architecture: str, config: MoEConfig) -> list[str]:
    """Each field whose value llama.cpp cannot compute in an architecture, beside those that have one value in it.

    Args:
        architecture: The file's.
        config: A model's config.
    """
    found: dict[str, tuple[Any, Any]] = {"attention_bias": (config.projection_bias, False)}
    if architecture in ("olmoe", "dots1"):
        found["num_kv_heads"] = (config.kv_heads, config.num_heads)
        found["tie_embeddings"] = (config.tie_embeddings, False)
    if architecture == "olmoe":
        found["head_dim"] = (config.head_size, config.hidden_size // config.num_heads)
    problems = [f"{field}: {value} (must be {wanted})" for field, (value, wanted) in found.items() if value != wanted]
    if architecture == "dots1" and not config.shared_experts:
        problems.append("shared_experts: 0 (must be 1 or more)")
    return problems
