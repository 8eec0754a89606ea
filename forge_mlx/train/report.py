"""The report of a run: ``loss.png`` and one self-contained ``report.html``, made from the run's own files.

``python -m forge_mlx.train.report RUN`` writes both anew, for a run that ended, crashed or still goes on.
Only ``config.yaml`` and ``metrics.jsonl`` of the folder are read.
"""

import argparse
from collections.abc import Sequence
import io
from pathlib import Path
import sys
from typing import Any

from forge_mlx._text import visible_controls
from forge_mlx.train.before_after import before_and_after, shown_answer
from forge_mlx.train.charts import Chart, Line, highest, smooth, smoothed
from forge_mlx.train.expert_report import expert_section
from forge_mlx.train.figures import (
    GIB,
    MIB,
    fact_text,
    headline_figures,
    quantization_figures,
    short,
    status,
    yardstick,
)
from forge_mlx.train.metrics import Record, replace_file
from forge_mlx.train.progress import format_duration
from forge_mlx.train.run_log import Run, flat, is_finite, load_run
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

__all__ = ["Run", "load_run", "main", "write_loss_plot", "write_report"]

_PNG_STYLE: dict[str, dict[str, Any]] = {
    "faint": {"color": "#a9c4f0", "linewidth": 0.7},
    "line": {"color": "#1f5fd0", "linewidth": 1.8},
    "dots": {"color": "#c8500a", "linewidth": 1.2, "marker": "o", "markersize": 4},
}
# Green and red.
_REWARD_HUES = {"chosen": 150.0, "rejected": 5.0}
# Of the step where fake quantisation begins, and of the one where it ends.
_TURN_DASHES = ("-", "-.")


def write_loss_plot(run: Run) -> Path:
    """Writes ``loss.png``, 1650 x 690: loss and bits per byte over the steps, training and validation."""
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained", facecolor="white")
    # The font that comes with matplotlib has every Latin-1 character, and "$" starts no formula in a name.
    name = run.name.encode("latin-1", "replace").decode("latin-1")
    figure.suptitle(f"{name}, {status(run)}", x=0.01, ha="left", fontsize=13, parse_math=False)
    for axes, chart in zip(figure.subplots(1, 2), _loss_charts(run), strict=True):
        for line in chart.lines:
            style = _PNG_STYLE[line.look] | ({"marker": "o"} if line.steps.size == 1 else {})
            axes.plot(line.steps, line.values, label=line.label, **style)
        if chart.rule is not None:
            axes.axhline(chart.rule[1], color="#555555", linestyle="--", linewidth=1.2, label=chart.rule[0])
        for (name, step), dashes in zip(chart.turns, _TURN_DASHES, strict=False):
            axes.axvline(step, color="#1a7f4b", linestyle=dashes, linewidth=1.2, label=name)
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
    environment.filters.update(visible=visible_controls, duration=format_duration, answer=shown_answer)
    marks = sorted({record["step"] for record in run.of("event") if record["step"] > 0})
    charts = [*_loss_charts(run), *_pair_charts(run), *_other_charts(run)]
    drawn = [chart.drawn(max(1, run.last_step), marks) for chart in charts]
    samples: dict[int, list[Record]] = {}
    for record in run.of("sample"):
        samples.setdefault(record["step"], []).append(record)
    page = environment.get_template("report.html").render(
        run=run,
        status=status(run),
        figures=headline_figures(run),
        yardstick=yardstick(run),
        quantization=quantization_figures(run),
        experts=expert_section(run, marks),
        charts=drawn,
        max_points=max(chart["thinned_to"] for chart in drawn),
        answers=before_and_after(run),
        samples=[(step, samples[step]) for step in sorted(samples, reverse=True)],
        facts=[(" / ".join(path), fact_text(value)) for path, value in flat(run.facts) if value is not None],
    )
    # A sample may hold a lone surrogate, which UTF-8 cannot.
    replace_file(run.folder / "report.html", page.encode("utf-8", "backslashreplace"))
    return run.folder / "report.html"


def _loss_charts(run: Run) -> list[Chart]:
    gzip = run.fact("gzip_bits_per_byte")
    rule = (f"gzip {gzip:.3f}", float(gzip)) if is_finite(gzip) else None
    turns = _quantization_turns(run)
    charts = []
    pairs = run.series("train", "accuracy")[0].size or run.series("eval", "accuracy")[0].size
    names = {"loss": "loss a pair", "accuracy": "share of pairs preferred"}
    for name, title in (names if pairs else {"loss": "loss, nats a token", "bits_per_byte": "bits per byte"}).items():
        lines = smoothed("training", *run.series("train", name))
        steps, values = run.series("eval", name)
        if steps.size:
            lines.append(Line("validation", "dots", steps, values))
        charts.append(Chart(title, lines, "{:.3f}".format, "clip", rule if name == "bits_per_byte" else None, turns))
    return charts


def _pair_charts(run: Run) -> list[Chart]:
    """What preference training does to the two answers of a pair; nothing for any other run."""
    margins = smoothed("training", *run.series("train", "margin"))
    steps, values = run.series("eval", "margin")
    if steps.size:
        margins.append(Line("validation", "dots", steps, values))
    if not margins:
        return []
    rewards = []
    for name, hue in _REWARD_HUES.items():
        steps, values = run.series("train", f"{name}_reward")
        rewards.append(Line(name, "kin", steps, smooth(values), hue))
    return [
        Chart("reward margin, chosen less rejected", margins, "{:.3f}".format),
        Chart("rewards in training, smoothed", rewards, "{:.3f}".format),
    ]


def _quantization_turns(run: Run) -> list[tuple[str, int]]:
    """Where fake quantisation began and ended, as far as the run has come; a start with the run is no turn."""
    turns = [(name, run.qat.get(key)) for name, key in (("quantised", "start_step"), ("float", "end_step"))]
    reached = [(name, step) for name, step in turns if isinstance(step, int) and 0 < step <= run.last_step]
    return [(f"{name} after step {step:,}", step) for name, step in reached]


def _other_charts(run: Run) -> list[Chart]:
    lr = [Line("learning rate", "line", *points)] if (points := run.series("train", "lr"))[0].size else []
    steps, memory = run.series("train", "peak_memory")
    unit, unit_name = (GIB, "GiB") if (highest(memory) or 0) >= GIB else (MIB, "MiB")
    memory_line = [Line("peak memory", "line", steps, memory / unit)] if steps.size else []
    norm = smoothed("gradient norm", *run.series("train", "grad_norm"), log=True)
    speed = smoothed("tokens/s", *run.series("train", "tokens_per_second"))
    return [
        Chart("learning rate", lr, "{:.3g}".format, "zero"),
        Chart("gradient norm", norm, "{:.3g}".format, "log"),
        Chart("tokens/s", speed, short, "zero"),
        Chart(f"peak memory, {unit_name}", memory_line, "{:.4g}".format, "zero"),
    ]


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
