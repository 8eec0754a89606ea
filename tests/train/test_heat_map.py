import base64
import io
import math

from forge_mlx.train import heat_map
from forge_mlx.train.heat_map import EMPTY, FULL, SHADES, UNKNOWN, HeatMap, legend, png, position, shades
from matplotlib.image import imread
import numpy as np
import pytest


def _regular(amounts, every=10):
    steps = every * np.arange(1.0, len(amounts) + 1)
    return HeatMap("map", steps - every, steps, np.asarray(amounts, np.float64))


def _pixels(picture):
    return np.round(255 * imread(io.BytesIO(picture))).astype(int)


def test_stretches_that_are_the_windows_have_their_ratios():
    amounts = np.array([[1, 3], [2, 2], [0, 8], [5, 0]])
    assert np.allclose(_regular(amounts).ratios(40, 4), [[0.5, 1.5], [1, 1], [0, 2], [2, 0]])
    assert np.allclose(_regular(amounts).ratios(40, 2), [[0.75, 1.25], [10 / 13, 16 / 13]])


@pytest.mark.parametrize("columns", [1, 3, 16, 40, 61])
def test_windows_of_any_length_agree_with_counting_step_by_step(columns):
    rng = np.random.default_rng(0)
    ends = np.array([3, 4, 20, 21, 22, 50, 60, 87.0])
    starts = np.array([0, 3, 4, 20, 21, 40, 50, 60.0])
    amounts = rng.integers(0, 100, (8, 5)).astype(float)
    # Each step in as many parts as there are columns, so that a column is a whole number of parts.
    parts = np.zeros((87 * columns, 5))
    for start, end, amount in zip(starts, ends, amounts, strict=True):
        parts[int(start) * columns : int(end) * columns] = amount / (end - start)
    sums = parts.reshape(columns, 87, 5).sum(axis=1)
    with np.errstate(invalid="ignore"):
        expected = sums / sums.mean(axis=1, keepdims=True)
    found = HeatMap("map", starts, ends, amounts).ratios(87, columns)
    # Where no window is: between steps 22 and 40.
    assert np.isnan(found).all(axis=1).tolist() == (sums.sum(axis=1) == 0).tolist()
    assert np.allclose(found, expected, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_window_with_a_value_that_is_not_known_is_unknown_and_spoils_no_other(bad):
    ratios = _regular([[1, 3], [bad, 2], [0, 8], [0, 0]]).ratios(40, 4)
    assert np.allclose(ratios[[0, 2]], [[0.5, 1.5], [0, 2]])
    assert np.isnan(ratios[[1, 3]]).all()


def test_two_records_of_one_step_do_no_harm():
    found = HeatMap("map", np.array([0.0, 10, 10]), np.array([10.0, 10, 20]), np.array([[1.0, 3], [9, 9], [2, 2]]))
    assert np.allclose(found.ratios(20, 2), [[0.5, 1.5], [1, 1]])
    assert np.allclose(found.ratios(20, 1), [[0.75, 1.25]])


def test_the_scale_is_centred_at_1_and_an_inverse_is_as_far():
    ratios = np.array([0, 0.001, 1 / 3, 0.5, 1, 2, 3, 1000, math.inf])
    places = shades(ratios).astype(int) - SHADES
    assert (places + places[::-1])[[2, 3, 4]].tolist() == [0, 0, 0]
    assert (np.diff(position(ratios)) > 0).all()
    assert places[[0, 4, -1]].tolist() == [-SHADES, 0, SHADES]
    # No other load looks like none at all.
    assert places[1] == 1 - SHADES
    assert shades(np.array([math.nan])).tolist() == [2 * SHADES + 1]


def test_the_picture_has_a_pixel_for_each_cell_and_shows_the_page_at_1():
    ratios = np.array([[0, 1, math.inf, math.nan], [0.5, 2, 1, 1]])
    pixels = _pixels(png(shades(ratios)))
    assert pixels.shape == (2, 4, 4)
    assert pixels[0, :, :3].tolist()[::2] == [list(EMPTY), list(FULL)]
    assert pixels[0, 3, :3].tolist() == list(UNKNOWN)
    assert pixels[..., 3].tolist() == [[255, 0, 255, 0x70], [round(255 * 11 / 32)] * 2 + [0, 0]]
    assert pixels[1, 0, :3].tolist() == list(EMPTY)
    assert pixels[1, 1, :3].tolist() == list(FULL)


def test_a_row_of_the_picture_is_a_row_of_the_map_first_on_top():
    drawn = _regular([[0, 1, 5], [2, 2, 2]]).drawn(20, 400)
    assert drawn["hover"] == {"last": 20, "columns": 2, "rows": 3}
    pixels = _pixels(base64.b64decode(drawn["picture"]))
    assert pixels[:, 0, :3].tolist()[::2] == [list(EMPTY), list(FULL)]
    assert pixels[:, 1, 3].tolist() == [0, 0, 0]
    assert [label for _, label in drawn["y_ticks"]] == ["0", "1", "2"]
    assert drawn["steps_a_column"] == 10
    assert drawn["unknown"] is False


@pytest.mark.parametrize(("rows", "height"), [(4, 96), (16, 128), (64, 176), (128, 176), (1024, 512)])
def test_the_map_is_as_high_as_its_rows_need(rows, height):
    assert _regular(np.ones((3, rows))).drawn(30, 400)["height"] == height


def test_columns_are_never_narrower_than_the_shortest_window():
    assert _regular(np.ones((50, 2))).drawn(500, 400)["hover"]["columns"] == 50
    assert _regular(np.ones((50, 2))).drawn(500, 20)["hover"]["columns"] == 20
    assert _regular(np.ones((1, 2)), every=1).drawn(1, 400)["hover"]["columns"] == 1
    assert _regular(np.full((1, 2), math.nan)).drawn(10, 400)["unknown"] is True


@pytest.mark.slow
def test_thousands_of_records_of_1024_experts_are_a_small_picture():
    rng = np.random.default_rng(0)
    loads = rng.poisson(200 * np.exp(rng.normal(0, 1, 1024)), (3000, 1024))
    drawn = _regular(loads).drawn(30_000, 97)
    assert _pixels(base64.b64decode(drawn["picture"])).shape == (1024, 97, 4)
    assert len(drawn["picture"]) < 100_000


def test_the_legend_runs_from_no_load_to_far_more_than_the_mean():
    found = legend()
    assert found["colours"][0] == "rgb(31 95 208 / 100%)"
    assert [text for _, text in found["ticks"]] == ["0", "¼", "½", "1", "2", "4", "16"]
    at = np.array([at for at, _ in found["ticks"]])
    assert at[[0, 3]].tolist() == [0, 50]
    assert at[1] + at[5] == pytest.approx(100)
    assert heat_map.EMPTY == (31, 95, 208)
