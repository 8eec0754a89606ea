"""Both feed-forward layers against their formulas, and that they run what `forge_mlx.kernels` has."""

from forge_mlx import nn as forge_nn
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.nn.activations import ACTIVATIONS, GATED_ACTIVATIONS
from forge_mlx.nn.mlp import MLP, GatedMLP
import mlx.core as mx
import mlx.nn as nn
import pytest

OF_MLX = {
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_approx,
    "silu": nn.silu,
    "relu2": nn.relu2,
    "swiglu": nn.silu,
    "geglu": nn.gelu,
    "geglu_tanh": nn.gelu_approx,
}


def layer(name):
    mx.random.seed(0)
    kind = GatedMLP if name in GATED_ACTIVATIONS else MLP
    return kind(8, 24, activation=name, bias=True)


def formula(module, name, x):
    hidden = OF_MLX[name](module["gate_proj"](x)) * module.up_proj(x) if name in GATED_ACTIVATIONS else None
    return module.down_proj(OF_MLX[name](module.up_proj(x)) if hidden is None else hidden)


def test_every_name_is_tested():
    assert OF_MLX.keys() == ACTIVATIONS.keys() | GATED_ACTIVATIONS.keys()


@pytest.mark.parametrize("name", OF_MLX)
def test_layer_is_its_formula(name):
    module, x = layer(name), 3 * mx.random.normal((2, 5, 8), key=mx.random.key(1))
    assert mx.allclose(module(x), formula(module, name, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OF_MLX)
def test_layer_runs_the_kernels(name):
    module, x = layer(name), mx.random.normal((2, 5, 8), key=mx.random.key(1))
    emulator.reset()
    with use_engine("emulator"):
        mx.eval(mx.grad(lambda x: (module(x) ** 2).sum())(x))
    kind = "gated" if name in GATED_ACTIVATIONS else "activation"
    # The projections launch kernels of their own.
    launched = [each.name for each in emulator.report().launches if each.name.startswith(("activation_", "gated_"))]
    assert launched == [f"{kind}_forward", f"{kind}_backward"]


def test_relu2_and_softcap_are_those_of_the_room():
    with use_engine("emulator"):
        emulator.reset()
        mx.eval(forge_nn.relu2(mx.ones((8,))), forge_nn.softcap(mx.ones((8,)), 2.0))
    assert [launch.name for launch in emulator.report().launches] == ["activation_forward"] * 2
