"""Losses over pairs of answers to one prompt, one chosen and one rejected: DPO and ORPO."""

import math
from typing import Final, Literal, NamedTuple, TypeAlias

from forge_mlx.kernels._common.checks import check_axes, check_floating, check_shape, given, is_number
import mlx.core as mx

DPOVariant: TypeAlias = Literal["sigmoid", "hinge", "ipo"]

# The log-probability nearest to 0 that float32 tells from it: there p is 1 to rounding.
_CERTAIN: Final = -(2.0**-24)
_LN_2: Final = math.log(2)


class PreferenceMetrics(NamedTuple):
    """Float32 scalars, each a weighted sum over the pairs: divide by ``pairs`` after adding up batches.

    Attributes:
        chosen_reward: Of DPO beta (ln p - ln p_reference) of the chosen answers, of ORPO lambda ln p a token.
        rejected_reward: The same of the rejected answers.
        accuracy: 1 for each pair whose chosen answer has the greater reward.
        margin: chosen_reward - rejected_reward.
        pairs: 1 for each pair: the sum of the weights, so the number of pairs that count if these are 0 and 1.
    """

    chosen_reward: mx.array
    rejected_reward: mx.array
    accuracy: mx.array
    margin: mx.array
    pairs: mx.array


class PreferenceLoss(NamedTuple):
    """What a loss over pairs gives.

    Attributes:
        loss: Float32 scalar: the weighted sum over the pairs.
        metrics: Without a gradient.
    """

    loss: mx.array
    metrics: PreferenceMetrics


def dpo_loss(
    chosen: mx.array,
    rejected: mx.array,
    reference_chosen: mx.array,
    reference_rejected: mx.array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: DPOVariant = "sigmoid",
    weights: mx.array | None = None,
) -> PreferenceLoss:
    """Direct preference optimisation (Rafailov et al. 2023), summed over pairs.

    With h = (chosen - reference_chosen) - (rejected - reference_rejected), the loss of a pair is::

        sigmoid: -(1 - label_smoothing) ln sigma(beta h) - label_smoothing ln sigma(-beta h)
        hinge: max(0, 1 - beta h)    # SLiC (Zhao et al. 2023)
        ipo: (h - 1 / (2 beta))^2    # Azar et al. 2024

    Label smoothing is the share of pairs whose labels are taken to be swapped (conservative DPO).

    Args:
        chosen: `[P]`, ln p of the chosen answers, summed over their tokens, as `sequence_log_probs` gives it.
        rejected: `[P]`, of the rejected ones.
        reference_chosen: `[P]`, the same under the reference model, which gets no gradient.
        reference_rejected: `[P]`.
        beta: How strongly the model is held to the reference, greater than 0.
        label_smoothing: 0 or more and less than 0.5.
        variant: "sigmoid", "hinge" or "ipo".
        weights: float32 `[P]`, a factor of 0 or more for each pair, 0 for padding; None for 1.

    Returns:
        The summed loss and metrics.

    Raises:
        ValueError: For shapes that differ, or an option outside its range.
    """
    _check_pairs(
        "dpo_loss",
        chosen,
        weights,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    _check_positive("dpo_loss", beta=beta)
    if not (is_number(label_smoothing) and 0 <= label_smoothing < 0.5):
        raise ValueError(f"[dpo_loss] label_smoothing must be 0 or more and below 0.5 but got {label_smoothing!r}.")
    if label_smoothing and variant != "sigmoid":
        raise ValueError(
            f"[dpo_loss] label_smoothing must be 0 with the variant {variant} but got {label_smoothing}. Leave it "
            "out, or take the variant sigmoid."
        )
    chosen, rejected, reference_chosen, reference_rejected = _counting(
        weights, chosen, rejected, reference_chosen, reference_rejected
    )
    chosen_gain, rejected_gain = (
        each.astype(mx.float32) - mx.stop_gradient(reference.astype(mx.float32))
        for each, reference in ((chosen, reference_chosen), (rejected, reference_rejected))
    )
    gap = chosen_gain - rejected_gain
    if variant == "sigmoid":
        losses = _softplus(-beta * gap)
        if label_smoothing:
            losses = (1 - label_smoothing) * losses + label_smoothing * _softplus(beta * gap)
    elif variant == "hinge":
        losses = mx.maximum(0.0, 1 - beta * gap)
    elif variant == "ipo":
        losses = mx.square(gap - 1 / (2 * beta))
    else:
        raise ValueError(f"[dpo_loss] variant must be sigmoid, hinge or ipo but got {variant!r}.")
    return _summed(losses, beta * chosen_gain, beta * rejected_gain, weights)


def orpo_loss(
    chosen: mx.array,
    rejected: mx.array,
    chosen_tokens: mx.array,
    rejected_tokens: mx.array,
    *,
    orpo_lambda: float = 0.1,
    weights: mx.array | None = None,
) -> PreferenceLoss:
    """Odds ratio preference optimisation (Hong et al. 2024), summed over pairs; it needs no reference model.

    With ln p = chosen / chosen_tokens a token (and of the rejected likewise), the loss of a pair is::

        -ln p_chosen - orpo_lambda ln sigma(ln odds(p_chosen) - ln odds(p_rejected)),  odds(p) = p / (1 - p)

    Probabilities that are 1 in float32 count as 1 - 2^-24, and keep their gradient.

    Args:
        chosen: `[P]`, ln p of the chosen answers, summed over their tokens, as `sequence_log_probs` gives it.
        rejected: `[P]`, of the rejected ones.
        chosen_tokens: `[P]`, tokens of each chosen answer; 0 only where the pair does not count.
        rejected_tokens: `[P]`.
        orpo_lambda: Weight of the odds ratio, 0 or more.
        weights: float32 `[P]`, a factor of 0 or more for each pair, 0 for padding; None for 1.

    Returns:
        The summed loss and metrics.

    Raises:
        ValueError: For shapes that differ, or a lambda below 0.
    """
    _check_pairs(
        "orpo_loss",
        chosen,
        weights,
        rejected=rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    if not (is_number(orpo_lambda) and 0 <= orpo_lambda < math.inf):
        raise ValueError(f"[orpo_loss] orpo_lambda must be a number of 0 or more but got {orpo_lambda!r}.")
    chosen, rejected = _counting(weights, chosen, rejected)
    chosen_mean, rejected_mean = (
        each.astype(mx.float32) / mx.maximum(tokens, 1)
        for each, tokens in ((chosen, chosen_tokens), (rejected, rejected_tokens))
    )
    losses = -chosen_mean + orpo_lambda * _softplus(_log_odds(rejected_mean) - _log_odds(chosen_mean))
    return _summed(losses, orpo_lambda * chosen_mean, orpo_lambda * rejected_mean, weights)


def _softplus(x: mx.array) -> mx.array:
    """-ln sigma(-x) = ln(1 + e^x), of any x."""
    return mx.logaddexp(x, 0.0)


def _log_odds(log_p: mx.array) -> mx.array:
    """ln(p / (1 - p)) of ln p."""
    # Only the value is bounded: where the gradient of p is not quite 0 yet, that of the loss is not either.
    log_p = log_p + mx.stop_gradient(mx.minimum(log_p, _CERTAIN) - log_p)
    # ln(1 - e^x), of which each form is exact on one side of -ln 2. The other's argument is kept where it is finite:
    # its gradient is multiplied by 0.
    near = log_p > -_LN_2
    from_near = mx.log(-mx.expm1(mx.where(near, log_p, -_LN_2)))
    from_far = mx.log1p(-mx.exp(mx.where(near, -_LN_2, log_p)))
    return log_p - mx.where(near, from_near, from_far)


def _counting(weights: mx.array | None, *log_probs: mx.array) -> tuple[mx.array, ...]:
    """The same with 0 where a pair does not count, whatever stands there: 0 times the gradient of a NaN is NaN."""
    if weights is None:
        return log_probs
    return tuple(mx.where(weights == 0, mx.zeros((), each.dtype), each) for each in log_probs)


def _summed(
    losses: mx.array, chosen_reward: mx.array, rejected_reward: mx.array, weights: mx.array | None
) -> PreferenceLoss:
    factor = mx.ones(losses.shape) if weights is None else weights.astype(mx.float32)

    def total(each: mx.array) -> mx.array:
        return (factor * each).sum()

    chosen_reward, rejected_reward = mx.stop_gradient(chosen_reward), mx.stop_gradient(rejected_reward)
    metrics = PreferenceMetrics(
        total(chosen_reward),
        total(rejected_reward),
        total((chosen_reward > rejected_reward).astype(mx.float32)),
        total(chosen_reward - rejected_reward),
        mx.stop_gradient(factor.sum()),
    )
    return PreferenceLoss(total(losses), metrics)


def _check_pairs(op: str, chosen: mx.array, weights: mx.array | None, **others: mx.array) -> None:
    """Raise unless all are numbers for the same pairs."""
    check_floating(op, chosen=chosen, **given(weights=weights))
    check_axes(op, 1, chosen=chosen)
    for name, array in {**others, **given(weights=weights)}.items():
        check_shape(op, name, array, chosen.shape, "the shape of chosen")


def _check_positive(op: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not (is_number(value) and 0 < value < math.inf):
            raise ValueError(f"[{op}] {name} must be a number greater than 0 but got {value!r}.")
