"""Which classes of mlx-lm are replaced by which of ours, and why others are not.

By name, so that mlx-lm need not be imported: who has a model of it has done so.
"""

from typing import Final

from forge_mlx.patching.attention import PatchedAttention
from forge_mlx.patching.modules import (
    Patched,
    PatchedDecoder,
    PatchedGEGLU,
    PatchedGEGLUTanh,
    PatchedJoinedSwiGLU,
    PatchedOffsetRMSNorm,
    PatchedRMSNorm,
    PatchedRotary,
    PatchedScaledRotary,
    PatchedSwiGLU,
    PatchedSwitchGLU,
)
import mlx.nn as nn

MODELS: Final = (
    "gemma.Model",
    "gemma2.Model",
    "gemma3_text.Model",
    "llama.Model",
    "mixtral.Model",
    "olmoe.Model",
    "phi3.Model",
    "qwen2.Model",
    "qwen3.Model",
    "qwen3_moe.Model",
    "smollm3.Model",
)
"""What `patch` takes; Mistral's models are llama's. Around one of them there may be a model for more than text."""

_OF_MLX_LM: Final[dict[str, type[Patched]]] = {
    "gemma.Attention": PatchedAttention,
    "gemma.GemmaModel": PatchedDecoder,
    "gemma.MLP": PatchedGEGLU,
    "gemma.RMSNorm": PatchedOffsetRMSNorm,
    "gemma2.Attention": PatchedAttention,
    "gemma2.GemmaModel": PatchedDecoder,
    "gemma2.MLP": PatchedGEGLUTanh,
    "gemma2.RMSNorm": PatchedOffsetRMSNorm,
    "gemma3_text.Attention": PatchedAttention,
    "gemma3_text.Gemma3Model": PatchedDecoder,
    "gemma3_text.MLP": PatchedGEGLUTanh,
    "gemma3_text.RMSNorm": PatchedOffsetRMSNorm,
    "llama.Attention": PatchedAttention,
    "llama.LlamaModel": PatchedDecoder,
    "llama.MLP": PatchedSwiGLU,
    "mixtral.MixtralAttention": PatchedAttention,
    "mixtral.MixtralModel": PatchedDecoder,
    "olmoe.Attention": PatchedAttention,
    "olmoe.OlmoeModel": PatchedDecoder,
    "phi3.Attention": PatchedAttention,
    "phi3.MLP": PatchedJoinedSwiGLU,
    "phi3.Phi3Model": PatchedDecoder,
    "qwen2.Attention": PatchedAttention,
    "qwen2.MLP": PatchedSwiGLU,
    "qwen2.Qwen2Model": PatchedDecoder,
    "qwen3.Attention": PatchedAttention,
    "qwen3.MLP": PatchedSwiGLU,
    "qwen3.Qwen3Model": PatchedDecoder,
    "qwen3_moe.Attention": PatchedAttention,
    "qwen3_moe.MLP": PatchedSwiGLU,
    "qwen3_moe.Qwen3MoeModel": PatchedDecoder,
    "rope_utils.Llama3RoPE": PatchedScaledRotary,
    "rope_utils.ProportionalRoPE": PatchedScaledRotary,
    "rope_utils.SuScaledRoPE": PatchedScaledRotary,
    "rope_utils.YarnRoPE": PatchedScaledRotary,
    "switch_layers.SwitchGLU": PatchedSwitchGLU,
}

_OF_MLX: Final[dict[type[nn.Module], type[Patched]]] = {nn.RMSNorm: PatchedRMSNorm, nn.RoPE: PatchedRotary}

_PRODUCT: Final = "MLX's products, also of quantised weights, are what we use ourselves"
_LOOKUP: Final = "a lookup; as a head it is forge_mlx.patching.loss that avoids its logits"
_ADAPTER: Final = "its small products are MLX's"
_ROUTING: Final = "routing stays mlx-lm's; its experts are listed apart"

_REASONS: Final = {
    "Linear": _PRODUCT,
    "QuantizedLinear": _PRODUCT,
    "SwitchLinear": _PRODUCT,
    "QuantizedSwitchLinear": _PRODUCT,
    "Embedding": _LOOKUP,
    "QuantizedEmbedding": _LOOKUP,
    "LoRALinear": _ADAPTER,
    "LoRASwitchLinear": _ADAPTER,
    "LoRAEmbedding": _ADAPTER,
    "DoRALinear": _ADAPTER,
    "DoRAEmbedding": _ADAPTER,
    "Dropout": "MLX's own",
    "SwiGLU": "skipped by the SwitchGLU around it",
    "NoPE": "does nothing",
    "MixtralSparseMoeBlock": _ROUTING,
    "OlmoeSparseMoeBlock": _ROUTING,
    "Qwen3MoeSparseMoeBlock": _ROUTING,
    "DynamicNTKScalingRoPE": "its base follows the length of the row; packed_rows refuses it",
    "TransformerBlock": "adds what its parts return",
    "MixtralDecoderLayer": "adds what its parts return",
    "Qwen3MoeDecoderLayer": "adds what its parts return",
    "Model": "its logits are avoided by forge_mlx.patching.loss alone",
}


def replacement(module: nn.Module) -> type[Patched] | None:
    """The class that takes the place of a module's own; None where there is none, or it has been taken.

    Args:
        module: Any module.
    """
    kind = type(module)
    if kind in _OF_MLX:
        return _OF_MLX[kind]
    found = _OF_MLX_LM.get(name_of(kind))
    if found is PatchedSwitchGLU and name_of(type(module["activation"])) != "switch_layers.SwiGLU":
        return None
    return found


def reason(kind: type[nn.Module]) -> str:
    """Why instances of a class are left as they are.

    Args:
        kind: The class.
    """
    return _REASONS.get(kind.__name__, "of no type that we have a replacement for")


def name_of(kind: type[nn.Module]) -> str:
    """The name of a class with its module, short for what is mlx-lm's or MLX's: llama.Attention, nn.Linear.

    Args:
        kind: The class.
    """
    if kind.__module__.startswith("mlx.nn."):
        return f"nn.{kind.__qualname__}"
    for prefix in ("mlx_lm.models.", "mlx_lm.tuner."):
        if kind.__module__.startswith(prefix):
            return f"{kind.__module__.removeprefix(prefix)}.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def text_model(op: str, model: nn.Module) -> nn.Module:
    """The language model in a model of mlx-lm: itself, or what a model for more than text has inside.

    Args:
        op: Who asks, for the message.
        model: The model.

    Raises:
        ValueError: It is of a type that is not known.
    """
    inner = model.get("language_model", model) if isinstance(model, nn.Module) else model
    if isinstance(inner, nn.Module) and name_of(type(inner)) in MODELS:
        return inner
    kind = type(model)
    known = ", ".join(name.removesuffix(".Model") for name in MODELS)
    raise ValueError(
        f"[{op}] model must be one of mlx_lm.models with the family {known} (Mistral is llama) but got "
        f"{kind.__module__}.{kind.__qualname__}. Load it with mlx_lm.load, or train it unpatched."
    )
