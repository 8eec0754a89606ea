"""One matrix an expert: products, and the strides that MLX's sorted product on GPUs needs."""

from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.nn.expert_linear import ExpertLinear, plain_blocks
from forge_mlx.nn.quantized import QuantizedExpertLinear
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest


def strides(array):
    """In elements."""
    mx.eval(array)
    return tuple(stride // array.dtype.size for stride in memoryview(array).strides)


def test_views_with_an_axis_put_in_become_blocks_with_strides_of_their_own():
    rows = mx.random.normal((6, 4))
    # What MLX 0.32.4 goes wrong with on GPUs: it takes the second stride for the distance of rows.
    assert strides(rows[:, None]) == (4, 1, 1)
    assert strides(plain_blocks(rows[:, None])) == (4, 4, 1)
    assert mx.array_equal(plain_blocks(rows[:, None]), rows[:, None])
    assert strides(plain_blocks(rows.reshape(2, 3, 4))) == (12, 4, 1)


@pytest.mark.parametrize("layer", [ExpertLinear, QuantizedExpertLinear])
def test_products_and_their_cotangents_get_plain_blocks(layer, monkeypatch):
    """Whatever the caller's views: those of a product and, through its result's shape, of its gradient's."""
    name = "gather_mm" if layer is ExpertLinear else "gather_qmm"
    seen, product = [], getattr(mx, name)

    def noting(x, *arrays, **options):
        seen.append(strides(x))
        return product(x, *arrays, **options)

    monkeypatch.setattr(mx, name, noting)
    experts = mx.array([0, 0, 2], mx.int32)
    made = ExpertLinear(64, 8, 3)
    if layer is QuantizedExpertLinear:
        holder = nn.Module()
        holder.experts = made
        made = convert_qat(prepare_qat(holder, QATConfig(bits=4))).experts
        assert type(made) is QuantizedExpertLinear
    out = made(mx.random.normal((3, 64))[:, None], experts)
    assert seen == [(64, 64, 1)]
    assert strides(out) == (8, 8, 1)


def test_rows_meet_the_matrix_of_their_expert():
    layer = ExpertLinear(5, 4, 3)
    draw = np.random.default_rng(0)
    x, experts = draw.standard_normal((6, 2, 5)).astype(np.float32), np.array([0, 0, 1, 2, 2, 2])
    want = x.astype(np.float64) @ np.array(layer.weight, np.float64)[experts].transpose(0, 2, 1)
    got = np.array(layer(mx.array(x), mx.array(experts)))
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()
    assert layer(mx.zeros((0, 2, 5)), mx.zeros((0,), mx.int32)).shape == (0, 2, 4)
