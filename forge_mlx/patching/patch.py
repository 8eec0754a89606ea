"""patch and unpatch: the class of each module of a known type becomes one of ours, and its own again."""

from collections.abc import Iterator
from typing import TypeVar

from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.metal.engine import resolve
from forge_mlx.patching.attention import PatchedAttention, head_size
from forge_mlx.patching.families import name_of, reason, replacement, text_model
from forge_mlx.patching.head import head_of
from forge_mlx.patching.modules import Patched, patched_class
from forge_mlx.patching.report import Kept, PatchReport, Replaced
import mlx.nn as nn

Model = TypeVar("Model", bound=nn.Module)


def patch(model: nn.Module) -> PatchReport:
    """Swap our kernels into a model of mlx-lm, in place, by the type of its modules.

    Attention becomes `flash_attention` (packed documents by `packed_rows`, windows, softcaps), RMSNorm, SwiGLU, GEGLU
    and rotary positions become the kernels of these names. Modules keep their parameters: saving, loading, quantising,
    freezing and LoRA layers go on as before, whichever is done first. A model that is patched already is gone through
    again, for modules that are new. With a KV cache attention runs mlx-lm's own way.

    Args:
        model: A model of `mlx_lm.models` of a family in `forge_mlx.patching.families.MODELS`.

    Returns:
        What is replaced now and what is not, and why; `print` it.

    Raises:
        ValueError: A model of another type, or with heads of more than 256 elements. Nothing is changed then.
    """
    text_model("patch", model)
    found = list(_modules(model))
    for path, module in found:
        if replacement(module) is PatchedAttention and head_size(module) > LARGEST_HEAD:
            raise ValueError(
                f"[patch] heads must have at most {LARGEST_HEAD} elements but got {head_size(module)} in {path} "
                f"({name_of(type(module))}). Train the model unpatched."
            )
    for _, module in found:
        new = replacement(module)
        if new is not None:
            module.__class__ = patched_class(new, type(module))
    return _report(model)


def unpatch(model: nn.Module) -> int:
    """Give each module that `patch` has changed the class that it had; parameters were never touched.

    Args:
        model: A model; one that is not patched stays as it is.

    Returns:
        How many modules were changed back.
    """
    patched = [module for _, module in _modules(model) if isinstance(module, Patched)]
    for module in patched:
        module.__class__ = module.original  # type: ignore[assignment]
    return len(patched)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, by its path, the model first."""
    seen: set[int] = set()
    for path, module in reversed(model.named_modules()):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _report(model: nn.Module) -> PatchReport:
    replaced: dict[type[Patched], int] = {}
    kept: dict[type[nn.Module], int] = {}
    for _, module in _modules(model):
        if isinstance(module, Patched):
            replaced[type(module)] = replaced.get(type(module), 0) + 1
        else:
            kept[type(module)] = kept.get(type(module), 0) + 1
    return PatchReport(
        name_of(type(model)),
        str(resolve("patch", None)),
        tuple(Replaced(name_of(kind.original), count, kind.by) for kind, count in replaced.items()),
        tuple(Kept(name_of(kind), count, reason(kind)) for kind, count in kept.items()),
        head_of(model).description,
    )
