"""What the experiments share: runs of the trainer in folders of their own, and their numbers."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
import subprocess
import sys
from typing import Any

from forge_mlx.train.metrics import read_metrics

CONFIGS = Path(__file__).parents[2] / "models" / "configs"


@dataclass(frozen=True)
class Task:
    """One training run.

    Attributes:
        name: of its folder.
        config: a file of models/configs.
        overrides: ``section.key=value``.
    """

    name: str
    config: str
    overrides: tuple[str, ...]


def train_all(tasks: Sequence[Task], root: Path, jobs: int) -> dict[str, Path]:
    """Train what is not trained yet, some runs at a time, each in a process of its own. Returns folders by name.

    Raises:
        RuntimeError: a run failed; its output is in the message. The others keep what they reached.
    """
    root.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip([task.name for task in tasks], pool.map(lambda task: _train(task, root), tasks), strict=True))


def _train(task: Task, root: Path) -> Path:
    folder = root / task.name
    command = [sys.executable, "-m", "forge_mlx.train", str(CONFIGS / task.config), *task.overrides]
    result = subprocess.run([*command, f"run.dir={folder}"], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"[train_all] {task.name} failed:\n{result.stdout}{result.stderr}")
    print(f"{task.name}: validation loss {final_loss(folder):.4f}", flush=True)
    return folder


def final_loss(folder: Path) -> float:
    """The last validation loss of a run, nats a token."""
    found = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "eval"]
    return float(found[-1]["loss"])


def train_records(folder: Path) -> list[dict[str, Any]]:
    """The training records of a run."""
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation over seeds."""
    known = list(values)
    deviation = f" +- {stdev(known):.4f}" if len(known) > 1 else ""
    return f"{mean(known):.4f}{deviation}"
