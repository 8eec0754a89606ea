"""A run's folder as its report reads it: ``config.yaml`` and the records of ``metrics.jsonl``."""

from collections.abc import Iterator
from dataclasses import dataclass, field
import math
from pathlib import Path
from typing import Any, TypeGuard

from forge_mlx.train.charts import Floats
from forge_mlx.train.metrics import Record, read_metrics
import numpy as np


@dataclass
class Run:
    """What a run's folder says."""

    folder: Path
    config: str
    records: list[Record]
    notices: list[str]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def of(self, kind: str) -> list[Record]:
        """The records of one kind, in the order they were written."""
        return [record for record in self.records if record["kind"] == kind]

    def series(self, kind: str, name: str) -> tuple[Floats, Floats]:
        """Steps and values of one field, float64 `[N]` each; what is not a finite number becomes NaN."""
        pairs = [(record["step"], record[name]) for record in self.of(kind) if name in record]
        values = np.array([value if is_finite(value) else math.nan for _, value in pairs], np.float64)
        return np.array([step for step, _ in pairs], np.float64), values

    def last(self, kind: str, name: str) -> Any:
        """The last value of one field; None when there is none."""
        return next((record[name] for record in reversed(self.of(kind)) if name in record), None)

    def fact(self, name: str) -> Any:
        """The setup fact of that name, looked up at any depth; None when there is none."""
        return next((value for path, value in flat(self.facts) if path[-1] == name), None)

    @property
    def qat(self) -> dict[str, Any]:
        """The setup's facts of quantisation-aware training; empty for a run without it."""
        facts = self.facts.get("qat")
        return facts if isinstance(facts, dict) else {}

    @property
    def deployed(self) -> dict[str, Any]:
        """What the last evaluation says of the converted model; empty when it says nothing."""
        evaluations = self.of("eval")
        found = evaluations[-1].get("deployed") if evaluations else None
        return found if isinstance(found, dict) else {}

    @property
    def last_step(self) -> int:
        """The latest step of any record, 0 in an empty log."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def finished(self) -> bool:
        """Whether the final evaluation was made and no training followed it."""
        evaluations = self.of("eval")
        return bool(evaluations and evaluations[-1].get("final")) and evaluations[-1]["step"] >= self.last_step


def load_run(run_dir: Path) -> Run:
    """Reads a run's folder.

    Raises:
        FileNotFoundError: When the folder or its metrics.jsonl is missing.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"[report] a run must be a folder that exists but got {str(run_dir)!r}.")
    log = run_dir / "metrics.jsonl"
    if not log.is_file():
        raise FileNotFoundError(
            f"[report] a run's folder must hold metrics.jsonl but {str(run_dir)!r} does not. "
            "Give the folder that a training run wrote."
        )
    config = run_dir / "config.yaml"
    text = config.read_text("utf-8", errors="replace") if config.is_file() else ""
    notices: list[str] = []
    run = Run(run_dir, text, read_metrics(log, notices.append), notices)
    for record in run.of("setup"):
        run.facts.update({key: value for key, value in record.items() if key not in ("kind", "step", "time")})
    return run


def flat(facts: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value of nested facts with the names that lead to it."""
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, key))
        else:
            yield (*path, key), value


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value of a record is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
