"""The log-probability of each row under a model, in batches of few shapes."""

from collections.abc import Callable

from forge_mlx.evaluation.rows import Row, padded
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.log_probs import target_log_probs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def score(
    model: GPT, rows: list[Row], batch_size: int, progress: Callable[[int], None] = lambda _: None
) -> NDArray[np.float64]:
    """The sum of ln p(target) over the counted targets of each row, added up in float64.

    Args:
        model: in evaluation mode.
        rows: each no longer than the model's `max_seq_len`.
        batch_size: rows in a forward pass; the longest rows come first, so that what needs most memory does.
        progress: told how many rows each pass has scored.

    Returns:
        `[num_rows]`, in nats, in the order of the rows.

    Raises:
        ValueError: `batch_size` is below 1, or log-probabilities are not finite.
    """
    if batch_size < 1:
        raise ValueError(f"[evaluate] --batch-size must be at least 1 but got {batch_size}.")
    found = np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].inputs))
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        inputs, targets, counted = padded([rows[index] for index in numbers], model.config.max_seq_len)
        log_probs = np.array(target_log_probs(model, mx.array(inputs), mx.array(targets)))
        found[numbers] = log_probs.sum(axis=-1, where=counted, dtype=np.float64)
        progress(len(numbers))
    wrong = np.flatnonzero(~np.isfinite(found))
    if wrong.size:
        raise ValueError(
            f"[evaluate] log-probabilities must be finite but those of {wrong.size} of {len(rows)} rows are not. The "
            "weights may be damaged, or their dtype too narrow."
        )
    return found
