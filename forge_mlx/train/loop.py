"""The training run, top to bottom: ``train(config)``."""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from forge_mlx.data.prepare import PreparedData, prepare
from forge_mlx.data.stream import BatchStream, eval_batches
from forge_mlx.hub.native import save_model
from forge_mlx.info import versions
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.optim import build_optimizer, learning_rate_factor
from forge_mlx.sampling import Sampler, generate_tokens
from forge_mlx.train.checkpoint import Checkpoint, RunState, replace_folder, save_checkpoint
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.device import Placement, choose_placement
from forge_mlx.train.folder import RunFolder, RunFolderError
from forge_mlx.train.metrics import MetricsLog, read_metrics
from forge_mlx.train.nonfinite import describe_nonfinite
from forge_mlx.train.progress import Progress
from forge_mlx.train.report import write_loss_plot, write_report
from forge_mlx.train.signals import StopSignals
from forge_mlx.train.step import TrainStep, make_evaluator

NATS_PER_BIT = math.log(2)


class TrainingStopped(RuntimeError):
    """The run ended before its last step; the message says why and what is on the disk."""


class NonFiniteLoss(TrainingStopped):
    """The loss or its gradient is no longer a number."""


class Interrupted(TrainingStopped):
    """Ctrl-C or SIGTERM. ``signal`` is its number."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


@dataclass(frozen=True)
class Outcome:
    """What a finished run reached.

    Attributes:
        loss: validation loss in nats a token.
        bits_per_byte: the same in bits a byte of text, which does not depend on the tokenizer.
        sample: a text by the model.
        folder: the run's folder.
    """

    loss: float
    bits_per_byte: float
    sample: str
    folder: Path


class _Window:
    """Sums since the last training record."""

    def __init__(self) -> None:
        self.nats = self.seconds = 0.0
        self.tokens = self.bytes = 0


class Trainer:
    """One run in memory: model, optimizer, data position, and where they are written.

    Args:
        config: the resolved config: device, dtype and vocabulary size are filled in.
        placement: device and dtype.
        data: tokenizer and token files.
        folder: the run's folder, locked by the caller.
    """

    def __init__(self, config: TrainConfig, placement: Placement, data: PreparedData, folder: RunFolder) -> None:
        self.config, self.placement, self.data, self.folder = config, placement, data, folder
        self.model = GPT(config.model, seed=config.run.seed)
        self.step_function = TrainStep(
            self.model, build_optimizer(config.optim), placement.dtype, config.optim.clip_norm
        )
        self.evaluate_batch = make_evaluator(self.model, placement.dtype)
        loop = config.train
        self.stream = BatchStream(data.train, loop.batch_size, loop.seq_len, config.run.seed)
        self.step = self.tokens = self.resumes = 0
        self.seconds_before = 0.0
        self.started = time.perf_counter()
        self.saved_step = -1

    @property
    def seconds(self) -> float:
        """Time in the loop, of earlier starts too."""
        return self.seconds_before + time.perf_counter() - self.started

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was made.

        Raises:
            ValueError: it does not fit the model, the optimizer or the data.
        """
        self.model.load_weights(list(checkpoint.weights.items()), strict=True)
        self.step_function.optimizer.load_flat_state(checkpoint.optimizer)
        state = checkpoint.state
        self.stream.load_state_dict(state.data)
        self.step, self.tokens, self.resumes = state.step, state.tokens, state.resumes + 1
        self.seconds_before, self.started = state.seconds, time.perf_counter()
        self.saved_step = state.step

    def save(self) -> Path:
        """Write a checkpoint."""
        state = RunState(self.step, self.tokens, self.seconds, self.stream.state_dict(), self.resumes)
        path = save_checkpoint(
            self.folder.checkpoints,
            dict(named_arrays(self.model.parameters())),
            self.step_function.optimizer.flat_state(),
            state,
            self.config.train.keep_checkpoints,
        )
        self.saved_step = self.step
        return path

    def train_step(self, window: _Window) -> tuple[float, float]:
        """One update. Returns the gradient norm and the learning rate.

        Raises:
            NonFiniteLoss: before anything is updated.
        """
        loop, optim = self.config.train, self.config.optim
        began = time.perf_counter()
        rows = [next(self.stream) for _ in range(loop.accumulate)]
        batches = [mx.array(row) for row in rows]
        # Distinct for every step of a run; runs of different seeds may meet far apart, which harms nothing.
        seed = self.config.run.seed * 1_000_003 + self.step
        loss, norm, grads, count = self.step_function.gradients(batches, seed)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            where = describe_nonfinite(self.model, batches, grads)
            raise NonFiniteLoss(f"step {self.step + 1}: the loss is {loss}, its gradient norm {norm}: {where}.")
        factor = learning_rate_factor(optim, self.step, loop.steps)
        self.step_function.update(grads, norm, count, factor)
        self.step += 1
        self.tokens += count
        window.nats += loss * count
        window.tokens += count
        window.bytes += sum(int(self.data.tokenizer.token_bytes[row[:, 1:]].sum()) for row in rows)
        window.seconds += time.perf_counter() - began
        return norm, factor * optim.lr

    def evaluate(self, max_tokens: int | None) -> dict[str, float]:
        """Validation loss (nats a token) and bits per byte over fixed windows."""
        loop = self.config.train
        params = self.model.trainable_parameters()
        nats, tokens, n_bytes = 0.0, 0, 0
        for rows, mask in eval_batches(self.data.valid, loop.batch_size, loop.seq_len, max_tokens):
            loss = self.evaluate_batch(params, mx.array(rows), mx.array(mask))
            nats += float(loss)
            tokens += int(mask.sum())
            n_bytes += int((self.data.tokenizer.token_bytes[rows[:, 1:]] * mask).sum())
        return {
            "loss": nats / tokens,
            "bits_per_byte": nats / NATS_PER_BIT / max(n_bytes, 1),
            "tokens": tokens,
        }

    def sample(self) -> str:
        """A text by the model as it is now."""
        loop, tokenizer = self.config.train, self.data.tokenizer
        prompt = [tokenizer.end_id, *tokenizer.encode(loop.sample_prompt)]
        room = self.config.model.max_seq_len - len(prompt)
        self.model.eval()
        tokens = list(
            generate_tokens(
                self.model,
                prompt,
                Sampler(temperature=loop.sample_temperature, top_p=0.95),
                min(loop.sample_tokens, room),
                stop=tokenizer.end_id,
                seed=self.config.run.seed,
            )
        )
        self.model.train()
        return tokenizer.decode(tokens)

    def save_final(self) -> None:
        """Write the final model folder, whole or not at all."""
        temporary = self.folder.path / ".unfinished-final"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_model(temporary, self.model, self.data.tokenizer)
        replace_folder(temporary, self.folder.final)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _run_loop(trainer: Trainer, metrics: MetricsLog, bar: Progress, stop: StopSignals) -> None:
    """Train until the last step; records, evaluations, samples and checkpoints as they come due."""
    loop = trainer.config.train
    window, recent = _Window(), deque[tuple[int, float]](maxlen=20)
    while trainer.step < loop.steps:
        before = window.seconds
        norm, rate = trainer.train_step(window)
        step = trainer.step
        recent.append((trainer.config.tokens_per_step, window.seconds - before))
        speed = sum(tokens for tokens, _ in recent) / sum(seconds for _, seconds in recent)
        bits = window.nats / NATS_PER_BIT / max(window.bytes, 1)
        bar.update(step, loss=window.nats / window.tokens, bits_per_byte=bits, tokens_per_second=speed, lr=rate)
        last = step == loop.steps
        if _due(step, loop.log_every) or last:
            metrics.log(
                "train",
                step,
                time=trainer.seconds,
                loss=window.nats / window.tokens,
                bits_per_byte=bits,
                lr=rate,
                grad_norm=norm,
                tokens=trainer.tokens,
                tokens_per_second=window.tokens / window.seconds,
                peak_memory=mx.get_peak_memory(),
            )
            window = _Window()
        if _due(step, loop.eval_every) and not last:
            result = trainer.evaluate(loop.eval_tokens)
            metrics.log("eval", step, time=trainer.seconds, final=False, **result)
            bar.line(_eval_line(step, result))
        if _due(step, loop.sample_every) and not last:
            metrics.log("sample", step, time=trainer.seconds, prompt=loop.sample_prompt, text=trainer.sample())
        if _due(step, loop.checkpoint_every) or last:
            trainer.save()
        if stop.received is not None and not last:
            if trainer.saved_step != step:
                trainer.save()
            message = f"stopped by {stop.received.name} after step {step}; saved, the same command goes on from here"
            metrics.log("event", step, time=trainer.seconds, message=message)
            raise Interrupted(message, int(stop.received))


def _eval_line(step: int, result: dict[str, float]) -> str:
    return f"step {step}: validation loss {result['loss']:.4f}, {result['bits_per_byte']:.4f} bits per byte"


def _finish(trainer: Trainer, metrics: MetricsLog, log: Callable[[str], None]) -> Outcome:
    """Last evaluation and sample, the final model, the report."""
    loop, step = trainer.config.train, trainer.step
    result = trainer.evaluate(loop.final_eval_tokens)
    sample = trainer.sample()
    trainer.save_final()
    metrics.log("sample", step, time=trainer.seconds, prompt=loop.sample_prompt, text=sample)
    metrics.log("eval", step, time=trainer.seconds, final=True, **result)
    log(_eval_line(step, result) + f" ({int(result['tokens'])} tokens)")
    return Outcome(result["loss"], result["bits_per_byte"], sample, trainer.folder.path)


def finished_outcome(folder: RunFolder, config: TrainConfig) -> Outcome | None:
    """The outcome of a run that has already reached the last step of ``config``, or None."""
    if config.run.resume == "never" or not folder.final.is_dir() or not folder.metrics_file.is_file():
        return None
    records = read_metrics(folder.metrics_file)
    evals = [r for r in records if r["kind"] == "eval" and r.get("final")]
    samples = [r for r in records if r["kind"] == "sample"]
    if not evals or not samples or evals[-1]["step"] < config.train.steps:
        return None
    return Outcome(evals[-1]["loss"], evals[-1]["bits_per_byte"], samples[-1]["text"], folder.path)


def _resolve(config: TrainConfig, placement: Placement, vocab_size: int) -> TrainConfig:
    """The config with vocabulary size, device and dtype filled in."""
    if config.model.vocab_size not in (None, vocab_size):
        raise ValueError(
            f"model.vocab_size must be the tokenizer's {vocab_size} (or null) but got {config.model.vocab_size}."
        )
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    run = config.run.model_copy(
        update={"device": placement.device.type.name, "dtype": placement.dtype_name, "resume": "auto"}
    )
    return config.model_copy(update={"model": model, "run": run})


def _setup_facts(trainer: Trainer) -> dict[str, Any]:
    model = trainer.model
    return {
        "corpus": asdict(trainer.data.facts),
        "parameters": model.num_parameters(),
        "non_embedding_parameters": model.num_parameters(embeddings=False),
        "total_steps": trainer.config.train.steps,
        "tokens_per_step": trainer.config.tokens_per_step,
        "device": trainer.placement.device.type.name,
        "dtype": trainer.placement.dtype_name,
        **versions(),
    }


def train(config: TrainConfig, log: Callable[[str], None] = print) -> Outcome:
    """Train a model as the config says, or go on with a run that was stopped.

    Args:
        config: the run.
        log: receives the lines for people that come before and after the progress display.

    Returns:
        what the finished run reached.

    Raises:
        ValueError: config, data and run folder do not fit together; nothing was changed.
        NonFiniteLoss: the loss is no longer a number; the last good checkpoint stays.
        Interrupted: a signal came; the state was saved first.
    """
    placement = choose_placement(config.run)
    mx.set_default_device(placement.device)
    folder = RunFolder(config.run.dir)
    folder.check_usable(config)
    if folder.started and config.run.resume != "never":
        changed = folder.changed_keys(config)
        if outcome := finished_outcome(folder, config):
            log(f"{folder.path}: this run has already finished; run.resume=never trains anew and keeps it.")
            return outcome
    else:
        changed = []
    log(f"device: {placement.device.type.name}, {placement.dtype_name} ({placement.reason})")
    data = prepare(config.data, log=log)
    resolved = _resolve(config, placement, data.tokenizer.vocab_size)
    with folder.locked():
        if config.run.resume == "never" and (kept := folder.set_aside()):
            log(f"the earlier run was moved to {kept}")
        return _train_in_folder(resolved, placement, data, folder, changed, log)


def _train_in_folder(
    config: TrainConfig,
    placement: Placement,
    data: PreparedData,
    folder: RunFolder,
    changed: list[str],
    log: Callable[[str], None],
) -> Outcome:
    mx.reset_peak_memory()
    trainer = Trainer(config, placement, data, folder)
    if checkpoint := folder.latest(log):
        try:
            trainer.restore(checkpoint)
        except ValueError as error:
            raise RunFolderError(f"{checkpoint.path}: does not fit this run: {error}") from error
    folder.write_config(config)
    data.tokenizer.save(folder.tokenizer_file)
    with MetricsLog(folder.metrics_file, notify=log) as metrics:
        metrics.truncate_after(trainer.step)
        _log_start(trainer, metrics, checkpoint is not None, changed, log)
        try:
            with (
                StopSignals() as stop,
                Progress(config.train.steps, trainer.step, log_every=config.train.log_every) as bar,
            ):
                _run_loop(trainer, metrics, bar, stop)
            return _finish(trainer, metrics, log)
        except NonFiniteLoss as error:
            message = f"{error} Nothing was updated in this step. {_what_is_kept(trainer)}"
            metrics.log("event", trainer.step, time=trainer.seconds, message=message)
            raise NonFiniteLoss(message) from None
        finally:
            _write_pictures(folder.path, log)


def _what_is_kept(trainer: Trainer) -> str:
    advice = "Try a lower learning rate or a longer warmup."
    if trainer.saved_step > 0:
        return f"The last good checkpoint is that of step {trainer.saved_step}. {advice}"
    return f"No checkpoint was due before it. {advice}"


def _write_pictures(folder: Path, log: Callable[[str], None]) -> None:
    """Write loss.png and report.html; a full disk must not hide why a run ended."""
    try:
        write_loss_plot(folder)
        write_report(folder)
    except OSError as error:
        log(f"the report could not be written: {error}")


def _log_start(
    trainer: Trainer, metrics: MetricsLog, resumed: bool, changed: list[str], log: Callable[[str], None]
) -> None:
    """Say how the run starts, to people and in the log."""
    config = trainer.config
    metrics.log("setup", trainer.step, time=trainer.seconds, **_setup_facts(trainer))
    if resumed:
        message = "; ".join([f"resumed at step {trainer.step}", *(f"changed {change}" for change in changed)])
        metrics.log("event", trainer.step, time=trainer.seconds, message=message)
        log(message)
    model = trainer.model
    log(
        f"model: {model.num_parameters():,} parameters ({model.num_parameters(embeddings=False):,} without "
        f"embeddings), attention by mx.fast; "
        f"{config.tokens_per_step:,} tokens a step, {config.train.steps} steps"
    )
