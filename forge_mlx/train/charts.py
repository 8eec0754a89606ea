"""Charts over the steps of a run: their limits, ticks, smoothing, and the SVG paths that a page draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
from typing import Any, Literal

from matplotlib.ticker import MaxNLocator
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Points that a drawn line keeps: more than a page is wide in pixels, and a long run's page stays small.
MAX_POINTS = 1200


@dataclass
class Line:
    """One line of a chart: its name, how it looks, and its points, float64 `[N]` each (NaN: a gap)."""

    label: str
    look: Literal["faint", "line", "dots"]
    steps: Floats
    values: Floats


@dataclass
class Chart:
    """One chart over the steps.

    Attributes:
        title: What is drawn, and its unit.
        lines: The lines, first one at the back.
        text: Writes a value for the reader.
        scale: "linear", "zero" (linear from 0), "log", or "clip" (linear, with a far higher start cut off).
        rule: Name and value of a horizontal line.
    """

    title: str
    lines: list[Line]
    text: Callable[[float], str]
    scale: Literal["linear", "zero", "log", "clip"] = "linear"
    rule: tuple[str, float] | None = None

    def limits(self) -> tuple[float, float]:
        """The lowest and highest value that the chart shows."""
        values = np.concatenate([line.values for line in self.lines] or [np.empty(0)])
        values = values[np.isfinite(values) & ((values > 0) | (self.scale != "log"))]
        if values.size == 0:
            return (0.1, 1.0) if self.scale == "log" else (0.0, 1.0)
        low, high = float(values.min()), float(values.max())
        if self.scale == "log":
            return low / 1.25, high * 1.25
        if self.scale == "clip":
            usual = float(np.quantile(values, 0.96))
            if high - low > 1.6 * (usual - low) > 0:
                high = usual + 0.15 * (usual - low)
        if self.rule is not None:
            low, high = min(low, self.rule[1]), max(high, self.rule[1])
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return (0.0 if self.scale == "zero" else low - margin), high + margin

    def clipped(self) -> str:
        """Says what lies above the chart; empty when nothing does."""
        high = self.limits()[1]
        peak = highest(np.concatenate([line.values for line in self.lines] or [np.empty(0)]))
        return "" if peak is None or peak <= high else f"the highest value, {self.text(peak)}, lies above"

    def drawn(self, last_step: int, marks: Sequence[int]) -> dict[str, Any]:
        """What the template needs: paths in a square of 1000, ticks in percent, values under a pointer."""
        low, high = self.limits()
        log = self.scale == "log"
        if log:
            low, high = math.log10(low), math.log10(high)

        def height(values: Floats) -> Floats:
            with np.errstate(divide="ignore", invalid="ignore"):
                scaled = np.log10(values) if log else values
            return np.where(np.isfinite(scaled), (scaled - low) / (high - low), math.nan)

        lines, hover = [], []
        for line in self.lines:
            steps, values = thin(line.steps, line.values)
            xs, ys = 1000 * steps / last_step, 1000 * (1 - height(values))
            lines.append({"label": line.label, "look": line.look, "path": svg_path(xs, ys), "dots": svg_dots(xs, ys)})
            if line.look != "faint":
                texts = [self.text(value) if math.isfinite(value) else "not finite" for value in values.tolist()]
                hover.append({"label": line.label, "look": line.look, "steps": steps.tolist(), "texts": texts})
        ticks = np.array((_log_ticks(low, high) if log else _ticks(low, high)) if self.lines else [])
        step_ticks = _ticks(0, last_step, whole=True) if self.lines else []
        return {
            "title": self.title,
            "lines": lines,
            "hover": {"last": last_step, "lines": hover},
            "rule": self.rule and (self.rule[0], 100 * float(height(np.array(self.rule[1])))),
            "y_ticks": [(100 * at, _tick_text(tick)) for at, tick in zip(height(ticks).tolist(), ticks, strict=True)],
            "x_ticks": [(100 * tick / last_step, _tick_text(tick)) for tick in step_ticks],
            "marks": [1000 * mark / last_step for mark in marks],
            "notes": [note for note in (self.clipped(), self._left_out()) if note],
            "thinned_to": MAX_POINTS if any(line.steps.size > MAX_POINTS for line in self.lines) else 0,
        }

    def _left_out(self) -> str:
        """Says which measured values have no place in the chart; empty when there are none."""
        kind = "not finite or not above 0" if self.scale == "log" else "not finite"
        for line in self.lines:
            bad = ~np.isfinite(line.values) | ((self.scale == "log") & ~(line.values > 0))
            if bad.any():
                first = int(line.steps[int(np.argmax(bad))])
                return f"values {kind}: {int(bad.sum()):,} of {line.label}, first at step {first:,}"
        return ""


def smoothed(label: str, steps: Floats, values: Floats, log: bool = False) -> list[Line]:
    """The measured values, faint, and above them their moving mean (``log``: the geometric mean)."""
    if not steps.size:
        return []
    mean = np.exp(smooth(np.log(np.where(values > 0, values, math.nan)))) if log else smooth(values)
    return [Line(label, "faint", steps, values), Line(f"{label}, smoothed", "line", steps, mean)]


def smooth(values: Floats) -> Floats:
    """The mean over 1 % of the points on either side, twice, so that a peak leaves a tent and no block."""
    half = max(1, values.size // 100)
    return _moving_mean(_moving_mean(values, half), half)


def _moving_mean(values: Floats, half: int) -> Floats:
    """The mean over ``half`` points on either side; NaN counts for nothing, and stays NaN.

    The window shrinks evenly toward the start, where a loss falls too steeply for a lopsided mean.
    """
    count = values.size
    index = np.arange(count)
    first, end = index - np.minimum(index, half), index + 1 + np.minimum(index, half)
    end = np.minimum(end, count)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    weight = np.maximum(1, counts[end] - counts[first])
    return np.where(finite, (sums[end] - sums[first]) / weight, math.nan)


def thin(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """At most MAX_POINTS points: of each stretch the lowest and the highest, so that no peak is lost."""
    if steps.size <= MAX_POINTS:
        return steps, values
    keep: set[int] = set()
    for stretch in np.array_split(np.arange(steps.size), MAX_POINTS // 2):
        part = values[stretch]
        if np.isfinite(part).any():
            keep |= {int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])}
        else:
            keep.add(int(stretch[0]))
    chosen = np.array(sorted(keep))
    return steps[chosen], values[chosen]


def svg_path(xs: Floats, ys: Floats) -> str:
    """An SVG path through the points that lifts the pen at each NaN; a lone point is a dot."""
    parts, drawing = [], False
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(y):
            parts.append(f"L{x:.1f} {y:.1f}" if drawing else f"M{x:.1f} {y:.1f}h.01")
        drawing = math.isfinite(y)
    return "".join(parts)


def svg_dots(xs: Floats, ys: Floats) -> str:
    """An SVG path of strokes too short to see: their round caps are dots in any aspect ratio."""
    points = zip(xs.tolist(), ys.tolist(), strict=True)
    return "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in points if math.isfinite(y))


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    locator = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole)
    return [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks between two decimal logarithms: 1, 2, 5 of each decade, or when those are many the decades."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    fine = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    ticks = [tick for tick in fine if low <= math.log10(tick) <= high]
    if len(ticks) <= 6:
        return ticks
    whole = [float(f"1e{decade}") for decade in decades if low <= decade <= high]
    return whole[:: max(1, math.ceil(len(whole) / 6))]


def highest(values: Floats) -> float | None:
    """The highest of the finite values; None when there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else None


def _tick_text(value: float) -> str:
    """2500 as 2.5k: an axis has room for few characters, and its values are round."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"
