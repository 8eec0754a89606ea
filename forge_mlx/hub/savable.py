"""Whether a model's layers are those that a Hugging Face folder can hold."""

from typing import Final

from forge_mlx.hub.errors import HubError
from forge_mlx.models.gpt import GPT
from forge_mlx.models.registry import build_model
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.norms import LayerNorm, RMSNorm
from forge_mlx.nn.parameters import named_leaves
from forge_mlx.nn.quantized import QuantizedEmbedding, QuantizedExpertLinear, QuantizedLinear
from forge_mlx.nn.router import Router
from forge_mlx.nn.weight_format import MLX_MODES
import mlx.nn as nn

# By class itself: what derives from one of these may compute something else.
_FLOAT: Final = {nn.Linear, Linear, nn.Embedding, Embedding, RMSNorm, LayerNorm, ExpertLinear, Router}
QUANTIZED: Final = {
    *(nn.QuantizedLinear, QuantizedLinear),
    *(nn.QuantizedEmbedding, QuantizedEmbedding),
    QuantizedExpertLinear,
}
"""Classes of layers of codes that mlx-lm reads."""
_OTHER_FORMATS: Final = (
    f"Train with weights {', '.join(MLX_MODES)} or ternary, and without activations; a checkpoint from before "
    "qat.start_step is exported as a float model. "
)
# How many of the layers that do not fit a message names.
_NAMED: Final = 4


def require_savable(model: GPT) -> dict[str, nn.Module]:
    """The innermost modules that have parameters, by their dotted names.

    Args:
        model: What is to be written.

    Raises:
        HubError: A layer is none that its place has in a float model, or of codes that mlx-lm does not read.
    """
    modules = _leaves(model)
    prepared = [name for name, module in modules.items() if isinstance(module, FakeQuantized)]
    if prepared:
        raise HubError(
            f"[save_pretrained] the model must hold the codes that it was trained for but {prepared[0]} and "
            f"{len(prepared) - 1} more are fake-quantised. Call convert_qat first."
        )
    expected = _leaves(build_model(model.config))
    problems = [f"{name} missing" for name in expected if name not in modules]
    for name, module in modules.items():
        if name not in expected or type(module) not in _FLOAT | QUANTIZED:
            problems.append(f"{name}: a {type(module).__name__}" + _mode(module))
        elif isinstance(module, Coded) and module.format.activations is not None:
            problems.append(f"{name}: inputs in {module.format.activations}")
    if problems:
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        # Other layers of codes are those of a model that was trained for them.
        way_out = _OTHER_FORMATS if any(isinstance(module, Coded) for module in modules.values()) else ""
        raise HubError(
            f"[save_pretrained] the layers must be float or of one of MLX's quantised formats but the model has "
            f"{'; '.join(problems[:_NAMED])}{more}. {way_out}Fuse or replace these, or keep forge_mlx's own folder."
        )
    return modules


def _leaves(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in named_leaves(model) if module.parameters()}


def _mode(module: nn.Module) -> str:
    return f" ({module.mode})" if isinstance(module, Coded) else ""
