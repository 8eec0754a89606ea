"""Functions that raise when they are differentiated: for ops that are no part of a loss."""

from typing import NoReturn, cast

from forge_mlx.kernels._common.differentiable import VmapRule, as_tuple
from forge_mlx.kernels._common.folding import Arrays, Axes, Function
import mlx.core as mx


def without_gradient(function: Function, vmap: VmapRule, message: str) -> Function:
    """A function that raises when it is differentiated.

    Args:
        function: Takes arrays and returns a tuple of arrays.
        vmap: Its vmap rule.
        message: What the ValueError says.
    """

    @mx.custom_function
    def refusing(*inputs: mx.array) -> Arrays:
        return function(*inputs)

    @refusing.vjp
    def vjp(_primals: Arrays, _cotangents: Arrays, _outputs: Arrays) -> NoReturn:
        raise ValueError(message)

    @refusing.jvp
    def jvp(_primals: Arrays, _tangents: Arrays) -> NoReturn:
        raise ValueError(message)

    @refusing.vmap
    def rule(inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        return vmap(call, as_tuple(inputs), as_tuple(axes))

    def call(*inputs: mx.array) -> Arrays:
        return cast(Arrays, refusing(*inputs))

    return call
