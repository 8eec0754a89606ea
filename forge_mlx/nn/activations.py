"""Element-wise functions that MLX lacks, or has in a slower form."""

from collections.abc import Callable
from typing import Final, cast

import mlx.core as mx
import mlx.nn as nn


# `square(maximum(x, 0))` is the obvious form, but compiled for the CPU it becomes a scalar loop (maximum's
# branch for NaN) that takes 30 times as long as this one, whose operations vectorise. Halving and doubling are
# exact, so that both forms round alike.
@mx.custom_function
def _relu2(x: mx.array) -> mx.array:
    return (0.5 * x) * (x + mx.abs(x))


@_relu2.vjp
def _relu2_vjp(x: mx.array, cotangent: mx.array, _output: mx.array) -> mx.array:
    return cotangent * (x + mx.abs(x))


@_relu2.vmap
def _relu2_vmap(x: mx.array, axis: int) -> tuple[mx.array, int]:
    return relu2(x), axis


def relu2(x: mx.array) -> mx.array:
    """max(x, 0)^2, with the gradient 2 max(x, 0).

    Args:
        x: Any shape, floating point. NaN gives NaN, and so does -inf; +inf gives +inf.

    Returns:
        The shape and dtype of x.
    """
    return cast(mx.array, _relu2(x))


def softcap(x: mx.array, cap: float) -> mx.array:
    """cap * tanh(x / cap): close to x for small values, never beyond +-cap.

    Args:
        x: Any shape, floating point.
        cap: The bound, above 0.

    Returns:
        The shape and dtype of x.
    """
    return mx.tanh(x / cap) * cap


ACTIVATIONS: Final[dict[str, Callable[[mx.array], mx.array]]] = {
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_approx,
    "silu": nn.silu,
    "relu2": relu2,
}
"""Activation of a plain MLP by its name in a config. `gelu` is the erf form."""

GATED_ACTIVATIONS: Final[dict[str, Callable[[mx.array], mx.array]]] = {"swiglu": nn.silu, "geglu": nn.gelu}
"""Activation of the gate of a gated MLP by the name of the MLP in a config."""
