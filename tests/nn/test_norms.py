"""The norms are the room's: plain MLX operations on a CPU, the kernels where they are asked for."""

from forge_mlx.kernels.norms import layer_norm_op, reference, rms_norm_op
from forge_mlx.metal.engine import use_engine
from forge_mlx.nn.norms import LayerNorm, RMSNorm
import mlx.core as mx
import numpy as np
import pytest


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no-weight"])
def test_rms_norm_on_a_cpu_is_mlxs_own(weight):
    x = mx.random.normal((2, 3, 40), key=mx.random.key(0))
    norm = RMSNorm(40, eps=0.1, weight=weight)
    assert ("weight" in norm.parameters()) is weight
    assert mx.array_equal(norm(x), mx.fast.rms_norm(x, norm.get("weight"), 0.1))


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no-weight"])
def test_rms_norm_runs_on_the_engine_that_is_asked_for(weight, monkeypatch):
    ran = []
    forward = rms_norm_op._forward
    monkeypatch.setattr(rms_norm_op, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    x = mx.random.normal((2, 3, 40), key=mx.random.key(0))
    norm = RMSNorm(40, eps=0.1, weight=weight)
    with use_engine("emulator"):
        got = norm(x)
    assert ran == ["emulator"]
    assert mx.allclose(got, norm(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rtol"), [(mx.float32, 1e-6), (mx.float16, 1e-3), (mx.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("dtype_of_weight", [mx.float32, mx.bfloat16], ids=str)
def test_an_offset_is_added_in_float32(dtype, rtol, dtype_of_weight):
    """Against the formula in float64, with weights that 16 bits cannot add to 1."""
    norm = RMSNorm(40, eps=0.1, offset=True)
    assert mx.array_equal(norm.weight, mx.zeros((40,)))
    norm.weight = mx.linspace(-0.003, 0.003, 40).astype(dtype_of_weight)
    x = mx.random.normal((50, 40), key=mx.random.key(0)).astype(dtype)
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 0.1)
    want *= 1 + np.array(norm.weight.astype(mx.float32)).astype(np.float64)
    got, (of_sum, total) = norm(x), norm.of_sum(x, mx.zeros_like(x))
    assert got.dtype == mx.result_type(x, norm.weight)
    assert (mx.array_equal(of_sum, got), mx.array_equal(total, x)) == (True, True)
    errors = np.array(got.astype(mx.float32)) / want - 1
    assert np.abs(errors).max() <= rtol
    # In the mean over the rows each channel's scale is right, where that of 16 bits is off by up to 0.003.
    assert np.abs(errors.mean(axis=0)).max() <= 0.002


def test_an_offset_without_a_weight_is_refused():
    with pytest.raises(ValueError, match=r"\[RMSNorm\] offset must be false without a weight but got true"):
        RMSNorm(40, weight=False, offset=True)


GIVEN = [(True, True), (True, False), (False, True), (False, False)]


def layer_norm_of(weight, bias):
    """A LayerNorm of 40 with parameters that are not what they start as."""
    norm = LayerNorm(40, eps=0.1, weight=weight, bias=bias)
    starts = {"weight": mx.ones((40,)), "bias": mx.zeros((40,))}
    assert norm.parameters().keys() == {name for name, given in (("weight", weight), ("bias", bias)) if given}
    for index, (name, array) in enumerate(norm.parameters().items()):
        assert mx.array_equal(array, starts[name])
        norm[name] = mx.random.normal((40,), key=mx.random.key(1 + index))
    return norm


@pytest.mark.parametrize(("weight", "bias"), GIVEN)
def test_layer_norm_on_a_cpu_is_the_rooms_formula(weight, bias):
    x = mx.random.normal((2, 3, 40), key=mx.random.key(0))
    norm = layer_norm_of(weight, bias)
    given = norm.get("weight"), norm.get("bias")
    assert mx.array_equal(norm(x), reference.layer_norm(x, *given, 0.1))
    assert mx.allclose(norm(x), mx.fast.layer_norm(x, *given, 0.1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weight", "bias"), GIVEN)
def test_layer_norm_runs_on_the_engine_that_is_asked_for(weight, bias, monkeypatch):
    ran = []
    forward = layer_norm_op._forward
    monkeypatch.setattr(layer_norm_op, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    x = mx.random.normal((2, 3, 40), key=mx.random.key(0))
    norm = layer_norm_of(weight, bias)
    with use_engine("emulator"):
        got = norm(x)
    assert ran == ["emulator"]
    assert mx.allclose(got, norm(x), rtol=1e-5, atol=1e-6)
