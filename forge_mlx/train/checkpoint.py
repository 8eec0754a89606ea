"""Checkpoints: all that a run needs to go on, written so that a crash at any moment leaves the last one whole."""

from contextlib import suppress
from dataclasses import asdict, dataclass
import errno
import json
import os
from pathlib import Path
import re
import shutil
from typing import Any
import zlib

from forge_mlx.hub.safetensors_files import write_tensors
import mlx.core as mx

FORMAT = 1
UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step-(\d{8,})")
_ARRAY_FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read."""


class CheckpointFormatError(CheckpointError):
    """A checkpoint that is whole, but written by a version of forge-mlx with another format."""


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds beside arrays.

    There is no random state: every step seeds MLX's generator from the run's seed and its own number.

    Attributes:
        step: updates done.
        tokens: target tokens seen.
        seconds: time spent in the training loop so far.
        data: the batch stream's position.
        window: sums since the last training record.
        base: fingerprint of the weights that training went on from; None: of a new model, or an older checkpoint.
    """

    step: int
    tokens: int
    seconds: float
    data: dict[str, Any]
    window: dict[str, Any]
    base: str | None = None


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
    """Write ``folder/step-00000042`` and remove all but the newest ``keep`` checkpoints up to this step.

    The files go into a temporary folder, are flushed to the disk, and the folder is renamed: a reader sees a
    whole checkpoint or none. Older ones are removed only after that.

    Returns:
        the checkpoint's folder.

    Raises:
        OSError: it could not be written; the earlier checkpoints are as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    target = folder / f"step-{state.step:08d}"
    temporary = folder / f"{UNFINISHED}{target.name}"
    temporary.mkdir()
    try:
        for name, arrays in zip(_ARRAY_FILES, (weights, optimizer), strict=True):
            write_tensors(temporary / name, arrays)
        sums = {name: _size_and_sum(temporary / name) for name in _ARRAY_FILES}
        content = {"format": FORMAT, "files": sums, "state": asdict(state)}
        (temporary / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        install_folder(temporary, target)
    except BaseException:
        # What is half written takes the room that another try needs.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    remove_old(folder, state.step, keep)
    return target


def install_folder(temporary: Path, target: Path) -> None:
    """Give a finished folder its name, durably; what had the name before is removed after that.

    Raises:
        OSError: it could not be flushed or renamed.
    """
    for file in temporary.iterdir():
        _flush(file)
    _flush(temporary)
    aside = target.with_name(f"{UNFINISHED}old-{target.name}")
    if target.exists():
        # A folder cannot be renamed onto one that is not empty.
        os.rename(target, aside)
    os.rename(temporary, target)
    _flush(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left half written or half removed; the folder need not exist."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to that of ``step``, which must be whole."""
    older = [path for path in list_checkpoints(folder) if step_of(path) < step]
    for path in older[: max(0, len(older) - (keep - 1))]:
        # The newest is whole: that an old one cannot be removed must not end the run.
        with suppress(OSError):
            _remove(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointFormatError: another version of forge-mlx wrote it.
        CheckpointError: a file is missing, damaged or unreadable.
    """
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointFormatError(
                f"{path}: format must be {FORMAT} but got {content['format']!r}: another version of forge-mlx wrote "
                "this checkpoint. Go on with that version, or start anew (run.resume=never keeps this run)."
            )
        arrays: list[dict[str, mx.array]] = []
        for name in _ARRAY_FILES:
            if _size_and_sum(path / name) != content["files"][name]:
                raise CheckpointError(f"{path}: damaged: {name} is not the file that was written.")
            loaded = mx.load(str(path / name))
            assert isinstance(loaded, dict)
            arrays.append(loaded)
        mx.eval(arrays)
        weights, optimizer = arrays
        return Checkpoint(path, weights, optimizer, RunState(**content["state"]))
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def _remove(checkpoint: Path) -> None:
    # Under another name first: a crash in between must not leave half of it under its own.
    doomed = checkpoint.with_name(f"{UNFINISHED}old-{checkpoint.name}")
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed)


def _size_and_sum(file: Path) -> dict[str, int]:
    """The length of a file and its CRC-32."""
    size = crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return {"bytes": size, "crc32": crc}


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder, and there is nothing else to be done.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
