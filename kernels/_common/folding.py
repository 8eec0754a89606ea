"""Kernels see `[B, M, ...]`: B batches of M rows, each batch with weights of its own. `mx.vmap` adds to B or to M."""

from collections.abc import Callable, Collection
import math

import mlx.core as mx

Arrays = tuple[mx.array, ...]
Axes = tuple[int | None, ...]
Function = Callable[..., Arrays]


def as_rows(x: mx.array) -> mx.array:
    """`[..., C]` as one batch `[1, M, C]`."""
    return x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])


def map_rows(function: Function, inputs: Arrays, axes: Axes, shared: Collection[int]) -> tuple[Arrays, Axes]:
    """The vmap rule of a function of rows, for an axis that its weights do not have: it becomes more rows.

    Args:
        function: Takes and returns arrays `[B, M, ...]`, and takes weights `[B, ...]`.
        inputs: Its arguments, with or without the mapped axis.
        axes: Where that axis is in each of them; None: nowhere.
        shared: Indices of the weights.

    Returns:
        The results with their mapped axes.
    """
    size = _mapped_size(inputs, axes)
    folded = [
        array if index in shared else _join(_with_axis(array, axis, 1, size), 1)
        for index, (array, axis) in enumerate(zip(inputs, axes, strict=True))
    ]
    outputs = tuple(
        each.reshape(each.shape[0], size, each.shape[1] // size, *each.shape[2:]) for each in function(*folded)
    )
    return outputs, (1,) * len(outputs)


def map_batches(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of a function of batches: the mapped axis becomes more batches.

    Args:
        function: Takes and returns arrays `[B, ...]`, whose batches do not know of each other.
        inputs: Its arguments, with or without the mapped axis; those without are repeated.
        axes: Where that axis is in each of them; None: nowhere.

    Returns:
        The results with their mapped axes.
    """
    size = _mapped_size(inputs, axes)
    folded = [_join(_with_axis(array, axis, 0, size), 0) for array, axis in zip(inputs, axes, strict=True)]
    outputs = tuple(each.reshape(size, each.shape[0] // size, *each.shape[1:]) for each in function(*folded))
    return outputs, (0,) * len(outputs)


def map_rows_or_batches(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of a function of rows (its first argument) and weights (the others).

    More rows where no weights have the mapped axis, else more batches.

    Args:
        function: Takes `[B, M, ...]`, then weights `[B, ...]`, and returns arrays `[B, M, ...]`.
        inputs: Its arguments, with or without the mapped axis.
        axes: Where that axis is in each of them; None: nowhere.

    Returns:
        The results with their mapped axes.
    """
    if all(axis is None for axis in axes[1:]):
        return map_rows(function, inputs, axes, shared=range(1, len(inputs)))
    return map_batches(function, inputs, axes)


def map_elements(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of a function of single elements: the mapped axis is one more axis, at the front.

    Args:
        function: Takes and returns arrays of one shape, whatever it is.
        inputs: Its arguments, with or without the mapped axis; those without are repeated.
        axes: Where that axis is in each of them; None: nowhere.

    Returns:
        The results with their mapped axes.
    """
    size = _mapped_size(inputs, axes)
    outputs = function(*(_with_axis(array, axis, 0, size) for array, axis in zip(inputs, axes, strict=True)))
    return outputs, (0,) * len(outputs)


def _mapped_size(arrays: Arrays, axes: Axes) -> int:
    return next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)


def _with_axis(array: mx.array, axis: int | None, target: int, size: int) -> mx.array:
    """The mapped axis moved to `target`, or made there."""
    if axis is not None:
        return mx.moveaxis(array, axis, target)
    return mx.broadcast_to(mx.expand_dims(array, target), (*array.shape[:target], size, *array.shape[target:]))


def _join(array: mx.array, axis: int) -> mx.array:
    """An axis and the next one as one."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
