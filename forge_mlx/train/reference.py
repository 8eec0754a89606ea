"""The log-probabilities of pairs of answers under the model that training starts from, computed once for a run."""

from collections.abc import Callable, Mapping
import hashlib
import json
import os
from pathlib import Path
from typing import Final, NamedTuple

from forge_mlx._text import count
from forge_mlx.data.batch import Batch
from forge_mlx.data.preference_rows import PreferenceRows
from forge_mlx.hub.safetensors_files import write_tensors
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.log_probs import sequence_log_probs
from forge_mlx.train.checkpoint import UNFINISHED
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.device import Placement
from forge_mlx.train.objective import Arrays, Measures, padding_arguments
from forge_mlx.train.pretrained_config import PretrainedConfig
from forge_mlx.train.step import make_evaluator
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

_PAIR: Final = PreferenceRows.group_size
_KEY = "key"
# Changes when the same model and pairs would give other numbers.
_VERSION = 1


class Reference(NamedTuple):
    """What a run compares with.

    Attributes:
        key: of all that it depends on.
        train: float32 `[pairs, 2]`, nats: the chosen answers' log-probabilities and the rejected ones'.
        valid: the same of the validation pairs.
        is_new: whether it was computed in this start.
    """

    key: str
    train: NDArray[np.float32]
    valid: NDArray[np.float32]
    is_new: bool

    def save(self, file: Path) -> None:
        """Write it where the next start finds it, unless it is there.

        Raises:
            OSError: it cannot be written.
        """
        if not self.is_new and file.is_file():
            return
        temporary = file.with_name(f"{UNFINISHED}{file.name}")
        arrays = {"train": mx.array(self.train), "valid": mx.array(self.valid)}
        write_tensors(temporary, arrays, {_KEY: self.key})
        os.replace(temporary, file)


def find_reference(
    config: TrainConfig,
    placement: Placement,
    model: GPT,
    rows: Mapping[str, PreferenceRows],
    base: str,
    file: Path,
    log: Callable[[str], None],
) -> Reference:
    """The reference of a run's pairs: that of an earlier start where it still holds, else computed.

    Args:
        config: of the run.
        placement: device and dtype.
        model: as it is before the first step.
        rows: the pairs, of `train` and `valid`.
        base: fingerprint of the checkpoint's weights.
        file: what an earlier start kept.
        log: takes a line for people.

    Raises:
        ValueError: a log-probability is not finite.
    """
    key = _key(config, placement, rows, base)
    pairs = count(sum(each.num_rows for each in rows.values()), "pair")
    kept = _kept(file, key, rows)
    if kept is not None:
        log(f"reference: the log-probabilities of {pairs} under the model before training are those in {file}")
        return kept
    log(f"reference: computing the log-probabilities of {pairs} under the model before training ...")
    size = config.train.batch_size
    found = {name: reference_log_probs(each, model, placement.dtype, size) for name, each in rows.items()}
    return Reference(key, found["train"], found["valid"], True)


def reference_log_probs(rows: PreferenceRows, model: GPT, dtype: mx.Dtype, batch_size: int) -> NDArray[np.float32]:
    """For each pair ln p of the chosen answer and of the rejected one under a model as it is now.

    Args:
        rows: the pairs.
        model: the reference.
        dtype: of the forward pass.
        batch_size: pairs in a forward pass.

    Returns:
        float32 `[pairs, 2]`, nats.
    """
    evaluate = make_evaluator(model, dtype, _RowLogProbs())
    params = model.trainable_parameters()
    found = []
    for start in range(0, rows.num_rows, batch_size):
        numbers = np.arange(start, min(start + batch_size, rows.num_rows))
        _, measures = evaluate(params, rows.batch(numbers).filled_up(_PAIR * batch_size))
        found.append(np.array(measures["log_probs"], np.float32)[: _PAIR * len(numbers)])
    return np.concatenate(found).reshape(-1, _PAIR)


class _RowLogProbs:
    """Measures the log-probability of each row's targets that count; there is no loss."""

    unit = "row"

    def __call__(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, Measures]:
        inputs, targets, weights, segment_ids, positions, _ = arrays
        assert inputs is not None
        assert targets is not None
        assert weights is not None
        padding = padding_arguments(model, segment_ids, positions)
        return mx.array(0.0), {"log_probs": sequence_log_probs(model, inputs, targets, weights, **padding)}

    def count(self, batch: Batch) -> int:
        return len(batch.inputs)

    def means(self, _sums: Mapping[str, float], _count: int) -> dict[str, float]:
        return {}


def _key(config: TrainConfig, placement: Placement, rows: Mapping[str, PreferenceRows], base: str) -> str:
    """Hash of the pairs, of the weights, of what is made of these, and of the dtype that they are computed in."""
    assert isinstance(config.model, PretrainedConfig)
    made = config.model.model_dump(include={"dequantize", "quantize"})
    pairs = {name: each.tokens.fingerprint for name, each in rows.items()}
    parts = [_VERSION, base, made, pairs, placement.dtype_name]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _kept(file: Path, key: str, rows: Mapping[str, PreferenceRows]) -> Reference | None:
    """What an earlier start computed; None where there is nothing, it is of something else, or damaged."""
    if not file.is_file():
        return None
    try:
        arrays, metadata = mx.load(str(file), format="safetensors", return_metadata=True)
        assert isinstance(arrays, dict)
        assert isinstance(metadata, dict)
        found = {name: np.array(arrays[name]) for name in rows}
    except (RuntimeError, ValueError, KeyError):
        return None
    fits = all(found[name].shape == (each.num_rows, _PAIR) for name, each in rows.items())
    return Reference(key, found["train"], found["valid"], False) if fits and metadata.get(_KEY) == key else None
