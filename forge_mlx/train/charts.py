"""Charts over the steps of a run: their limits, ticks, smoothing, and the SVG paths that a page draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
import math
from typing import Any, Literal

from matplotlib.ticker import MaxNLocator
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Points that a drawn line keeps: more than a page is wide in pixels, and a long run's page stays small.
MAX_POINTS = 1200
# Lines of one kind, as of a model's layers, that a legend names and a pointer reads one by one.
FEW = 4
# Hues of the first and the last of such lines: blue, by way of red, to orange.
_HUES = 215.0, 395.0


@dataclass
class Line:
    """One line of a chart: its name, how it looks, and its points, float64 `[N]` each (NaN: a gap).

    The "kin" of a chart are lines of one kind and of the same steps, each with a hue of its own, in degrees; its
    "edges" are the highest and the lowest of many kin.
    """

    label: str
    look: Literal["faint", "line", "dots", "kin", "edge"]
    steps: Floats
    values: Floats
    hue: float | None = None


@dataclass
class Chart:
    """One chart over the steps.

    Attributes:
        title: What is drawn, and its unit.
        lines: The lines, first one at the back.
        text: Writes a value for the reader.
        scale: "linear", "zero" (linear from 0), "log", or "clip" (linear, with a far higher start cut off).
        rule: Name and value of a horizontal line.
        turns: Name and step of each vertical line.
    """

    title: str
    lines: list[Line]
    text: Callable[[float], str]
    scale: Literal["linear", "zero", "log", "clip"] = "linear"
    rule: tuple[str, float] | None = None
    turns: list[tuple[str, int]] = field(default_factory=list)

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

        most, lines = self._points_a_line(), []
        for line in self._shown():
            steps, values = thin(line.steps, line.values, most)
            xs, ys = 1000 * steps / last_step, 1000 * (1 - height(values))
            dotted = line.look == "dots" or (line.look == "kin" and steps.size == 1)
            lines.append(
                {
                    "look": line.look,
                    "hue": line.hue,
                    "path": svg_path(xs, ys),
                    "dots": svg_dots(xs, ys) if dotted else "",
                }
            )
        ticks = np.array((_log_ticks(low, high) if log else _ticks(low, high)) if self.lines else [])
        return {
            "title": self.title,
            "lines": lines,
            "legend": self._legend(),
            "hover": {"last": last_step, "lines": self._readout(most)},
            "rule": self.rule and (self.rule[0], 100 * float(height(np.array(self.rule[1])))),
            "turns": [(name, 100 * step / last_step) for name, step in self.turns],
            "y_ticks": [(100 * at, _tick_text(tick)) for at, tick in zip(height(ticks).tolist(), ticks, strict=True)],
            "x_ticks": step_ticks(last_step) if self.lines else [],
            "marks": [1000 * mark / last_step for mark in marks if mark not in {step for _, step in self.turns}],
            "notes": [note for note in (self.clipped(), self._left_out()) if note],
            "thinned_to": most if any(line.steps.size > most for line in self.lines) else 0,
        }

    def _kin(self) -> list[Line]:
        return [line for line in self.lines if line.look == "kin"]

    def _points_a_line(self) -> int:
        """Points that each line keeps: fewer where there are many lines, so that their page stays small too."""
        return MAX_POINTS * 2 * FEW // max(2 * FEW, len(self._kin()))

    def _shown(self) -> list[Line]:
        """The lines that are drawn: many kin are smoothed, between edges that hide no peak."""
        kin = self._kin()
        if len(kin) <= FEW:
            return self.lines
        edges = [Line(label, "edge", kin[0].steps, values) for label, values, _ in _edges(kin)]
        return [*edges, *(replace(line, values=smooth(line.values)) for line in kin)]

    def _legend(self) -> list[Line]:
        """The lines that the legend names, each name once: of many kin some from the first to the last."""
        named = list({line.label: line for line in self.lines}.values())
        if len(self._kin()) <= FEW:
            return named
        places = np.linspace(0, len(named) - 1, min(FEW, len(named))).round().astype(int)
        edges = Line("highest and lowest", "edge", named[0].steps, named[0].values)
        return [*(named[place] for place in places), edges]

    def _readout(self, most: int) -> list[dict[str, Any]]:
        """What a pointer reads: each line but the faint ones; of many kin the highest and the lowest, with its name."""
        kin = self._kin()
        if len(kin) <= FEW:
            return [self._read(line, most) for line in self.lines if line.look != "faint"]
        found = []
        for label, values, owners in _edges(kin):
            read = self._read(Line(label, "edge", kin[0].steps, values), most)
            places = np.searchsorted(kin[0].steps, read["steps"]).tolist()
            texts = zip(read["texts"], places, strict=True)
            found.append(read | {"texts": [f"{text}, {kin[owners[place]].label}" for text, place in texts]})
        return found

    def _read(self, line: Line, most: int) -> dict[str, Any]:
        steps, values = thin(line.steps, line.values, most)
        texts = [self.text(value) if math.isfinite(value) else "not finite" for value in values.tolist()]
        read = {"label": line.label, "look": line.look, "steps": steps.tolist(), "texts": texts}
        return read if line.hue is None else read | {"hue": line.hue}

    def _left_out(self) -> str:
        """Says which measured values have no place in the chart; empty when there are none."""
        kind = "not finite or not above 0" if self.scale == "log" else "not finite"
        for line in self.lines:
            bad = ~np.isfinite(line.values) | ((self.scale == "log") & ~(line.values > 0))
            if bad.any():
                first = int(line.steps[int(np.argmax(bad))])
                return f"values {kind}: {int(bad.sum()):,} of {line.label}, first at step {first:,}"
        return ""


def kin(labels: Sequence[str], steps: Floats, values: Floats) -> list[Line]:
    """Lines of one kind, from blue to orange in their order; none for a line without any number.

    Args:
        labels: Name of each line, L.
        steps: Their steps, float64 `[N]`, ascending.
        values: Their values, float64 `[N, L]`.
    """
    hues = np.linspace(*_HUES, len(labels)) % 360
    lines = zip(labels, values.T, hues.tolist(), strict=True)
    return [Line(label, "kin", steps, each, hue) for label, each, hue in lines if np.isfinite(each).any()]


def _edges(kin: Sequence[Line]) -> list[tuple[str, Floats, NDArray[np.intp]]]:
    """Of lines with the same steps the highest and the lowest: name, values, and which line each is of."""
    values = np.stack([line.values for line in kin])
    edges = []
    for label, absent, pick in (("highest", -math.inf, np.argmax), ("lowest", math.inf, np.argmin)):
        owners = pick(np.where(np.isfinite(values), values, absent), axis=0)
        edges.append((label, np.take_along_axis(values, owners[None], axis=0)[0], owners))
    return edges


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


def thin(steps: Floats, values: Floats, most: int) -> tuple[Floats, Floats]:
    """At most ``most`` points: of each stretch the lowest and the highest, so that no peak is lost."""
    if steps.size <= most:
        return steps, values
    keep: set[int] = set()
    for stretch in np.array_split(np.arange(steps.size), most // 2):
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


def step_ticks(last_step: int) -> list[tuple[float, str]]:
    """Ticks of the axis of steps: percent from its left end, and text."""
    return [(100 * tick / last_step, _tick_text(tick)) for tick in _ticks(0, last_step, whole=True)]


def index_ticks(count: int) -> list[tuple[float, str]]:
    """Ticks of an axis of ``count`` numbered rows, row 0 at its top: percent from its lower end, and text."""
    return [(100 * (1 - (tick + 0.5) / count), f"{tick:.0f}") for tick in _ticks(0, count - 1, whole=True)]


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
