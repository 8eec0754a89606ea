"""Layers of codes back to floats."""

from typing import TypeVar

from forge_mlx.models.replace import replace_each
from forge_mlx.nn.adapted_base import codes_options, float_layer
from forge_mlx.nn.coded import holds_codes
from forge_mlx.nn.weight_format import Packed, WeightFormat
import mlx.core as mx
import mlx.nn as nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def dequantize_layers(model: AnyModule, dtype: mx.Dtype) -> AnyModule:
    """Replace each layer of codes by the float layer whose weight the codes stand for.

    The floats are the codes' own values, rounded once to the dtype; what quantising lost does not come back.

    Args:
        model: Changed in place.
        dtype: Of the weights.

    Returns:
        The model.

    Raises:
        ValueError: When no layer holds codes.
    """
    if not any(name and holds_codes(module) for name, module in model.named_modules()):
        raise ValueError("[dequantize_layers] model must have layers of codes but has none. Leave this out.")
    replace_each(model, lambda layer: float_layer(layer, _floats(layer, dtype)) if holds_codes(layer) else None)
    return model


def _floats(layer: nn.Module, dtype: mx.Dtype) -> mx.array:
    packed = Packed(layer.weight, layer.scales, layer.get("biases"))
    return WeightFormat(codes_options(layer), dtype).values(packed.scaled_for(dtype))
