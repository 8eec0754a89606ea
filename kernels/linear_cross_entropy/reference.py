"""The formulas of linear_cross_entropy and of its gradients in plain MLX operations, with whole logits in float32.

With z = hidden @ weight.T + bias, and the loss of a row and its gradient dz as in the room cross_entropy::

    dhidden = dz @ weight        dweight = dz.T @ hidden        dbias = dz.sum(0)
"""

from forge_mlx.kernels._common.checks import check_axes, check_floating, check_shape, given
from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels.cross_entropy.options import (
    IGNORE_INDEX,
    Options,
    Reduction,
    check_options,
    check_reduction,
    check_targets,
)
from forge_mlx.kernels.cross_entropy.reduction import reduce_losses
from forge_mlx.kernels.cross_entropy.reference import IGNORED, row_gradients, row_losses, target_codes
import mlx.core as mx

_OP = "linear_cross_entropy"


def check_arguments(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    bias: mx.array | None,
    weights: mx.array | None,
    options: Options,
    reduction: str,
    chunk: int | None,
) -> None:
    """Raise what `linear_cross_entropy` raises for its arguments.

    Args:
        hidden: `[..., C]`.
        weight: `[V, C]`.
        targets: `[...]`.
        bias: `[V]` or None.
        weights: `[...]` or None.
        options: The options of a row's loss.
        reduction: "mean", "sum" or "none".
        chunk: Rows at once, or None.

    Raises:
        ValueError: Shapes that do not fit, dtypes of the wrong kind, options that make no loss, no rows in weight, a
            chunk that is not a number of rows.
    """
    check_floating(_OP, hidden=hidden, weight=weight, **given(bias=bias))
    check_axes(_OP, 1, hidden=hidden)
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"[{_OP}] weight must have the shape [V, C], V at least 1 and C the last axis of hidden, "
            f"{hidden.shape[-1]}, but got {weight.shape}."
        )
    if bias is not None:
        check_shape(_OP, "bias", bias, weight.shape[:1], "the first axis of weight")
    check_targets(_OP, "hidden", hidden.shape, targets, weights)
    check_options(_OP, options)
    check_reduction(_OP, reduction)
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"[{_OP}] chunk must be a number of rows, 1 or more, or None but got {chunk!r}.")


def logits(hidden: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """hidden @ weight.T + bias in float32.

    Args:
        hidden: `[N, C]`.
        weight: `[V, C]`.
        bias: `[V]` or None.

    Returns:
        `[N, V]`.
    """
    z = hidden.astype(mx.float32) @ weight.astype(mx.float32).T
    return z if bias is None else z + bias.astype(mx.float32)


def losses(hidden: mx.array, weight: mx.array, bias: mx.array | None, targets: mx.array, options: Options) -> mx.array:
    """The loss of each row.

    Args:
        hidden: `[N, C]`.
        weight: `[V, C]`.
        bias: `[V]` or None.
        targets: `[N]`, integers.
        options: The options.

    Returns:
        float32 `[N]`: 0 where the target is ignored, NaN where there is no such token.
    """
    return row_losses(logits(hidden, weight, bias), targets, options)[0]


def backward(
    hidden: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    targets: mx.array,
    dloss: mx.array,
    options: Options,
) -> Arrays:
    """The gradients of `losses`.

    Args:
        hidden: `[N, C]`.
        weight: `[V, C]`.
        bias: `[V]` or None.
        targets: `[N]`, integers.
        dloss: `[N]`, cotangent of the losses.
        options: The options.

    Returns:
        dhidden, dweight and, with a bias, dbias, each in the dtype of what it is the gradient of.
    """
    z = logits(hidden, weight, bias)
    lse = row_losses(z, targets, options)[1]
    dz = row_gradients(z, targets, lse, dloss, mx.zeros_like(lse), options)
    dhidden = (dz @ weight.astype(mx.float32)).astype(hidden.dtype)
    dweight = (dz.T @ hidden.astype(mx.float32)).astype(weight.dtype)
    return (dhidden, dweight) if bias is None else (dhidden, dweight, mx.sum(dz, axis=0).astype(bias.dtype))


def linear_cross_entropy(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    *,
    bias: mx.array | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weights: mx.array | None = None,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> mx.array:
    """cross_entropy(hidden @ weight.T + bias), as `forge_mlx.kernels.linear_cross_entropy` but for `impl`.

    Args:
        hidden: `[..., C]`.
        weight: `[V, C]`.
        targets: `[...]`.
        bias: `[V]` or None.
        ignore_index: Targets of this value count nowhere.
        label_smoothing: The share of the loss that all tokens have alike.
        softcap: The largest magnitude that the logits are brought under; None: any.
        z_loss: Factor of the squared logsumexp.
        weights: `[...]` or None.
        reduction: "mean", "sum" or "none".
        chunk: Checked only: the logits are whole here.

    Returns:
        float32, a scalar or `[...]`.

    Raises:
        ValueError: As `check_arguments`.
    """
    options = Options(ignore_index, label_smoothing, softcap, z_loss)
    check_arguments(hidden, weight, targets, bias, weights, options, reduction, chunk)
    if targets.size == 0:
        return mx.zeros(targets.shape if reduction == "none" else ())
    rows = losses(hidden.reshape(targets.size, hidden.shape[-1]), weight, bias, targets.flatten(), options)
    kept = target_codes(targets, weight.shape[0], ignore_index) != IGNORED
    return reduce_losses(rows.reshape(targets.shape), kept, weights, reduction)
