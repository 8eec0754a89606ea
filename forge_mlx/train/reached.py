"""How far the run of a folder is, and how long it must be to go on from there."""

from typing import Any

from forge_mlx._text import count
from forge_mlx.train.checkpoint import list_checkpoints, step_of
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.duration import least_epochs_beyond
from forge_mlx.train.folder import RunFolder, RunFolderError
from forge_mlx.train.metrics import Record, read_metrics


def reached_step(folder: RunFolder, records: list[Record]) -> int:
    """The step of a folder's newest checkpoint or of its final model, 0 without any.

    Args:
        folder: of a run.
        records: of its log.
    """
    steps = [step_of(path) for path in list_checkpoints(folder.checkpoints)[-1:]]
    return max([*steps, _final_step(records) if folder.final.is_dir() else 0])


def _final_step(records: list[Record]) -> int:
    """The step of the newest final model, 0 without any."""
    return max((record["step"] for record in records if record["kind"] == "eval" and record.get("final")), default=0)


def logged_rows(records: list[Record]) -> int | None:
    """Rows, or pairs, of an epoch as the last start of a run had them; None: its log does not say.

    Args:
        records: of its log.
    """
    packings: list[dict[str, Any]] = [r["packing"] for r in records if r["kind"] == "setup" and "packing" in r]
    return packings[-1]["rows"] if packings else None


def last_step(config: TrainConfig, num_rows: int | None) -> int | None:
    """Where a run ends, whose data were the same in all its starts; None: that is not known.

    Args:
        config: of this start.
        num_rows: rows, or pairs, of an epoch; None: not known.

    Raises:
        ValueError: a setting needs more steps than the epochs take.
    """
    if config.train.steps is not None:
        return config.train.steps
    return None if num_rows is None else config.total_steps(num_rows)


def way_on(folder: RunFolder, config: TrainConfig) -> str:
    """Where a run that has finished is, and what goes on: `` at step 48; train.epochs of at least 8.73 goes on``.

    One that went on from there and broke off has a newer checkpoint beside its final model.

    Args:
        folder: of the run.
        config: of this start.
    """
    records = read_metrics(folder.metrics_file, lambda _: None)
    finished, step = _final_step(records), reached_step(folder, records)
    newer = f", with a checkpoint of step {step:,}" if step > finished else ""
    return f" at step {finished:,}{newer}; {_longer(config, step, logged_rows(records))} goes on"


def require_not_past_end(folder: RunFolder, config: TrainConfig) -> None:
    """Refuse a length that the run has gone beyond: what it learned since cannot be taken back.

    Args:
        folder: of a run that was started.
        config: of this start.

    Raises:
        RunFolderError: as said.
        ValueError: a setting needs more steps than the epochs take.
    """
    records = read_metrics(folder.metrics_file, lambda _: None)
    step, num_rows = reached_step(folder, records), logged_rows(records)
    last = last_step(config, num_rows)
    if last is None or step <= last:
        return
    epochs = f", {step * config.train.rows_per_step / num_rows:.3g} epochs," if num_rows else ""
    raise RunFolderError(
        f"{folder.path}: this run is at step {step:,}{epochs} and past the {count(last, 'step')} asked for; "
        f"{_longer(config, step, num_rows)} goes on. Or choose a new folder (run.dir=...), or start anew "
        "(run.resume=never keeps the old run under another name)."
    )


def _longer(config: TrainConfig, step: int, num_rows: int | None) -> str:
    """The least length that has a step more."""
    if config.train.epochs is None:
        return f"train.steps of at least {step + 1}"
    if num_rows is None:
        return "a larger train.epochs"
    return f"train.epochs of at least {least_epochs_beyond(step, num_rows, config.train.rows_per_step):.12g}"
