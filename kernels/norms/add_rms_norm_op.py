"""add_rms_norm: a sum and its normalisation by the root mean square, forward and backward in one pass each."""

from functools import cache

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Axes, Function, as_rows, map_batches, map_elements, map_rows
from forge_mlx.kernels.norms import reference
from forge_mlx.kernels.norms.launch import Rows, launch_forward
from forge_mlx.kernels.norms.rms_norm_backward import rms_norm_backward
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def add_rms_norm(
    x: mx.array, residual: mx.array, w: mx.array | None = None, eps: float = 1e-5, *, impl: str | None = None
) -> tuple[mx.array, mx.array]:
    """r = x + residual, rounded to its dtype, and y = r / sqrt(mean(r^2) + eps) * w over the last axis.

    Replaces, in a pre-norm block:

        r = x + residual
        y = mx.fast.rms_norm(r, w, eps)

    in one pass over the rows, and one for the gradient, which takes the cotangents of both: dx = dresidual = dr + the
    gradient through the norm. All is computed in float32; y is made of the rounded r, so both are what the two lines
    above give. The engine "reference", which automatic takes on a CPU, runs those two lines, with the limits that
    `rms_norm` names.

    Differentiable in x, residual and w; the gradient of w has the same bits every time. Second derivatives are those
    of the gradient's formula in plain MLX operations.

    Args:
        x: `[..., C]`, float32, float16 or bfloat16.
        residual: Of the same shape, any of these dtypes. If they differ, r has the dtype that MLX promotes the two to:
            float32.
        w: `[C]`, any of these dtypes; None for no scale.
        eps: Added to the mean square, 0 or more. With 0 a row of zeros gives NaN.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        y and r, `[..., C]`: y in the dtype that MLX promotes r and w to.

    Raises:
        ValueError: x without axes, residual of another shape, w of another shape, a dtype other than the three, eps
            negative or not finite, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_add_arguments(x, residual, w, eps)
    engine = resolve("add_rms_norm", impl)
    if x.size == 0:
        r = x + residual
        return mx.zeros(x.shape, reference.output_dtype(r, w)), r
    if engine.name == "reference":
        (r,) = _sum()(x, residual)
        return mx.fast.rms_norm(r, w, eps), r
    weight = mx.ones((1, 1), x.dtype) if w is None else w[None]
    y, r, _ = _normalise(engine.name, float(eps), w is not None)(as_rows(x), as_rows(residual), weight)
    return y.reshape(x.shape), r.reshape(x.shape)


@cache
def _sum() -> Function:
    """x + residual, with a vmap rule of its own: MLX's leaves the mapped axis of its second gradient where it is."""

    def forward(x: mx.array, residual: mx.array) -> Arrays:
        return (x + residual,)

    def backward(x: mx.array, residual: mx.array, dr: mx.array) -> Arrays:
        return dr.astype(x.dtype), dr.astype(residual.dtype)

    def formula(x: mx.array, residual: mx.array, dr: mx.array) -> Arrays:
        # Two arrays, because `mx.vjp` takes only the first cotangent of an array that a function returns twice.
        return dr.astype(x.dtype), (1 * dr).astype(residual.dtype)

    return differentiable(forward, backward, formula, unread={0, 1}, vmap=map_elements)


@cache
def _normalise(engine: EngineName, eps: float, weighted: bool) -> Function:
    """The differentiable function x and residual `[B, M, C]`, w `[B, C]` -> y and r `[B, M, C]`, s `[B, M]`.

    w counts only if weighted.
    """

    def forward(x: mx.array, residual: mx.array, w: mx.array) -> Arrays:
        return _forward(engine, x, residual, w, eps, weighted)

    def backward(
        x: mx.array,
        residual: mx.array,
        w: mx.array,
        r: mx.array,
        s: mx.array,
        dy: mx.array,
        dr: mx.array,
        ds: mx.array,
    ) -> Arrays:
        of_sum, dw = rms_norm_backward(engine, r, w, s, dy, ds, weighted, dr)
        # Where the two dtypes differ r is float32, so nothing is rounded twice.
        return of_sum.astype(x.dtype), of_sum.astype(residual.dtype), mx.zeros_like(w) if dw is None else dw

    def formula(x: mx.array, residual: mx.array, w: mx.array, *rest: mx.array) -> Arrays:
        dx, dresidual, dw = reference.add_rms_norm_backward(x, residual, w if weighted else None, *rest)
        return dx, dresidual, mx.zeros_like(w) if dw is None else dw

    # Also where all rows share one w, each element of a mapped axis has a dw of its own.
    # The gradient is made of r, their sum.
    return differentiable(forward, backward, formula, saved=(1, 2), unread={0, 1}, vmap=_map, backward_vmap=map_batches)


def _map(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule: more rows where w does not have the mapped axis, else more batches."""
    if axes[2] is None:
        return map_rows(function, inputs, axes, shared={2})
    return map_batches(function, inputs, axes)


def _forward(engine: EngineName, x: mx.array, residual: mx.array, w: mx.array, eps: float, weighted: bool) -> Arrays:
    """y, r and s, launched on an engine that runs kernels."""
    r = mx.result_type(x, residual)
    y = mx.result_type(r, w.dtype) if weighted else r
    return launch_forward(
        engine,
        "add_rms_norm",
        Rows.of(x, r),
        {"x": x, "residual": residual, "w": w, "eps": eps},
        [(x.shape, y), (x.shape, r), (x.shape[:2], mx.float32)],
        {"T": x.dtype, "U": residual.dtype, "R": r, "W": w.dtype, "Y": y, "WEIGHT": weighted},
    )
