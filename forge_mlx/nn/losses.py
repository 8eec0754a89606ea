"""Cross entropy of next-token logits, in float32, with ignored and weighted targets."""

from typing import Final, Literal, get_args

import mlx.core as mx

IGNORE_INDEX: Final = -100
"""A target with this value has no loss and no gradient."""

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: mx.array,
    targets: mx.array,
    *,
    ignore_index: int = IGNORE_INDEX,
    weights: mx.array | None = None,
    reduction: Reduction = "mean",
) -> mx.array:
    """logsumexp(logits) - logits[target], reduced over the kept targets.

    In plain operations::

        target = mx.take_along_axis(logits, targets[..., None], -1)[..., 0]
        loss = weights * (mx.logsumexp(logits, -1) - target)
        mean = loss.sum() / weights.sum()

    On a GPU this is `mx.fast.cross_entropy`, one kernel that keeps no probabilities. On a CPU the
    exponentials are the cost: MLX's own forms take them in the forward and again in the backward, this one
    once (`[2048, 2048]` logits, forward and backward: 0.55 times the time). Second derivatives work on a CPU; on
    a GPU MLX's kernel raises.

    Args:
        logits: `[..., V]`, floating point; computed in float32 whatever the dtype. -inf is a token that
            cannot occur.
        targets: `[...]`, integers. One outside `[0, V)` that is not `ignore_index` makes the loss NaN.
        ignore_index: Targets of this value count nowhere: loss 0, gradient 0, in no denominator.
        weights: `[...]`, one factor per target (not PyTorch's factor per class), differentiable; None for 1.
        reduction: "mean" divides by the number of kept targets, or by the sum of their weights, and is 0 when
            none is kept; "sum"; or "none" for `[...]`.

    Returns:
        float32, a scalar or `[...]`.

    Raises:
        ValueError: For shapes that do not fit, dtypes of the wrong kind or an unknown reduction.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"[cross_entropy] reduction must be one of {get_args(Reduction)} but got {reduction!r}.")
    losses, kept = _token_losses(logits, targets, ignore_index, weights)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    count = kept.sum()
    return mx.where(count == 0, 0.0, total / mx.where(count == 0, 1.0, count))


def cross_entropy_sum(
    logits: mx.array,
    targets: mx.array,
    *,
    ignore_index: int = IGNORE_INDEX,
    weights: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The numerator and the denominator of `cross_entropy`'s mean, to add up over batches before dividing.

    Args:
        logits: `[..., V]`, floating point.
        targets: `[...]`, integers.
        ignore_index: Targets of this value count in neither.
        weights: `[...]`, one factor per target; None for 1.

    Returns:
        The sum of the losses, and the number of kept targets or the sum of their weights: float32 scalars.

    Raises:
        ValueError: As `cross_entropy`.
    """
    losses, kept = _token_losses(logits, targets, ignore_index, weights)
    return losses.sum(), kept.sum()


def _token_losses(
    logits: mx.array, targets: mx.array, ignore_index: int, weights: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Weighted loss and weight of each target, both float32 `[...]` and 0 where it is ignored."""
    _check(logits, targets, weights)
    logits = logits.astype(mx.float32)
    kept = targets != ignore_index
    known = (targets >= 0) & (targets < logits.shape[-1])
    # An unknown id is replaced, so that nothing is read out of bounds, and its loss and gradient made NaN.
    safe = mx.stop_gradient(mx.where(known, targets, 0))
    nll = mx.fast.cross_entropy(logits, safe) if _fused() else _nll(logits, safe)
    nll = nll * mx.where(kept & ~known, mx.nan, 1.0)
    factor = mx.ones(targets.shape) if weights is None else weights.astype(mx.float32)
    return mx.where(kept, nll * factor, 0.0), mx.where(kept, factor, 0.0)


def _fused() -> bool:
    return bool(mx.default_device() == mx.gpu)


def _check(logits: mx.array, targets: mx.array, weights: mx.array | None) -> None:
    if not mx.issubdtype(logits.dtype, mx.floating):
        raise ValueError(f"[cross_entropy] logits must be floating point but got {logits.dtype}.")
    if not mx.issubdtype(targets.dtype, mx.integer):
        raise ValueError(f"[cross_entropy] targets must be integers but got {targets.dtype}.")
    if logits.ndim == 0 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            "[cross_entropy] targets must have the shape of logits without its last axis but got "
            f"{targets.shape} for logits {logits.shape}."
        )
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(
            f"[cross_entropy] weights must have the shape of targets, {targets.shape}, but got {weights.shape}."
        )


def _nll(logits: mx.array, targets: mx.array) -> mx.array:
    """logsumexp(logits) - logits[target] in float32, `[...]`.

    `mx.logsumexp` would take the exponentials again in the backward; `mx.exp` reuses its result there.
    """
    largest = mx.stop_gradient(mx.max(logits, axis=-1, keepdims=True))
    total = mx.sum(mx.exp(logits - largest), axis=-1, keepdims=True)
    target = mx.take_along_axis(logits, targets[..., None], axis=-1)
    # The two large numbers are subtracted first, so that a small loss beside them is not rounded away.
    return (mx.log(total) + (largest - target)).squeeze(-1)
