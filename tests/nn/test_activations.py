"""relu2 and softcap against NumPy in float64, and relu2's own rules against autodiff of the plain form."""

from forge_mlx.nn.activations import relu2, softcap
import mlx.core as mx
import numpy as np
import pytest

VALUES = [0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 1e-20, 3.7, -1234.5, 1e18, 1e19, 2e38, -2e38, np.inf]


def plain(x):
    return mx.square(mx.maximum(x, 0))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_relu2_is_the_plain_form_to_the_bit(dtype, compiled):
    finite = [value for value in VALUES if value > mx.finfo(dtype).min]
    x = mx.concatenate([mx.array(finite), 10 * mx.random.normal((1000,), key=mx.random.key(0))]).astype(dtype)
    function = mx.compile(relu2) if compiled else relu2
    assert mx.array_equal(function(x), plain(x))
    assert function(x).dtype == dtype


def test_relu2_keeps_nan():
    assert np.isnan(relu2(mx.array(np.nan)).item())


def test_relu2_first_and_second_derivative():
    x = mx.array([-2.0, -0.5, 0.0, 0.5, 3.0])
    first = mx.grad(lambda x: (relu2(x) * mx.arange(1, 6)).sum())
    assert first(x).tolist() == [0, 0, 0, 4, 30]
    second = mx.grad(lambda x: first(x).sum())
    assert second(mx.array([-2.0, 0.5, 3.0, 4.0, 5.0])).tolist() == [0, 4, 6, 8, 10]


def test_relu2_gradient_of_extreme_values():
    x = mx.array([1e-30, -1e-30, 1e19, -2e38, 1.5e38])
    assert mx.array_equal(mx.grad(lambda x: relu2(x).sum())(x), 2 * mx.maximum(x, 0))


def test_relu2_under_vmap_keeps_its_gradient(tmp_path):
    x = mx.random.normal((3, 4), key=mx.random.key(1))
    mapped = mx.grad(lambda x: mx.vmap(relu2, in_axes=1, out_axes=1)(x).sum())(x)
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), mapped)
    assert "Sign" not in graph.read_text(), "the derivative of abs: autodiff went through the formula"
    assert mx.array_equal(mx.vmap(relu2)(x), plain(x))
    assert mx.allclose(mapped, 2 * mx.maximum(x, 0), rtol=1e-6, atol=0)


def test_softcap_is_bounded_and_close_to_the_identity_near_zero():
    x = np.array([-1e30, -100, -15, -1e-3, 0, 1e-3, 2, 15, 100, 1e30], np.float32)
    got = np.array(softcap(mx.array(x), 15.0))
    np.testing.assert_allclose(got, 15 * np.tanh(x.astype(np.float64) / 15), rtol=1e-6)
    assert np.abs(got).max() == 15
