"""A copy of a model's modules that shares their arrays."""

from typing import Any, TypeVar, cast

import mlx.nn as nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copied_modules(model: AnyModule) -> AnyModule:
    """The same modules anew, holding the same arrays: layers of the copy can be replaced, and the model stays.

    A module that stands in several places is one in the copy too. Arrays are values in MLX: what is put into the copy
    later does not show in the model, and what both hold takes memory once.

    Args:
        model: Any module.
    """
    made: dict[int, nn.Module] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, nn.Module):
            if id(value) not in made:
                new = made[id(value)] = type(value).__new__(type(value))
                new.__dict__.update(value.__dict__, _no_grad=type(value._no_grad)(value._no_grad))
                dict.update(new, {name: copied(part) for name, part in value.items()})
            return made[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(copied(part) for part in value)
        return {name: copied(part) for name, part in value.items()} if isinstance(value, dict) else value

    return cast(AnyModule, copied(model))
