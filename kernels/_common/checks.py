"""Checks of an op's arguments, all with messages of one form."""

import math
from typing import Final

from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx

FLOATS: Final = (mx.float32, mx.float16, mx.bfloat16)


def check_floating(op: str, **arrays: mx.array | None) -> None:
    """Raise unless each array is float32, float16 or bfloat16.

    Args:
        op: The op's name, for the message.
        **arrays: Arrays by the names of the op's arguments; None passes.

    Raises:
        ValueError: For any other dtype.
    """
    for name, array in arrays.items():
        if array is not None and array.dtype not in FLOATS:
            raise ValueError(
                f"[{op}] {name} must be float32, float16 or bfloat16 but got {dtype_name(array.dtype)}. "
                f"Convert it: {name}.astype(...)."
            )


def check_axes(op: str, least: int, **arrays: mx.array) -> None:
    """Raise unless each array has at least `least` axes.

    Args:
        op: The op's name, for the message.
        least: Number of axes.
        **arrays: Arrays by the names of the op's arguments.

    Raises:
        ValueError: For an array with fewer.
    """
    for name, array in arrays.items():
        if array.ndim < least:
            raise ValueError(f"[{op}] {name} must have {least} or more axes but got the shape {array.shape}.")


def check_shape(op: str, name: str, array: mx.array, shape: tuple[int, ...], why: str) -> None:
    """Raise unless an array has one certain shape.

    Args:
        op: The op's name, for the message.
        name: The argument's name.
        array: The array.
        shape: The shape that it must have.
        why: Where that shape comes from, for example "the last axis of x".

    Raises:
        ValueError: For any other shape.
    """
    if array.shape != shape:
        raise ValueError(f"[{op}] {name} must have the shape {shape}, {why}, but got {array.shape}.")


def check_eps(op: str, eps: float) -> None:
    """Raise unless eps is a finite number of 0 or more.

    Args:
        op: The op's name, for the message.
        eps: The number.

    Raises:
        ValueError: For a negative or infinite number, and for NaN.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"[{op}] eps must be a finite number of 0 or more but got {eps}.")
