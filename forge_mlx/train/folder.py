"""The run folder: its files, its lock, and whether a run may go on in it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
import fcntl
import os
from pathlib import Path

from forge_mlx.train.checkpoint import (
    UNFINISHED,
    Checkpoint,
    CheckpointError,
    CheckpointFormatError,
    list_checkpoints,
    load_checkpoint,
    remove_unfinished,
)
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.config_changes import anchored, compare
from forge_mlx.train.load import dump_config, load_config
from forge_mlx.train.metrics import replace_file


class RunFolderError(ValueError):
    """The run folder cannot be used as the config asks."""


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that cannot be read, and why."""

    path: Path
    reason: str

    def set_aside(self) -> str:
        """Rename it to the first free ``damaged-NAME``, since the run comes by its step again; a line about it."""
        kept = wanted = self.path.with_name(f"damaged-{self.path.name}")
        number = 2
        while kept.exists():
            kept = wanted.with_name(f"{wanted.name}-{number}")
            number += 1
        self.path.rename(kept)
        return f"{self.reason.rstrip('.')}. It is called {kept.name} now, and the checkpoint before it is used."


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
        self.template_file = path / "chat_template.jinja"
        self.reference_file = path / "reference.safetensors"
        self._lock_file = path / ".lock"

    @property
    def started(self) -> bool:
        """Whether a run began here: its log and then its config were written."""
        return self.metrics_file.is_file() and self.config_file.is_file()

    @property
    def has_results(self) -> bool:
        """Whether a run left a checkpoint or a final model here, which other settings may not fit."""
        return self.started and (self.final.is_dir() or bool(list_checkpoints(self.checkpoints)))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, made if need be; where no run begins inside the block, it is left as it was found.

        Raises:
            RunFolderError: another trainer holds it, or it cannot be written.
        """
        self._require_no_file()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._lock_file.open("a+")
        except OSError as error:
            raise RunFolderError(f"run.dir must be a folder that can be written: {error}.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise self._in_use(file.read().strip()) from None
            except OSError as error:
                raise RunFolderError(
                    f"{self.path}: the folder cannot be locked: {error}. Choose one on a local disk."
                ) from error
            # Between open and flock another trainer may have moved the folder away, and the lock with it.
            if not (self._lock_file.exists() and os.path.samestat(os.fstat(file.fileno()), self._lock_file.stat())):
                raise self._in_use("")
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                self._leave_as_found()

    def check_usable(self, config: TrainConfig) -> None:
        """Fail early where ``run.resume`` and the folder's contents do not fit together.

        Raises:
            RunFolderError: there is no checkpoint to go on from, or what is there is not the folder of a run.
        """
        self._require_no_file()
        if config.run.resume == "must" and not list_checkpoints(self.checkpoints):
            raise RunFolderError(f"run.resume is must, but {self.checkpoints} holds no checkpoint.")
        if self.started or not self.path.is_dir():
            return
        # A run that was killed while it began leaves an empty log; hidden files may be the file manager's.
        others = [p.name for p in self.path.iterdir() if not p.name.startswith(".") and p != self.metrics_file]
        if list_checkpoints(self.checkpoints):
            missing = " and ".join(f.name for f in (self.config_file, self.metrics_file) if not f.is_file())
            raise RunFolderError(
                f"{self.path}: holds checkpoints, but {missing} is missing, which says what run they are of. Put it "
                "back (a metrics.jsonl may be empty), or choose another run.dir."
            )
        if others:
            raise RunFolderError(
                f"run.dir must be new or the folder of a run, but {self.path} holds other files, such as "
                f"{min(others)}. Choose another folder."
            )

    def _require_no_file(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"run.dir must be a folder but {self.path} is a file.")

    def require_way_on(self) -> None:
        """Refuse to begin anew over a final model whose checkpoints are gone.

        Raises:
            RunFolderError: as said.
        """
        if self.final.is_dir() and not list_checkpoints(self.checkpoints):
            raise RunFolderError(
                f"{self.path}: holds a final model but no checkpoint to go on from. Choose another run.dir, or start "
                "anew (run.resume=never keeps this run under another name)."
            )

    def set_aside(self) -> Path | None:
        """Rename the folder of an earlier run to the first free ``NAME-before-N`` beside it.

        Its lock goes with it: the folder must be locked anew afterwards.
        """
        if not self.started:
            return None
        # Resolved: of a link to a folder elsewhere the folder is renamed, and the link stays.
        path = self.path.resolve()
        number = 1
        while (kept := path.with_name(f"{path.name}-before-{number}")).exists():
            number += 1
        path.rename(kept)
        path.mkdir()
        return kept

    def changed_keys(self, config: TrainConfig) -> list[str]:
        """Keys whose value differs from the one this folder's run last had, as ``key: old -> new``.

        Args:
            config: the config of this start; values that the trainer is still to fill in are not compared.

        Raises:
            RunFolderError: some of them decide what the checkpoint means.
        """
        changed, refused = compare(load_config(self.config_file), config)
        if refused:
            raise RunFolderError(
                f"{self.path}: this run cannot go on with other values of these keys (old -> new):\n  "
                + "\n  ".join(refused)
                + "\nPut the old values back, choose a new folder (run.dir=...), or start anew (run.resume=never "
                "keeps the old run under another name)."
            )
        return changed

    def latest(self) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
        """The newest checkpoint that can be read (None without any), and the damaged ones that are newer.

        Raises:
            CheckpointFormatError: the newest that is not damaged is of another version.
            RunFolderError: there are checkpoints and none can be read.
        """
        damaged: list[DamagedCheckpoint] = []
        for path in reversed(list_checkpoints(self.checkpoints)):
            try:
                return load_checkpoint(path), damaged
            except CheckpointFormatError:
                raise
            except CheckpointError as error:
                damaged.append(DamagedCheckpoint(path, str(error)))
        if damaged:
            reasons = "".join(f"\n  {checkpoint.reason}" for checkpoint in damaged)
            raise RunFolderError(
                f"{self.checkpoints}: none of the {len(damaged)} checkpoints can be read:{reasons}\n"
                "Bring one back from a backup, or start anew (run.resume=never keeps this folder under another name)."
            )
        return None, []

    def remove_unfinished(self) -> None:
        """Remove what killed processes left half written; the folder must be locked."""
        for folder in (self.path, self.checkpoints):
            remove_unfinished(folder)

    def write_config(self, config: TrainConfig, note: str = "") -> None:
        """Write the resolved config, through a temporary file; what it says of resuming was for this start alone.

        Args:
            config: of this start.
            note: a line for people above it.
        """
        config = anchored(config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})}))
        temporary = self.path / f"{UNFINISHED}{self.config_file.name}"
        dump_config(config, temporary, note)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, self.config_file)

    def write_template(self, template: str | None) -> None:
        """Write the chat template that the run uses, for whoever opens it; None: there is none.

        Args:
            template: its Jinja source.
        """
        if template is None:
            self.template_file.unlink(missing_ok=True)
        else:
            replace_file(self.template_file, template.encode())

    def _in_use(self, process: str) -> RunFolderError:
        return RunFolderError(
            f"{self.path}: another process{f' ({process})' if process else ''} is training here. Wait for it, or give "
            "this run another folder (run.dir=...)."
        )

    def _leave_as_found(self) -> None:
        """Where no run began, take the lock's file away, and the folder if it is empty then."""
        if not self.started:
            with suppress(OSError):
                self._lock_file.unlink()
                self.path.rmdir()
