"""add, mul, scale, add_bias, accumulate and axpy: every array moved once, sums of gradients in a fixed order."""

from functools import cache

from forge_mlx.kernels._common.checks import check_floating
from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import (
    Arrays,
    Function,
    as_rows,
    map_batches,
    map_elements,
    map_rows_or_batches,
)
from forge_mlx.kernels.elementwise import launch, plain, reference
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def add(x: mx.array, y: mx.array, *, impl: str | None = None) -> mx.array:
    """x + y, computed in float32 and rounded once. Replaces ``x + y``, and broadcasts nothing.

    The gradient of both is the cotangent itself: nothing is launched for it, and nothing saved.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        y: The same shape.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        The shape of both, in the dtype that MLX promotes them to.

    Raises:
        ValueError: Two shapes, another dtype, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_pair("add", x=x, y=y)
    engine = resolve("add", impl)
    if engine.name == "reference":
        return x + y
    return _sum(engine.name, x, y, mx.result_type(x, y))


def mul(x: mx.array, y: mx.array, *, impl: str | None = None) -> mx.array:
    """x y, computed in float32 and rounded once. Replaces ``x * y``, and broadcasts nothing.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        y: The same shape.
        impl: As `add` takes it.

    Returns:
        The shape of both, in the dtype that MLX promotes them to.

    Raises:
        ValueError: As `add`.
        RuntimeError: As `add`.
    """
    reference.check_pair("mul", x=x, y=y)
    engine = resolve("mul", impl)
    if engine.name == "reference":
        return x * y
    if x.size == 0:
        return mx.zeros(x.shape, mx.result_type(x, y))
    return _product_function(engine.name)(x, y)[0]


def scale(x: mx.array, s: float | mx.array, *, impl: str | None = None) -> mx.array:
    """s x in the dtype of x, computed in float32 and rounded once.

    Replaces ``(x * s).astype(x.dtype)``; a number s is not rounded to the dtype first, as MLX does. Differentiable in
    an array s too: ds = sum(x dout) in float32, always in the same order.

    Args:
        x: Any shape, float32, float16 or bfloat16.
        s: A number, or a 0-d array of one of these dtypes: then nothing is compiled again for another value.
        impl: As `add` takes it.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: As `add`, and for an s that is not one number.
        RuntimeError: As `add`.
    """
    check_floating("scale", x=x)
    reference.check_factor("scale", s)
    engine = resolve("scale", impl)
    if x.size == 0:
        return mx.zeros_like(x)
    if engine.name == "reference":
        return plain.scale(x, s)
    function = _scaled_function(engine.name, x.dtype, isinstance(s, mx.array))
    return function(x[None], reference.factor(s))[0][0]


def add_bias(x: mx.array, b: mx.array, *, impl: str | None = None) -> mx.array:
    """x + b for every row of x, computed in float32 and rounded once. Replaces ``x + b``.

    db, the sums of the columns of the cotangent, is added up in float32 and always in the same order.

    Args:
        x: `[..., C]`, float32, float16 or bfloat16.
        b: `[C]`, of any of these dtypes.
        impl: As `add` takes it.

    Returns:
        `[..., C]` in the dtype that MLX promotes x and b to.

    Raises:
        ValueError: x without axes, b of another shape, another dtype, an unknown engine.
        RuntimeError: As `add`.
    """
    reference.check_bias(x, b)
    engine = resolve("add_bias", impl)
    if x.size == 0:
        return mx.zeros(x.shape, mx.result_type(x, b))
    if engine.name == "reference":
        return x + b
    return _bias_function(engine.name)(as_rows(x), b[None])[0].reshape(x.shape)


def accumulate(dst: mx.array, src: mx.array, *, impl: str | None = None) -> mx.array:
    """dst + src in the dtype of dst, computed in float32 and rounded once.

    Replaces ``(dst + src).astype(dst.dtype)``: a sum of gradients, say, that must keep its dtype whatever comes.

    Args:
        dst: Any shape, float32, float16 or bfloat16. It is not changed.
        src: The same shape, of any of these dtypes.
        impl: As `add` takes it.

    Returns:
        The shape and dtype of dst.

    Raises:
        ValueError: As `add`.
        RuntimeError: As `add`.
    """
    reference.check_pair("accumulate", dst=dst, src=src)
    engine = resolve("accumulate", impl)
    if engine.name == "reference":
        return (dst + src).astype(dst.dtype)
    return _sum(engine.name, dst, src, dst.dtype)


def axpy(dst: mx.array, src: mx.array, s: float | mx.array, *, impl: str | None = None) -> mx.array:
    """dst + s src in the dtype of dst, computed in float32 and rounded once.

    Replaces ``(dst + s * src).astype(dst.dtype)``. Differentiable in an array s too, as `scale` is.

    Args:
        dst: Any shape, float32, float16 or bfloat16. It is not changed.
        src: The same shape, of any of these dtypes.
        s: A number, or a 0-d array of one of these dtypes.
        impl: As `add` takes it.

    Returns:
        The shape and dtype of dst.

    Raises:
        ValueError: As `add`, and for an s that is not one number.
        RuntimeError: As `add`.
    """
    reference.check_pair("axpy", dst=dst, src=src)
    reference.check_factor("axpy", s)
    engine = resolve("axpy", impl)
    if dst.size == 0:
        return mx.zeros_like(dst)
    if engine.name == "reference":
        return plain.axpy(dst, src, s)
    function = _added_function(engine.name, isinstance(s, mx.array))
    return function(dst[None], src[None], reference.factor(s))[0][0]


def _sum(engine: EngineName, x: mx.array, y: mx.array, dtype: mx.Dtype) -> mx.array:
    return _sum_function(engine, dtype)(x, y)[0] if x.size else mx.zeros(x.shape, dtype)


# Gradients are plain operations, so that they hold no array that they do not read. What they launch is a differentiable
# function of its own.


@cache
def _sum_function(engine: EngineName, dtype: mx.Dtype) -> Function:
    """The differentiable function of two arrays of one shape -> their sum in a dtype."""

    def forward(x: mx.array, y: mx.array) -> Arrays:
        return (launch.elementwise(engine, x, y, dtype, product=False),)

    return differentiable(forward, reference.add_backward, reference.add_backward, vmap=map_elements)


@cache
def _product_function(engine: EngineName) -> Function:
    """The differentiable function of two arrays of one shape -> their product."""

    def forward(x: mx.array, y: mx.array) -> Arrays:
        return (launch.elementwise(engine, x, y, mx.result_type(x, y), product=True),)

    def backward(x: mx.array, y: mx.array, dout: mx.array) -> Arrays:
        return launch.mul_backward(engine, x, y, dout)

    return differentiable(forward, backward, reference.mul_backward, vmap=map_elements)


@cache
def _scaled_function(engine: EngineName, dtype: mx.Dtype, is_variable: bool) -> Function:
    """The differentiable function x `[B, ...]`, s `[B]` -> s x in a dtype; s has a gradient if it is variable."""

    def forward(x: mx.array, s: mx.array) -> Arrays:
        return (launch.scaled(engine, None, x, s, dtype),)

    def backward(x: mx.array, s: mx.array, dout: mx.array) -> Arrays:
        return _factor_gradients(engine, x, s, dout, is_variable)

    return differentiable(forward, backward, backward, constants=() if is_variable else (1,), vmap=map_batches)


@cache
def _added_function(engine: EngineName, is_variable: bool) -> Function:
    """The differentiable function dst, src `[B, ...]`, s `[B]` -> dst + s src; s has a gradient if it is variable."""

    def forward(dst: mx.array, src: mx.array, s: mx.array) -> Arrays:
        return (launch.scaled(engine, dst, src, s, dst.dtype),)

    def backward(_dst: mx.array, src: mx.array, s: mx.array, dout: mx.array) -> Arrays:
        return dout, *_factor_gradients(engine, src, s, dout, is_variable)

    return differentiable(forward, backward, backward, constants=() if is_variable else (2,), vmap=map_batches)


def _factor_gradients(engine: EngineName, x: mx.array, s: mx.array, dout: mx.array, is_variable: bool) -> Arrays:
    """Of s x by x, and by s if it is variable."""
    if is_variable:
        return _factor_gradient_function(engine)(x, s, dout)
    return _scaled_function(engine, x.dtype, False)(dout, s)


@cache
def _factor_gradient_function(engine: EngineName) -> Function:
    """The differentiable function x `[B, ...]`, s `[B]`, dout `[B, ...]` -> s dout, sum(x dout)."""

    def forward(x: mx.array, s: mx.array, dout: mx.array) -> Arrays:
        return launch.scaled_backward(engine, x, s, dout)

    def backward(x: mx.array, s: mx.array, dout: mx.array, *cotangents: mx.array) -> Arrays:
        return tuple(mx.vjp(reference.scaled_backward, [x, s, dout], list(cotangents))[1])

    return differentiable(forward, backward, backward, vmap=map_batches)


@cache
def _bias_function(engine: EngineName) -> Function:
    """The differentiable function x `[B, M, C]`, b `[B, C]` -> x + b."""

    def forward(x: mx.array, b: mx.array) -> Arrays:
        return (launch.add_bias(engine, x, b, mx.result_type(x, b)),)

    def backward(x: mx.array, b: mx.array, dout: mx.array) -> Arrays:
        return dout.astype(x.dtype), *_column_sums_function(engine, b.dtype)(dout)

    return differentiable(forward, backward, backward, vmap=map_rows_or_batches)


@cache
def _column_sums_function(engine: EngineName, dtype: mx.Dtype) -> Function:
    """The differentiable function x `[B, M, C]` -> the sums of its columns `[B, C]` in a dtype."""

    def forward(x: mx.array) -> Arrays:
        return (launch.column_sums(engine, x, dtype),)

    def backward(x: mx.array, dsums: mx.array) -> Arrays:
        return (mx.broadcast_to(dsums.astype(x.dtype)[:, None], x.shape),)

    return differentiable(forward, backward, backward, vmap=map_batches)
