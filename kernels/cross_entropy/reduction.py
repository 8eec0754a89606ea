"""From the losses of tokens to a number, in plain MLX operations on `[...]`: V times less than the logits."""

from forge_mlx.kernels.cross_entropy.options import Reduction
import mlx.core as mx


def kept_weights(kept: mx.array, weights: mx.array | None) -> mx.array:
    """What each token counts for: its weight or 1, and 0 where its target is ignored.

    Args:
        kept: Bool, `[...]`: whether a target counts.
        weights: `[...]` or None.

    Returns:
        float32 `[...]`.
    """
    return kept.astype(mx.float32) if weights is None else mx.where(kept, weights.astype(mx.float32), 0.0)


def reduce_losses(losses: mx.array, kept: mx.array, weights: mx.array | None, reduction: Reduction) -> mx.array:
    """Weigh the losses of tokens and reduce them.

    The gradient of the losses is then weight / denominator, or weight: one number for each token, which the kernel
    that makes the gradient of the logits multiplies with.

    Args:
        losses: float32 `[...]`, 0 where the target is ignored.
        kept: Bool, `[...]`: whether a target counts.
        weights: `[...]` or None for 1.
        reduction: "mean" divides by the sum of the kept weights, and is 0 where that is 0; "sum"; or "none".

    Returns:
        float32, a scalar or `[...]`.
    """
    if weights is not None:
        # Once for both uses, whose gradients are then added in float32 too.
        weights = weights.astype(mx.float32)
        losses = mx.where(kept, losses * weights, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    count = kept_weights(kept, weights).sum()
    return mx.where(count == 0, 0.0, total / mx.where(count == 0, 1.0, count))
