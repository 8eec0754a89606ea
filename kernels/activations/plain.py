"""The engine "reference": what is fastest in plain MLX operations."""

from collections.abc import Callable
from functools import cache
import math
from typing import Final

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_elements
from forge_mlx.kernels.activations import reference
import mlx.core as mx

# Gate of a function that is x times a gate.
_GATES: Final[dict[reference.Function, Callable[[mx.array], mx.array]]] = {
    "silu": mx.sigmoid,
    "gelu": lambda x: 0.5 * (1 + mx.erf(x * math.sqrt(0.5))),
}
_INVERSE_SQRT_TWO_PI: Final = 1 / math.sqrt(2 * math.pi)


def _keeps_its_exponential(function: reference.Function, dtype: mx.Dtype) -> bool:
    """Whether the gradient is made of the forward's exponential, which on a CPU is most of the work.

    In float16 the cotangent times x overflows, and the tanh form of gelu has a gate whose own derivative overflows:
    there the formulas are taken, in float32 inside.
    """
    return function in _GATES and dtype != mx.float16


def activation(function: reference.Function, x: mx.array, cap: float) -> mx.array:
    """f(x).

    Args:
        function: Its name.
        x: Any shape.
        cap: For softcap alone.
    """
    if _keeps_its_exponential(function, x.dtype):
        return _with_gate(function)(x)[0]
    if function == "sigmoid" and x.dtype != mx.float16:
        return _sigmoid()(x)[0]
    if function == "softcap" and x.dtype == mx.float32:
        return _softcap(cap)(x)[0]
    if function == "relu2":
        return _relu2(x.dtype == mx.float16)(x)[0]
    return _recomputed(function, cap)(x)[0]


def gated(function: reference.Function, gate: mx.array, up: mx.array) -> mx.array:
    """f(gate) up.

    Args:
        function: Its name.
        gate: Any shape.
        up: The same shape and dtype.
    """
    if _keeps_its_exponential(function, gate.dtype):
        return _gated_with_gate(function)(gate, up)[0]
    return _gated_recomputed(function)(gate, up)[0]


def _compiled(function: Function) -> Function:
    """The function as one loop, where nothing differentiates or compiles it with more around it."""
    compiled: Function = mx.compile(function, shapeless=True)
    return compiled


@cache
def _sigmoid() -> Function:
    return _compiled(lambda x: (mx.sigmoid(x),))


@cache
def _softcap(cap: float) -> Function:
    """cap tanh(x / cap) and 1 - (y / cap)^2: MLX's derivative takes a cosh, whose square overflows."""

    def backward(_x: mx.array, y: mx.array, dy: mx.array) -> Arrays:
        return (dy * (1 - mx.square(y / cap)),)

    forward = _compiled(lambda x: (mx.tanh(x / cap) * cap,))
    return differentiable(forward, backward, backward, saved=(0,), vmap=map_elements)


@cache
def _with_gate(function: reference.Function) -> Function:
    """x times its gate.

    MLX's derivative multiplies the cotangent and x, which overflows, and then by the derivative of the gate: infinity
    times 0 is NaN. Here the cotangent comes last. The gate is a constant of the product, so that the exponential is
    taken once; the second derivative makes it from x again.
    """
    gate = _GATES[function]

    def backward(x: mx.array, gate: mx.array, dy: mx.array) -> Arrays:
        return (dy * _slope(function, x, gate),)

    def formula(x: mx.array, _gate: mx.array, dy: mx.array) -> Arrays:
        return (reference.backward(function, x, dy, 1.0),)

    product = differentiable(lambda x, gate: (x * gate,), backward, formula, constants={1}, vmap=map_elements)
    return lambda x: product(x, gate(x))


@cache
def _gated_with_gate(function: reference.Function) -> Function:
    """x times its gate times up, as `_with_gate`."""
    gate = _GATES[function]

    def backward(x: mx.array, gate: mx.array, up: mx.array, dy: mx.array) -> Arrays:
        return dy * (up * _slope(function, x, gate)), dy * (x * gate)

    def formula(x: mx.array, _gate: mx.array, up: mx.array, dy: mx.array) -> Arrays:
        return reference.gated_backward(function, x, up, dy)

    forward = _compiled(lambda x, gate, up: (x * gate * up,))
    product = differentiable(forward, backward, formula, constants={1}, vmap=map_elements)
    return lambda x, up: product(x, gate(x), up)


def _slope(function: reference.Function, x: mx.array, gate: mx.array) -> mx.array:
    """The derivative of x gate, finite wherever x is."""
    if function == "silu":
        return gate + x * (gate * (1 - gate))
    return gate + x * (_INVERSE_SQRT_TWO_PI * mx.exp(-0.5 * (x * x)))


@cache
def _recomputed(function: reference.Function, cap: float) -> Function:
    """f of x by the formulas, which the gradient makes from x again."""
    return _with_gradient(
        lambda x: (reference.forward(function, x, cap),),
        lambda x, dy: (reference.backward(function, _again(x), dy, cap),),
    )


@cache
def _gated_recomputed(function: reference.Function) -> Function:
    """f(gate) up by the formulas, which the gradient makes from both again."""
    return _with_gradient(
        lambda gate, up: (reference.gated_forward(function, gate, up),),
        lambda gate, up, dy: reference.gated_backward(function, _again(gate), _again(up), dy),
    )


def _again(x: mx.array) -> mx.array:
    """The same numbers, and in 16 bits another expression for mx.compile.

    It merges equal expressions of the forward and the backward pass. That saves an exponential, and in float32 costs
    one array; in 16 bits it would keep x and the exponential in float32, four times the bytes of x alone.
    """
    return x if x.dtype == mx.float32 else mx.negative(mx.negative(x))


@cache
def _relu2(is_float16: bool) -> Function:
    """max(x, 0)^2 and 2 max(x, 0), whose own derivative at 0 is the formula's 0, not the 1 of an absolute value.

    Compiled for the CPU, mx.maximum becomes a scalar loop (a branch for NaN) that takes 30 times as long as an
    absolute value, which vectorises; halving is exact, so that both forms round alike. float16 is a scalar loop
    anyway, in which fewer operations are faster, and doubling comes last, as 2 x may overflow.
    """

    def forward(x: mx.array) -> Arrays:
        return (mx.square(mx.maximum(x, 0)) if is_float16 else (0.5 * x) * (x + mx.abs(x)),)

    def backward(x: mx.array, dy: mx.array) -> Arrays:
        return (2 * (dy * mx.maximum(x, 0)) if is_float16 else dy * (x + mx.abs(x)),)

    def formula(x: mx.array, dy: mx.array) -> Arrays:
        return (reference.backward("relu2", x, dy, 1.0),)

    return differentiable(_compiled(forward), backward, formula, vmap=map_elements)


def _with_gradient(forward: Function, backward: Function) -> Function:
    """`forward` of arrays of one shape with a written gradient in plain operations."""
    return differentiable(_compiled(forward), backward, backward, vmap=map_elements)
