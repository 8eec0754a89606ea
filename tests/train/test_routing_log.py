"""What a training record says of the routers, against sums by hand."""

from forge_mlx.nn.routing_record import RoutingRecord
from forge_mlx.train.routing_log import RoutingWindow
import mlx.core as mx
import numpy as np
import pytest


def _record(load: list[int], tokens: float, probability: list[float], entropy: float, z: float) -> RoutingRecord:
    return RoutingRecord(
        load=mx.array(load, mx.int32),
        probability_sum=mx.array(probability),
        entropy_sum=mx.array(entropy),
        z_sum=mx.array(z),
        tokens=mx.array(tokens),
    )


def test_a_record_sums_loads_and_averages_the_rest_over_steps() -> None:
    window = RoutingWindow()
    window.add(
        [_record([6, 2, 0], 4, [2.0, 1.0, 1.0], 2.0, 12.0), _record([4, 4, 0], 4, [1.0, 1.0, 2.0], 3.0, 20.0)], 2
    )
    window.add([_record([0, 2, 6], 4, [1.0, 1.0, 2.0], 4.0, 4.0), _record([2, 2, 4], 4, [2.0, 2.0, 0.0], 1.0, 8.0)], 2)
    found = window.fields([1, 2], [mx.array([0.0, -0.5, 0.25]), mx.array([1.0, 2.0, 3.0])])
    assert found["layers"] == [1, 2]
    assert found["load"] == [[6, 4, 6], [6, 6, 4]]
    assert found["max_over_mean"] == pytest.approx([6 / (16 / 3)] * 2)
    assert found["dropped"] == 0
    assert found["bias_range"] == [[-0.5, 0.25], [1.0, 3.0]]
    assert found["entropy"] == pytest.approx([(2 + 4) / 4 / 2, (3 + 1) / 4 / 2])
    # E sum of (share of the load) x (mean probability), step by step.
    first = 3 * (6 / 8 * 2 / 4 + 2 / 8 * 1 / 4), 3 * (4 / 8 * 1 / 4 + 4 / 8 * 1 / 4)
    second = 3 * (2 / 8 * 1 / 4 + 6 / 8 * 2 / 4), 3 * (2 / 8 * 2 / 4 + 2 / 8 * 2 / 4)
    assert found["aux_loss"] == pytest.approx([(one + two) / 2 for one, two in zip(first, second, strict=True)])
    assert found["z_loss"] == pytest.approx([(12 + 4) / 4 / 2, (20 + 8) / 4 / 2])


def test_places_that_tokens_did_not_get_are_counted() -> None:
    window = RoutingWindow()
    window.add([_record([3, 2], 4, [2.0, 2.0], 1.0, 1.0), _record([4, 4], 4, [2.0, 2.0], 1.0, 1.0)], 2)
    window.add([_record([4, 4], 4, [2.0, 2.0], 1.0, 1.0), _record([4, 3], 4, [2.0, 2.0], 1.0, 1.0)], 2)
    assert window.fields([0, 1], [None, None])["dropped"] == 3 + 1


def test_a_step_of_padding_alone_counts_as_nothing() -> None:
    window = RoutingWindow()
    window.add([_record([0, 0], 0, [0.0, 0.0], 0.0, 0.0)], 1)
    found = window.fields([0], [None])
    assert (found["load"], found["dropped"], found["bias_range"]) == ([[0, 0]], 0, None)
    assert np.array([found[name] for name in ("max_over_mean", "entropy", "aux_loss", "z_loss")]).tolist() == [[0]] * 4


def test_without_layers_there_is_nothing_to_say() -> None:
    window = RoutingWindow()
    window.add([], 2)
    assert window.fields([], []) == {}
