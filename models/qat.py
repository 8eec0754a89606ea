"""Quantisation-aware training: a model is prepared, trained as any other, and converted to the codes it trained with.

    prepare_qat(model, QATConfig(weights="affine", bits=4))
    ...  # train: parameters have the same names and shapes
    convert_qat(model)

After Jacob et al. 2018 (arXiv:1712.05877); the two steps and their names are torchao's. The gradient is the
straight-through estimator of Bengio et al. 2013 (arXiv:1308.3432).
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from forge_mlx.models.qat_config import LayerQuantization, QATConfig, QATOverride
from forge_mlx.models.qat_patterns import chosen_formats
from forge_mlx.models.replace import replace_each, replace_layer
from forge_mlx.nn.coded import coded_layers
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
import mlx.core as mx
import mlx.nn as nn

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
    layers = preparable_layers(model)
    chosen = chosen_formats("[prepare_qat]", model, layers, config)
    _check_shapes(layers, chosen)
    prepared: dict[int, nn.Module] = {}
    for name, how in chosen.items():
        layer = layers[name]
        # A layer that stands in several places stays one.
        if id(layer) not in prepared:
            made = _PREPARED[type(layer)]
            prepared[id(layer)] = made(layer, how.options, ste=how.ste, activations=how.activations)
        replace_layer(model, name, prepared[id(layer)])
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
    replace_each(model, lambda layer: layer.to_coded() if isinstance(layer, FakeQuantized) else None)
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


def preparable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The float layers inside of a model that `prepare_qat` can replace, by their names, in the order of the names.

    Args:
        model: Any model.
    """
    return {name: layer for name, layer in sorted(model.named_modules()) if name and type(layer) in _PREPARED}


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
    if found := coded_layers(model):
        raise ValueError(
            f"[prepare_qat] model must hold floats but {found[0] or 'it'} holds codes: it is converted already. "
            "Prepare the model that they were made of."
        )
    if type(model) in _PREPARED:
        raise ValueError(
            f"[prepare_qat] model must be a module that holds the layers to quantise, which are replaced in it, but is "
            f"itself a {type(model).__name__}. Put it into one, such as nn.Sequential(layer)."
        )
    if not preparable_layers(model):
        raise ValueError(
            f"[prepare_qat] model must have linear layers, embeddings or experts to quantise but the "
            f"{type(model).__name__} has none. Layers of classes that derive from these do not count."
        )


def _check_shapes(layers: Mapping[str, nn.Module], chosen: Mapping[str, LayerQuantization]) -> None:
    problems = [
        f"{name} {layers[name].weight.shape} ({how.options.mode}: a multiple of {columns_multiple(how.options)})"
        for name, how in chosen.items()
        if layers[name].weight.shape[-1] % columns_multiple(how.options)
    ]
    if problems:
        raise ValueError(
            "[prepare_qat] the last axis of a weight must be whole groups and words of codes but is not in "
            f"{', '.join(problems)}. Change the shape or the group size, or leave these out by overrides: "
            "{NAME: null}."
        )
