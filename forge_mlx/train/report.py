"""The report of a run: ``loss.png`` and one self-contained ``report.html``, made from the run's own files.

``python -m forge_mlx.train.report RUN`` writes both anew, for a run that ended, crashed or still goes on.
Only ``config.yaml`` and ``metrics.jsonl`` of the folder are read.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
import io
import math
from pathlib import Path
import sys
from typing import Any

from forge_mlx.train.charts import Chart, Floats, Line, highest, smoothed
from forge_mlx.train.metrics import Record, read_metrics, replace_file
from forge_mlx.train.progress import format_duration, visible_controls
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
import numpy as np

_MIB, _GIB = 1 << 20, 1 << 30
_PNG_STYLE: dict[str, dict[str, Any]] = {
    "faint": {"color": "#a9c4f0", "linewidth": 0.7},
    "line": {"color": "#1f5fd0", "linewidth": 1.8},
    "dots": {"color": "#c8500a", "linewidth": 1.2, "marker": "o", "markersize": 4},
}


@dataclass
class Run:
    """What a run's folder says."""

    folder: Path
    config: str
    records: list[Record]
    notices: list[str]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def of(self, kind: str) -> list[Record]:
        """The records of one kind, in the order they were written."""
        return [record for record in self.records if record["kind"] == kind]

    def series(self, kind: str, name: str) -> tuple[Floats, Floats]:
        """Steps and values of one field, float64 `[N]` each; what is not a finite number becomes NaN."""
        pairs = [(record["step"], record[name]) for record in self.of(kind) if name in record]
        values = np.array([value if _is_finite(value) else math.nan for _, value in pairs], np.float64)
        return np.array([step for step, _ in pairs], np.float64), values

    def last(self, kind: str, name: str) -> Any:
        """The last value of one field; None when there is none."""
        return next((record[name] for record in reversed(self.of(kind)) if name in record), None)

    def fact(self, name: str) -> Any:
        """The setup fact of that name, looked up at any depth; None when there is none."""
        return next((value for path, value in _flat(self.facts) if path[-1] == name), None)

    @property
    def last_step(self) -> int:
        """The latest step of any record, 0 in an empty log."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def finished(self) -> bool:
        """Whether the final evaluation was made and no training followed it."""
        evaluations = self.of("eval")
        return bool(evaluations and evaluations[-1].get("final")) and evaluations[-1]["step"] >= self.last_step


def load_run(run_dir: Path) -> Run:
    """Reads a run's folder.

    Raises:
        FileNotFoundError: When the folder or its metrics.jsonl is missing.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"[report] a run must be a folder that exists but got {str(run_dir)!r}.")
    log = run_dir / "metrics.jsonl"
    if not log.is_file():
        raise FileNotFoundError(
            f"[report] a run's folder must hold metrics.jsonl but {str(run_dir)!r} does not. "
            "Give the folder that a training run wrote."
        )
    config = run_dir / "config.yaml"
    text = config.read_text("utf-8", errors="replace") if config.is_file() else ""
    notices: list[str] = []
    run = Run(run_dir, text, read_metrics(log, notices.append), notices)
    for record in run.of("setup"):
        run.facts.update({key: value for key, value in record.items() if key not in ("kind", "step", "time")})
    return run


def write_loss_plot(run: Run) -> Path:
    """Writes ``loss.png``, 1650 x 690: loss and bits per byte over the steps, training and validation."""
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained", facecolor="white")
    # The font that comes with matplotlib has every Latin-1 character, and "$" starts no formula in a name.
    name = run.name.encode("latin-1", "replace").decode("latin-1")
    figure.suptitle(f"{name}, {_status(run)}", x=0.01, ha="left", fontsize=13, parse_math=False)
    for axes, chart in zip(figure.subplots(1, 2), _loss_charts(run), strict=True):
        for line in chart.lines:
            style = _PNG_STYLE[line.look] | ({"marker": "o"} if line.steps.size == 1 else {})
            axes.plot(line.steps, line.values, label=line.label, **style)
        if chart.rule is not None:
            axes.axhline(chart.rule[1], color="#555555", linestyle="--", linewidth=1.2, label=chart.rule[0])
        clipped = chart.clipped()
        axes.set(xlabel=f"step ({clipped})" if clipped else "step", ylim=chart.limits())
        axes.set_title(chart.title, loc="left", fontsize=11)
        axes.grid(color="#e8e8e8", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if chart.lines:
            axes.legend(frameon=False, fontsize=9, loc="upper right")
        else:
            axes.text(0.5, 0.5, "nothing logged yet", ha="center", transform=axes.transAxes, color="#777777")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    replace_file(run.folder / "loss.png", image.getvalue())
    return run.folder / "loss.png"


def write_report(run: Run) -> Path:
    """Writes ``report.html``: one file that asks for no other, whatever state the run is in."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(visible=visible_controls, duration=format_duration)
    marks = sorted({record["step"] for record in run.of("event") if record["step"] > 0})
    charts = [chart.drawn(max(1, run.last_step), marks) for chart in (*_loss_charts(run), *_other_charts(run))]
    samples: dict[int, list[Record]] = {}
    for record in run.of("sample"):
        samples.setdefault(record["step"], []).append(record)
    page = environment.get_template("report.html").render(
        run=run,
        status=_status(run),
        figures=_figures(run),
        yardstick=_yardstick(run),
        charts=charts,
        max_points=max(chart["thinned_to"] for chart in charts),
        samples=[(step, samples[step]) for step in sorted(samples, reverse=True)],
        facts=[(" / ".join(path), _fact_text(value)) for path, value in _flat(run.facts)],
    )
    # A sample may hold a lone surrogate, which UTF-8 cannot.
    replace_file(run.folder / "report.html", page.encode("utf-8", "backslashreplace"))
    return run.folder / "report.html"


def _status(run: Run) -> str:
    total = run.fact("total_steps")
    steps = f"{run.last_step:,}" + (f" of {total:,}" if isinstance(total, int) else "") + " steps"
    return f"finished after {run.last_step:,} steps" if run.finished else f"not finished, {steps} so far"


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """The headline figures as label, value and a remark."""
    where = "final" if run.finished else f"so far, at step {step:,}" if (step := run.last("eval", "step")) else ""
    gzip, parameters = run.fact("gzip_bits_per_byte"), run.fact("parameters")
    _, speeds = run.series("train", "tokens_per_second")
    speed = float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else None
    peak = highest(run.series("train", "peak_memory")[1])
    elapsed = run.records[-1].get("time") if run.records else None
    total = run.fact("total_steps")
    return [
        ("validation loss", _number(run.last("eval", "loss"), "{:.4f}"), where or "no evaluation yet"),
        (
            "bits per byte",
            _number(run.last("eval", "bits_per_byte"), "{:.3f}"),
            _number(gzip, "gzip: {:.3f}", "gzip: not measured"),
        ),
        ("steps", f"{run.last_step:,}", _number(total, "of {:,}", "")),
        ("tokens", _number(run.last("train", "tokens"), _short), "trained on"),
        ("wall time", _number(elapsed, format_duration), "without pauses"),
        ("tokens/s", _number(speed, _short), "median"),
        ("peak memory", _number(peak, _memory_text), ""),
        ("parameters", _number(parameters, _short), _number(parameters, "{:,}", "")),
    ]


def _yardstick(run: Run) -> dict[str, Any] | None:
    """What bits per byte means beside gzip's figure; None before there are both."""
    ours, gzip = run.last("eval", "bits_per_byte"), run.fact("gzip_bits_per_byte")
    if not (_is_finite(ours) and _is_finite(gzip) and ours > 0 and gzip > 0):
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


def _loss_charts(run: Run) -> list[Chart]:
    gzip = run.fact("gzip_bits_per_byte")
    rule = (f"gzip {gzip:.3f}", float(gzip)) if _is_finite(gzip) else None
    charts = []
    for name, title in (("loss", "loss, nats a token"), ("bits_per_byte", "bits per byte")):
        lines = smoothed("training", *run.series("train", name))
        steps, values = run.series("eval", name)
        if steps.size:
            lines.append(Line("validation", "dots", steps, values))
        charts.append(Chart(title, lines, "{:.3f}".format, "clip", rule if name == "bits_per_byte" else None))
    return charts


def _other_charts(run: Run) -> list[Chart]:
    lr = [Line("learning rate", "line", *points)] if (points := run.series("train", "lr"))[0].size else []
    steps, memory = run.series("train", "peak_memory")
    unit, unit_name = (_GIB, "GiB") if (highest(memory) or 0) >= _GIB else (_MIB, "MiB")
    memory_line = [Line("peak memory", "line", steps, memory / unit)] if steps.size else []
    norm = smoothed("gradient norm", *run.series("train", "grad_norm"), log=True)
    speed = smoothed("tokens/s", *run.series("train", "tokens_per_second"))
    return [
        Chart("learning rate", lr, "{:.3g}".format, "zero"),
        Chart("gradient norm", norm, "{:.3g}".format, "log"),
        Chart("tokens/s", speed, _short, "zero"),
        Chart(f"peak memory, {unit_name}", memory_line, "{:.4g}".format, "zero"),
    ]


def _flat(facts: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, key))
        else:
            yield (*path, key), value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any, form: str | Callable[[float], str], missing: str = "n/a") -> str:
    if value is None:
        return missing
    if not _is_finite(value):
        return str(value)
    return form.format(value) if isinstance(form, str) else form(value)


def _short(value: float) -> str:
    """1234 as 1,234 and 12345678 as 12.3M."""
    for size, divisor, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / divisor:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def _memory_text(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"


def _fact_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: writes both files of one run and prints their paths; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m forge_mlx.train.report",
        description="Write loss.png and report.html of a run anew, from its config.yaml and metrics.jsonl.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder; the run may still be going on")
    try:
        run = load_run(parser.parse_args(arguments).run)
        for notice in run.notices:
            print(notice, file=sys.stderr)
        print(write_loss_plot(run))
        print(write_report(run))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
