"""Adapters of a model: put in, trained, switched off, merged into the weights and taken out again.

add_adapters(model, AdapterConfig(rank=16), seed=0)
...  # train: model.trainable_parameters() are the adapters'
adapted = merge_adapters(model)
unmerge_adapters(model, adapted)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.models.adapter_layers import adapted_layer, formats_of_codes
from forge_mlx.models.adapter_targets import chosen_layers
from forge_mlx.models.qat import convert_qat, is_prepared, prepare_qat
from forge_mlx.models.qat_config import LayerQuantization, QATConfig
from forge_mlx.models.replace import replace_each, replace_layer
from forge_mlx.nn.adapted_base import float_layer, float_weight, kind_of
from forge_mlx.nn.coded import holds_codes
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.lora import Adapter, AdapterOptions
from forge_mlx.nn.module_copy import copied_modules
import mlx.core as mx
import mlx.nn as nn

__all__ = [
    "AdapterConfig",
    "adapted_layers",
    "adapter_parameters",
    "adapters_disabled",
    "add_adapters",
    "merge_adapters",
    "unmerge_adapters",
]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def add_adapters(model: AnyModule, config: AdapterConfig, *, seed: int, qat: QATConfig | None = None) -> AnyModule:
    """Put adapters into a model and freeze everything else: what is trainable then is theirs alone.

    Each chosen layer becomes one that holds it, frozen. It may be float or of codes (QLoRA). At first the model
    computes what it did without adapters, to the bit, unless it is quantised here. A and B are float32 and follow from
    the seed and the chosen names alone; the global random state is neither read nor changed.

    With `qat` the adapted weight is quantised in every forward pass, and A and B learn what the merged codes will give.
    A float model is prepared by `prepare_qat` first. In a model of codes the adapted layers are quantised in their own
    format, which `qat` must name, and the others stay as they are. Either way `convert_qat` gives the codes that
    training saw.

    Args:
        model: Changed in place. Weights must be in it already: DoRA's magnitudes start with them.
        config: Which layers get adapters, and of what kind.
        seed: Of the initial A.
        qat: How adapted weights are quantised; None: not at all.

    Returns:
        The model.

    Raises:
        ValueError: When the model has adapters, a pattern fits nothing, the method is none for a layer, or `qat` does
            not go with the model or with dropout; nothing is changed then.
    """
    if adapted_layers(model):
        raise ValueError("[add_adapters] model must be without adapters but has some. Merge or take them out first.")
    _check_dropout(model, config, qat)
    chosen = chosen_layers(model, config)
    _check_kinds(chosen, config)
    formats: dict[str, LayerQuantization] = {}
    if qat is not None and any(holds_codes(module) for module in model.modules()):
        formats = formats_of_codes(model, chosen, qat)
    elif qat is not None:
        prepare_qat(model, qat)
        chosen = chosen_layers(model, config)
    model.freeze()
    options = AdapterOptions(config.rank, config.scale, config.dropout)
    made: dict[int, nn.Module] = {}
    for (name, layer), key in zip(chosen.items(), mx.random.split(mx.random.key(seed), len(chosen)), strict=True):
        # A layer that stands in several places stays one.
        if id(layer) not in made:
            made[id(layer)] = adapted_layer(layer, options, config.method == "dora", formats.get(name), key)
        replace_layer(model, name, made[id(layer)])
    return model


def adapted_layers(model: nn.Module) -> list[tuple[str, Adapter]]:
    """The layers with adapters and their names, in the order of the names.

    Args:
        model: Any model.
    """
    return [(name, module) for name, module in sorted(model.named_modules()) if isinstance(module, Adapter)]


def adapter_parameters(model: nn.Module) -> dict[str, mx.array]:
    """The adapters' parameters by their names in the model, whether frozen or not.

    Args:
        model: Any model.
    """
    return {
        f"{name}.{part}": layer[part]
        for name, layer in adapted_layers(model)
        for part in ("lora_a", "lora_b", "m")
        if part in layer
    }


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it does without its adapters, as the reference model of a preference loss.

    It counts when the model is called, in a compiled function when that is traced: a function may call the model both
    inside and outside. Layers of quantisation-aware training quantise the base's weight inside.

    Args:
        model: Any model; without adapters nothing changes.
    """
    layers = [layer for _, layer in adapted_layers(model)]
    before = [layer.active for layer in layers]
    try:
        for layer in layers:
            layer.active = False
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.active = active


def merge_adapters(
    model: nn.Module, *, dequantize: bool = False, dtype: mx.Dtype | None = None
) -> dict[str, nn.Module]:
    """Replace each adapted layer by one of the base's class with the adapted weight.

    Float weights are summed in float32 and rounded once to the dtype of the base's weight. Codes are made anew in the
    format of the base's. A model in quantisation-aware training becomes the codes that it was trained with, in all of
    its layers, as by `convert_qat`.

    Args:
        model: Changed in place.
        dequantize: Whether all layers of codes become float layers, those without adapters too.
        dtype: Of the forward pass in training, for quantisation-aware training: adapters are cast to it first, because
            codes depend on it. None: they stay as they are.

    Returns:
        What was replaced, by name, for `unmerge_adapters`. Without it the memory of what is replaced is free.

    Raises:
        ValueError: When the model has no adapters.
    """
    if not adapted_layers(model):
        raise ValueError("[merge_adapters] model must have adapters but has none. Call add_adapters first.")
    in_qat = is_prepared(model)
    if dtype is not None and not in_qat:
        raise ValueError(
            f"[merge_adapters] dtype must be left out without quantisation-aware training but got {dtype}: sums are "
            "float32."
        )
    replaced = _outermost(model, dequantize)
    # The conversion casts the parameters of what it finds: what is to be put back must not be that.
    copies = cast(dict[str, nn.Module], copied_modules(cast(Any, replaced)))
    for name in replaced:
        replace_layer(model, name, copies[name])
    if in_qat:
        convert_qat(model, dtype)
    replace_each(model, lambda layer: layer.merged(dequantize=dequantize) if isinstance(layer, Adapter) else None)
    if dequantize:
        replace_each(model, lambda layer: float_layer(layer, float_weight(layer)) if holds_codes(layer) else None)
    return replaced


def unmerge_adapters(model: nn.Module, replaced: dict[str, nn.Module]) -> None:
    """Put back what `merge_adapters` replaced, to the bit.

    Args:
        model: The merged model, changed in place.
        replaced: What `merge_adapters` returned of this model. Of another model with layers of the same names it
            would put in that one's, unseen.

    Raises:
        ValueError: When the model has adapters, or no such places.
    """
    if adapted_layers(model):
        raise ValueError("[unmerge_adapters] model must be merged but has adapters. Call merge_adapters first.")
    names = dict(model.named_modules())
    missing = [name for name in replaced if name not in names]
    if missing or not replaced:
        raise ValueError(
            f"[unmerge_adapters] replaced must be what merge_adapters gave of this model but got {len(replaced)} layers"
            f"{f', {missing[0]} among them, which it does not have' if missing else ''}. Give that."
        )
    for name, layer in replaced.items():
        replace_layer(model, name, layer)


def _check_dropout(model: nn.Module, config: AdapterConfig, qat: QATConfig | None) -> None:
    if config.dropout and (qat is not None or is_prepared(model)):
        raise ValueError(
            "[add_adapters] dropout must be 0 in quantisation-aware training, where the adapted weight is quantised as "
            f"one, but got {config.dropout}. Set it to 0."
        )


def _check_kinds(chosen: dict[str, nn.Module], config: AdapterConfig) -> None:
    experts = [name for name, layer in chosen.items() if kind_of(layer) == "experts"]
    if config.method == "dora" and experts:
        raise ValueError(
            f"[add_adapters] targets: with method dora no layer may be one of experts but got {experts[0]} and "
            f"{len(experts) - 1} more. Name the others, or take method lora."
        )


def _outermost(model: nn.Module, dequantize: bool) -> dict[str, nn.Module]:
    """The layers that a merge replaces, without what is inside of them."""
    kinds = (Adapter, FakeQuantized)
    found = {
        name: module
        for name, module in sorted(model.named_modules())
        if isinstance(module, kinds) or (dequantize and holds_codes(module))
    }
    return {name: module for name, module in found.items() if name.rpartition(".")[0] not in found}
