"""The training run, top to bottom: ``train(config)``."""

from collections import deque
from pathlib import Path

from forge_mlx.data.prepare_examples import ExampleFacts
from forge_mlx.train.banner import log_device, log_model, log_path, setup_facts
from forge_mlx.train.checkpoint import remove_old
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.device import choose_placement, resolved
from forge_mlx.train.folder import RunFolder, RunFolderError
from forge_mlx.train.metrics import MetricsLog
from forge_mlx.train.outcome import Interrupted, NonFiniteLoss, Outcome, TrainingStopped, finished_outcome
from forge_mlx.train.progress import Progress
from forge_mlx.train.reached import require_not_past_end, way_on
from forge_mlx.train.records import (
    enter_phase,
    eval_line,
    evaluate_deployed,
    log_missing_samples,
    log_samples,
    log_window,
    phase_fields,
)
from forge_mlx.train.report import load_run, write_loss_plot, write_report
from forge_mlx.train.signals import StopRequested, StopSignals
from forge_mlx.train.trainer import Trainer
from forge_mlx.train.work import Log, begin_work
import mlx.core as mx

__all__ = ["Interrupted", "NonFiniteLoss", "Outcome", "TrainingStopped", "train"]


def train(config: TrainConfig, log: Log = print) -> Outcome:
    """Train a model as the config says, or go on with a run that was stopped.

    Args:
        config: the run.
        log: receives the lines for people that come before and after the progress display.

    Returns:
        what the finished run reached.

    Raises:
        ValueError: config, data and run folder do not fit together; nothing was changed in the folder.
        NonFiniteLoss: the loss or a weight is no longer a number; the last good checkpoint stays.
        Interrupted: a signal came; during training the state was saved first.
        TrainingStopped: the run's files cannot be written; the last checkpoint stays.
    """
    say = _until_nobody_reads(log)
    folder = RunFolder(config.run.dir)
    with StopSignals() as stop:
        try:
            return _start(config, folder, stop, say)
        except StopRequested as request:
            message = f"stopped by {request.signal.name} before training began; nothing is lost"
            raise Interrupted(message, request.signal) from None


def _start(config: TrainConfig, folder: RunFolder, stop: StopSignals, log: Log) -> Outcome:
    """Make the trainer and run it in its folder; a run that has finished trains no more."""
    placement = choose_placement(config.run)
    mx.set_default_device(placement.device)
    config = resolved(config, placement)
    anew = config.run.resume == "never"
    with folder.locked():
        folder.check_usable(config)
        # Where a start ended before its first checkpoint, out of memory for one, every key may change.
        changed = folder.changed_keys(config) if folder.has_results and not anew else []
        if folder.started and not anew and (outcome := finished_outcome(folder, config, log)):
            _say_finished(folder, config, changed, log)
            return outcome
        if not anew:
            folder.require_way_on()
            if folder.has_results:
                require_not_past_end(folder, config)
        log_device(placement, log)
        trainer = Trainer(begin_work(config, placement, log), placement, folder)
        log_path(trainer, log)
        if not anew:
            return _train_in_folder(trainer, changed, stop, log)
        if kept := folder.set_aside():
            log(f"the earlier run was moved to {kept}")
    with folder.locked():
        return _train_in_folder(trainer, [], stop, log)


def _train_in_folder(trainer: Trainer, changed: list[str], stop: StopSignals, log: Log) -> Outcome:
    """Restore, train, finish; whatever ends the run, the log and the report say so."""
    folder = trainer.folder
    notices = _restore(trainer, changed)
    for notice in notices:
        log(notice)
    log_model(trainer, log)
    mx.reset_peak_memory()
    try:
        folder.remove_unfinished()
        if trainer.saved_step is not None:
            # A start that was killed may have left one too many.
            remove_old(folder.checkpoints, trainer.saved_step, trainer.config.train.keep_checkpoints)
        with MetricsLog(folder.metrics_file, notify=log) as metrics:
            # A start that ended before its first checkpoint left samples, perhaps of another config.
            metrics.truncate_after(trainer.step, without="sample" if trainer.saved_step is None else None)
            folder.write_config(trainer.config, trainer.config.describe_epochs(trainer.rows.num_rows))
            _write_for_later(trainer)
            metrics.log("setup", trainer.step, time=trainer.seconds, **setup_facts(trainer))
            for notice in notices:
                metrics.log("event", trainer.step, time=trainer.seconds, message=notice)
            return _train_and_finish(trainer, metrics, stop, log)
    except OSError as error:
        raise TrainingStopped(f"the run's files could not be written: {error}. {_what_is_kept(trainer)}") from error
    finally:
        _write_pictures(folder.path, log)


def _write_for_later(trainer: Trainer) -> None:
    """What opening the run, or going on with it, needs beside a checkpoint."""
    work, folder = trainer.work, trainer.folder
    if work.source is None:
        work.tokenizer.save(folder.tokenizer_file)
    else:
        folder.write_template(work.source.tokenizer.chat_template)
    if work.reference is not None:
        work.reference.save(folder.reference_file)


def _train_and_finish(trainer: Trainer, metrics: MetricsLog, stop: StopSignals, log: Log) -> Outcome:
    """The loop and the end of a run; why it stopped early is logged."""
    loop = trainer.config.train
    try:
        if trainer.step < trainer.total_steps:
            with stop.deferred(), Progress(trainer.total_steps, trainer.step, log_every=loop.log_every) as bar:
                _run_loop(trainer, metrics, bar, stop)
        return _finish(trainer, metrics, log)
    except Interrupted as stopped:
        ending: TrainingStopped = stopped
    except StopRequested as request:
        ending = Interrupted(f"stopped at once by {request.signal.name}. {_what_is_kept(trainer)}", request.signal)
    except NonFiniteLoss as error:
        advice = "Try a lower learning rate or a longer warmup."
        ending = NonFiniteLoss(f"{error} {_what_is_kept(trainer)} {advice}")
    except TrainingStopped as error:
        ending = TrainingStopped(f"{error} {_what_is_kept(trainer)}")
    metrics.log("event", trainer.step, time=trainer.seconds, message=str(ending))
    raise ending from None


def _run_loop(trainer: Trainer, metrics: MetricsLog, bar: Progress, stop: StopSignals) -> None:
    """Train until the last step; records, evaluations, samples and checkpoints as they come due."""
    loop = trainer.config.train
    recent = deque[tuple[int, float]](maxlen=20)
    if trainer.step == 0 and trainer.work.source is not None:
        # What the checkpoint says before it is trained, for the report to stand beside what it says after.
        log_samples(trainer, metrics, bar.line)
    enter_phase(trainer, metrics, bar.line)
    while trainer.step < trainer.total_steps:
        tokens_before, seconds_before = trainer.tokens, trainer.window.seconds
        norm, rate = trainer.train_step()
        step, window, last = trainer.step, trainer.window, trainer.step == trainer.total_steps
        recent.append((trainer.tokens - tokens_before, window.seconds - seconds_before))
        tokens, seconds = (sum(each) for each in zip(*recent, strict=True))
        speed = tokens / seconds
        bar.update(
            step,
            loss=window.loss,
            bits_per_byte=window.bits_per_byte,
            accuracy=trainer.measured(window).get("accuracy"),
            tokens_per_second=speed,
            lr=rate,
        )
        if _due(step, loop.log_every) or last:
            log_window(trainer, metrics, norm, rate)
        enter_phase(trainer, metrics, bar.line)
        if _due(step, loop.eval_every) and not last:
            result = trainer.evaluate(loop.eval_tokens)
            metrics.log("eval", step, time=trainer.seconds, final=False, **result, **phase_fields(trainer))
            bar.line(eval_line(step, result))
        if _due(step, loop.sample_every) and not last:
            log_samples(trainer, metrics, bar.line)
        if _due(step, loop.checkpoint_every) or last or stop.received is not None:
            trainer.save()
        if stop.received is not None:
            rest = "" if not last else "; the last evaluation is still to come"
            raise Interrupted(
                f"stopped by {stop.received.name} after step {step} of {trainer.total_steps}{rest}. All of it is "
                "saved: the same command goes on from here.",
                stop.received,
            )


def _finish(trainer: Trainer, metrics: MetricsLog, log: Log) -> Outcome:
    """Last evaluation and sample, the final model."""
    loop, step = trainer.config.train, trainer.step
    enter_phase(trainer, metrics, log)
    log("last evaluation ...")
    result = trainer.evaluate(loop.final_eval_tokens)
    samples = trainer.samples()
    trainer.save_final()
    log_missing_samples(trainer, metrics, samples, log)
    deployed = evaluate_deployed(trainer, metrics, log)
    metrics.log("eval", step, time=trainer.seconds, final=True, **result, **phase_fields(trainer), **deployed)
    log(eval_line(step, result) + f" ({int(result['tokens']):,} tokens)")
    prompt, text = samples[0]
    facts = trainer.work.facts
    return Outcome(
        result["loss"],
        result.get("bits_per_byte"),
        result.get("accuracy"),
        prompt.text,
        text,
        trainer.folder.path,
        isinstance(facts, ExampleFacts) and facts.in_chat,
    )


def _restore(trainer: Trainer, changed: list[str]) -> list[str]:
    """Go on from the newest checkpoint that can be read, if there is one. Returns what is to be said about it."""
    checkpoint, damaged = trainer.folder.latest()
    if checkpoint is None:
        return []
    try:
        trainer.restore(checkpoint)
    except ValueError as error:
        raise RunFolderError(
            f"{checkpoint.path} does not fit: {error} Or choose a new folder (run.dir=...), or start anew "
            "(run.resume=never keeps the old run under another name)."
        ) from error
    notices = [bad.set_aside() for bad in damaged]
    return [*notices, "; ".join([f"resumed at step {trainer.step}", *(f"changed {change}" for change in changed)])]


def _say_finished(folder: RunFolder, config: TrainConfig, changed: list[str], log: Log) -> None:
    log(f"{folder.path}: this run has already finished{way_on(folder, config)}, run.resume=never starts anew.")
    if changed:
        log(f"without effect, as there is nothing left to do: {'; '.join(changed)}")
    # Missing when the earlier start was killed right at its end.
    if not ((folder.path / "report.html").is_file() and (folder.path / "loss.png").is_file()):
        _write_pictures(folder.path, log)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _what_is_kept(trainer: Trainer) -> str:
    if trainer.saved_step is None:
        return "There is no checkpoint yet: the same command starts from the beginning."
    return f"The last good checkpoint is that of step {trainer.saved_step}; the same command goes on from there."


def _write_pictures(folder: Path, log: Log) -> None:
    """Write loss.png and report.html; that they fail must not hide how the run ended."""
    try:
        run = load_run(folder)
        write_loss_plot(run)
        write_report(run)
    except (Exception, KeyboardInterrupt) as error:
        log(
            f"the report could not be written: {type(error).__name__}: {error}; "
            f"python -m forge_mlx.train.report {folder} writes it"
        )


def _until_nobody_reads(log: Log) -> Log:
    """The log, silent once its reader has gone (a closed pipe or terminal): that must not end a long run."""
    gone = False

    def say(text: str) -> None:
        nonlocal gone
        if not gone:
            try:
                log(text)
            except OSError:
                gone = True

    return say
