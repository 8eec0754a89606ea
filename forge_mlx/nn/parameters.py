"""Questions about a tree of parameters: names, which are matrices, how many elements there are; which stay frozen."""

from collections.abc import Iterable
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

MAGNITUDE: Final = "m"
"""What DoRA calls the magnitudes of a weight's rows."""


def is_matrix(parameter: mx.array) -> bool:
    """Whether a parameter gets weight decay: it has two axes or more.

    Projections, embedding tables and the output head do; norm scales and biases, which have one axis, do not.

    Args:
        parameter: A parameter of any shape.
    """
    return parameter.ndim >= 2


def named_arrays(tree: Any) -> list[tuple[str, mx.array]]:
    """The arrays of a tree with their dotted names, in the tree's order.

    Args:
        tree: Nested dicts and lists of arrays, as `Module.parameters()` returns.
    """
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def cast_floats(tree: Any, dtype: mx.Dtype) -> Any:
    """The tree with its floating arrays in another dtype, but for DoRA's magnitudes, which its layers read in float32.

    Args:
        tree: Nested dicts and lists of arrays, as `Module.trainable_parameters()` returns.
        dtype: Of the forward pass.
    """

    def cast_one(name: str, array: mx.array) -> mx.array:
        stays = name.rpartition(".")[2] == MAGNITUDE or not mx.issubdtype(array.dtype, mx.floating)
        return array if stays else array.astype(dtype)

    return tree_map_with_path(cast_one, tree)


def count_elements(tree: Any) -> int:
    """Number of elements of all arrays of a tree.

    Args:
        tree: Nested dicts and lists of arrays, as `Module.parameters()` returns.
    """
    return sum(array.size for _, array in named_arrays(tree))


def named_leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The innermost modules of a model with their dotted names, in the order of its layers.

    Args:
        model: Any module.
    """
    return cast(list[tuple[str, nn.Module]], tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module))


class StaysFrozen(set[str]):
    """Names of frozen parameters, of which some stay frozen whatever `unfreeze` takes out; for a module's `_no_grad`.

    `mlx.nn.Module.unfreeze` of a model changes this set of each module inside and calls no method of theirs.

    Args:
        names: Those that stay.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._staying = frozenset(self)

    def clear(self) -> None:
        """Take all names out but those that stay."""
        self.intersection_update(self._staying)

    def difference_update(self, *others: Iterable[object]) -> None:
        """Take names out, but none that stays."""
        super().difference_update(set[object]().union(*others) - self._staying)
