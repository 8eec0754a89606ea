"""Training on pairs of answers: the objective."""

from collections.abc import Mapping
from typing import Final

from forge_mlx.data.batch import Batch
from forge_mlx.data.preference_rows import PreferenceRows
from forge_mlx.nn.log_probs import sequence_log_probs
from forge_mlx.nn.preference import PreferenceLoss, dpo_loss, orpo_loss
from forge_mlx.train.objective import Arrays, Measures, padding_arguments
from forge_mlx.train.preference_config import PreferenceConfig
import mlx.core as mx
import mlx.nn as nn

# A pair is two rows, the chosen answer's first.
_PAIR: Final = PreferenceRows.group_size


class PairPreference:
    """DPO or ORPO, summed over pairs.

    Args:
        config: which loss, and its dials; None: all defaults.
    """

    unit = "pair"

    def __init__(self, config: PreferenceConfig | None) -> None:
        self._config = config or PreferenceConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model that training starts from."""
        return self._config.loss == "dpo"

    def __call__(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, Measures]:
        """The summed loss of a batch's pairs, and the sums of rewards, margin and accuracy over them.

        Args:
            model: has `hidden` and `head_weight`.
            arrays: of a batch of pairs; with `needs_reference` with the reference's log-probabilities.
        """
        inputs, targets, weights, segment_ids, positions, reference = arrays
        assert inputs is not None
        assert targets is not None
        assert weights is not None
        padding = padding_arguments(model, segment_ids, positions)
        sums = sequence_log_probs(model, inputs, targets, weights, **padding)
        counts = (weights > 0).sum(axis=-1)
        pairs = (counts[::_PAIR] > 0).astype(mx.float32)
        found = self._loss(sums, counts, reference, pairs)
        metrics = found.metrics
        return found.loss, {
            "chosen_reward": metrics.chosen_reward,
            "rejected_reward": metrics.rejected_reward,
            "accuracy": metrics.accuracy,
        }

    def _loss(self, sums: mx.array, counts: mx.array, reference: mx.array | None, pairs: mx.array) -> PreferenceLoss:
        config = self._config
        chosen, rejected = sums[::_PAIR], sums[1::_PAIR]
        if config.loss == "orpo":
            return orpo_loss(
                chosen, rejected, counts[::_PAIR], counts[1::_PAIR], orpo_lambda=config.orpo_lambda, weights=pairs
            )
        assert reference is not None
        return dpo_loss(
            chosen,
            rejected,
            reference[::_PAIR],
            reference[1::_PAIR],
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            variant=config.variant,
            weights=pairs,
        )

    def count(self, batch: Batch) -> int:
        """The pairs of a batch, rows of padding left out."""
        assert batch.weights is not None
        return int((batch.weights[::_PAIR] > 0).any(axis=-1).sum())

    def means(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Mean rewards of chosen and rejected answers, their difference, and how often the chosen one's is greater."""
        means = {name: value / count for name, value in sums.items()}
        return means | {"margin": means["chosen_reward"] - means["rejected_reward"]}
