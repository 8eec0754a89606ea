"""Layers of codes on a CPU: many rows are multiplied by floats, few of them and those in training are not."""

from forge_mlx.kernels.quantize import quantize
from forge_mlx.kernels.quantize.options import Options
from forge_mlx.nn.quantized import Packed, QuantizedEmbedding, QuantizedLinear, WeightFormat
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
            assert bool(calls) == (training or not is_many)
            calls.clear()
