"""Checkpoints: all that a run needs to go on, written so that a crash at any moment leaves the last one whole."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

FORMAT = 1
_PREFIX = "step-"
_TEMPORARY = ".unfinished-"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not belong to this run."""


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds beside arrays.

    There is no random state: every step seeds MLX's generator from the run's seed and its own number.

    Attributes:
        step: updates done.
        tokens: target tokens seen.
        seconds: time spent in the training loop so far.
        data: the batch stream's position.
        resumes: how often the run was continued.
    """

    step: int
    tokens: int
    seconds: float
    data: dict[str, Any]
    resumes: int = 0
    format: int = FORMAT


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back."""

    path: Path
    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    state: RunState


def save_checkpoint(
    folder: Path,
    weights: dict[str, mx.array],
    optimizer: dict[str, mx.array],
    state: RunState,
    keep: int,
) -> Path:
    """Write ``folder/step-00000042`` and remove all but the newest ``keep`` checkpoints.

    The files go into a temporary folder, are flushed to the disk, and the folder is renamed: a reader sees a
    whole checkpoint or none. Older ones are removed only after that.

    Returns:
        the checkpoint's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{_PREFIX}{state.step:08d}"
    temporary, target = folder / f"{_TEMPORARY}{name}", folder / name
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    mx.save_safetensors(str(temporary / "model.safetensors"), weights)
    mx.save_safetensors(str(temporary / "optimizer.safetensors"), optimizer)
    (temporary / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    for file in temporary.iterdir():
        _flush(file)
    replace_folder(temporary, target)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def replace_folder(temporary: Path, target: Path) -> None:
    """Put a finished folder in its place, durably; an older one of that name is replaced."""
    if target.exists():
        # A folder cannot be renamed onto one that is not empty, so for a moment the name does not exist; a
        # crash then costs this checkpoint, which the run makes again from the one before.
        shutil.rmtree(target)
    os.replace(temporary, target)
    _flush(target.parent)


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(_PREFIX) and path.is_dir())


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: a file is missing, damaged or of another format.
    """
    try:
        fields = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if fields.get("format") != FORMAT:
            raise CheckpointError(f"{path}: format must be {FORMAT} but got {fields.get('format')}.")
        weights = mx.load(str(path / "model.safetensors"))
        optimizer = mx.load(str(path / "optimizer.safetensors"))
        assert isinstance(weights, dict)
        assert isinstance(optimizer, dict)
        mx.eval(weights, optimizer)
        return Checkpoint(path, weights, optimizer, RunState(**fields))
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged: {error}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
