"""swiglu and geglu: an activation of one array times another, in one pass each way, nothing saved but both."""

from functools import cache

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_elements
from forge_mlx.kernels.activations import plain, reference
from forge_mlx.kernels.activations.launch import launch
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def swiglu(gate: mx.array, up: mx.array, *, impl: str | None = None) -> mx.array:
    """silu(gate) up, computed in float32 and rounded once.

    Replaces `mlx.nn.silu(gate) * up`. Differentiable in both; the gradient reads gate, up and the output's gradient
    once. Second derivatives are those of the gradient's formula in plain MLX operations. Infinities as `silu` has
    them.

    Args:
        gate: Any shape, float32, float16 or bfloat16.
        up: The same shape and dtype.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        The shape and dtype of both.

    Raises:
        ValueError: Another dtype, two dtypes or two shapes, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    return _gated("swiglu", "silu", gate, up, impl)


def geglu(gate: mx.array, up: mx.array, approximate: str = "none", *, impl: str | None = None) -> mx.array:
    """gelu(gate) up, computed in float32 and rounded once.

    Replaces `mlx.nn.gelu(gate) * up`, and with "tanh" `mlx.nn.gelu_approx(gate) * up`; otherwise as `swiglu`.

    Args:
        gate: Any shape, float32, float16 or bfloat16.
        up: The same shape and dtype.
        approximate: "none" for the erf form of gelu, or "tanh".
        impl: As `swiglu` takes it.

    Returns:
        The shape and dtype of both.

    Raises:
        ValueError: As `swiglu`, and for another `approximate`.
        RuntimeError: As `swiglu`.
    """
    return _gated("geglu", reference.gelu_function("geglu", approximate), gate, up, impl)


def _gated(op: str, function: reference.Function, gate: mx.array, up: mx.array, impl: str | None) -> mx.array:
    reference.check_gated(op, gate, up)
    engine = resolve(op, impl)
    if engine.name == "reference":
        return plain.gated(function, gate, up)
    if gate.size == 0:
        return mx.zeros_like(gate)
    return _function(engine.name, function)(gate, up)[0]


@cache
def _function(engine: EngineName, function: reference.Function) -> Function:
    """The differentiable function gate, up -> y of arrays of one shape, whatever it is."""

    def forward(gate: mx.array, up: mx.array) -> Arrays:
        return _forward(engine, function, gate, up)

    def backward(gate: mx.array, up: mx.array, dy: mx.array) -> Arrays:
        return _backward(engine, function, gate, up, dy)

    def formula(gate: mx.array, up: mx.array, dy: mx.array) -> Arrays:
        return reference.gated_backward(function, gate, up, dy)

    return differentiable(forward, backward, formula, vmap=map_elements)


def _forward(engine: EngineName, function: reference.Function, gate: mx.array, up: mx.array) -> Arrays:
    return launch("gated_forward", engine, function, {"gate": gate, "up": up}, {}, 1)


def _backward(engine: EngineName, function: reference.Function, gate: mx.array, up: mx.array, dy: mx.array) -> Arrays:
    return launch("gated_backward", engine, function, {"gate": gate, "up": up, "dy": dy}, {}, 2)
