"""What a report shows of the experts of an MoE run: load maps, routers, and what came to no expert."""

from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import Any, Literal

from forge_mlx.train.charts import FEW, Chart, Floats, kin
from forge_mlx.train.figures import Figure, number
from forge_mlx.train.heat_map import HeatMap, legend
from forge_mlx.train.metrics import Record
from forge_mlx.train.run_log import Run, is_finite
import numpy as np

# Cells of all maps together, about a byte of the page each, and columns of one map: at least, whatever the cells.
MAX_CELLS, COLUMNS = 400_000, (80, 400)
_PER_LAYER = ("load", "max_over_mean", "entropy", "aux_loss", "z_loss")


@dataclass
class _ExpertLog:
    """The training records of an MoE run.

    Attributes:
        records: The training records, step for step the last one written, steps ascending.
        layers: Index of each MoE layer in the model.
        num_experts: Experts of a layer; 0 where no load was logged.
        left_out: Fields whose values have another shape than those of the last record, with how often.
    """

    records: list[Record]
    layers: list[int]
    num_experts: int
    left_out: dict[str, int]

    def values(self, name: str, *shape: int) -> tuple[Floats, Floats]:
        """Steps, float64 `[N]`, and a field's values, float64 `[N, *shape]`, of the records that have it."""
        steps, found = [], []
        for record in self.records:
            value = _moe(record).get(name)
            if value is None:
                continue
            array = _array(value, shape)
            if array is None:
                self.left_out[name] = self.left_out.get(name, 0) + 1
            else:
                steps.append(record["step"])
                found.append(array)
        return np.array(steps, np.float64), np.stack(found) if found else np.empty((0, *shape))


def expert_section(run: Run, marks: Sequence[int]) -> dict[str, Any] | None:
    """What the template's section of experts needs; None for a run without MoE layers.

    Args:
        run: The run.
        marks: Steps of its events.
    """
    log = _expert_log(run.of("train"))
    if log is None:
        return None
    last_step = max(1, run.last_step)
    steps, load = (
        log.values("load", len(log.layers), log.num_experts) if log.num_experts else (np.empty(0), np.empty(0))
    )
    maps = _maps(log, steps, load, last_step) if steps.size else []
    charts = [chart.drawn(last_step, marks) for chart in _charts(log)]
    return {
        "figures": _figures(log, load),
        "maps": maps,
        "legend": legend(),
        "unknown": any(each["unknown"] for each in maps),
        "column_text": _column_text(maps[0]["steps_a_column"]) if maps else "",
        "charts": charts,
        "max_points": max(chart["thinned_to"] for chart in charts),
        "smoothed": len(log.layers) > FEW,
        "notes": [
            f"Left out: {name} of {count:,} record(s), not one value for each layer and expert."
            for name, count in log.left_out.items()
        ],
    }


def _expert_log(records: Sequence[Record]) -> _ExpertLog | None:
    """The records as a log of experts; its shape is that of the last record whose shape can be told."""
    latest = {record["step"]: record for record in records}
    ordered = [latest[step] for step in sorted(latest)]
    if not any(_moe(record) for record in ordered):
        return None
    for moe in map(_moe, reversed(ordered)):
        lists = [value for name in _PER_LAYER if isinstance(value := moe.get(name), list)]
        layers = moe["layers"] if isinstance(moe.get("layers"), list) else list(range(max(map(len, lists), default=0)))
        load = _array(moe.get("load"))
        if layers and load is not None and load.ndim == 2 and len(load) == len(layers):
            return _ExpertLog(ordered, layers, load.shape[1], {})
        if layers and moe.get("load") is None:
            return _ExpertLog(ordered, layers, 0, {})
    return _ExpertLog(ordered, [], 0, {})


def _maps(log: _ExpertLog, steps: Floats, load: Floats, last_step: int) -> list[dict[str, Any]]:
    least, most = COLUMNS
    columns = min(most, max(least, MAX_CELLS // (len(log.layers) * log.num_experts)))
    # A record's window began at the record before it, one without a load included.
    ends = np.array([0, *(record["step"] for record in log.records)], np.float64)
    starts = ends[np.searchsorted(ends, steps) - 1]
    maps = (HeatMap(f"layer {layer}", starts, steps, load[:, index]) for index, layer in enumerate(log.layers))
    return [each.drawn(last_step, columns) for each in maps]


def _column_text(steps: float) -> str:
    return "one step" if steps <= 1 else f"{steps:,.0f} steps" if steps >= 10 else f"{steps:.3g} steps"


def _charts(log: _ExpertLog) -> list[Chart]:
    names = [f"layer {layer}" for layer in log.layers]

    def chart(
        name: str, title: str, form: str, scale: Literal["linear", "clip"], rule: tuple[str, float] | None
    ) -> Chart:
        return Chart(title, kin(names, *log.values(name, len(names))), form.format, scale, rule)

    entropy = math.log(log.num_experts) if log.num_experts else 0.0
    uniform = (f"uniform, ln {log.num_experts:,} = {entropy:.3f}", entropy) if entropy else None
    steps, ranges = log.values("bias_range", len(names), 2)
    ends = [line for end in (0, 1) for line in kin(names, steps, ranges[..., end])]
    where_logged = [
        Chart("selection bias, lowest and highest", ends, "{:.4g}".format),
        chart("aux_loss", "auxiliary loss before its weight", "{:.4g}", "clip", ("balanced", 1.0)),
        chart("z_loss", "router z-loss before its weight", "{:.4g}", "clip", None),
    ]
    return [
        chart("max_over_mean", "load of the busiest expert, mean = 1", "{:.3g}", "clip", ("balanced", 1.0)),
        chart("entropy", "entropy of the router, nats", "{:.3f}", "linear", uniform),
        *(each for each in where_logged if each.lines),
    ]


def _figures(log: _ExpertLog, load: Floats) -> list[Figure]:
    count = len(log.layers)
    where = f"in each of {count:,} layers" if count > 1 else "in one layer"
    dropped = [value for record in log.records if (value := _moe(record).get("dropped")) is not None]
    unlogged = sum(_moe(record).get("dropped") is None for record in log.records)
    return [
        ("experts", number(log.num_experts or None, "{:,}"), where if log.layers else ""),
        *_load_figures(log, load),
        (
            "dropped tokens",
            number(sum(dropped), "{:,}") if dropped and all(map(is_finite, dropped)) else "n/a",
            f"{unlogged:,} record(s) say nothing of it" if dropped and unlogged else "over the whole run",
        ),
    ]


def _load_figures(log: _ExpertLog, load: Floats) -> list[Figure]:
    """The busiest expert and those without a token, of the last record whose loads are known."""
    known = np.flatnonzero(np.isfinite(load).all(axis=(1, 2))) if load.size else np.empty(0, np.intp)
    if not known.size:
        return [("highest load / mean", "n/a", ""), ("idle experts", "n/a", "")]
    last = load[known[-1]]
    share = last / np.maximum(last.mean(axis=1, keepdims=True), 1e-9)
    layer, expert = np.unravel_index(int(share.argmax()), share.shape)
    return [
        ("highest load / mean", f"{share.max():.2f}", f"expert {expert} of layer {log.layers[layer]}, last record"),
        ("idle experts", f"{int((last == 0).sum()):,} of {last.size:,}", "without a token in the last record"),
    ]


def _moe(record: Record) -> dict[str, Any]:
    value = record.get("moe")
    return value if isinstance(value, dict) else {}


def _array(value: Any, shape: tuple[int, ...] | None = None) -> Floats | None:
    """Nested lists as float64, None inside as NaN; None for what is no array, or none of that shape."""
    try:
        array = np.array(value, np.float64)
    except (TypeError, ValueError):
        return None
    return array if shape is None or array.shape == shape else None
