"""Quantisation-aware training: a model is prepared, trained as any other, and converted to the codes it trained with.

    prepare_qat(model, QATConfig(weights="affine", bits=4))
    ...  # train: parameters have the same names and shapes
    convert_qat(model)

After Jacob et al. 2018 (arXiv:1712.05877); the two steps and their names are torchao's. The gradient is the
straight-through estimator of Bengio et al. 2013 (arXiv:1308.3432).
"""

from dataclasses import replace
import difflib
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar, cast

from forge_mlx.models.qat_config import LayerQuantization, QATConfig, QATOverride
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.fake_quant import (
    FakeQuantEmbedding,
    FakeQuantExpertLinear,
    FakeQuantized,
    FakeQuantLinear,
    columns_multiple,
)
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.parameters import cast_floats
from forge_mlx.nn.quantized import Coded
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

__all__ = [
    "QATConfig",
    "QATOverride",
    "convert_qat",
    "fake_quant_enabled",
    "is_prepared",
    "prepare_qat",
    "prepared_layers",
    "set_fake_quant",
]

# By class itself: what derives from one of these may compute something else.
_PREPARED: Final[dict[type[nn.Module], type[FakeQuantized]]] = {
    nn.Linear: FakeQuantLinear,
    Linear: FakeQuantLinear,
    nn.Embedding: FakeQuantEmbedding,
    Embedding: FakeQuantEmbedding,
    ExpertLinear: FakeQuantExpertLinear,
}
# Those of `mlx.nn.quantize` too.
_HOLD_CODES: Final = (Coded, nn.QuantizedLinear, nn.QuantizedEmbedding)

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def prepare_qat(model: AnyModule, config: QATConfig) -> AnyModule:
    """Let a model compute with the weights that its codes will give back.

    Each chosen `Linear`, `Embedding` and `ExpertLinear` becomes a layer that quantises its weight in every forward
    pass, in the dtype that the weight has there. Parameters keep their names and are the same arrays, so that an
    optimizer's state and checkpoints fit before and after. Norms, biases and all other parameters stay float, and so do
    routers: their weights are few, and rounding them would change which experts a token goes to. A tied head is
    quantised with the embedding.

    Args:
        model: Changed in place.
        config: What is quantised, and how.

    Returns:
        The model.

    Raises:
        ValueError: When the model is prepared or holds codes already, or has nothing to quantise; when a pattern fits
            no module that can be quantised or has no effect, nothing is left to quantise, a layer in two places would
            be quantised in two ways, or the shapes of weights do not fit their formats; these are all named, and
            nothing is changed.
    """
    _check_arguments(model, config)
    chosen = _chosen(model, config)
    _check_shared(model, chosen)
    _check_shapes(chosen)
    prepared: dict[int, nn.Module] = {}
    for name, (layer, how) in chosen.items():
        # A layer that stands in several places stays one.
        prepared.setdefault(
            id(layer), _PREPARED[type(layer)](layer, how.options, ste=how.ste, activations=how.activations)
        )
        _replace(model, name, prepared[id(layer)])
    return model


def convert_qat(model: AnyModule, dtype: mx.Dtype | None = None) -> AnyModule:
    """Replace each fake-quantised layer by one that holds the codes of its weight; the rest stays as it is.

    The codes are those of `forge_mlx.kernels.quantize`, never of `mx.quantize`, whose results differ between devices.
    MLX's modes become `mlx.nn.QuantizedLinear` and `mlx.nn.QuantizedEmbedding`, experts a layer on `mx.gather_qmm`;
    ternary becomes MLX's affine format of 2 bits, which holds the trained weights exactly; int8, int4 and fp8_e4m3
    become layers that make the weight of its codes in every call. Layers are converted whether or not fake quantisation
    is enabled. The logits are those of training but for roundings: MLX's quantised products do not round the weight
    that they make of codes to its dtype, and sum in their own order, on a CPU 16-bit products in 16 bits.

    Args:
        model: A prepared model, changed in place.
        dtype: Trainable parameters are cast to it first: that of the forward pass in training, because the codes of a
            weight depend on its dtype. Frozen ones stay what they are, in training too. None: all stay as they are.

    Returns:
        The model.

    Raises:
        ValueError: When the model is not prepared, or dtype is not float32, float16 or bfloat16.
    """
    if not is_prepared(model):
        raise ValueError(
            "[convert_qat] model must be prepared but has no fake-quantised layer. Call prepare_qat first."
        )
    if dtype is not None:
        if dtype not in (mx.float32, mx.float16, mx.bfloat16):
            raise ValueError(f"[convert_qat] dtype must be float32, float16 or bfloat16 but got {dtype}.")
        model.update(cast_floats(model.trainable_parameters(), dtype))
    coded: dict[int, nn.Module] = {}
    for name, layer in prepared_layers(model):
        if id(layer) not in coded:
            coded[id(layer)] = layer.to_coded()
            mx.eval(coded[id(layer)].parameters())
        _replace(model, name, coded[id(layer)])
    return model


def is_prepared(model: nn.Module) -> bool:
    """Whether a model has a fake-quantised layer, enabled or not.

    Args:
        model: Any model.
    """
    return bool(prepared_layers(model))


def set_fake_quant(model: nn.Module, enabled: bool) -> None:
    """Switch fake quantisation of weights and inputs on or off. A compiled function keeps what it was compiled with.

    Args:
        model: A prepared model.
        enabled: Whether the forward pass is quantised.

    Raises:
        ValueError: When the model is not prepared.
    """
    layers = prepared_layers(model)
    if not layers:
        raise ValueError(
            "[set_fake_quant] model must be prepared but has no fake-quantised layer. Call prepare_qat first."
        )
    for _, layer in layers:
        layer.enabled = enabled


def fake_quant_enabled(config: QATConfig, step: int) -> bool:
    """Whether the update that follows on `step` updates is quantised: start_step <= step < end_step.

    Args:
        config: The config.
        step: Number of updates done.
    """
    return config.start_step <= step and (config.end_step is None or step < config.end_step)


def prepared_layers(model: nn.Module) -> list[tuple[str, FakeQuantized]]:
    """The fake-quantised layers of a model with their names, enabled or not.

    Args:
        model: Any model.
    """
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FakeQuantized)]


def _check_arguments(model: nn.Module, config: object) -> None:
    """Raise unless the config is one, and the model holds layers that can be replaced."""
    if not isinstance(config, QATConfig):
        raise ValueError(
            f"[prepare_qat] config must be a QATConfig but got a {type(config).__name__}. Write QATConfig(bits=4), for "
            "one."
        )
    if is_prepared(model):
        raise ValueError(
            "[prepare_qat] model must be without fake quantisation but is prepared already. Prepare it once."
        )
    found = sorted(name for name, module in model.named_modules() if isinstance(module, _HOLD_CODES))
    if found:
        raise ValueError(
            f"[prepare_qat] model must hold floats but {found[0] or 'it'} holds codes: it is converted already. "
            "Prepare the model that they were made of."
        )
    if type(model) in _PREPARED:
        raise ValueError(
            f"[prepare_qat] model must be a module that holds the layers to quantise, which are replaced in it, but is "
            f"itself a {type(model).__name__}. Put it into one, such as nn.Sequential(layer)."
        )
    if not any(type(module) in _PREPARED for module in model.modules()):
        raise ValueError(
            f"[prepare_qat] model must have linear layers, embeddings or experts to quantise but the "
            f"{type(model).__name__} has none. Layers of classes that derive from these do not count."
        )


def _chosen(model: nn.Module, config: QATConfig) -> dict[str, tuple[nn.Module, LayerQuantization]]:
    """Each layer to quantise by its name, with the last override that fits."""
    modules = {name: module for name, module in sorted(model.named_modules()) if name}
    names = [name for name, module in modules.items() if type(module) in _PREPARED]
    picked = {name for pattern in config.modules for name in _matches(pattern, "modules", names, modules)}
    last: dict[str, QATOverride | None] = dict.fromkeys(picked, QATOverride())
    decided_by: dict[str, str] = {}
    for pattern, override in config.overrides.items():
        found = _matches(pattern, "overrides", [name for name in names if name in picked], modules)
        decided_by.update(dict.fromkeys(found, pattern))
        if (
            override is not None
            and override.activations == "int8"
            and all(_keeps_input(model, name, modules[name]) for name in found)
        ):
            raise ValueError(
                f"[prepare_qat] overrides: activations must be left out for {pattern!r}, which fits only the output "
                "head or embeddings, whose input stays float, but got int8. Remove it."
            )
        last.update(dict.fromkeys(found, override))
    covered = [pattern for pattern in config.overrides if pattern not in decided_by.values()]
    if covered:
        raise ValueError(
            f"[prepare_qat] overrides: a pattern must decide about a layer but all that {covered[0]!r} fits are fitted "
            "by later ones, and the last counts. Move it behind them or remove it."
        )
    chosen = {}
    for name, override in sorted(last.items()):
        if override is not None:
            how = config.merged(override)
            kept = _keeps_input(model, name, modules[name])
            chosen[name] = modules[name], replace(how, activations=None) if kept else how
    _check_effect(chosen, config)
    return chosen


def _check_effect(chosen: dict[str, tuple[nn.Module, LayerQuantization]], config: QATConfig) -> None:
    """Raise where nothing would be quantised of what the config asks for."""
    if not chosen:
        raise ValueError(
            "[prepare_qat] overrides: a layer must be left to quantise but null fits all that `modules` chooses: the "
            "model would stay float. Remove an override, or train without quantisation."
        )
    if config.activations is not None and all(how.activations is None for _, how in chosen.values()):
        raise ValueError(
            f"[prepare_qat] activations must be null where the inputs of all quantised layers stay float, as those of "
            f"embeddings and of the output head do, but got {config.activations}. Set it to null or quantise others."
        )


def _matches(pattern: str, key: str, names: list[str], modules: dict[str, nn.Module]) -> list[str]:
    """The names among those of layers that can be quantised that a pattern fits, at least one."""
    found = [name for name in names if fnmatchcase(name, pattern)]
    if found:
        return found
    others = [name for name in modules if fnmatchcase(name, pattern)]
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    inside = [name for name in names if name.startswith(f"{pattern}.")]
    if inside:
        way_out = f"It is the name of what holds such layers: write {pattern}.*."
    elif others and key == "overrides" and any(type(modules[name]) in _PREPARED for name in others):
        way_out = f"{others[0]} is not among `modules`: add it there."
    elif others:
        way_out = f"{others[0]} is a {type(modules[others[0]]).__name__}, which stays float."
    else:
        way_out = (
            f"Near it are {', '.join(near)}." if near else f"There are {len(names)}, such as {', '.join(names[:3])}."
        )
    raise ValueError(f"[prepare_qat] {key}: a pattern must fit a layer to quantise but got {pattern!r}. {way_out}")


def _keeps_input(model: nn.Module, name: str, layer: nn.Module) -> bool:
    """Whether a layer's input stays float: ids, and what the head gets, as a loss may read the head's matrix alone."""
    return isinstance(layer, nn.Embedding) or name == getattr(model, "head_name", None)


def _check_shared(model: nn.Module, chosen: dict[str, tuple[nn.Module, LayerQuantization]]) -> None:
    """Raise where a layer that stands in several places, and has one weight, would be quantised in several ways."""
    ways: dict[int, dict[str, LayerQuantization | None]] = {}
    for name, layer in sorted(model.named_modules()):
        if type(layer) in _PREPARED:
            ways.setdefault(id(layer), {})[name] = chosen[name][1] if name in chosen else None
    for found in ways.values():
        if len(set(found.values())) > 1:
            raise ValueError(
                "[prepare_qat] a layer in several places must be quantised alike in all of them but "
                f"{', '.join(found)}, which are one layer, are not. Let the same patterns fit them."
            )


def _check_shapes(chosen: dict[str, tuple[nn.Module, LayerQuantization]]) -> None:
    problems = [
        f"{name} {layer.weight.shape} ({how.options.mode}: a multiple of {columns_multiple(how.options)})"
        for name, (layer, how) in chosen.items()
        if layer.weight.shape[-1] % columns_multiple(how.options)
    ]
    if problems:
        raise ValueError(
            "[prepare_qat] the last axis of a weight must be whole groups and words of codes but is not in "
            f"{', '.join(problems)}. Change the shape or the group size, or leave these out by overrides: "
            "{NAME: null}."
        )


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    model.update_modules(cast(dict[str, Any], tree_unflatten([(name, layer)])))
