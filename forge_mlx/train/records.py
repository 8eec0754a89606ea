"""What a run writes of its trainer: training records, samples, phases, the loss as deployed."""

from typing import Any

from forge_mlx.train.metrics import MetricsLog, read_metrics
from forge_mlx.train.prompts import Prompt
from forge_mlx.train.trainer import Trainer
from forge_mlx.train.window import Window
from forge_mlx.train.work import Log
import mlx.core as mx


def log_window(trainer: Trainer, metrics: MetricsLog, norm: float, rate: float) -> None:
    """Write the training record and start the next window."""
    window = trainer.window
    routing = trainer.routing_fields()
    metrics.log(
        "train",
        trainer.step,
        time=trainer.seconds,
        loss=window.loss,
        **trainer.measured(window),
        lr=rate,
        grad_norm=norm,
        tokens=trainer.tokens,
        tokens_per_second=window.tokens / window.seconds,
        peak_memory=mx.get_peak_memory(),
        **({"moe": routing} if routing else {}),
    )
    trainer.window = Window()


def log_samples(trainer: Trainer, metrics: MetricsLog, say: Log) -> None:
    """Write what the model says now; the screen shows the first."""
    samples = trainer.samples()
    for prompt, text in samples:
        metrics.log("sample", trainer.step, time=trainer.seconds, **_sample_fields(prompt, text))
    say(f"step {trainer.step}: sample: {samples[0][1]!r}")


def log_missing_samples(trainer: Trainer, metrics: MetricsLog, samples: list[tuple[Prompt, str]], log: Log) -> None:
    """Write the samples of a run's end that no record has: a start that was killed has written some already."""
    step = trainer.step
    records = read_metrics(trainer.folder.metrics_file, log)
    written = [record["prompt"] for record in records if record["kind"] == "sample" and record["step"] == step]
    for prompt, text in samples:
        if prompt.text not in written:
            metrics.log("sample", step, time=trainer.seconds, **_sample_fields(prompt, text))


def enter_phase(trainer: Trainer, metrics: MetricsLog, say: Log) -> None:
    """Begin or end fake quantisation where its step has come; the log says so."""
    if notice := trainer.enter_phase():
        metrics.log("event", trainer.step, time=trainer.seconds, message=notice)
        say(f"step {trainer.step}: {notice}")


def phase_fields(trainer: Trainer) -> dict[str, Any]:
    """Whether the weights are fake-quantised, of a run in which they may be."""
    return {} if trainer.config.qat is None else {"fake_quant": trainer.fake_quant}


def _sample_fields(prompt: Prompt, text: str) -> dict[str, str]:
    expected = {} if prompt.expected is None else {"expected": prompt.expected}
    return {"prompt": prompt.text, "text": text, **expected}


def evaluate_deployed(trainer: Trainer, metrics: MetricsLog, log: Log) -> dict[str, Any]:
    """The field of the last record about the codes in final/; nothing without them."""
    try:
        deployed = trainer.deployed_evaluation()
    except RuntimeError as error:
        # MLX has not every quantised product on every device; the codes are written, and the run is whole.
        message = f"deployed: final/ holds the codes, but MLX cannot compute with them here: {error}"
        metrics.log("event", trainer.step, time=trainer.seconds, message=message)
        log(message)
        return {}
    if deployed is None:
        return {}
    log(
        f"deployed: the codes in final/ give a loss of {deployed['loss']:.6f} where the model in training gives "
        f"{deployed['trained_loss']:.6f} (the first {deployed['tokens']:,} validation tokens)"
    )
    return {"deployed": deployed}


def eval_line(step: int, result: dict[str, float]) -> str:
    """An evaluation in words."""
    if "accuracy" in result:
        said = f"the chosen answer preferred in {100 * result['accuracy']:.1f} % of {int(result['pairs']):,} pairs"
    else:
        said = f"{result['bits_per_byte']:.4f} bits per byte"
    return f"step {step}: validation loss {result['loss']:.4f}, {said}"
