"""Which of a model's arrays a checkpoint of a run holds, and how they are put back."""

from collections.abc import Mapping

from forge_mlx.models.gpt import GPT
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.train.config import TrainConfig
import mlx.core as mx


def kept_weights(config: TrainConfig, model: GPT) -> dict[str, mx.array]:
    """What a checkpoint holds: all parameters, or with adapters these alone, as the base has its own files.

    Args:
        config: of the run.
        model: what is trained.
    """
    return dict(named_arrays(model.parameters() if config.adapter is None else model.trainable_parameters()))


def put_back(config: TrainConfig, model: GPT, weights: Mapping[str, mx.array]) -> None:
    """Put into a model what `kept_weights` gave.

    Args:
        config: of the run.
        model: as training begins; changed in place.
        weights: of a checkpoint.

    Raises:
        ValueError: names or shapes differ from those of the model.
    """
    own = kept_weights(config, model)
    if missing := sorted(own.keys() - weights.keys()):
        raise ValueError(f"its weights lack {', '.join(missing[:3])}, which the model has.")
    if extra := sorted(weights.keys() - own.keys()):
        raise ValueError(f"its weights have {', '.join(extra[:3])}, which the model has not.")
    for name, array in weights.items():
        if array.shape != own[name].shape:
            raise ValueError(f"{name} must have the shape {own[name].shape} but has {array.shape}.")
    model.load_weights(list(weights.items()), strict=False)
