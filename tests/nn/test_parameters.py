"""Which parameters decay, and how many there are."""

from forge_mlx.nn.parameters import count_elements, is_matrix
import mlx.core as mx
import mlx.nn as nn


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
