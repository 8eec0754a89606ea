"""A picture of the kernels' benchmark: how many times MLX's time and peak memory ours is, op by op."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_timing import PASSES
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

PICTURES = (".png", ".svg", ".pdf")
# Told apart by people who see colours differently, and in grey by their shapes.
_LOOKS = {"forward": ("#0072b2", "o"), "backward": ("#d55e00", "s"), "both": ("#009e73", "D")}


def plot(file: Path, results: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw one row an op with a mark for each case and pass, times on the left and peaks on the right.

    Args:
        file: Where the picture goes; its suffix says the format.
        results: What the benchmark's JSON has as `results`.
        title: What was measured, and on what.
    """
    ops = list(dict.fromkeys(each["op"] for each in results))
    figure = Figure(figsize=(11, 1.8 + 0.55 * len(ops)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, key, name in ((left, "speed", "time"), (right, "memory", "peak memory")):
        for which in PASSES:
            points = [(each[key], _height(ops, each)) for each in results if each["pass"] == which]
            colour, marker = _LOOKS[which]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.scatter(xs, ys, s=30, c=colour, marker=marker, alpha=0.75, linewidths=0, label=which)
        for row in range(0, len(ops), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="0.96", zorder=0)
        _label(axes, name)
    left.set_yticks(range(len(ops)), ops)
    left.set_ylim(len(ops) - 0.5, -0.5)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(PASSES), frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=150)


def _height(ops: Sequence[str], result: Mapping[str, Any]) -> float:
    """Each pass of an op has a line of its own, around the op's."""
    return ops.index(result["op"]) + 0.25 * (PASSES.index(result["pass"]) - 1)


def _label(axes: Axes, name: str) -> None:
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high, 2.0))
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(axis="x", color="0.85")
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{name}: MLX / ours; right of 1 ours is better")
