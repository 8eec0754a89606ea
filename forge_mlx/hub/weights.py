"""The tensors of a checkpoint put into a model: every one has a place, and every place gets one."""

from collections.abc import Callable, Mapping
import re
from typing import Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.family import Family
from forge_mlx.hub.families.layout import Layout
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
from mlx.utils import tree_unflatten

ALWAYS_FLOAT32: Final = ".selection_bias"
"""End of the names of what steers a router, in steps that 16 bits would round away."""
# How many tensors of each kind a message names.
_NAMED: Final = 3
_LAYER: Final = re.compile(r"layers\.(\d+)\..*")
_HEAD: Final = "lm_head"


def text_tensors(
    found: Mapping[str, mx.array], family: Family, num_layers: int, where: str, log: Callable[[str], None]
) -> dict[str, mx.array]:
    """The tensors of the text model by their names without a prefix; what else there is, the log says.

    Args:
        found: All tensors of a checkpoint.
        family: The model's.
        num_layers: Layers that the model has.
        where: What errors call the checkpoint: its folder.
        log: Told in one line what is left out.

    Raises:
        HubError: Two tensors have one name without their prefixes.
    """
    layout, kept = family.layout, dict[str, mx.array]()
    dropped, behind = 0, 0
    for name, array in found.items():
        bare = layout.bare(name)
        layer = _LAYER.fullmatch(bare)
        if layout.is_dropped(name):
            dropped += 1
        elif family.drops_layers_behind and layer is not None and int(layer[1]) >= num_layers:
            behind += 1
        elif not layout.is_buffer(bare):
            if bare in kept:
                raise HubError(f"{where}: {name} must be there once but another name of the same is there too.")
            kept[bare] = layout.upright(name, array)
    if dropped:
        log(f"{where}: {dropped} tensors that are no part of the text model were left out")
    if behind:
        log(f"{where}: {behind} tensors of layers for multi-token prediction were left out")
    return kept


def put_weights(
    model: GPT, layout: Layout, tensors: dict[str, mx.array], where: str, *, dtype: mx.Dtype | None
) -> None:
    """Make each array of a model of the tensors that it stands for.

    Args:
        model: Its layers of codes hold zeros; changed in place.
        layout: The family's.
        tensors: From `text_tensors`.
        where: What errors call the checkpoint: its folder.
        dtype: What floats are cast to; None: they stay what they are.

    Raises:
        HubError: Tensors are missing, or nothing needs them, or they have another shape or dtype; the first of each are
            named.
    """
    coded = {name for name, module in model.named_modules() if isinstance(module, Coded)}
    missing, unfit, used, arrays = list[str](), list[str](), set[str](), list[tuple[str, mx.array]]()
    for name, parameter in named_arrays(model.parameters()):
        pieces = layout.pieces(name, tensors)
        piece = next((each for each in pieces if all(part in tensors for part in each.names)), None)
        if piece is None:
            missing += [part for part in pieces[-1].names if part not in tensors]
            used |= set(pieces[-1].names)
            continue
        used |= set(piece.names)
        module, _, part = name.rpartition(".")
        is_codes = module in coded and (part == "weight" or parameter.dtype == mx.uint8)
        array, problem = _fitted(piece.make, [tensors[each] for each in piece.names], parameter, is_codes)
        if problem:
            unfit.append(f"{piece.names[0]} {problem}")
        elif array is not None:
            is_cast = mx.issubdtype(array.dtype, mx.floating) and not name.endswith(ALWAYS_FLOAT32)
            arrays.append((name, array.astype(dtype) if dtype is not None and is_cast else array))
    extra = sorted(tensors.keys() - used)
    if model.config.tie_embeddings:
        extra = _without_copied_head(tensors, layout.place("embed_tokens"), extra, where)
    _require_fit(where, list(dict.fromkeys(missing)), extra, list(dict.fromkeys(unfit)))
    model.update(tree_unflatten(arrays))


def common_dtype(tensors: Mapping[str, mx.array]) -> mx.Dtype:
    """The dtype that most float tensors have; float32 without any.

    Args:
        tensors: Of a checkpoint.
    """
    found = [array.dtype for array in tensors.values() if mx.issubdtype(array.dtype, mx.floating)]
    return max(found, key=found.count) if found else mx.float32


def _fitted(
    make: Callable[[list[mx.array]], mx.array], parts: list[mx.array], parameter: mx.array, is_codes: bool
) -> tuple[mx.array | None, str]:
    """The array of some tensors, or what is wrong with it."""
    try:
        array = make(parts)
    except (ValueError, IndexError):
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            return None, f"and {len(parts) - 1} more must have shapes that fit together but have {sorted(shapes)}"
        return None, f"must make {parameter.shape} but is {parts[0].shape}"
    if array.shape != parameter.shape:
        return None, f"must make {parameter.shape} but is {parts[0].shape}"
    fits = array.dtype == parameter.dtype if is_codes else mx.issubdtype(array.dtype, mx.floating)
    if not fits:
        return None, f"must be {dtype_name(parameter.dtype) if is_codes else 'floats'} but is {dtype_name(array.dtype)}"
    return array, ""


def _without_copied_head(tensors: Mapping[str, mx.array], table: str, extra: list[str], where: str) -> list[str]:
    """What is left over but a copy of the embedding as the head, which a tied model does not need."""
    heads = [name for name in extra if name.startswith(f"{_HEAD}.")]
    for name in heads:
        copied = tensors.get(table + name.removeprefix(_HEAD))
        if copied is None or copied.shape != tensors[name].shape or not mx.array_equal(copied, tensors[name]).item():
            raise HubError(
                f"{where}: {name} must be {table}{name.removeprefix(_HEAD)} again where tie_word_embeddings is true "
                "but is something else. Set it to false in config.json."
            )
    return [name for name in extra if name not in heads]


def _require_fit(where: str, missing: list[str], extra: list[str], unfit: list[str]) -> None:
    problems = [
        f"{len(names)} {what}: {'; '.join(names[:_NAMED])}{' ...' if len(names) > _NAMED else ''}"
        for what, names in {"missing": missing, "that nothing needs": extra, "that do not fit": unfit}.items()
        if names
    ]
    if problems:
        raise HubError(
            f"{where}: the tensors must be those that config.json asks for but there are {', '.join(problems)}."
        )
