"""Which parameters decay and which stay frozen, how many there are, and the innermost modules."""

import copy

from forge_mlx.nn.parameters import StaysFrozen, count_elements, is_matrix, named_leaves
import mlx.core as mx
import mlx.nn as nn
import pytest


def test_matrices_have_two_axes_or_more():
    assert [is_matrix(mx.zeros(shape)) for shape in [(), (3,), (3, 1), (2, 3, 4)]] == [
        False,
        False,
        True,
        True,
    ]


def test_elements_of_nested_parameters():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    assert count_elements(model.parameters()) == 3 * 5 + 5 + 5 * 2
    assert count_elements({}) == 0


def test_leaves_are_named_in_the_order_of_the_layers():
    model = nn.Module()
    model.layers = [nn.Sequential(nn.Linear(3, 2), nn.ReLU()), nn.Linear(2, 2)]
    found = named_leaves(model)
    assert [(name, type(leaf).__name__) for name, leaf in found] == [
        ("layers.0.layers.0", "Linear"),
        ("layers.0.layers.1", "ReLU"),
        ("layers.1", "Linear"),
    ]
    assert found[2][1] is model.layers[1]


@pytest.mark.parametrize("make", [lambda names: names, copy.deepcopy], ids=["made", "copied"])
def test_some_names_stay_among_the_frozen(make):
    names = StaysFrozen({"a", "b"})
    names.update({"c", "d"})
    names = make(names)
    names.difference_update({"a", "c"}, ["b"])
    assert names == {"a", "b", "d"}
    names.clear()
    assert names == {"a", "b"}
