"""Layers of a model replaced by others, in all places where they stand."""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer into one place of a model.

    Args:
        model: Changed in place.
        name: The dotted name of the place.
        layer: What stands there then.
    """
    model.update_modules(cast(dict[str, Any], tree_unflatten([(name, layer)])))


def replace_each(model: nn.Module, successor: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace the layers that have a successor, one after another: the memory of the last is free before the next.

    A layer that stands in several places stays one. Layers inside of others come first.

    Args:
        model: Changed in place; it is not replaced itself.
        successor: Makes what takes the place of a layer; None: the layer stays.
    """
    places: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, layer in sorted(model.named_modules()):
        if name:
            places.setdefault(id(layer), (layer, []))[1].append(name)
    waiting = sorted(places.values(), key=lambda place: max(name.count(".") for name in place[1]))
    # Both hold layers: what is replaced must be in neither of them.
    places.clear()
    while waiting:
        layer, names = waiting.pop()
        made = successor(layer)
        if made is not None:
            mx.eval(made.parameters())
            for name in names:
                replace_layer(model, name, made)
