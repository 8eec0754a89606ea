"""rms_norm: normalisation by the root mean square, forward and backward in one pass each."""

from functools import cache

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, as_rows, map_batches, map_rows_or_batches
from forge_mlx.kernels.norms import reference
from forge_mlx.kernels.norms.launch import Rows, launch_forward
from forge_mlx.kernels.norms.rms_norm_backward import rms_norm_backward
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def rms_norm(x: mx.array, w: mx.array | None = None, eps: float = 1e-5, *, impl: str | None = None) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * w over the last axis, computed in float32 and rounded once.

    Replaces `mx.fast.rms_norm`, with the same dtypes and errors for the same mistakes. The engine "reference", which
    automatic takes on a CPU, calls `mx.fast.rms_norm`: there it is the faster form of the same formula. In 16 bits
    it rounds once more, before the product with w, and its gradient is inaccurate where |x| is above 1e13. Where the
    sum of x^2 leaves float32 (|x| near 1e19) the row becomes 0 on every engine.

    Differentiable in x and w. The gradient reads x and the output's gradient once; the gradient of w is summed in
    an order that depends on the shape alone, so that it has the same bits every time. Second derivatives are those
    of the gradient's formula in plain MLX operations.

    Args:
        x: `[..., C]`, float32, float16 or bfloat16.
        w: `[C]`, any of these dtypes; None for no scale.
        eps: Added to the mean square, 0 or more. With 0 a row of zeros gives NaN.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        `[..., C]` in the dtype that MLX promotes x and w to.

    Raises:
        ValueError: x without axes or of another dtype, w of another shape or dtype, eps negative or not finite, an
            unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_arguments("rms_norm", x, eps, w=w)
    engine = resolve("rms_norm", impl)
    if x.size == 0:
        return mx.zeros(x.shape, reference.output_dtype(x, w))
    if engine.name == "reference":
        return mx.fast.rms_norm(x, w, eps)
    weight = mx.ones((1, 1), x.dtype) if w is None else w[None]
    y, _ = _normalise(engine.name, float(eps), w is not None)(as_rows(x), weight)
    return y.reshape(x.shape)


@cache
def _normalise(engine: EngineName, eps: float, weighted: bool) -> Function:
    """The differentiable function x `[B, M, C]`, w `[B, C]` -> y `[B, M, C]`, r `[B, M]`; w counts only if weighted."""

    def forward(x: mx.array, w: mx.array) -> Arrays:
        return _forward(engine, x, w, eps, weighted)

    def backward(x: mx.array, w: mx.array, r: mx.array, dy: mx.array, dr: mx.array) -> Arrays:
        dx, dw = rms_norm_backward(engine, x, w, r, dy, dr, weighted)
        return dx, mx.zeros_like(w) if dw is None else dw

    def formula(x: mx.array, w: mx.array, r: mx.array, dy: mx.array, dr: mx.array) -> Arrays:
        dx, dw = reference.rms_norm_backward(x, w if weighted else None, r, dy, dr)
        return dx, mx.zeros_like(w) if dw is None else dw

    # Also where all rows share one w, each element of a mapped axis has a dw of its own.
    return differentiable(forward, backward, formula, saved=(1,), vmap=map_rows_or_batches, backward_vmap=map_batches)


def _forward(engine: EngineName, x: mx.array, w: mx.array, eps: float, weighted: bool) -> Arrays:
    """y and r, launched on an engine that runs kernels."""
    y = mx.result_type(x, w)
    return launch_forward(
        engine,
        "rms_norm",
        Rows.of(x),
        {"x": x, "w": w, "eps": eps},
        [(x.shape, y), (x.shape[:2], mx.float32)],
        {"T": x.dtype, "W": w.dtype, "Y": y, "WEIGHT": weighted},
    )
