"""Adapters of routers, which mlx-lm's training makes by default: merged as they are read, as routers take none here."""

from collections.abc import Mapping

from forge_mlx.hub.families.layout import Layout
from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.models.adapter_layers import adapted_layer
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.lora import AdapterOptions
from forge_mlx.nn.router import Router
import mlx.core as mx
import mlx.nn as nn


def routers_by_name(model: nn.Module) -> dict[str, Router]:
    """The routers of a model by our names, in their order.

    Args:
        model: Any model.
    """
    return {name: module for name, module in sorted(model.named_modules()) if isinstance(module, Router)}


def router_places(model: GPT, layout: Layout) -> dict[str, str]:
    """What mlx-lm calls each router, by our name.

    Args:
        model: Any model.
        layout: Of its family.
    """
    return {name: layout.module(name, coded=True) for name in routers_by_name(model)}


def merge_into_routers(model: nn.Module, found: Mapping[str, Mapping[str, mx.array]], config: AdapterConfig) -> None:
    """W + s (A B)^T in place of the weight W of each router, with DoRA m / ||V|| V of the rows of that; as W's dtype.

    Args:
        model: Changed in place.
        found: The adapter's parameters by the names of routers.
        config: Its rank, scale and method.
    """
    routers = routers_by_name(model)
    options = AdapterOptions(config.rank, config.scale, 0.0)
    for name, parts in found.items():
        layer = adapted_layer(_linear(routers[name].weight), options, config.method == "dora", None, mx.random.key(0))
        layer.update({part: array.astype(mx.float32) for part, array in parts.items()})
        routers[name].weight = layer.merged().weight
        mx.eval(routers[name].weight)


def _linear(weight: mx.array) -> Linear:
    made = Linear.__new__(Linear)
    # Not the class's own, which would draw a weight.
    nn.Module.__init__(made)
    made.weight = weight
    return made
