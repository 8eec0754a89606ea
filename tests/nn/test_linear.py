"""Linear is mlx.nn.Linear in all but what computes it, so that whatever replaces or adapts that one takes it too."""

from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.nn import Linear
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import pytest

BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


def pair(bias, dtype=mx.float32):
    """Ours and MLX's with the same seed."""
    layers = []
    for kind in (Linear, nn.Linear):
        mx.random.seed(3)
        layers.append(kind(64, 96, bias=bias))
        layers[-1].set_dtype(dtype)
    return layers


def random(shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)


@BIAS
def test_parameters_and_text_are_mlxs(bias):
    ours, theirs = pair(bias)
    assert isinstance(ours, nn.Linear)
    assert repr(ours) == repr(theirs)
    for (name, a), (other, b) in zip(tree_flatten(ours.parameters()), tree_flatten(theirs.parameters()), strict=True):
        assert name == other
        assert mx.array_equal(a, b)


@BIAS
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64)], ids=str)
def test_results_and_gradients_on_a_cpu_are_mlxs_to_the_bit(shape, dtype, bias):
    x = random(shape, dtype)
    found = []
    for layer in pair(bias, dtype):
        value, gradients = nn.value_and_grad(layer, lambda x, layer=layer: (layer(x).astype(mx.float32) ** 2).sum())(x)
        dx = mx.grad(lambda x, layer=layer: (layer(x).astype(mx.float32) ** 2).sum())(x)
        found.append([layer(x), value, dx, *(each for _, each in tree_flatten(gradients))])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert mx.array_equal(a, b)


def kernels_of(monkeypatch):
    """Names of the kernels that are launched from now on."""
    launched = []
    call = MetalKernel.__call__

    def recorded(self, *args, **options):
        launched.append(self.source.name)
        return call(self, *args, **options)

    monkeypatch.setattr(MetalKernel, "__call__", recorded)
    return launched


@BIAS
@pytest.mark.parametrize("shape", [(64,), (2, 40, 64)], ids=str)
def test_linear_runs_on_the_engine_that_is_asked_for(shape, bias, monkeypatch):
    launched = kernels_of(monkeypatch)
    ours, theirs = pair(bias)
    x = random(shape)

    def gradients(layer):
        return nn.value_and_grad(layer, lambda x: (layer(x) ** 2).sum())(x)

    with use_engine("emulator"):
        value, got = gradients(ours)
    # The bias is added inside. Its gradient is one more launch where there is more than one row to sum.
    forward = "matmul_tiled" if len(shape) == 1 else "matmul_simdgroup"
    assert launched[0] == forward
    assert len([name for name in launched if name.startswith("matmul")]) == (4 if bias and x.ndim > 1 else 3)
    wanted, want = gradients(theirs)
    assert mx.allclose(value, wanted, rtol=1e-5)
    for (_, a), (_, b) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_wrong_width_raises():
    with pytest.raises(ValueError, match=r"\[matmul\] .* as op\(a\) has columns, 63, but got 64"):
        Linear(64, 96)(mx.zeros((2, 63)))


@BIAS
def test_compiled(bias):
    ours, theirs = pair(bias)
    x = random((5, 64))
    assert mx.allclose(mx.compile(ours)(x), theirs(x), rtol=1e-6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = Linear(64, 64)

    def __call__(self, x):
        return self.proj(x)


def test_quantisation_takes_it():
    block, x = Block(), random((5, 64))
    before = block(x)
    nn.quantize(block, group_size=32, bits=8)
    assert isinstance(block.proj, nn.QuantizedLinear)
    assert mx.allclose(block(x), before, atol=0.05)


def test_adapters_of_mlx_lm_take_it():
    utils = pytest.importorskip("mlx_lm.tuner.utils", reason="mlx-lm needs Python 3.11")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [Block()]

        def __call__(self, x):
            return self.layers[0](x)

    model, x = Model(), random((5, 64))
    before = model(x)
    utils.linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    adapted = model.layers[0].proj
    assert type(adapted).__name__ == "LoRALinear"
    assert isinstance(adapted.linear, Linear)
    assert mx.array_equal(model(x), before)
