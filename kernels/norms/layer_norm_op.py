"""layer_norm: normalisation by mean and variance, forward and backward in one pass each."""

from functools import cache
from typing import Final

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, as_rows, map_batches, map_rows_or_batches
from forge_mlx.kernels._common.partial_sums import sum_parts
from forge_mlx.kernels._common.rows import vector_size
from forge_mlx.kernels.norms import reference
from forge_mlx.kernels.norms.launch import (
    Rows,
    launch_backward,
    launch_backward_columns,
    launch_backward_rows,
    launch_forward,
)
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.signature import TemplateValue
import mlx.core as mx

_CROWDED_THREADS: Final = 512
"""From more threads on, the backward pass of 16-bit rows has no registers left for w beside the two sums."""


def layer_norm(
    x: mx.array, w: mx.array | None = None, b: mx.array | None = None, eps: float = 1e-5, *, impl: str | None = None
) -> mx.array:
    """(x - mean(x)) / sqrt(var(x) + eps) * w + b over the last axis, computed in float32 and rounded once.

    Replaces `mx.fast.layer_norm`, with the same dtypes and errors for the same mistakes. The variance is the mean of
    (x - mean(x))^2, never a difference of two means, so a mean far from 0 costs no more than x itself has lost.

    Differentiable in x, w and b. The gradient reads x and the output's gradient once; those of w and b are summed in
    an order that depends on the shape alone, so that they have the same bits every time. Second derivatives are those
    of the gradient's formula in plain MLX operations. The engine "reference", which automatic takes on a CPU, is both
    formulas in plain MLX operations.

    Where the sum of (x - mean(x))^2 leaves float32 (|x| near 1e19) y becomes b; where the sum of x does (near 1e38 / C)
    the row becomes NaN, as with `mx.fast.layer_norm`.

    Args:
        x: `[..., C]`, float32, float16 or bfloat16.
        w: `[C]`, any of these dtypes; None for no scale.
        b: `[C]`, any of these dtypes; None for no shift.
        eps: Added to the variance, 0 or more. With 0 a row of one number repeated gives NaN.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        `[..., C]` in the dtype that MLX promotes x, w and b to, or without w in that of x.

    Raises:
        ValueError: x without axes or of another dtype, w or b of another shape or dtype, eps negative or not finite,
            an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_arguments("layer_norm", x, eps, w=w, b=b)
    engine = resolve("layer_norm", impl)
    if x.size == 0:
        return mx.zeros(x.shape, reference.output_dtype(x, w, b))
    weights = [mx.ones((1, 1), x.dtype) if each is None else each[None] for each in (w, b)]
    y, _, _ = _normalise(engine.name, float(eps), w is not None, b is not None)(as_rows(x), *weights)
    return y.reshape(x.shape)


@cache
def _normalise(engine: EngineName, eps: float, weighted: bool, biased: bool) -> Function:
    """The differentiable function x `[B, M, C]`, w and b `[B, C]` -> y `[B, M, C]`, mean and s `[B, M]`.

    w counts only if weighted, b only if biased.
    """

    def given(w: mx.array, b: mx.array) -> tuple[mx.array | None, mx.array | None]:
        return w if weighted else None, b if biased else None

    def forward(x: mx.array, w: mx.array, b: mx.array) -> Arrays:
        if engine == "reference":
            return reference.layer_norm_forward(x, *given(w, b), eps)
        return _forward(engine, x, w, b, eps, weighted, biased)

    def backward(x: mx.array, w: mx.array, b: mx.array, *rest: mx.array) -> Arrays:
        return with_zeros(w, b, *_backward(engine, x, w, b, *rest, weighted=weighted, biased=biased))

    def formula(x: mx.array, w: mx.array, b: mx.array, *rest: mx.array) -> Arrays:
        return with_zeros(w, b, *reference.layer_norm_backward(x, *given(w, b), *rest))

    def with_zeros(w: mx.array, b: mx.array, dx: mx.array, dw: mx.array | None, db: mx.array | None) -> Arrays:
        return dx, mx.zeros_like(w) if dw is None else dw, mx.zeros_like(b) if db is None else db

    return differentiable(
        forward,
        formula if engine == "reference" else backward,
        formula,
        saved=(1, 2),
        vmap=map_rows_or_batches,
        # Also where all rows share one w and b, each element of a mapped axis has gradients of its own.
        backward_vmap=map_batches,
    )


def _forward(
    engine: EngineName, x: mx.array, w: mx.array, b: mx.array, eps: float, weighted: bool, biased: bool
) -> Arrays:
    """y, mean and s, launched on an engine that runs kernels."""
    y = reference.output_dtype(x, w if weighted else None, b if biased else None)
    return launch_forward(
        engine,
        "layer_norm",
        Rows.of(x),
        {"x": x, "w": w, "b": b, "eps": eps},
        [(x.shape, y), (x.shape[:2], mx.float32), (x.shape[:2], mx.float32)],
        {"T": x.dtype, "W": w.dtype, "B": b.dtype, "Y": y, "WEIGHT": weighted, "BIAS": biased},
    )


def _backward(
    engine: EngineName,
    x: mx.array,
    w: mx.array,
    b: mx.array,
    mean: mx.array,
    s: mx.array,
    dy: mx.array,
    dmean: mx.array,
    ds: mx.array,
    *,
    weighted: bool,
    biased: bool,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """dx, dw if weighted and db if biased, launched on an engine that runs kernels."""
    rows, sums = Rows.of(x), weighted + biased
    types: dict[str, TemplateValue] = {"T": x.dtype, "W": w.dtype, "Y": dy.dtype, "WEIGHT": weighted}
    inputs = {"x": x, "w": w, "mean": mean, "inverse_std": s, "dy": dy}
    cotangents = {"dmean": dmean, "ds": ds}
    is_crowded = weighted and biased and rows.columns > _CROWDED_THREADS * vector_size(x.dtype) and x.dtype.size == 2
    if rows.is_long or (is_crowded and w.dtype.size > 2):
        of_rows = launch_backward_rows(engine, "layer_norm", rows, inputs | cotangents, types, 3)
        inputs |= {"numbers": of_rows}
        dx, parts = launch_backward_columns(engine, "layer_norm", rows, inputs, types | {"BIAS": biased}, sums)
    else:
        flags = types | {"BIAS": biased, "CROWDED": is_crowded}
        dx, parts = launch_backward(engine, "layer_norm", rows, inputs | cotangents, flags, sums)
    return dx, *_sums(engine, parts, w.dtype if weighted else None, b.dtype if biased else None)


def _sums(
    engine: EngineName, parts: mx.array, w: mx.Dtype | None, b: mx.Dtype | None
) -> tuple[mx.array | None, mx.array | None]:
    """dw and db of the dtypes that are given, from what each threadgroup has summed."""
    if w is None or b is None:
        dtype = b if w is None else w
        found = None if dtype is None else sum_parts(engine, parts, dtype)
        return (found, None) if b is None else (None, found)
    both = sum_parts(engine, parts, w if w == b else mx.float32)
    dw, db = mx.split(both, 2, axis=-1)
    return dw.astype(w), db.astype(b)
