"""The loss of a row of logits and its gradient in plain MLX operations, in float32.

With z the logits (under softcap c: c * tanh(logits / c)), t the target, ls the label smoothing and zl the z_loss::

    L    = logsumexp(z)
    loss = L - (1 - ls) z[t] - ls mean(z) + zl L^2

L goes from one direction to the other in two parts: largest = max(z) and spread = L - largest. Their sum as one number
would be off by up to 2^-25 |L|, and the probabilities made of it by that factor.
"""

from functools import cache
import math

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_elements
from forge_mlx.kernels.cross_entropy.options import IGNORE_INDEX, Options, Reduction, check_arguments
from forge_mlx.kernels.cross_entropy.reduction import reduce_losses
import mlx.core as mx

IGNORED = -1
UNKNOWN = -2
_LONG = 4096
"""Columns from which a row is summed in two steps."""


def is_kept(targets: mx.array, ignore_index: int) -> mx.array:
    """Whether each target counts, bool `[...]`.

    Args:
        targets: `[...]`, integers.
        ignore_index: What an ignored target is.
    """
    return _comparable(targets) != ignore_index


def target_codes(targets: mx.array, vocabulary: int, ignore_index: int) -> mx.array:
    """Targets of any integer dtype as int32: the target, or IGNORED, or UNKNOWN where there is no such token.

    Codes are targets themselves, of which ignore_index is IGNORED. They have no gradient, though targets are asked for
    one where they are arguments of what mx.checkpoint takes.

    Args:
        targets: `[...]`.
        vocabulary: V, the number of tokens.
        ignore_index: What an ignored target is.
    """
    numbers = _comparable(targets)
    codes = mx.where((numbers >= 0) & (numbers < vocabulary), numbers, UNKNOWN)
    return mx.stop_gradient(mx.where(is_kept(targets, ignore_index), codes, IGNORED).astype(mx.int32))


def _comparable(targets: mx.array) -> mx.array:
    """So that a negative ignore_index can be compared with unsigned targets, and no number wraps round."""
    if targets.dtype == mx.uint64:
        # What int64 does not hold is no token, as its largest number.
        targets = mx.minimum(targets, mx.array(2**63 - 1, mx.uint64))
    return targets if targets.dtype == mx.int32 else targets.astype(mx.int64)


def capped(logits: mx.array, softcap: float | None) -> mx.array:
    """softcap * tanh(logits / softcap), or the logits where there is no softcap.

    Args:
        logits: Of any shape, in float32.
        softcap: The limit.
    """
    return logits if softcap is None else _cap(softcap)(logits)[0]


@cache
def _cap(softcap: float) -> Function:
    """z = c tanh(x / c) with dx = dz (1 - (z / c)^2): MLX's tanh takes a cosh, whose square overflows, for that."""

    def forward(logits: mx.array) -> Arrays:
        return (softcap * mx.tanh(logits * (1 / softcap)),)

    def backward(_logits: mx.array, z: mx.array, dz: mx.array) -> Arrays:
        return (dz * cap_slope(z, softcap),)

    return differentiable(forward, backward, backward, saved=(0,), vmap=map_elements)


def cap_slope(z: mx.array, softcap: float) -> mx.array:
    """The derivative of `capped`, 1 - (z / softcap)^2.

    Args:
        z: What `capped` has returned.
        softcap: The limit.
    """
    return 1 - mx.square(z * (1 / softcap))


def row_losses(logits: mx.array, targets: mx.array, options: Options) -> tuple[mx.array, mx.array]:
    """The loss of each row and the parts of its L. MLX's derivative of this takes no second exponential.

    The gradient of L is that of spread: largest counts as a constant, on which their sum does not depend.

    Args:
        logits: `[..., V]` in float32.
        targets: `[...]`, integers.
        options: The options.

    Returns:
        loss `[...]`, and largest and spread `[..., 2]`, float32: all 0 where the target is ignored, the loss NaN where
        there is no such token.
    """
    codes = target_codes(targets, logits.shape[-1], options.ignore_index)
    kept = codes != IGNORED
    z = capped(logits, options.softcap)
    # An ignored row is taken off infinity: its exponentials are 0 whatever it holds below, and so is its gradient.
    largest = mx.where(kept, mx.stop_gradient(mx.max(z, axis=-1)), mx.inf)
    total = mx.where(kept, _row_sums(mx.exp(z - largest[..., None])), 1.0)
    # mx.logsumexp would take the exponentials again in the gradient, mx.exp does not.
    spread = mx.log(total)
    target = mx.take_along_axis(z, mx.maximum(codes, 0)[..., None], axis=-1).squeeze(-1)
    smoothing = options.label_smoothing
    # The large numbers are subtracted first, so that a small loss beside them is not rounded away.
    loss = spread + (largest - target if smoothing == 0 else (1 - smoothing) * (largest - target))
    if smoothing != 0:
        loss = loss + smoothing * (largest - _row_sums(z) / z.shape[-1])
    largest = mx.where(kept, largest, 0.0)
    if options.z_loss != 0:
        loss = loss + options.z_loss * mx.square(largest + spread)
    loss = mx.where(codes == UNKNOWN, mx.nan, 1.0) * loss
    return mx.where(kept, loss, 0.0), mx.stack([largest, spread], axis=-1)


def _row_sums(x: mx.array) -> mx.array:
    """The sum of each row, `[..., V]` -> `[...]`; of a long one by way of pieces of some sqrt(V) elements.

    On a CPU MLX adds up a row in few running sums: at V = 128256 that puts the loss off by up to 1.7e-4, and sums of
    pieces by 1e-6. They are as fast, and their gradient is no array of its own either.
    """
    columns = x.shape[-1]
    pieces = _pieces(columns)
    if pieces == 1:
        return mx.sum(x, axis=-1)
    return mx.sum(mx.sum(x.reshape(*x.shape[:-1], pieces, columns // pieces), axis=-1), axis=-1)


@cache
def _pieces(columns: int) -> int:
    """The largest divisor up to the square root, so that all pieces are of one length; 1 for short rows."""
    if columns < _LONG:
        return 1
    return next(pieces for pieces in range(math.isqrt(columns), 0, -1) if columns % pieces == 0)


def row_gradients(
    logits: mx.array, targets: mx.array, parts: mx.array, dloss: mx.array, dparts: mx.array, options: Options
) -> mx.array:
    """The gradient of `row_losses`, from the logits and the parts of L alone.

    ::

        p  = exp((z - largest) - spread)
        dz = p (dloss (1 + 2 zl L) + dspread) - dloss ((1 - ls) [j = t] + ls / V)

    and under softcap c times 1 - (z / c)^2.

    Args:
        logits: `[..., V]` in float32.
        targets: `[...]`, integers.
        parts: largest and spread, `[..., 2]`, as `row_losses` returns them.
        dloss: `[...]`, cotangent of the loss.
        dparts: `[..., 2]`, cotangents of the parts; zeros where nothing but the gradient itself was made of them. That
            of largest does not count.
        options: The options.

    Returns:
        `[..., V]` in float32: 0 where the target is ignored, NaN where there is no such token.
    """
    vocabulary = logits.shape[-1]
    codes = target_codes(targets, vocabulary, options.ignore_index)
    kept = codes != IGNORED
    z = capped(logits, options.softcap)
    dloss = mx.where(kept, dloss, 0.0) * mx.where(codes == UNKNOWN, mx.nan, 1.0)
    largest, spread = parts[..., 0], parts[..., 1]
    of_sum = dloss * (1 + 2 * options.z_loss * (largest + spread)) + mx.where(kept, dparts[..., 1], 0.0)
    # As in row_losses: an ignored row has no exponentials.
    away = (z - mx.where(kept, largest, mx.inf)[..., None]) - spread[..., None]
    dz = mx.exp(away) * of_sum[..., None]
    if options.label_smoothing != 0:
        dz = dz - (dloss * (options.label_smoothing / vocabulary))[..., None]
    target = mx.maximum(codes, 0)[..., None]
    of_target = mx.take_along_axis(dz, target, axis=-1) - (dloss * (1 - options.label_smoothing))[..., None]
    dz = mx.put_along_axis(dz, target, of_target, axis=-1)
    if options.softcap is not None:
        dz = dz * cap_slope(z, options.softcap)
    return dz


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
) -> mx.array:
    """The loss as `forge_mlx.kernels.cross_entropy` but for `impl`.

    Args:
        logits: `[..., V]`.
        targets: `[...]`, integers.
        ignore_index: Targets of this value count nowhere.
        label_smoothing: The share of the loss that all tokens have alike.
        softcap: The largest magnitude that the logits are brought under; None: any.
        z_loss: Factor of the squared logsumexp.
        weights: `[...]` or None for 1.
        reduction: "mean", "sum" or "none".

    Returns:
        float32, a scalar or `[...]`.

    Raises:
        ValueError: As `check_arguments`.
    """
    options = Options(ignore_index, label_smoothing, softcap, z_loss)
    check_arguments("cross_entropy", logits, targets, weights, options, reduction)
    losses = row_losses(logits.astype(mx.float32), targets, options)[0] if targets.size else mx.zeros(targets.shape)
    return reduce_losses(losses, is_kept(targets, ignore_index), weights, reduction)
