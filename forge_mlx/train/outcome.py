"""How a run ends: with an outcome, or with the reason why it stopped."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
import signal
from typing import Any

from forge_mlx.train.config import TrainConfig
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.metrics import read_metrics
from forge_mlx.train.reached import last_step, logged_rows


class TrainingStopped(RuntimeError):
    """The run ended before its last step; the message says why and what is on the disk."""


class NonFiniteLoss(TrainingStopped):
    """The loss, its gradient or a weight is no longer a number."""


class Interrupted(TrainingStopped):
    """Ctrl-C, SIGTERM or a closed terminal. ``signal`` is the signal."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.signal = number


@dataclass(frozen=True)
class Outcome:
    """What a finished run reached.

    Attributes:
        loss: validation loss in nats a token, or the preference loss a pair.
        bits_per_byte: the same in bits a byte of text, which does not depend on the tokenizer; None of pairs.
        accuracy: share of the pairs whose chosen answer is preferred; None of texts.
        prompt: what the sample continues.
        sample: a text by the model, without its prompt.
        folder: the run's folder.
        in_chat: whether all examples were in the chat template.
    """

    loss: float
    bits_per_byte: float | None
    accuracy: float | None
    prompt: str
    sample: str
    folder: Path
    in_chat: bool = False


def finished_outcome(folder: RunFolder, config: TrainConfig, log: Callable[[str], None]) -> Outcome | None:
    """The outcome of a run that has already reached the last step of ``config``, or None.

    Args:
        folder: of a run that was started.
        config: of this start.
        log: receives a line about records that cannot be read.
    """
    if not folder.final.is_dir():
        return None
    records = read_metrics(folder.metrics_file, log)
    evals = [r for r in records if r["kind"] == "eval" and r.get("final")]
    samples = [r for r in records if r["kind"] == "sample"]
    end = last_step(config, logged_rows(records))
    if not evals or not samples or end is None or evals[-1]["step"] < end:
        return None
    last = evals[-1]
    # Of several prompts the first, as when the run ended.
    sample = next(r for r in samples if r["step"] == samples[-1]["step"])
    data: dict[str, Any] = next((r["corpus"] for r in reversed(records) if r["kind"] == "setup"), {})
    return Outcome(
        last["loss"],
        last.get("bits_per_byte"),
        last.get("accuracy"),
        sample["prompt"],
        sample["text"],
        folder.path,
        data.get("in_chat", False),
    )
