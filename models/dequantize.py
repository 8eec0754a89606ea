"""Layers of codes back to floats."""

from typing import TypeVar

from forge_mlx.nn.adapted_base import float_layer, float_weight, holds_codes
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

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
    coded = {name: module for name, module in model.named_modules() if holds_codes(module)}
    if not coded:
        raise ValueError("[dequantize_layers] model must have layers of codes but has none. Leave this out.")
    made: dict[int, nn.Module] = {}
    for name, layer in coded.items():
        # A layer that stands in several places stays one.
        if id(layer) not in made:
            made[id(layer)] = float_layer(layer, float_weight(layer).astype(dtype))
            mx.eval(made[id(layer)].parameters())
        model.update_modules(tree_unflatten([(name, made[id(layer)])]))
    return model
