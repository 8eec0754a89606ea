"""Log-probabilities of targets under a decoder, without its logits ever being whole."""

from typing import Protocol, runtime_checkable

from forge_mlx.kernels._common.checks import check_arrays, check_integers, check_shape, given
from forge_mlx.kernels.linear_cross_entropy import linear_cross_entropy
import mlx.core as mx


class _Config(Protocol):
    @property
    def logit_softcap(self) -> float | None: ...


@runtime_checkable
class HasHead(Protocol):
    """A model whose logits are softcap(hidden(tokens) @ head_weight.T).

    A model whose ``head_weight`` is made from a parameter, as a fake-quantised one, also has ``head_name``: the name of
    the module whose ``weight`` that is.
    """

    @property
    def config(self) -> _Config:
        """Says how logits are bounded."""

    def hidden(
        self, tokens: mx.array, *, segment_ids: mx.array | None = None, positions: mx.array | None = None
    ) -> mx.array:
        """Map ``[B, T]`` to ``[B, T, C]``."""

    @property
    def head_weight(self) -> mx.array:
        """``[V, C]``."""


def target_log_probs(
    model: HasHead,
    inputs: mx.array,
    targets: mx.array,
    *,
    segment_ids: mx.array | None = None,
    positions: mx.array | None = None,
) -> mx.array:
    """ln p(target | inputs up to its position), for each position.

    The logits are computed and dropped chunk by chunk, and once more in the backward pass.

    Args:
        model: The decoder.
        inputs: Integers `[B, T]`.
        targets: Integers `[B, T]` in [0, V): the token behind each input.
        segment_ids: As the model takes them.
        positions: As the model takes them.

    Returns:
        float32 `[B, T]`.

    Raises:
        ValueError: When inputs and targets are no integers of one shape.
    """
    check_arrays("target_log_probs", inputs=inputs, targets=targets)
    check_integers("target_log_probs", inputs=inputs, targets=targets)
    check_shape("target_log_probs", "targets", targets, inputs.shape, "the shape of inputs")
    hidden = model.hidden(inputs, **given(segment_ids=segment_ids, positions=positions))
    return -linear_cross_entropy(
        hidden, model.head_weight, targets, softcap=model.config.logit_softcap, reduction="none"
    )


def sequence_log_probs(
    model: HasHead,
    inputs: mx.array,
    targets: mx.array,
    weights: mx.array,
    *,
    segment_ids: mx.array | None = None,
    positions: mx.array | None = None,
) -> mx.array:
    """Sum over a row of weight ln p(target): the log-probability of what the weights mark.

    A position of weight 0 counts nothing, whatever stands there.

    Args:
        model: The decoder.
        inputs: Integers `[B, T]`.
        targets: Integers `[B, T]`.
        weights: float32 `[B, T]`: 1 where a target counts, 0 where it is prompt or padding.
        segment_ids: As the model takes them.
        positions: As the model takes them.

    Returns:
        float32 `[B]`.

    Raises:
        ValueError: As `target_log_probs`, or when weights have another shape.
    """
    check_arrays("sequence_log_probs", weights=weights)
    check_shape("sequence_log_probs", "weights", weights, inputs.shape, "the shape of inputs")
    found = target_log_probs(model, inputs, targets, segment_ids=segment_ids, positions=positions)
    return mx.where(weights == 0, 0.0, weights * found).sum(axis=-1)
