"""Questions about a tree of parameters: names, which are matrices, how many elements there are."""

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten


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


def count_elements(tree: Any) -> int:
    """Number of elements of all arrays of a tree.

    Args:
        tree: Nested dicts and lists of arrays, as `Module.parameters()` returns.
    """
    return sum(array.size for _, array in named_arrays(tree))
