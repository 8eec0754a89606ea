"""The model as it is deployed: a copy of the trained one with the codes of its weights."""

from forge_mlx.data.batch import Batch
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import convert_qat, is_prepared, prepare_qat
from forge_mlx.nn.losses import cross_entropy
from forge_mlx.nn.module_copy import copied_modules
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.objective import batch_arrays
import mlx.core as mx


def deployed_model(config: TrainConfig, trained: GPT, dtype: mx.Dtype) -> GPT:
    """A converted copy of a trained model; the model itself, prepared or float, stays as it is.

    Args:
        config: of the run, with a ``qat`` section.
        trained: the model in training.
        dtype: of the forward pass in training: the codes are those of the weights that it saw.

    Raises:
        ValueError: the config has no ``qat`` section.
    """
    if config.qat is None:
        raise ValueError("[deployed_model] the config must have a section qat but has none. Save the model as it is.")
    copy = copied_modules(trained)
    if not is_prepared(copy):
        prepare_qat(copy, config.qat)
    convert_qat(copy, dtype)
    copy.eval()
    return copy


def summed_logits_loss(model: GPT, batch: Batch) -> float:
    """The sum over a batch's targets of ``-weight ln p(target)``, nats, through the model's own head.

    Args:
        model: in evaluation mode.
        batch: rows of tokens.
    """
    inputs, targets, weights, segment_ids, positions, *_ = batch_arrays(batch)
    assert inputs is not None
    assert targets is not None
    logits = model(inputs, segment_ids=segment_ids, positions=positions)
    return float(cross_entropy(logits, targets, weights=weights, reduction="sum"))
