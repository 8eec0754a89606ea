"""Cross entropy of next-token logits, in float32, with ignored and weighted targets."""

from forge_mlx.kernels.cross_entropy import IGNORE_INDEX, Reduction, cross_entropy
from forge_mlx.kernels.cross_entropy.reduction import kept_weights
from forge_mlx.kernels.cross_entropy.reference import is_kept
import mlx.core as mx

__all__ = ["IGNORE_INDEX", "Reduction", "cross_entropy", "cross_entropy_sum"]


def cross_entropy_sum(
    logits: mx.array,
    targets: mx.array,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weights: mx.array | None = None,
    impl: str | None = None,
) -> tuple[mx.array, mx.array]:
    """The numerator and the denominator of `cross_entropy`'s mean, to add up over batches before dividing.

    Args:
        logits: `[..., V]`, float32, float16 or bfloat16.
        targets: `[...]`, integers.
        ignore_index: Targets of this value count in neither.
        label_smoothing: The share of the loss that all tokens have alike, 0 to 1.
        softcap: The largest magnitude that the logits are brought under; None: any.
        z_loss: Factor of the squared logsumexp, 0 or more.
        weights: `[...]`, one factor per target; None for 1.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        The sum of the losses, and the number of kept targets or the sum of their weights: float32 scalars.

    Raises:
        ValueError: As `cross_entropy`.
        RuntimeError: The engine that was asked for cannot run here.
    """
    total = cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        weights=weights,
        reduction="sum",
        impl=impl,
    )
    return total, kept_weights(is_kept(targets, ignore_index), weights).sum()
