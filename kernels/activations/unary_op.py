"""sigmoid, silu, gelu, relu2 and softcap: one pass forward, one backward, nothing saved but the input."""

from functools import cache

from forge_mlx.kernels._common.checks import check_floating
from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_elements
from forge_mlx.kernels.activations import plain, reference
from forge_mlx.kernels.activations.launch import launch
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def sigmoid(x: mx.array, *, impl: str | None = None) -> mx.array:
    """1 / (1 + exp(-x)), computed in float32 and rounded once.

    Replaces `mx.sigmoid`. The kernels make the gradient from x and not from the rounded result, so that it keeps its
    digits where it is small; the engine "reference" calls `mx.sigmoid` in float32 and bfloat16, and so rounds each
    step of a bfloat16 result and of its gradient. Second derivatives are those of the gradient's formula in plain MLX
    operations.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: x of another dtype, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    return _activation("sigmoid", "sigmoid", x, 1.0, impl)


def silu(x: mx.array, *, impl: str | None = None) -> mx.array:
    """x sigmoid(x), computed in float32 and rounded once.

    Replaces `mlx.nn.silu`, which the engine "reference" equals in float32 and bfloat16: there -inf gives NaN, and
    bfloat16 is rounded after each step. Elsewhere -inf gives -0 with a gradient of 0.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        impl: As `sigmoid` takes it.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: As `sigmoid`.
        RuntimeError: As `sigmoid`.
    """
    return _activation("silu", "silu", x, 1.0, impl)


def gelu(x: mx.array, approximate: str = "none", *, impl: str | None = None) -> mx.array:
    """x Phi(x), Phi the share of a normal distribution below x; "tanh": x (1 + tanh(u)) / 2, u = sqrt(2/pi) (x +
    0.044715 x^3). Computed in float32 and rounded once.

    Replaces `mlx.nn.gelu` and `mlx.nn.gelu_approx`, whose results differ by up to 5e-4. Far below 0, where 1 + erf
    cancels, the kernels keep all digits. -inf gives -0 with a gradient of 0, except for the erf form on the engine
    "reference" in float32 and bfloat16, which is as `mlx.nn.gelu`: NaN, and bfloat16 rounded after each step.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        approximate: "none" for the erf form, or "tanh".
        impl: As `sigmoid` takes it.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: As `sigmoid`, and for another `approximate`.
        RuntimeError: As `sigmoid`.
    """
    return _activation("gelu", reference.gelu_function("gelu", approximate), x, 1.0, impl)


def relu2(x: mx.array, *, impl: str | None = None) -> mx.array:
    """max(x, 0)^2, with the gradient 2 max(x, 0).

    Computed in float32 and rounded once, on every engine. NaN gives NaN; -inf gives 0, except on the engine
    "reference", where it gives NaN.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        impl: As `sigmoid` takes it.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: As `sigmoid`.
        RuntimeError: As `sigmoid`.
    """
    return _activation("relu2", "relu2", x, 1.0, impl)


def softcap(x: mx.array, cap: float, *, impl: str | None = None) -> mx.array:
    """cap tanh(x / cap): close to x for small values, never beyond +-cap. Computed in float32 and rounded once.

    The gradient is 1 - tanh(x / cap)^2, with tanh made from x again: from a result in bfloat16 one derivative in five
    would be off by over 10 %.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        cap: The bound, a Python number above 0 within float32's range.
        impl: As `sigmoid` takes it.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: As `sigmoid`, and for another cap, an array among them.
        RuntimeError: As `sigmoid`.
    """
    reference.check_cap(cap)
    return _activation("softcap", "softcap", x, float(cap), impl)


def _activation(op: str, function: reference.Function, x: mx.array, cap: float, impl: str | None) -> mx.array:
    check_floating(op, x=x)
    engine = resolve(op, impl)
    if engine.name == "reference":
        return plain.activation(function, x, cap)
    if x.size == 0:
        return mx.zeros_like(x)
    return _function(engine.name, function, cap)(x)[0]


@cache
def _function(engine: EngineName, function: reference.Function, cap: float) -> Function:
    """The differentiable function x -> y of arrays of any shape."""

    def forward(x: mx.array) -> Arrays:
        return _forward(engine, function, cap, x)

    def backward(x: mx.array, dy: mx.array) -> Arrays:
        return _backward(engine, function, cap, x, dy)

    def formula(x: mx.array, dy: mx.array) -> Arrays:
        return (reference.backward(function, x, dy, cap),)

    return differentiable(forward, backward, formula, vmap=map_elements)


def _forward(engine: EngineName, function: reference.Function, cap: float, x: mx.array) -> Arrays:
    return launch("activation_forward", engine, function, {"x": x}, {"cap": cap}, 1)


def _backward(engine: EngineName, function: reference.Function, cap: float, x: mx.array, dy: mx.array) -> Arrays:
    return launch("activation_backward", engine, function, {"x": x, "dy": dy}, {"cap": cap}, 1)
