"""softmax: forward and backward in one pass each, or two over long rows."""

from functools import cache, partial
import math
from pathlib import Path

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_elements
from forge_mlx.kernels._common.rows import FORWARD, is_long, tiling
from forge_mlx.kernels.softmax import reference
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import MAX_THREADS
import mlx.core as mx

_ROOM = Path(__file__).parent


def softmax(x: mx.array, *, impl: str | None = None) -> mx.array:
    """e^x / sum(e^x) over the last axis, computed in float32 and rounded once.

    Replaces `mx.softmax(x, axis=-1, precise=True)`, which the engine "reference", that automatic takes on a CPU, calls.
    There too the gradient is p (dp - sum(p dp)) in float32, of the result p as the dtype has rounded it; MLX's own
    rounds each step to the dtype. A row of -inf gives NaN, as does one that holds NaN or inf.

    Second derivatives are those of the gradient's formula in plain MLX operations.

    Args:
        x: `[..., C]`, float32, float16 or bfloat16.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        `[..., C]` in the dtype of x.

    Raises:
        ValueError: x without axes or of another dtype, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_arguments(x)
    engine = resolve("softmax", impl)
    if x.size == 0:
        return mx.zeros(x.shape, x.dtype)
    return _softmax(engine.name)(x)[0]


@cache
def _softmax(engine: EngineName) -> Function:
    """The differentiable function x `[..., C]` -> p `[..., C]`."""

    def formula(_x: mx.array, p: mx.array, dp: mx.array) -> Arrays:
        return (reference.backward(p, dp),)

    if engine == "reference":
        return differentiable(_plain, formula, formula, saved=(0,), vmap=map_elements)
    forward, backward = partial(_forward, engine), partial(_backward, engine)
    return differentiable(forward, backward, formula, saved=(0,), vmap=map_elements)


def _plain(x: mx.array) -> Arrays:
    return (mx.softmax(x, axis=-1, precise=True),)


@cache
def _kernel(name: str) -> MetalKernel:
    return MetalKernel(_ROOM / f"{name}.metal")


def _forward(engine: EngineName, x: mx.array) -> Arrays:
    """p, launched on an engine that runs kernels."""
    return _launch("softmax_forward", engine, {"x": x})


def _backward(engine: EngineName, _x: mx.array, p: mx.array, dp: mx.array) -> Arrays:
    """dx, launched on an engine that runs kernels."""
    return _launch("softmax_backward", engine, {"p": p, "dp": dp})


def _launch(name: str, engine: EngineName, arrays: dict[str, mx.array]) -> Arrays:
    """One result of the shape and dtype of some arrays `[..., C]`."""
    like = next(iter(arrays.values()))
    columns, rows = like.shape[-1], math.prod(like.shape[:-1])
    inputs: dict[str, mx.array | int] = {key: array.reshape(rows, columns) for key, array in arrays.items()}
    if is_long(columns, like.dtype):
        name, threads, groups = f"{name}_long", MAX_THREADS, rows
    else:
        tiles = tiling(1, rows, columns, like.dtype, FORWARD)
        threads, groups = tiles.threads, tiles.groups
        inputs |= {"width": tiles.lanes or tiles.threads, "rows_per_group": tiles.rows_per_group}
    outputs = _kernel(name)(
        inputs,
        output_shapes=[like.shape],
        output_dtypes=[like.dtype],
        grid=(groups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template={"T": like.dtype},
        engine=engine,
    )
    return tuple(outputs)
