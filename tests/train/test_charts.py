import math
import re

from forge_mlx.train import charts
from forge_mlx.train.charts import Chart, Line, index_ticks, kin
import numpy as np
import pytest


def test_thinning_keeps_the_peaks():
    values = np.zeros(1001)
    values[[123, 777]] = 5.0, -5.0
    steps, kept = charts.thin(np.arange(1001.0), values, 20)
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


def _layers(count, steps=300, scale=0.0):
    values = np.arange(1.0, count + 1) + scale * np.random.default_rng(0).normal(size=(steps, count))
    return kin([f"layer {index}" for index in range(count)], np.arange(1.0, steps + 1), values)


def test_few_kin_are_drawn_named_and_read_one_by_one():
    lines = _layers(3)
    drawn = Chart("x", lines, "{:g}".format).drawn(300, [])
    assert [line["hue"] for line in drawn["lines"]] == [215.0, 305.0, 35.0]
    assert [line.label for line in drawn["legend"]] == ["layer 0", "layer 1", "layer 2"]
    assert [(line["label"], line["texts"][0], line["hue"]) for line in drawn["hover"]["lines"]] == [
        ("layer 0", "1", 215.0),
        ("layer 1", "2", 305.0),
        ("layer 2", "3", 35.0),
    ]


def test_many_kin_are_smoothed_between_edges_that_keep_every_peak():
    lines = _layers(9)
    lines[2].values[150] = 20.0
    lines[6].values[40] = math.nan
    lines[7].values[200] = -3.0
    drawn = Chart("x", lines, "{:g}".format).drawn(300, [])
    looks = [line["look"] for line in drawn["lines"]]
    assert looks == ["edge", "edge", *["kin"] * 9]
    highest, lowest = drawn["hover"]["lines"]
    assert (highest["label"], lowest["label"]) == ("highest", "lowest")
    assert highest["texts"][highest["steps"].index(151.0)] == "20, layer 2"
    assert lowest["texts"][lowest["steps"].index(201.0)] == "-3, layer 7"
    for index in (0, 40):
        assert (highest["texts"][index], lowest["texts"][index]) == ("9, layer 8", "1, layer 0")
    names = [line.label for line in drawn["legend"]]
    assert names == ["layer 0", "layer 3", "layer 5", "layer 8", "highest and lowest"]
    # The peak lies at the top of the upper edge, and the line of its own layer only leans to it.
    tops = [min(float(y) for y in re.findall(r"[ML][\d.]+ (-?[\d.]+)", line["path"])) for line in drawn["lines"]]
    assert tops[0] == min(tops)
    assert tops[2 + 2] > tops[0] + 100
    assert drawn["notes"] == ["values not finite: 1 of layer 6, first at step 41"]


def test_many_lines_share_the_points_of_a_page():
    drawn = Chart("x", _layers(96, steps=3000, scale=0.1), "{:.3f}".format).drawn(3000, [])
    points = [line["path"].count("M") + line["path"].count("L") for line in drawn["lines"]]
    assert max(points) <= charts.MAX_POINTS * 8 // 96
    assert drawn["thinned_to"] == charts.MAX_POINTS * 8 // 96
    assert len(str(drawn)) < 250_000


def test_a_line_without_a_number_is_none_and_one_point_is_a_dot():
    lines = kin(["a", "b"], np.array([3.0]), np.array([[math.nan, 2.0]]))
    assert [line.label for line in lines] == ["b"]
    assert Chart("x", lines, "{:g}".format).drawn(3, [])["lines"][0]["dots"] == "M1000.0 500.0h.01"


def test_two_lines_of_a_layer_are_named_once():
    steps, low, high = np.arange(2.0), np.full((2, 2), -1.0), np.full((2, 2), 1.0)
    chart = Chart("x", [*kin(["a", "b"], steps, low), *kin(["a", "b"], steps, high)], "{:g}".format)
    assert [line.label for line in chart.drawn(2, [])["legend"]] == ["a", "b"]
    assert [line["label"] for line in chart.drawn(2, [])["hover"]["lines"]] == ["a", "b", "a", "b"]


def test_a_turn_takes_the_place_of_an_event_s_mark():
    line = Line("x", "line", np.arange(10.0), np.arange(10.0))
    drawn = Chart("x", [line], "{:g}".format, turns=[("float", 5)]).drawn(10, [5, 8])
    assert drawn["turns"] == [("float", 50.0)]
    assert drawn["marks"] == [800.0]


@pytest.mark.parametrize(("count", "names"), [(1, ["0"]), (8, ["0", "2", "4", "6"]), (1024, ["0", "250", "500"])])
def test_rows_are_counted_from_the_top(count, names):
    ticks = index_ticks(count)
    assert [name for _, name in ticks][: len(names)] == names
    assert ticks[0][0] == pytest.approx(100 * (1 - 0.5 / count))
    assert all(0 < at < 100 for at, _ in ticks)
