"""row_scale and row_scale_accumulate: rows times a column of gates."""

from functools import cache
import math

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_batches
from forge_mlx.kernels.dispatch import launch, reference
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def row_scale(x: mx.array, gates: mx.array, e: int, *, impl: str | None = None) -> mx.array:
    """x gates[..., e], each row times its gate for expert e, computed in float32 and rounded once.

    Replaces ``(x * gates[..., e, None]).astype(x.dtype)``. Gradients::

        dx = dout * gates[..., e, None]
        dgates[..., e] = (dout * x).sum(axis=-1), 0 in the other columns

    The sum is in float32 and always in the same order. Second derivatives are those of the gradient's formula in plain
    MLX operations.

    Args:
        x: `[..., C]`, float32, float16 or bfloat16.
        gates: `[..., E]`, the leading axes of x, of any of these dtypes: float32 gates of 16-bit rows, say.
        e: A column of gates, from 0 to E - 1. It is a constant: a compiled function is compiled again for another.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        `[..., C]` in the dtype of x.

    Raises:
        ValueError: Arrays without axes, of another dtype or with other leading axes, an e that is no integer or no
            column of gates, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_row_scale("row_scale", x, gates, e)
    engine = resolve("row_scale", impl)
    if x.size == 0:
        return mx.zeros(x.shape, x.dtype)
    return _scale(engine.name, int(e))(_rows(x), _rows(gates))[0].reshape(x.shape)


def row_scale_accumulate(dst: mx.array, x: mx.array, gates: mx.array, e: int, *, impl: str | None = None) -> mx.array:
    """dst + x gates[..., e] in the dtype of dst, computed in float32 and rounded once.

    Replaces ``(dst + x * gates[..., e, None]).astype(dst.dtype)``: one expert after the other adds to the result of a
    layer. Gradients as those of `row_scale`, and ddst = dout, for which nothing is launched.

    Args:
        dst: `[..., C]`, the shape of x, float32, float16 or bfloat16. It is not changed.
        x: `[..., C]`, of any of these dtypes.
        gates: `[..., E]`, as `row_scale` takes it.
        e: A column of gates, as `row_scale` takes it.
        impl: As `row_scale` takes it.

    Returns:
        `[..., C]` in the dtype of dst.

    Raises:
        ValueError: As `row_scale`, and for a dst of another shape than x.
        RuntimeError: As `row_scale`.
    """
    reference.check_accumulate(dst, x, gates, e)
    engine = resolve("row_scale_accumulate", impl)
    if x.size == 0:
        return mx.zeros(dst.shape, dst.dtype)
    return _accumulate(engine.name, int(e))(_rows(dst), _rows(x), _rows(gates))[0].reshape(x.shape)


def _rows(x: mx.array) -> mx.array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# Gradients of these two are plain operations, so that dst is not held for one that does not read it. What they launch
# is a differentiable function of its own.


@cache
def _scale(engine: EngineName, e: int) -> Function:
    """The differentiable function x `[N, C]`, gates `[N, E]` -> x gates[:, e]."""

    def forward(x: mx.array, gates: mx.array) -> Arrays:
        if engine == "reference":
            return (reference.scale_forward(x, gates, e),)
        return (launch.row_scale(engine, None, x, gates, e),)

    def backward(x: mx.array, gates: mx.array, dout: mx.array) -> Arrays:
        return _gradients(engine, e)(x, gates, dout)

    return differentiable(forward, backward, backward, vmap=map_batches)


@cache
def _accumulate(engine: EngineName, e: int) -> Function:
    """The differentiable function dst, x `[N, C]`, gates `[N, E]` -> dst + x gates[:, e]."""

    def forward(dst: mx.array, x: mx.array, gates: mx.array) -> Arrays:
        if engine == "reference":
            return (reference.accumulate_forward(dst, x, gates, e),)
        return (launch.row_scale(engine, dst, x, gates, e),)

    def backward(_dst: mx.array, x: mx.array, gates: mx.array, dout: mx.array) -> Arrays:
        return dout, *_gradients(engine, e)(x, gates, dout)

    return differentiable(forward, backward, backward, vmap=map_batches)


@cache
def _gradients(engine: EngineName, e: int) -> Function:
    """The differentiable function x `[N, C]`, gates `[N, E]`, dout `[N, C]` -> dx, dgates."""

    def formula(x: mx.array, gates: mx.array, dout: mx.array) -> Arrays:
        return reference.scale_backward(x, gates, e, dout)

    if engine == "reference":
        return formula

    def forward(x: mx.array, gates: mx.array, dout: mx.array) -> Arrays:
        return launch.row_scale_backward(engine, x, gates, e, dout)

    def backward(x: mx.array, gates: mx.array, dout: mx.array, *cotangents: mx.array) -> Arrays:
        return tuple(mx.vjp(formula, [x, gates, dout], list(cotangents))[1])

    return differentiable(forward, backward, backward, vmap=map_batches)
