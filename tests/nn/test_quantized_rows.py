"""Layers of codes on a CPU: many rows are multiplied by floats, few of them are not."""

from forge_mlx.kernels.quantize import quantize
from forge_mlx.kernels.quantize.options import Options
from forge_mlx.nn.quantized import QuantizedEmbedding, QuantizedExpertLinear, QuantizedLinear
from forge_mlx.nn.weight_format import Packed, WeightFormat
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

FORMAT = WeightFormat(Options("affine", 4, 32, None), mx.float32)


@pytest.fixture(autouse=True)
def on_cpu():
    default = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(default)


@pytest.fixture
def calls(monkeypatch):
    """How often MLX's quantised product was taken."""
    seen = []
    for kind, method in ((nn.QuantizedLinear, "__call__"), (nn.QuantizedEmbedding, "as_linear")):
        plain = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda *args, plain=plain: seen.append(args[1].shape) or plain(*args))
    return seen


@pytest.mark.parametrize("kind", [QuantizedLinear, QuantizedEmbedding])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_rows_decide(kind, dtype, calls):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((48, 64)).astype(np.float32)
    bias = mx.array(rng.standard_normal(48).astype(np.float32)) if kind is QuantizedLinear else None
    form = WeightFormat(FORMAT.options, dtype)
    codes = Packed(*quantize(mx.array(weight).astype(dtype), mode="affine", bits=4, group_size=32))
    layer = kind(codes, form, bias)
    floats = np.array(mx.dequantize(*codes, group_size=32, bits=4).astype(mx.float32)).astype(np.float64)
    apply = layer if kind is QuantizedLinear else layer.as_linear
    for training in (False, True):
        layer.train(training)
        for shape in ((1, 64), (7, 64), (8, 64), (3, 5, 64)):
            x = rng.standard_normal(shape).astype(np.float32)
            x = mx.array(x).astype(dtype)
            want = np.array(x.astype(mx.float32)).astype(np.float64) @ floats.T + (
                0 if bias is None else np.array(bias)
            )
            got = np.array(apply(x).astype(mx.float32))
            tolerance = 1e-5 if dtype == mx.float32 else 2e-2
            assert np.max(np.abs(got - want)) <= tolerance * np.max(np.abs(want))
            is_many = x.size >= 8 * 64
            assert bool(calls) != is_many
            calls.clear()


def _layers(count, size):
    """Square layers of codes, without a bias."""
    keys = mx.random.split(mx.random.key(0), count)
    weights = [mx.random.normal((size, size), key=key) / size**0.5 for key in keys]
    layers = [QuantizedLinear(Packed(*quantize(w, mode="affine", bits=4, group_size=32)), FORMAT) for w in weights]
    mx.eval([layer.parameters() for layer in layers])
    return layers


def test_the_gradient_is_the_product_with_the_floats():
    (layer,) = _layers(1, 64)
    x, cotangent = (mx.random.normal((9, 64), key=mx.random.key(seed)) for seed in (1, 2))
    _, (found,) = mx.vjp(layer, [x], [cotangent])
    want = np.array(cotangent).astype(np.float64) @ np.array(layer.effective_weight()).astype(np.float64)
    assert np.abs(np.array(found) - want).max() <= 1e-5 * np.abs(want).max()


def _peak(count, size, rows, between):
    """Bytes that a forward and backward pass through some layers takes beside them."""
    layers = _layers(count, size)

    def loss(x):
        for layer in layers:
            x = between(layer(x))
        return x.sum()

    x = mx.random.normal((rows, size))
    mx.eval(x)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.value_and_grad(loss)(x))
    return mx.get_peak_memory() - before


def test_floats_are_not_kept_for_the_backward_pass():
    size = 256
    # What MLX computes ahead takes the room of some layers, however many there are.
    assert _peak(48, size, 8, mx.sin) - _peak(24, size, 8, mx.sin) < 8 * 4 * size * size


def test_products_are_not_kept_for_the_backward_pass():
    rows, size = 512, 32
    # Nothing between the layers needs them.
    assert _peak(48, size, rows, mx.negative) - _peak(24, size, rows, mx.negative) < 8 * 4 * rows * size


EXPERTS = np.repeat(np.arange(3, dtype=np.int32), 16)


def _expert_layer(dtype):
    weight = mx.random.normal((3, 48, 64), key=mx.random.key(0)).astype(dtype)
    codes = Packed(*quantize(weight, mode="affine", bits=4, group_size=32))
    return QuantizedExpertLinear(codes, WeightFormat(FORMAT.options, dtype)), mx.dequantize(*codes, 32, 4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_rows_of_experts_decide(dtype, monkeypatch):
    layer, floats = _expert_layer(dtype)
    floats = np.array(floats.astype(mx.float32)).astype(np.float64)
    plain, seen = mx.gather_qmm, []
    monkeypatch.setattr(mx, "gather_qmm", lambda *args, **options: seen.append(1) or plain(*args, **options))
    for blocks, rows, quantized in ((48, 1, False), (47, 1, True), (6, 8, False), (5, 8, True)):
        experts = EXPERTS[:: 48 // blocks][:blocks]
        x = mx.random.normal((blocks, rows, 64), key=mx.random.key(rows)).astype(dtype)
        got, (dx,) = mx.vjp(lambda x, experts=experts: layer(x, mx.array(experts)), [x], [mx.ones((blocks, rows, 48))])
        wide = np.array(x.astype(mx.float32)).astype(np.float64)
        tolerance = 1e-5 if dtype == mx.float32 else 2e-2
        for found, want in (
            (got[0], np.einsum("mrk,mok->mro", wide, floats[experts])),
            (dx, np.broadcast_to(floats[experts].sum(axis=1)[:, None], wide.shape)),
        ):
            assert found.dtype == dtype
            assert np.abs(np.array(found.astype(mx.float32)) - want).max() <= tolerance * np.abs(want).max()
        assert bool(seen) == quantized
        seen.clear()
