"""Checks of an op's arguments, all with messages of one form."""

import math
from numbers import Real
from typing import Final, TypeGuard

from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

FLOATS: Final = (mx.float32, mx.float16, mx.bfloat16)


def given(**arrays: mx.array | None) -> dict[str, mx.array]:
    """The arguments that are not None, where None is allowed.

    Args:
        **arrays: Arrays by the names of the op's arguments.
    """
    return {name: array for name, array in arrays.items() if array is not None}


def check_arrays(op: str, **arrays: object) -> None:
    """Raise unless each argument is an array of MLX.

    Args:
        op: The op's name, for the message.
        **arrays: What was given, by the names of the op's arguments.

    Raises:
        ValueError: For anything else: a NumPy array, a list, a number, None.
    """
    for name, array in arrays.items():
        if isinstance(array, mx.array):
            continue
        if array is None:
            raise ValueError(f"[{op}] {name} must be an mx.array but got None.")
        kind = type(array)
        full = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        can_convert = isinstance(array, (np.ndarray, np.generic, Real, list, tuple))
        hint = f" Convert it: mx.array({name})." if can_convert else ""
        raise ValueError(f"[{op}] {name} must be an mx.array but got {full}.{hint}")


def check_floating(op: str, **arrays: mx.array) -> None:
    """Raise unless each argument is an array of float32, float16 or bfloat16.

    Args:
        op: The op's name, for the message.
        **arrays: Arrays by the names of the op's arguments; with `given`, those that may be None.

    Raises:
        ValueError: For any other dtype, and for what is no array.
    """
    check_arrays(op, **arrays)
    for name, array in arrays.items():
        if array.dtype not in FLOATS:
            raise ValueError(
                f"[{op}] {name} must be float32, float16 or bfloat16 but got {dtype_name(array.dtype)}. "
                f"Convert it: {name}.astype(...)."
            )


def check_integers(op: str, **arrays: mx.array) -> None:
    """Raise unless each argument is an array of integers.

    Args:
        op: The op's name, for the message.
        **arrays: Arrays by the names of the op's arguments.

    Raises:
        ValueError: For any other dtype, bool among them, and for what is no array.
    """
    check_arrays(op, **arrays)
    for name, array in arrays.items():
        if not mx.issubdtype(array.dtype, mx.integer):
            raise ValueError(f"[{op}] {name} must be integers but got {dtype_name(array.dtype)}.")


def check_axes(op: str, least: int, **arrays: mx.array) -> None:
    """Raise unless each array has at least `least` axes.

    Args:
        op: The op's name, for the message.
        least: Number of axes.
        **arrays: Arrays by the names of the op's arguments.

    Raises:
        ValueError: For an array with fewer, and for what is no array.
    """
    check_arrays(op, **arrays)
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
        ValueError: For any other shape, and for what is no array.
    """
    check_arrays(op, **{name: array})
    if array.shape != shape:
        raise ValueError(f"[{op}] {name} must have the shape {shape}, {why}, but got {array.shape}.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number of Python or of NumPy; truth values are none.

    Args:
        value: Anything.
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def check_eps(op: str, eps: float) -> None:
    """Raise unless eps is a finite number of 0 or more.

    Args:
        op: The op's name, for the message.
        eps: The number.

    Raises:
        ValueError: For a negative or infinite number, for NaN, and for anything that is no Python number.
    """
    check_constant(op, "eps", eps)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"[{op}] eps must be a finite number of 0 or more but got {eps}.")


def check_constant(op: str, name: str, value: float) -> None:
    """Raise unless a value is a number that is known when the op is called.

    An array would have a gradient, and a value of its own in a compiled function: it would be silently constant.

    Args:
        op: The op's name, for the message.
        name: The argument's name.
        value: The number.

    Raises:
        ValueError: For an array, and for anything else that is no number.
    """
    if isinstance(value, mx.array):
        raise ValueError(
            f"[{op}] {name} must be a Python number but got an mx.array: it is a constant without a gradient. "
            f"Convert it: {name}.item()."
        )
    if not is_number(value):
        raise ValueError(f"[{op}] {name} must be a Python number but got {value!r}.")


def check_float32_range(op: str, name: str, value: float) -> None:
    """Raise unless float32 holds a number with all of its digits.

    Args:
        op: The op's name, for the message.
        name: The argument's name.
        value: A finite number.

    Raises:
        ValueError: For one too large for float32, and for one too small that is not 0.
    """
    limits = np.finfo(np.float32)
    if value != 0 and not float(limits.tiny) <= abs(value) <= float(limits.max):
        raise ValueError(
            f"[{op}] {name} must be within float32's range, {limits.tiny:.3g} to {limits.max:.3g}, but got {value}."
        )


def check_scalar(op: str, name: str, value: float | mx.array) -> None:
    """Raise unless a value is one real number, in Python or on the device.

    Args:
        op: The op's name, for the message.
        name: The argument's name.
        value: A number of Python or NumPy, or a 0-d array of one.

    Raises:
        ValueError: For an array with axes or of complex numbers, and for anything that is no real number.
    """
    if isinstance(value, mx.array):
        is_real = mx.issubdtype(value.dtype, mx.number) and not mx.issubdtype(value.dtype, mx.complexfloating)
        if value.ndim == 0 and is_real:
            return
        got = f"{dtype_name(value.dtype)} {value.shape}"
    elif is_number(value):
        return
    else:
        got = repr(value)
    raise ValueError(f"[{op}] {name} must be a real number or a 0-d array of one but got {got}.")
