import math

from forge_mlx.train import charts
from forge_mlx.train.charts import Chart, Line
import numpy as np
import pytest


def test_thinning_keeps_the_peaks(monkeypatch):
    monkeypatch.setattr(charts, "MAX_POINTS", 20)
    values = np.zeros(1001)
    values[[123, 777]] = 5.0, -5.0
    steps, kept = charts.thin(np.arange(1001.0), values)
    assert {(123.0, 5.0), (777.0, -5.0)} <= set(zip(steps.tolist(), kept.tolist(), strict=True))
    assert (np.diff(steps) > 0).all()
    assert steps.size <= 20


def test_smoothing_follows_a_line_skips_nan_and_flattens_noise():
    line = np.arange(500.0)
    assert np.allclose(charts.smooth(line)[:480], line[:480])
    noise = np.tile([1.0, -1.0], 250)
    assert np.abs(charts.smooth(noise)[20:]).max() < 0.1
    gap = np.array([1.0, math.nan, 1.0, 1.0])
    assert np.allclose(charts.smooth(gap), gap, equal_nan=True)


def test_a_gap_lifts_the_pen():
    path = charts.svg_path(np.array([0.0, 1, 2, 3, 4]), np.array([5.0, 6, math.nan, 7, 8]))
    assert path == "M0.0 5.0h.01L1.0 6.0M3.0 7.0h.01L4.0 8.0"


@pytest.mark.parametrize(
    ("scale", "values", "limits", "ticks"),
    [
        ("zero", [0.0, 10.0], (0.0, 10.6), ["0", "2.5", "5", "7.5", "10"]),
        ("linear", [4.0, 4.0], (3.6, 4.4), ["3.6", "3.8", "4", "4.2", "4.4"]),
        ("log", [0.1, 0.0, 1000.0], (0.08, 1250.0), ["0.1", "1", "10", "100", "1k"]),
        ("log", [1.0, 4.0], (0.8, 5.0), ["1", "2", "5"]),
        ("clip", [9.0, 9.0, *np.linspace(3, 2, 98)], (1.9324, 3.1944), ["2", "2.5", "3"]),
        ("clip", [9.0, 2.0, 5.0], (1.58, 9.42), ["2", "4", "6", "8"]),
    ],
)
def test_limits_and_ticks(scale, values, limits, ticks):
    line = Line("x", "line", np.arange(float(len(values))), np.array(values))
    chart = Chart("x", [line], "{:g}".format, scale)
    assert chart.limits() == pytest.approx(limits, abs=1e-3)
    assert (chart.clipped() != "") is (limits[1] < max(values))
    drawn = chart.drawn(len(values), [])
    assert [label for _, label in drawn["y_ticks"]] == ticks
    assert all(0 <= at <= 100 for at, _ in drawn["y_ticks"])
