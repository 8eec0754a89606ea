"""The activations, their derivatives and the gated forms in plain MLX operations, all in float32 and rounded once."""

import math
from typing import Final, Literal

from forge_mlx.kernels._common.checks import check_constant, check_float32_range, check_floating
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx

Function = Literal["sigmoid", "silu", "gelu", "gelu_tanh", "relu2", "softcap"]

_SQRT_HALF: Final = math.sqrt(0.5)
_INVERSE_SQRT_TWO_PI: Final = 1 / math.sqrt(2 * math.pi)
# The tanh form of gelu is x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
_LINEAR: Final = 2 * math.sqrt(2 / math.pi)
_CUBIC: Final = 0.044715 * _LINEAR
# From here on a factor beside x is 0 in float32; without a bound infinity times 0 would be NaN.
_SILU_END: Final = 128.0
_GELU_END: Final = 16.0


def value(function: Function, x: mx.array, cap: float) -> mx.array:
    """The function of each element.

    Args:
        function: Its name; "gelu" is the erf form.
        x: Any shape, float32.
        cap: For softcap alone.
    """
    if function == "sigmoid":
        return mx.sigmoid(x)
    if function == "silu":
        return mx.maximum(x, -_SILU_END) * mx.sigmoid(x)
    if function == "gelu":
        return mx.maximum(x, -_GELU_END) * _normal_below(x)
    if function == "gelu_tanh":
        return mx.maximum(x, -_GELU_END) * _gelu_gate(x)
    if function == "relu2":
        return mx.square(mx.maximum(x, 0))
    return cap * mx.tanh(x / cap)


def slope(function: Function, x: mx.array, cap: float) -> mx.array:
    """The function's derivative at each element.

    Args:
        function: Its name.
        x: Any shape, float32.
        cap: For softcap alone.
    """
    if function == "sigmoid":
        s = mx.sigmoid(x)
        return s * (1 - s)
    if function == "silu":
        s = mx.sigmoid(x)
        return s * (1 + mx.clip(x, -_SILU_END, _SILU_END) * (1 - s))
    if function == "gelu":
        at = mx.clip(x, -_GELU_END, _GELU_END)
        return _normal_below(at) + at * (_INVERSE_SQRT_TWO_PI * mx.exp(-0.5 * (at * at)))
    if function == "gelu_tanh":
        at, s = mx.clip(x, -_GELU_END, _GELU_END), _gelu_gate(x)
        return s * (1 + at * (_LINEAR + (3 * _CUBIC * at) * at) * (1 - s))
    if function == "relu2":
        return 2 * mx.maximum(x, 0)
    return 1 - mx.square(mx.tanh(x / cap))


def _normal_below(x: mx.array) -> mx.array:
    return 0.5 * (1 + mx.erf(x * _SQRT_HALF))


def _gelu_gate(x: mx.array) -> mx.array:
    return mx.sigmoid(x * (_LINEAR + _CUBIC * mx.square(x)))


def forward(function: Function, x: mx.array, cap: float) -> mx.array:
    """f(x).

    Args:
        function: Its name.
        x: Any shape.
        cap: For softcap alone.

    Returns:
        The shape and dtype of x.
    """
    return value(function, x.astype(mx.float32), cap).astype(x.dtype)


def backward(function: Function, x: mx.array, dy: mx.array, cap: float) -> mx.array:
    """dx = dy f'(x).

    Args:
        function: Its name.
        x: Any shape.
        dy: Cotangent of f(x).
        cap: For softcap alone.

    Returns:
        The shape and dtype of x.
    """
    return (dy.astype(mx.float32) * slope(function, x.astype(mx.float32), cap)).astype(x.dtype)


def gated_forward(function: Function, gate: mx.array, up: mx.array) -> mx.array:
    """f(gate) up.

    Args:
        function: Its name.
        gate: Any shape.
        up: The same shape and dtype.
    """
    return (value(function, gate.astype(mx.float32), 1.0) * up.astype(mx.float32)).astype(gate.dtype)


def gated_backward(function: Function, gate: mx.array, up: mx.array, dy: mx.array) -> tuple[mx.array, mx.array]:
    """dgate = dy up f'(gate) and dup = dy f(gate).

    Args:
        function: Its name.
        gate: Any shape.
        up: The same shape and dtype.
        dy: Cotangent of f(gate) up.
    """
    values, dy = gate.astype(mx.float32), dy.astype(mx.float32)
    dgate = dy * (up.astype(mx.float32) * slope(function, values, 1.0))
    return dgate.astype(gate.dtype), (dy * value(function, values, 1.0)).astype(up.dtype)


def check_cap(cap: float) -> None:
    """Raise unless cap is a Python or NumPy number above 0 that float32 holds in full.

    Args:
        cap: The number.

    Raises:
        ValueError: For any other, and for an array, which would get no gradient.
    """
    check_constant("softcap", "cap", cap)
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"[softcap] cap must be a finite number above 0 but got {cap}.")
    check_float32_range("softcap", "cap", cap)


def gelu_function(op: str, approximate: str) -> Function:
    """The form of gelu that `approximate` names.

    Args:
        op: The op's name, for the message.
        approximate: "none" for the erf form, "tanh".

    Raises:
        ValueError: For anything else.
    """
    if not isinstance(approximate, str):
        raise ValueError(f"[{op}] approximate must be the string 'none' or 'tanh' but got {approximate!r}.")
    if approximate == "none":
        return "gelu"
    if approximate == "tanh":
        return "gelu_tanh"
    raise ValueError(f"[{op}] approximate must be 'none' or 'tanh' but got {approximate!r}.")


def check_gated(op: str, gate: mx.array, up: mx.array) -> None:
    """Raise unless gate and up can be multiplied element by element.

    Args:
        op: The op's name, for the message.
        gate: Any shape.
        up: The same shape and dtype.

    Raises:
        ValueError: Another dtype than the three, two dtypes, two shapes.
    """
    check_floating(op, gate=gate, up=up)
    if gate.dtype != up.dtype:
        raise ValueError(
            f"[{op}] gate and up must have one dtype but got {dtype_name(gate.dtype)} and {dtype_name(up.dtype)}. "
            "Convert one of them."
        )
    if gate.shape != up.shape:
        raise ValueError(f"[{op}] gate and up must have one shape but got {gate.shape} and {up.shape}.")


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + exp(-x)), as `forge_mlx.kernels.sigmoid` but for `impl`.

    Args:
        x: Any shape.
    """
    check_floating("sigmoid", x=x)
    return forward("sigmoid", x, 1.0)


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x), as `forge_mlx.kernels.silu` but for `impl`.

    Args:
        x: Any shape.
    """
    check_floating("silu", x=x)
    return forward("silu", x, 1.0)


def gelu(x: mx.array, approximate: str = "none") -> mx.array:
    """x Phi(x), as `forge_mlx.kernels.gelu` but for `impl`.

    Args:
        x: Any shape.
        approximate: "none" or "tanh".
    """
    check_floating("gelu", x=x)
    return forward(gelu_function("gelu", approximate), x, 1.0)


def relu2(x: mx.array) -> mx.array:
    """max(x, 0)^2, as `forge_mlx.kernels.relu2` but for `impl`.

    Args:
        x: Any shape.
    """
    check_floating("relu2", x=x)
    return forward("relu2", x, 1.0)


def softcap(x: mx.array, cap: float) -> mx.array:
    """cap tanh(x / cap), as `forge_mlx.kernels.softcap` but for `impl`.

    Args:
        x: Any shape.
        cap: The bound.
    """
    check_floating("softcap", x=x)
    check_cap(cap)
    return forward("softcap", x, float(cap))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up, as `forge_mlx.kernels.swiglu` but for `impl`.

    Args:
        gate: Any shape.
        up: The same shape and dtype.
    """
    check_gated("swiglu", gate, up)
    return gated_forward("silu", gate, up)


def geglu(gate: mx.array, up: mx.array, approximate: str = "none") -> mx.array:
    """gelu(gate) up, as `forge_mlx.kernels.geglu` but for `impl`.

    Args:
        gate: Any shape.
        up: The same shape and dtype.
        approximate: "none" or "tanh".
    """
    check_gated("geglu", gate, up)
    return gated_forward(gelu_function("geglu", approximate), gate, up)
