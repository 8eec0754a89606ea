"""The norms are the room's: plain MLX operations on a CPU, the kernels where they are asked for."""

from forge_mlx.kernels.norms import layer_norm_op, reference, rms_norm_op
from forge_mlx.metal.engine import use_engine
from forge_mlx.nn.norms import LayerNorm, RMSNorm
import mlx.core as mx
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
