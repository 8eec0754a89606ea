"""topk_renorm: the k best experts of each token and their weights, one launch forward and one backward."""

from functools import cache
import math
from pathlib import Path

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Axes, Function
from forge_mlx.kernels.routing import reference
from forge_mlx.kernels.routing.tiles import row_tiling
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx

_ROOM = Path(__file__).parent


def topk_renorm(
    p: mx.array,
    k: int,
    bias: mx.array | None = None,
    normalize: bool = True,
    eps: float = 1e-20,
    *,
    impl: str | None = None,
) -> tuple[mx.array, mx.array]:
    """gates = p on the k experts with the largest p + bias, over their sum + eps; 0 on all others.

    In plain operations, but for ties::

        indices = mx.argsort(-(p + bias), axis=-1)[..., :k]
        chosen = mx.take_along_axis(p, indices, axis=-1)
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + eps)
        gates = mx.put_along_axis(mx.zeros_like(p), indices, chosen, axis=-1)

    Selection: p + bias in float32; of equal ones the lowest index comes first (-0 equals 0). NaN counts as larger than
    all numbers, as in PyTorch, and two NaN as equal: each row has k different indices in range whatever p holds, and a
    NaN in p shows up in the gates. A bias of -inf puts experts out of reach, as long as k others are left: then the
    lowest indices of those at -inf are chosen too, with their p as weight. A selected p may be 0: only the indices tell
    which experts were chosen.

    Differentiable in p: dp = (dgates - sum(gates * dgates)) / (sum of the selected p + eps) on the selection and 0
    elsewhere; without `normalize` dgates on the selection. Computed in float32 and rounded once. The selection itself
    has no gradient: that of bias is zeros, and no gradient comes from the indices. These can be used in whatever is
    differentiated, as indices of `mx.take_along_axis` or `mx.gather_mm`. Second derivatives are those of the
    gradient's formula in plain MLX operations.

    Args:
        p: Scores `[..., E]`, float32, float16 or bfloat16, E at most 1024.
        k: Experts of each token, from 1 to E.
        bias: Added to p for the selection only: `[E]`, or whatever broadcasts to p; floating, of any of the three
            dtypes.
        normalize: Whether the selected p are divided by their sum + eps.
        eps: 0 or more, in float32. With 0 a sum of 0 gives NaN.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        The gates `[..., E]` in the dtype of p, and the indices, int32 `[..., k]`, the best expert first.

    Raises:
        ValueError: p or bias of another dtype or shape, E over 1024, k that is no integer from 1 to E, normalize that
            is no bool, eps negative or out of float32's range, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_topk(p, k, bias, normalize, eps)
    engine = resolve("topk_renorm", impl)
    if p.size == 0:
        return mx.zeros(p.shape, p.dtype), mx.zeros((*p.shape[:-1], int(k)), mx.int32)
    arrays = (p,) if bias is None else (p, bias)
    gates, indices = _topk(engine.name, int(k), normalize, float(eps), bias is not None)(*arrays)
    return gates, mx.stop_gradient(indices)


@cache
def _topk(engine: EngineName, k: int, normalize: bool, eps: float, biased: bool) -> Function:
    """The differentiable function p `[..., E]` and, if there is one, bias -> gates `[..., E]`, indices `[..., k]`."""

    def plain(p: mx.array, bias: mx.array | None = None) -> Arrays:
        return reference.forward(p, bias, k, normalize, eps)

    def formula(p: mx.array, *rest: mx.array) -> Arrays:
        indices, dgates, _ = rest[-3:]
        return (reference.backward(p, indices, dgates, normalize, eps),)

    def forward(p: mx.array, bias: mx.array | None = None) -> Arrays:
        return _forward(engine, p, bias, k, normalize, eps)

    def backward(p: mx.array, *rest: mx.array) -> Arrays:
        indices, dgates, _ = rest[-3:]
        return (_backward(engine, p, indices, dgates, normalize, eps),)

    def rule(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        return _map_rows(function, inputs, axes, biased)

    constants = {1} if biased else set()
    if engine == "reference":
        return differentiable(plain, formula, formula, saved=(1,), constants=constants, vmap=rule)
    return differentiable(forward, backward, formula, saved=(1,), constants=constants, vmap=rule)


def _map_rows(function: Function, inputs: Arrays, axes: Axes, biased: bool) -> tuple[Arrays, Axes]:
    """The vmap rule: one more axis in front. A bias without it stays as it is and broadcasts."""
    size = next(each.shape[axis] for each, axis in zip(inputs, axes, strict=True) if axis is not None)
    p_axes = inputs[0].ndim - (axes[0] is not None)
    mapped = []
    for index, (array, axis) in enumerate(zip(inputs, axes, strict=True)):
        if axis is not None:
            array = mx.moveaxis(array, axis, 0)
            # A bias may have fewer axes than p: the mapped one belongs in front of all of them.
            array = array.reshape(size, *[1] * (p_axes + 1 - array.ndim), *array.shape[1:])
        elif not (biased and index == 1):
            array = mx.broadcast_to(array[None], (size, *array.shape))
        mapped.append(array)
    outputs = function(*mapped)
    return outputs, (0,) * len(outputs)


@cache
def _kernel(name: str) -> MetalKernel:
    return MetalKernel(_ROOM / f"{name}.metal")


def _forward(engine: EngineName, p: mx.array, bias: mx.array | None, k: int, normalize: bool, eps: float) -> Arrays:
    """Gates and indices, launched on an engine that runs kernels."""
    rows, experts = math.prod(p.shape[:-1]), p.shape[-1]
    mode, added = _bias_rows(p, bias)
    tiles = row_tiling(rows, experts, p.dtype)
    outputs = _kernel("topk_renorm_forward")(
        {"p": p.reshape(rows, experts), "bias": added, "k": k, "eps": eps, "lanes_per_row": tiles.lanes},
        output_shapes=[p.shape, (*p.shape[:-1], k)],
        output_dtypes=[p.dtype, mx.int32],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": p.dtype, "B": added.dtype, "BIAS": mode, "VECTORS": tiles.vectors, "NORMALIZE": normalize},
        engine=engine,
    )
    return tuple(outputs)


def _bias_rows(p: mx.array, bias: mx.array | None) -> tuple[int, mx.array]:
    """What the kernel calls BIAS, and the bias as it reads it: one row for all, or one for each row of p."""
    if bias is None:
        return 0, mx.zeros((1,), p.dtype)
    experts = p.shape[-1]
    if math.prod(bias.shape[:-1]) == 1:
        return 1, mx.broadcast_to(bias.reshape(-1), (experts,))
    return 2, mx.broadcast_to(bias, p.shape).reshape(-1, experts)


def _backward(
    engine: EngineName, p: mx.array, indices: mx.array, dgates: mx.array, normalize: bool, eps: float
) -> mx.array:
    """dp, launched on an engine that runs kernels."""
    rows, experts, k = math.prod(p.shape[:-1]), p.shape[-1], indices.shape[-1]
    tiles = row_tiling(rows, experts, p.dtype)
    (dp,) = _kernel("topk_renorm_backward")(
        {
            "p": p.reshape(rows, experts),
            "indices": indices.reshape(rows, k),
            "dgates": dgates.reshape(rows, experts),
            "k": k,
            "eps": eps,
            "lanes_per_row": tiles.lanes,
        },
        output_shapes=[p.shape],
        output_dtypes=[p.dtype],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": p.dtype, "VECTORS": tiles.vectors, "NORMALIZE": normalize},
        engine=engine,
    )
    return dp
