"""rms_norm: normalisation by the root mean square, forward and backward in one pass each."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

from forge_mlx.kernels._common.folding import Arrays, Axes, as_rows, map_batches, map_rows
from forge_mlx.kernels.rms_norm import reference
from forge_mlx.kernels.rms_norm.tiles import (
    BACKWARD,
    FORWARD,
    SUM_COLUMNS,
    SUM_THREADS,
    column_tiling,
    is_long,
    tiling,
)
from forge_mlx.metal.checked_launch import Scalar
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import MAX_THREADS, SIMDGROUP
import mlx.core as mx

_ROOM = Path(__file__).parent


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
    reference.check_arguments(x, w, eps)
    engine = resolve("rms_norm", impl)
    if x.size == 0:
        return mx.zeros(x.shape, reference.output_dtype(x, w))
    if engine.name == "reference":
        return mx.fast.rms_norm(x, w, eps)
    weight = mx.ones((1, 1), x.dtype) if w is None else w[None]
    y, _ = _normalise(engine.name, float(eps), w is not None)(as_rows(x), weight)
    return y.reshape(x.shape)


@cache
def _normalise(engine: EngineName, eps: float, weighted: bool) -> Callable[[mx.array, mx.array], Arrays]:
    """The differentiable function x `[B, M, C]`, w `[B, C]` -> y `[B, M, C]`, r `[B, M]`; w counts only if weighted."""

    @mx.custom_function
    def normalise(x: mx.array, w: mx.array) -> Arrays:
        return _forward(engine, x, w, eps, weighted)

    @normalise.vjp
    def vjp(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        return _gradient(engine, weighted)(*primals, outputs[1], *cotangents)

    @normalise.vmap
    def vmap(inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        function = _normalise(engine, eps, weighted)
        if axes[1] is None:
            return map_rows(function, inputs, axes, shared={1})
        return map_batches(function, inputs, axes)

    return cast(Callable[[mx.array, mx.array], Arrays], normalise)


@cache
def _gradient(engine: EngineName, weighted: bool) -> Callable[..., Arrays]:
    """The differentiable function x, w, r, dy, dr -> dx, dw."""

    def formula(x: mx.array, w: mx.array, r: mx.array, dy: mx.array, dr: mx.array) -> Arrays:
        dx, dw = reference.backward(x, w if weighted else None, r, dy, dr)
        return dx, mx.zeros_like(w) if dw is None else dw

    @mx.custom_function
    def gradient(x: mx.array, w: mx.array, r: mx.array, dy: mx.array, dr: mx.array) -> Arrays:
        dx, dw = _backward(engine, x, w, r, dy, dr, weighted)
        return dx, mx.zeros_like(w) if dw is None else dw

    @gradient.vjp
    def vjp(primals: Arrays, cotangents: Arrays, _outputs: Arrays) -> Arrays:
        return tuple(mx.vjp(formula, list(primals), list(cotangents))[1])

    @gradient.vmap
    def vmap(inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        # Also where all share one w: each has its own dw.
        return map_batches(_gradient(engine, weighted), inputs, axes)

    return cast(Callable[..., Arrays], gradient)


@cache
def _kernel(name: str) -> MetalKernel:
    return MetalKernel(_ROOM / f"{name}.metal")


def _template(x: mx.array, w: mx.array, weighted: bool) -> dict[str, mx.Dtype | int | bool]:
    y = mx.result_type(x, w)
    return {"T": x.dtype, "W": w.dtype, "Y": y, "WEIGHT": weighted}


def _forward(engine: EngineName, x: mx.array, w: mx.array, eps: float, weighted: bool) -> Arrays:
    """y and r, launched on an engine that runs kernels."""
    batches, rows, columns = x.shape
    template = _template(x, w, weighted)
    inputs: dict[str, mx.array | Scalar] = {"x": x, "w": w, "eps": eps}
    if is_long(columns, x.dtype):
        kernel, threads, groups = _kernel("forward_long"), MAX_THREADS, rows
    else:
        kernel = _kernel("forward")
        tiles = tiling(batches, rows, columns, x.dtype, FORWARD)
        threads, groups = tiles.threads, tiles.groups
        template |= {"NARROW": tiles.is_narrow}
        inputs |= {"lanes_per_row": tiles.lanes, "rows_per_group": tiles.rows_per_group}
    outputs = kernel(
        inputs,
        output_shapes=[x.shape, x.shape[:2]],
        output_dtypes=[mx.result_type(x, w), mx.float32],
        grid=(groups * threads, batches, 1),
        threadgroup=(threads, 1, 1),
        template=template,
        engine=engine,
    )
    return tuple(outputs)


def _backward(
    engine: EngineName, x: mx.array, w: mx.array, r: mx.array, dy: mx.array, dr: mx.array, weighted: bool
) -> tuple[mx.array, mx.array | None]:
    """dx, and dw if weighted, launched on an engine that runs kernels."""
    launch = _backward_long if is_long(x.shape[-1], x.dtype) else _backward_short
    dx, partial_dw = launch(engine, x, w, r, dy, dr, weighted)
    return dx, _sum_dw(engine, partial_dw, w.dtype) if weighted else None


def _backward_short(
    engine: EngineName, x: mx.array, w: mx.array, r: mx.array, dy: mx.array, dr: mx.array, weighted: bool
) -> Arrays:
    batches, rows, columns = x.shape
    tiles = tiling(batches, rows, columns, x.dtype, BACKWARD)
    inputs = {"x": x, "w": w, "inverse_rms": r, "dy": dy, "dr": dr}
    outputs = _kernel("backward")(
        inputs | {"lanes_per_row": tiles.lanes, "rows_per_group": tiles.rows_per_group},
        output_shapes=[x.shape, (batches, tiles.groups, columns) if weighted else (1,)],
        output_dtypes=[x.dtype, mx.float32],
        grid=(tiles.groups * tiles.threads, batches, 1),
        threadgroup=(tiles.threads, 1, 1),
        template=_template(x, w, weighted) | {"NARROW": tiles.is_narrow},
        engine=engine,
    )
    return tuple(outputs)


def _backward_long(
    engine: EngineName, x: mx.array, w: mx.array, r: mx.array, dy: mx.array, dr: mx.array, weighted: bool
) -> Arrays:
    batches, rows, columns = x.shape
    template = _template(x, w, weighted)
    (c,) = _kernel("backward_long_rows")(
        {"x": x, "w": w, "inverse_rms": r, "dy": dy, "dr": dr},
        output_shapes=[(batches, rows)],
        output_dtypes=[mx.float32],
        grid=(rows * MAX_THREADS, batches, 1),
        threadgroup=(MAX_THREADS, 1, 1),
        template=template,
        engine=engine,
    )
    tiles = column_tiling(batches, rows, columns, x.dtype, BACKWARD)
    outputs = _kernel("backward_long")(
        {"x": x, "w": w, "inverse_rms": r, "dy": dy, "c": c, "rows_per_group": tiles.rows_per_group},
        output_shapes=[x.shape, (batches, tiles.groups, columns) if weighted else (1,)],
        output_dtypes=[x.dtype, mx.float32],
        grid=(tiles.blocks * tiles.threads, tiles.groups, batches),
        threadgroup=(tiles.threads, 1, 1),
        template=template,
        engine=engine,
    )
    return tuple(outputs)


def _sum_dw(engine: EngineName, partial_dw: mx.array, dtype: mx.Dtype) -> mx.array:
    """`[B, parts, C]` -> `[B, C]`."""
    batches, parts, columns = partial_dw.shape
    threads = min(SUM_THREADS, parts * SIMDGROUP)
    (dw,) = _kernel("sum_dw")(
        {"partial_dw": partial_dw},
        output_shapes=[(batches, columns)],
        output_dtypes=[dtype],
        grid=(-(-columns // SUM_COLUMNS) * threads, batches, 1),
        threadgroup=(threads, 1, 1),
        template={"W": dtype},
        engine=engine,
    )
    return dw
