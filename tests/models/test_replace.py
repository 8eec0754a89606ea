"""Layers put into the places of others: all places at once, the inner ones first, and one weight at a time."""

from forge_mlx.models.dequantize import dequantize_layers
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.replace import replace_each
from forge_mlx.nn import Linear, QuantizedLinear
import mlx.core as mx
import mlx.nn as nn
import pytest


def stack(count=33, size=256):
    """Square layers; the last is the first again."""
    layers = [Linear(size, size, bias=False) for _ in range(count - 1)]
    return nn.Sequential(*layers, layers[0])


def test_a_layer_in_two_places_stays_one_and_inner_layers_come_first():
    model = nn.Sequential(nn.Sequential(Linear(8, 8), nn.ReLU()), Linear(8, 8))
    model.again = model.layers[0].layers[0]
    seen = []

    def successor(layer):
        seen.append(layer)
        return nn.Identity() if isinstance(layer, (Linear, nn.Sequential)) else None

    inner, outer = model.again, model.layers[0]
    replace_each(model, successor)
    assert seen.index(inner) < seen.index(outer)
    assert len(seen) == len({id(layer) for layer in seen}) == 4
    assert [type(layer) for layer in (*model.layers, model.again)] == [nn.Identity] * 3
    assert not any(layer is model for layer in seen)


def test_the_float_weights_are_free_as_soon_as_their_codes_are_there():
    model = prepare_qat(stack(), QATConfig())
    mx.eval(model.parameters())
    mx.clear_cache()
    size = 4 * 256 * 256
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert_qat(model)
    assert all(type(layer) is QuantizedLinear for layer in model.layers)
    assert model.layers[0] is model.layers[-1]
    assert mx.get_active_memory() < before - 24 * size
    # The formula takes some sizes for itself. Codes and scales are 5/32 of the floats: all of them beside all of the
    # floats would be 5 sizes more.
    assert mx.get_peak_memory() < before + 5 * size


def test_codes_alone_are_no_model_to_make_floats_of():
    with pytest.raises(ValueError, match="must have layers of codes but has none"):
        dequantize_layers(nn.QuantizedLinear(64, 64), mx.float32)
