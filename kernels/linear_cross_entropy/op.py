"""linear_cross_entropy: the loss of next-token logits that are computed, used and dropped chunk by chunk."""

from forge_mlx.kernels.cross_entropy.options import IGNORE_INDEX, Options, Reduction
from forge_mlx.kernels.cross_entropy.reduction import kept_weights, reduce_losses
from forge_mlx.kernels.cross_entropy.reference import IGNORED, target_codes
from forge_mlx.kernels.linear_cross_entropy.chunks import Setup
from forge_mlx.kernels.linear_cross_entropy.forward_gradients import chosen_variables
from forge_mlx.kernels.linear_cross_entropy.functions import row_losses, weighted_sum
from forge_mlx.kernels.linear_cross_entropy.reference import check_arguments
from forge_mlx.metal.engine import resolve
import mlx.core as mx


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
    impl: str | None = None,
) -> mx.array:
    """cross_entropy(hidden @ weight.T + bias, targets, ...) through chunks of rows: the logits never exist whole.

    In plain operations::

        logits = hidden @ weight.T + bias
        loss = cross_entropy(logits, targets, weights=weights, reduction=reduction, ...)

    with the options, and the results for ignored and unknown targets, of `cross_entropy`. Forward and backward hold
    the logits of one chunk, up to three arrays of that size; the gradient of weight is summed over the chunks in
    float32 and rounded once. A gradient that nothing asks for is not computed: with a frozen weight there are no
    products for it.

    The backward pass computes the logits again: 4 products in all. With "mean" or "sum" it can be 3: see
    `forge_mlx.kernels.linear_cross_entropy.gradients_in_forward`. Products are MLX's, in the dtype that it promotes
    hidden and weight to; on a CPU in float32, where 16-bit products are slow, so that a 16-bit weight exists in
    float32 too meanwhile.

    Differentiable in hidden, weight, bias and weights. Second derivatives are those of the plain operations, with the
    logits whole. `mx.vmap` over hidden and targets makes more rows; over weight or bias, or of a gradient of them, it
    goes through the mapped axis one by one.

    Args:
        hidden: `[..., C]`, float32, float16 or bfloat16.
        weight: `[V, C]`, any of these dtypes.
        targets: `[...]`, integers.
        bias: `[V]`, any of these dtypes; None for none.
        ignore_index: Targets of this value count nowhere: loss 0, gradient 0, in no denominator.
        label_smoothing: The share of the loss that all tokens have alike, 0 to 1.
        softcap: The largest magnitude that the logits are brought under; None: any.
        z_loss: Factor of the squared logsumexp, 0 or more.
        weights: `[...]`, float32, float16 or bfloat16: one factor for each target, differentiable; None for 1.
        reduction: "mean" divides by the number of kept targets, or by the sum of their weights, and is 0 when none is
            kept; "sum"; or "none" for `[...]`.
        chunk: Rows at once. None: as many as have 4 MiB of logits, on a GPU 256 MiB, but at least 256. Where the weight
            has no gradient: 4 MiB but at least 64, on a GPU 32 MiB but at least 256.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        float32, a scalar or `[...]`.

    Raises:
        ValueError: Shapes that do not fit, dtypes of the wrong kind, options that make no loss, a chunk below 1, an
            unknown reduction or engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    options = Options(ignore_index, label_smoothing, softcap, z_loss)
    check_arguments(hidden, weight, targets, bias, weights, options, reduction, chunk)
    engine = resolve("linear_cross_entropy", impl)
    if targets.size == 0:
        return mx.zeros(targets.shape if reduction == "none" else ())
    codes = mx.stop_gradient(target_codes(targets, weight.shape[0], ignore_index))
    kept = codes != IGNORED
    # What is ignored has the code IGNORED, whatever it was.
    options = Options(IGNORED, float(label_smoothing), softcap, float(z_loss))
    setup = Setup(engine.name, options, bias is not None, chunk)
    rows = (
        hidden.reshape(targets.size, hidden.shape[-1]),
        weight,
        mx.zeros((0,)) if bias is None else bias,
        codes.flatten(),
    )
    early = tuple(name for name in chosen_variables() if name != "bias" or bias is not None)
    if reduction == "none" or not early:
        return reduce_losses(row_losses(setup, *rows).reshape(targets.shape), kept, weights, reduction)
    counts = kept_weights(kept, weights)
    total = weighted_sum(setup, early, *rows, counts.flatten())
    if reduction == "sum":
        return total
    count = counts.sum()
    return mx.where(count == 0, 0.0, total / mx.where(count == 0, 1.0, count))
