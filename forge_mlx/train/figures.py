"""The numbers at the head of a run's report, as text."""

from collections.abc import Callable
from typing import Any

from forge_mlx.train.charts import highest
from forge_mlx.train.duration import epochs_text
from forge_mlx.train.progress import format_duration
from forge_mlx.train.run_log import Run, is_finite
import numpy as np

MIB, GIB = 1 << 20, 1 << 30

Figure = tuple[str, str, str]
"""A label, the value and a remark."""


def status(run: Run) -> str:
    """Whether the run has finished, and how far it is."""
    total = run.fact("total_steps")
    steps = f"{run.last_step:,}" + (f" of {total:,}" if isinstance(total, int) else "") + " steps"
    return f"finished after {run.last_step:,} steps" if run.finished else f"not finished, {steps} so far"


def headline_figures(run: Run) -> list[Figure]:
    """What every run has."""
    where = "final" if run.finished else f"so far, at step {step:,}" if (step := run.last("eval", "step")) else ""
    _, speeds = run.series("train", "tokens_per_second")
    speed = float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else None
    peak = highest(run.series("train", "peak_memory")[1])
    elapsed = run.records[-1].get("time") if run.records else None
    total, epochs = run.fact("total_steps"), run.fact("epochs")
    return [
        ("validation loss", number(run.last("eval", "loss"), "{:.4f}"), where or "no evaluation yet"),
        _second_figure(run),
        ("steps", f"{run.last_step:,}", number(total, "of {:,}", "") + number(epochs, _epochs_remark, "")),
        ("tokens", number(run.last("train", "tokens"), short), "trained on"),
        ("wall time", number(elapsed, format_duration), "without pauses"),
        ("tokens/s", number(speed, short), "median"),
        ("peak memory", number(peak, memory_text), ""),
        _parameters_figure(run),
    ]


def _epochs_remark(epochs: float) -> str:
    return f", {epochs_text(epochs)}"


def _parameters_figure(run: Run) -> Figure:
    parameters, trained = run.fact("parameters"), run.fact("trained_parameters")
    exact = number(parameters, "{:,}", "") if trained is None else f"{number(trained, short)} trained"
    return "parameters", number(parameters, short), exact


def _second_figure(run: Run) -> Figure:
    """What stands beside the loss: bits per byte of a text, of pairs how often the chosen answer is preferred."""
    if (share := run.last("eval", "accuracy")) is not None:
        pairs = number(run.last("eval", "pairs"), "of {:,.0f} pairs", "")
        margin = number(run.last("eval", "margin"), ", margin {:+.2f}", "")
        return "preferred", number(share, lambda value: f"{100 * value:.1f} %"), pairs + margin
    # Of examples only the answers are measured, which gzip never sees alone.
    missing = "of what is learnt" if run.fact("train_examples") is not None else "gzip: not measured"
    gzip = number(run.fact("gzip_bits_per_byte"), "gzip: {:.3f}", missing)
    return "bits per byte", number(run.last("eval", "bits_per_byte"), "{:.3f}"), gzip


def quantization_figures(run: Run) -> list[Figure]:
    """What a run with quantisation-aware training reached, in training and deployed; empty for any other run."""
    evaluations, deployed = run.of("eval"), run.deployed
    if not (run.qat or deployed or any("fake_quant" in record for record in evaluations)):
        return []
    figures = [_quantization_figure(run.qat)]
    for wanted, label in ((False, "validation loss, float"), (True, "validation loss, fake-quantised")):
        found = [record for record in evaluations if record.get("fake_quant") is wanted]
        if found:
            where = "final" if run.finished and found[-1] is evaluations[-1] else f"at step {found[-1]['step']:,}"
            figures.append((label, number(found[-1].get("loss"), "{:.4f}"), where))
    figures.append(_deployed_figure(run))
    return figures


def _quantization_figure(qat: dict[str, Any]) -> Figure:
    mode = qat.get("mode") or qat.get("weights") or "yes"
    bits, group_size, modules = (qat.get(name) for name in ("bits", "group_size", "modules"))
    start, end = qat.get("start_step"), qat.get("end_step")
    parts = [
        number(bits, "{:,} bits", ""),
        number(group_size, "groups of {:,}", ""),
        number(modules, "{:,} modules", "") if is_finite(modules) else "",
        f"{activations} activations" if (activations := qat.get("activations")) else "",
        number(start, "after step {:,}", "") if start else "from the first step" if start == 0 else "",
        number(end, "until step {:,}", ""),
    ]
    return "fake quantisation", str(mode), ", ".join(part for part in parts if part)


def _deployed_figure(run: Run) -> Figure:
    label, deployed = "loss as deployed", run.deployed
    if not deployed:
        return label, "n/a", "the model has not been converted"
    loss, trained = deployed.get("loss"), deployed.get("trained_loss")
    remark = "the converted model"
    if is_finite(loss) and is_finite(trained):
        remark = f"in training {trained:.6f} ({loss - trained:+.1e}) on the same text"
    if is_finite(tokens := deployed.get("tokens")):
        remark += f", {tokens:,} tokens"
    # Six digits: what is asked of the two is that they agree.
    return label, number(loss, "{:.6f}"), remark


def yardstick(run: Run) -> dict[str, Any] | None:
    """What bits per byte means beside gzip's figure; None before there are both."""
    ours, gzip = run.last("eval", "bits_per_byte"), run.fact("gzip_bits_per_byte")
    if not (is_finite(ours) and is_finite(gzip) and ours > 0 and gzip > 0):
        return None
    percent = 100 * (1 - ours / gzip)
    relation = f"{abs(percent):.0f} % {'fewer' if percent >= 0 else 'more'} bits than gzip's {gzip:.3f}"
    return {
        "text": f"To write one byte of text it was not trained on, this model needs {ours:.3f} bits, "
        f"{relation} on the same files, and unlike the loss this figure does not depend on the tokenizer.",
        "bars": [
            ("this model", f"{ours:.3f}", 100 * ours / max(ours, gzip)),
            ("gzip", f"{gzip:.3f}", 100 * gzip / max(ours, gzip)),
        ],
    }


def number(value: Any, form: str | Callable[[float], str], missing: str = "n/a") -> str:
    """A value of a record as text; what is not a finite number as it is."""
    if value is None:
        return missing
    if not is_finite(value):
        return str(value)
    return form.format(value) if isinstance(form, str) else form(value)


def short(value: float) -> str:
    """1234 as 1,234 and 12345678 as 12.3M."""
    for size, divisor, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / divisor:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def memory_text(size: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def fact_text(value: Any) -> str:
    """A setup fact as a reader writes it, not as Python does."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
