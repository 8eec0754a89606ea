"""cross_entropy: the loss of next-token logits, from one reading of them, and its gradient from another."""

from dataclasses import replace
from functools import cache, partial
import math
from pathlib import Path

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_elements
from forge_mlx.kernels._common.rows import COLUMN_THREADS, FORWARD, column_tiling, tiling, vector_size
from forge_mlx.kernels.cross_entropy.options import IGNORE_INDEX, Options, Reduction, check_arguments
from forge_mlx.kernels.cross_entropy.reduction import reduce_losses
from forge_mlx.kernels.cross_entropy.reference import (
    IGNORED,
    UNKNOWN,
    capped,
    is_kept,
    row_gradients,
    row_losses,
    target_codes,
)
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import MAX_THREADS
import mlx.core as mx

_ROOM = Path(__file__).parent


def cross_entropy(
    logits: mx.array,
    targets: mx.array,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weights: mx.array | None = None,
    reduction: Reduction = "mean",
    impl: str | None = None,
) -> mx.array:
    """logsumexp(z) - (1 - label_smoothing) z[target] - label_smoothing mean(z) + z_loss logsumexp(z)^2, reduced.

    In plain operations, all of them in float32::

        z = softcap * mx.tanh(logits / softcap)
        lse = mx.logsumexp(z, -1)
        target = mx.take_along_axis(z, targets[..., None], -1)[..., 0]
        loss = lse - (1 - label_smoothing) * target - label_smoothing * z.mean(-1) + z_loss * lse**2
        mean = (weights * loss).sum() / weights.sum()

    Logits of -inf are tokens that cannot occur: they take no part in the logsumexp and get no gradient. With
    `label_smoothing` the formula decides: their mean is -inf, so the loss is infinite. With `softcap` it does too: a
    capped logit is finite. A target whose own logit is -inf costs infinity, and a row of nothing else NaN.

    The kernels read the logits once in each direction however many there are, and save two numbers a row; reduction and
    weights are factors of a row. The logits of an ignored target are not read. The engine "reference", which automatic
    takes on a CPU, takes the exponentials once for both directions. There, NaN or +inf among the logits of an ignored
    target makes their gradient NaN; the loss and the gradients of other rows stay what they are. On a GPU it is
    `mx.fast.cross_entropy` where there is neither label_smoothing nor z_loss; that has no second derivatives.

    Args:
        logits: `[..., V]`, float32, float16 or bfloat16.
        targets: `[...]`, integers. One outside `[0, V)` that is not `ignore_index` makes the loss, and the gradient
            of its row, NaN.
        ignore_index: Targets of this value count nowhere: loss 0, gradient 0, in no denominator.
        label_smoothing: The share of the loss that all tokens have alike, 0 to 1. This and the next two are numbers,
            not arrays.
        softcap: The largest magnitude that the logits are brought under, 1.18e-38 to 8.51e+37; None: any.
        z_loss: Factor of the squared logsumexp, 0 or more.
        weights: `[...]`, floating point, integers or bool: one factor for each target (not PyTorch's factor for each
            class), differentiable; None for 1.
        reduction: "mean" divides by the number of kept targets, or by the sum of their weights, and is 0 when none is
            kept; "sum"; or "none" for `[...]`.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        float32, a scalar or `[...]`.

    Raises:
        ValueError: Shapes that do not fit, dtypes of the wrong kind, options that make no loss, an unknown reduction
            or engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    options = Options(ignore_index, label_smoothing, softcap, z_loss)
    check_arguments("cross_entropy", logits, targets, weights, options, reduction)
    engine = resolve("cross_entropy", impl)
    losses = _losses(engine.name, logits, targets, options)
    return reduce_losses(losses, is_kept(targets, ignore_index), weights, reduction)


def _losses(engine: EngineName, logits: mx.array, targets: mx.array, options: Options) -> mx.array:
    """The loss of each row, `[...]`."""
    if targets.size == 0:
        return mx.zeros(targets.shape)
    if engine == "reference" and not (_has_fused_kernel() and options.label_smoothing == options.z_loss == 0):
        return row_losses(logits.astype(mx.float32), targets, options)[0]
    codes = target_codes(targets, logits.shape[-1], options.ignore_index)
    if engine == "reference":
        return _fused_losses(logits, codes, options)
    # Codes are targets, and so what is ignored has a new name.
    return _of_kernels(engine, replace(options, ignore_index=IGNORED))(logits, codes)[0]


def _has_fused_kernel() -> bool:
    return bool(mx.default_device() == mx.gpu)


def _fused_losses(logits: mx.array, codes: mx.array, options: Options) -> mx.array:
    """`row_losses` by MLX's own kernel."""
    z = capped(logits.astype(mx.float32), options.softcap)
    # An unknown target is replaced, so that nothing is read out of bounds.
    losses = mx.fast.cross_entropy(z, mx.maximum(codes, 0)) * mx.where(codes == UNKNOWN, mx.nan, 1.0)
    return mx.where(codes == IGNORED, 0.0, losses)


@cache
def _of_kernels(engine: EngineName, options: Options) -> Function:
    """The differentiable function logits `[..., V]`, codes `[...]` -> loss `[...]`, parts of L `[..., 2]`."""

    def formula(logits: mx.array, codes: mx.array, parts: mx.array, dloss: mx.array, dparts: mx.array) -> Arrays:
        gradient = row_gradients(logits.astype(mx.float32), codes, parts, dloss, dparts, options)
        return (gradient.astype(logits.dtype),)

    return differentiable(
        partial(_forward, engine, options),
        partial(_backward, engine, options),
        formula,
        saved=(1,),
        constants=(1,),
        vmap=map_elements,
    )


@cache
def _kernel(name: str) -> MetalKernel:
    return MetalKernel(_ROOM / f"{name}.metal")


def _scalars(options: Options) -> dict[str, mx.array | float]:
    cap = 1.0 if options.softcap is None else options.softcap
    return {"smoothing": float(options.label_smoothing), "cap": float(cap), "z_loss": float(options.z_loss)}


def _forward(engine: EngineName, options: Options, logits: mx.array, codes: mx.array) -> Arrays:
    """loss and the parts of L, launched on an engine that runs kernels."""
    columns, rows = logits.shape[-1], math.prod(logits.shape[:-1])
    # A longer row goes through the same threads several times.
    most = min(columns, MAX_THREADS * vector_size(logits.dtype))
    tiles = tiling(1, rows, most, logits.dtype, FORWARD)
    outputs = _kernel("cross_entropy_forward")(
        {
            **{"logits": logits.reshape(rows, columns), "codes": codes.flatten()},
            **_scalars(options),
            **{"width": tiles.lanes or tiles.threads, "rows_per_group": tiles.rows_per_group},
        },
        output_shapes=[codes.shape, (*codes.shape, 2)],
        output_dtypes=[mx.float32] * 2,
        grid=(tiles.groups * tiles.threads, 1, 1),
        threadgroup=(tiles.threads, 1, 1),
        template={"T": logits.dtype, "CAP": options.softcap is not None},
        engine=engine,
    )
    return tuple(outputs)


def _backward(
    engine: EngineName,
    options: Options,
    logits: mx.array,
    codes: mx.array,
    parts: mx.array,
    dloss: mx.array,
    dparts: mx.array,
) -> Arrays:
    """The gradient of the logits, launched on an engine that runs kernels."""
    columns, rows = logits.shape[-1], math.prod(logits.shape[:-1])
    blocks, threads, width, rows_per_group, groups = _column_blocks(rows, columns, logits.dtype)
    outputs = _kernel("cross_entropy_backward")(
        {
            **{"logits": logits.reshape(rows, columns), "codes": codes.flatten(), "parts": parts.flatten()},
            **{"dloss": dloss.flatten(), "dparts": dparts.flatten()},
            **_scalars(options),
            **{"width": width, "rows_per_group": rows_per_group},
        },
        output_shapes=[logits.shape],
        output_dtypes=[logits.dtype],
        grid=(blocks * threads, groups, 1),
        threadgroup=(threads, 1, 1),
        template={"T": logits.dtype, "CAP": options.softcap is not None},
        engine=engine,
    )
    return tuple(outputs)


def _column_blocks(rows: int, columns: int, dtype: mx.Dtype) -> tuple[int, int, int, int, int]:
    """Threadgroups beside each other, threads, threads of a row, rows of a threadgroup, threadgroups for all rows."""
    if columns <= COLUMN_THREADS * vector_size(dtype):
        short = tiling(1, rows, columns, dtype, FORWARD)
        return 1, short.threads, short.lanes or short.threads, short.rows_per_group, short.groups
    tiles = column_tiling(1, rows, columns, dtype, FORWARD)
    return tiles.blocks, tiles.threads, tiles.threads, tiles.rows_per_group, tiles.groups
