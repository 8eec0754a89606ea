"""The parameters of a module as arguments of a function, so that what runs it later or again has gradients for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten


def trained(module: nn.Module) -> list[tuple[str, mx.array]]:
    """The parameters of a module that are trained, by name.

    Args:
        module: The module.
    """
    return cast(list[tuple[str, mx.array]], tree_flatten(module.trainable_parameters()))


@contextmanager
def given_parameters(module: nn.Module, names: list[str], values: tuple[mx.array, ...]) -> Iterator[None]:
    """A module with other values for some of its parameters, and in the end its own again.

    Args:
        module: The module.
        names: Of the parameters, as from `trained`.
        values: One for each name.
    """
    if not names:
        yield
        return
    own = trained(module)
    module.update(tree_unflatten(list(zip(names, values, strict=True))))
    try:
        yield
    finally:
        module.update(tree_unflatten(own))


def without_keeping(module: nn.Module, between: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """module(between(*arrays)), the value between computed again in the backward pass and not kept for it.

    Nothing else is computed again: the module's product is not needed there. Kept after all where nothing is trained
    and where the module drops elements out, which would be others the second time.

    Args:
        module: What maps the value between to the result.
        between: An elementwise function.
        *arrays: Its arguments.
    """
    drops = any(isinstance(each, nn.Dropout) and each._p_1 < 1 for each in module.modules())
    if drops or not module.training:
        return cast(mx.array, module(between(*arrays)))
    parameters = trained(module)
    names = [name for name, _ in parameters]

    def function(*inputs: mx.array) -> mx.array:
        with given_parameters(module, names, inputs[len(arrays) :]):
            return cast(mx.array, module(between(*inputs[: len(arrays)])))

    return mx.checkpoint(function)(*arrays, *(value for _, value in parameters))
