"""The run folder: its files, its lock, and whether a run may go on in it."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_mlx.train.checkpoint import Checkpoint, CheckpointError, list_checkpoints, load_checkpoint
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.load import dump_config, load_config

# A checkpoint means something else when one of these changes; all other keys may change between two starts.
_FIXED_KEYS = (
    "model",
    "data",
    "run.seed",
    "train.batch_size",
    "train.seq_len",
    "train.accumulate",
    "optim.name",
)
_IGNORED_KEYS = ("run.dir", "run.resume")


class RunFolderError(ValueError):
    """The run folder cannot be used as the config asks."""


class RunFolder:
    """Names of the files of one run.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"
        self.tokenizer_file = path / "tokenizer.model"

    @property
    def started(self) -> bool:
        """Whether a run wrote its config here."""
        return self.config_file.is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second trainer in it gets an error."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise RunFolderError(
                    f"{self.path}: process {file.read().strip() or 'unknown'} is training here. Wait for it, or "
                    "give this run another folder (run.dir=...)."
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def check_usable(self, config: TrainConfig) -> None:
        """Fail early where ``run.resume`` and the folder's contents do not fit together."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"run.dir must be a folder but {self.path} is a file.")
        if config.run.resume == "must" and not list_checkpoints(self.checkpoints):
            raise RunFolderError(f"run.resume is must, but {self.checkpoints} holds no checkpoint.")
        if not self.started and self.path.is_dir() and any(p.name != ".lock" for p in self.path.iterdir()):
            raise RunFolderError(
                f"run.dir must be new or the folder of a run, but {self.path} holds other files. Choose another."
            )

    def set_aside(self) -> Path | None:
        """Move the contents of an earlier run to a new numbered folder beside this one."""
        if not self.started:
            return None
        number = 1
        while (kept := self.path.with_name(f"{self.path.name}-before-{number}")).exists():
            number += 1
        kept.mkdir()
        for item in self.path.iterdir():
            if item.name != ".lock":
                shutil.move(item, kept / item.name)
        return kept

    def changed_keys(self, config: TrainConfig) -> list[str]:
        """Keys whose value differs from the one this folder's run was started with, as ``key: old -> new``.

        Raises:
            RunFolderError: one of them decides what the checkpoint means.
        """
        old, new = _flatten(load_config(self.config_file)), _flatten(config)
        changed = []
        for key in sorted(old.keys() | new.keys()):
            filled_in = new.get(key) in (None, "auto")
            if key in _IGNORED_KEYS or old.get(key) == new.get(key) or (filled_in and key in _RESOLVED_KEYS):
                continue
            change = f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
            if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED_KEYS):
                raise RunFolderError(
                    f"{self.path}: cannot go on with another {change}. Put the old value back, choose a new folder "
                    "(run.dir=...), or start anew (run.resume=never keeps the old run under another name)."
                )
            changed.append(change)
        return changed

    def latest(self, log: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; damaged ones are named and passed over.

        Raises:
            RunFolderError: there are checkpoints and none can be read.
        """
        paths = list_checkpoints(self.checkpoints)
        for path in reversed(paths):
            try:
                return load_checkpoint(path)
            except CheckpointError as error:
                log(f"{error} Trying the one before it.")
        if paths:
            raise RunFolderError(f"{self.checkpoints}: none of its {len(paths)} checkpoints can be read.")
        return None

    def write_config(self, config: TrainConfig) -> None:
        """Write the resolved config, through a temporary file."""
        temporary = self.config_file.with_suffix(".unfinished")
        dump_config(config, temporary)
        os.replace(temporary, self.config_file)


# The trainer replaces null or auto in these by what it chose and writes that down.
_RESOLVED_KEYS = ("model.vocab_size", "run.device", "run.dtype")


def _flatten(config: TrainConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    visit("", config.model_dump(mode="json"))
    return flat
