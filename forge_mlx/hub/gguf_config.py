"""The shape of a model in a GGUF file's metadata, as llama.cpp has it, and back."""

from collections.abc import Callable
import math
from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_experts import has_experts, read_experts
from forge_mlx.hub.gguf_file import GGUFFile
from forge_mlx.hub.gguf_metadata import Metadata
from forge_mlx.hub.gguf_rope import read_rope
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from pydantic import ValidationError

_GEMMA: Final = {"norm_offset": True, "post_norms": True, "mlp": "geglu_tanh"}
FIXED: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"qk_norm": True},
    "gemma2": _GEMMA,
    "gemma3": {**_GEMMA, "qk_norm": True},
    "gpt2": {"norm": "layer_norm", "position": "learned", "bias": True, "mlp": "gelu_tanh"},
    "olmoe": {"qk_norm": "joint", "normalize_gates": False},
    "qwen3moe": {"qk_norm": True},
    "dots1": {"qk_norm": True, "router_scores": "sigmoid", "selection_bias": True, "normalize_gates": False},
}
"""What an architecture computes without saying so; other fields of the config that no key says have their default."""

# Every so manieth layer sees everything, the others a window.
_FULL_EVERY: Final = {"gemma2": 2, "gemma3": 6}
# The one size of each whose scores are scaled by the share of a head in the width, not by its size: the 27B.
_SCALED_BY_SHARE: Final = {"gemma2": 46, "gemma3": 62}
_WINDOW: Final = {"gemma2": 4096}
_SOFTCAPS: Final = {"gemma2": (50.0, 30.0)}
_TOO_LARGE: Final = 1 << 31
# What changes nothing that this package computes.
_WITHOUT_EFFECT: Final = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal")


def read_config(file: GGUFFile, log: Callable[[str], None]) -> DecoderConfig:
    """The config that a file's metadata, and the presence of some tensors, describe.

    Args:
        file: The header.
        log: Told once which keys of the shape are not known.

    Raises:
        HubError: The architecture is not one of `FIXED`, a key is missing or has a value that the model cannot have.
    """
    metadata = Metadata(file)
    architecture = metadata.architecture
    if architecture not in FIXED:
        raise HubError(
            f"{file.path}: general.architecture must be one of {', '.join(FIXED)} but got {architecture!r}. Other "
            "models can be opened from their Hugging Face folder."
        )
    values = _sizes(metadata, file) | FIXED[architecture]
    kind: type[DecoderConfig] = MoEConfig if has_experts(metadata, file) else GPTConfig
    if kind is MoEConfig:
        values |= read_experts(metadata, file, FIXED[architecture], values["intermediate_size"])
    elif architecture != "gpt2":
        values |= _biases(file)
    if architecture != "gpt2":
        values |= read_rope(metadata, file, values["head_dim"])
    if architecture in _FULL_EVERY:
        values |= _gemma(metadata, values)
    if values["head_dim"] * values["num_heads"] == values["hidden_size"]:
        values["head_dim"] = None
    metadata.asked.update(map(metadata.own, _WITHOUT_EFFECT))
    if metadata.unasked():
        log(f"{file.path}: {len(metadata.unasked())} keys are not known and were left out: {_few(metadata.unasked())}")
    try:
        return kind(**values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors()]
        raise HubError(f"{file.path}: the metadata describes no model: {'; '.join(problems)}") from None


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _sizes(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    own = metadata.own
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise HubError(
            f"{file.path}: the tensor token_embd.weight must be there as a matrix. The file is no whole model."
        )
    heads, width = metadata.integer(own("attention.head_count")), metadata.integer(own("embedding_length"))
    layers = metadata.integer(own("block_count"))
    if not (0 < heads <= width == embedding.shape[1] and 0 < layers <= len(file.tensors)):
        raise HubError(
            f"{file.path}: {own('attention.head_count')}, {own('embedding_length')} and {own('block_count')} must fit "
            f"the {len(file.tensors)} tensors, of which token_embd.weight is {embedding.shape}, but got {heads}, "
            f"{width} and {layers}."
        )
    norm = "layer_norm" if metadata.architecture == "gpt2" else "layer_norm_rms"
    found = {
        "vocab_size": embedding.shape[0],
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": metadata.integer(own("attention.head_count_kv"), heads),
        "head_dim": _head_dim(metadata, file, width // heads),
        "intermediate_size": metadata.integer(own("feed_forward_length")),
        "max_seq_len": metadata.integer(own("context_length")),
    }
    for field in ("num_heads", "num_kv_heads", "intermediate_size", "max_seq_len"):
        # Of the largest sizes not even an array without values can be made.
        if not 0 < found[field] * found["head_dim"] < _TOO_LARGE:
            raise HubError(
                f"{file.path}: the metadata must describe a model that can be but {field} is {found[field]}."
            )
    return {
        **found,
        "norm_eps": metadata.number(own(f"attention.{norm}_epsilon")),
        "tie_embeddings": not _has_head(file),
    }


def _head_dim(metadata: Metadata, file: GGUFFile, share: int) -> int:
    head_dim = metadata.integer(metadata.own("attention.key_length"), share)
    for key in map(metadata.own, ("attention.value_length", "rope.dimension_count")):
        if metadata.integer(key, head_dim) != head_dim:
            raise HubError(
                f"{file.path}: {key} must be the size of a head, {head_dim}, but got {metadata.integer(key)}."
            )
    return head_dim


def _has_head(file: GGUFFile) -> bool:
    """Whether the output head is another matrix than the embedding; some files have a tied one twice."""
    head, embedding = file.tensors.get("output.weight"), file.tensors["token_embd.weight"]
    if head is None:
        return False
    if (head.shape, head.type) != (embedding.shape, embedding.type):
        return True
    return not bool((file.read(head) == file.read(embedding)).all())


def _biases(file: GGUFFile) -> dict[str, Any]:
    query, output = (f"blk.0.attn_{name}.bias" in file.tensors for name in ("q", "output"))
    attention: bool | str = "qkv" if query and not output else query
    mlp = "blk.0.ffn_up.bias" in file.tensors
    return {"attention_bias": attention or None, "mlp_bias": mlp or None}


def _gemma(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    name, own = metadata.architecture, metadata.own
    softcaps = _SOFTCAPS.get(name, (0.0, 0.0))
    logits = metadata.number(own("final_logit_softcapping"), softcaps[1]) or None
    # Gemma 3 caps no scores, whatever its keys say.
    attention = metadata.number(own("attn_logit_softcapping"), softcaps[0]) or None if name == "gemma2" else None
    window = metadata.integer(own("attention.sliding_window"), _WINDOW.get(name, 0))
    share = values["hidden_size"] / values["num_heads"]
    default_scale = gemma_scale(name, values["num_layers"], values["head_dim"], share)
    found = {
        "embedding_scale": math.sqrt(values["hidden_size"]),
        "attention_scale": metadata.number(own("attention.scale"), default_scale),
        "attention_softcap": attention,
        "logit_softcap": logits,
        "sliding_window": window or None,
        "sliding_layers": sliding_layers(name, values["num_layers"]) if window else None,
    }
    if name == "gemma3" and window:
        found["rope_local_base"] = metadata.number(own("rope.freq_base_swa"), 10000.0)
    return found


def gemma_scale(architecture: str, num_layers: int, head_dim: int, share: float) -> float:
    """The factor on a Gemma's scores, which llama.cpp tells from the number of its layers.

    Args:
        architecture: gemma2 or gemma3.
        num_layers: How many layers there are.
        head_dim: Size of a head.
        share: Of a head in the width, hidden_size / num_heads.
    """
    return float((share if num_layers == _SCALED_BY_SHARE[architecture] else head_dim) ** -0.5)


def sliding_layers(architecture: str, num_layers: int) -> list[int]:
    """The layers of a Gemma that see a window.

    Args:
        architecture: gemma2 or gemma3.
        num_layers: How many layers there are.
    """
    every = _FULL_EVERY[architecture]
    return [layer for layer in range(num_layers) if layer % every < every - 1]
