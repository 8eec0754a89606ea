"""Training on pairs of answers: the objective, and the log-probabilities of the reference model."""

from collections.abc import Mapping

from forge_mlx.data.batch import Batch
from forge_mlx.data.preference_rows import PreferenceRows
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.log_probs import sequence_log_probs
from forge_mlx.nn.preference import PreferenceLoss, dpo_loss, orpo_loss
from forge_mlx.train.objective import Arrays, Measures
from forge_mlx.train.preference_config import PreferenceConfig
from forge_mlx.train.step import make_evaluator
import mlx.core as mx
import mlx.nn as nn
import numpy as np

# A pair is two rows, the chosen answer's first.
_PAIR = 2


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
        inputs, targets, weights, _, _, reference = arrays
        assert inputs is not None
        assert targets is not None
        assert weights is not None
        sums = sequence_log_probs(model, inputs, targets, weights)
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


class _RowLogProbs:
    """Measures the log-probability of each row's targets that count; there is no loss."""

    unit = "row"

    def __call__(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, Measures]:
        inputs, targets, weights, *_ = arrays
        assert inputs is not None
        assert targets is not None
        assert weights is not None
        return mx.array(0.0), {"log_probs": sequence_log_probs(model, inputs, targets, weights)}

    def count(self, batch: Batch) -> int:
        return len(batch.inputs)

    def means(self, _sums: Mapping[str, float], _count: int) -> dict[str, float]:
        return {}


def with_reference(rows: PreferenceRows, model: GPT, dtype: mx.Dtype, batch_size: int) -> PreferenceRows:
    """The same pairs with their log-probabilities under a model as it is now.

    Args:
        rows: the pairs.
        model: the reference.
        dtype: of the forward pass.
        batch_size: pairs in a forward pass.
    """
    evaluate = make_evaluator(model, dtype, _RowLogProbs())
    params = model.trainable_parameters()
    found = []
    for start in range(0, rows.num_rows, batch_size):
        numbers = np.arange(start, min(start + batch_size, rows.num_rows))
        _, measures = evaluate(params, rows.batch(numbers).filled_up(_PAIR * batch_size))
        found.append(np.array(measures["log_probs"])[: _PAIR * len(numbers)])
    values = np.concatenate(found)
    return rows.with_reference(values[::_PAIR], values[1::_PAIR])
