import math

from forge_mlx.data import Batch
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.optim import OptimConfig, build_optimizer
from forge_mlx.train.nonfinite import describe_nonfinite, first_bad_layer
from forge_mlx.train.step import TrainStep
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest

CONFIG = GPTConfig(vocab_size=13, num_layers=3, hidden_size=8, num_heads=2, intermediate_size=16, mlp="relu2")


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield


@pytest.fixture
def model():
    return GPT(CONFIG, seed=1)


BATCHES = [Batch(*np.random.default_rng(seed).integers(0, 13, (2, 2, 6)).astype(np.int32)) for seed in range(2)]


def failed(model, dtype=mx.float32):
    """Take a step's gradients; check that it failed and that nothing changed. Returns loss and description."""
    step = TrainStep(model, build_optimizer(OptimConfig()), dtype, 1.0)
    before = [np.array(a) for _, a in tree_flatten([model.parameters(), step.optimizer.state])]
    loss, norm, grads, _ = step.gradients(BATCHES, 0)
    assert not (math.isfinite(loss) and math.isfinite(norm))
    layers = list(model.layers)
    where = describe_nonfinite(model, BATCHES, grads, dtype)
    assert model.layers == layers
    after = [np.array(a) for _, a in tree_flatten([model.parameters(), step.optimizer.state])]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    return loss, where


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_weight_is_named(model, bad):
    weight = model.layers[1].mlp.up_proj.weight
    weight[3, 2] = bad
    later = model.layers[2].self_attn.q_proj.weight
    later[0, 0] = math.nan
    assert failed(model)[1] == "the first bad parameter is layers.1.mlp.up_proj.weight"


def test_a_layer_that_overflows_is_named(model):
    # up_proj gives 1e25, whose square is more than float32 holds.
    model.layers[1].mlp.up_proj.weight = mx.full((16, 8), 1e25)
    loss, where = failed(model)
    assert not math.isfinite(loss)
    assert where == "all parameters are finite; the first bad output is that of layers.1"


def test_a_head_that_overflows_is_named():
    model = GPT(CONFIG.model_copy(update={"tie_embeddings": False}), seed=1)
    model.norm.weight = mx.full((8,), 1e20)
    model.lm_head.weight = mx.full((13, 8), 1e20)
    assert first_bad_layer(model, BATCHES[0]) == "head"
    assert failed(model)[1] == "all parameters are finite; the first bad output is that of head"


def test_an_overflow_of_float16_only_is_found_in_float16(model):
    model.layers[2].mlp.up_proj.weight = mx.full((16, 8), 300.0)
    assert first_bad_layer(model, BATCHES[0]) is None
    assert failed(model, mx.float16)[1] == "all parameters are finite; the first bad output is that of layers.2"


def test_a_layer_that_is_bad_in_a_later_batch_only_is_named(model):
    class BadFor(nn.Module):
        def __init__(self, layer, first):
            super().__init__()
            self.layer, self._first, self._seen = layer, first, 0

        def __call__(self, x, *args, **kwargs):
            self._seen += 1
            return self.layer(x, *args, **kwargs) * (math.nan if self._seen > self._first else 1.0)

    model.layers[0] = BadFor(model.layers[0], 1)
    grads = model.parameters()
    assert describe_nonfinite(model, BATCHES, grads, mx.float32) == (
        "all parameters are finite; the first bad output is that of layers.0"
    )


def test_a_bad_gradient_behind_a_finite_loss_is_named_where_it_began(model):
    @mx.custom_function
    def broken(x):
        return x * 1.0

    @broken.vjp
    def broken_vjp(_x, cotangent, _output):
        return cotangent * math.nan

    class Broken(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def __call__(self, x, *args, **kwargs):
            return broken(self.layer(x, *args, **kwargs))

    model.layers[1] = Broken(model.layers[1])
    loss, where = failed(model)
    assert math.isfinite(loss)
    # layers.2 and the norm lie between it and the loss and are fine; layers.0 and the embedding are spoilt.
    assert where.startswith(
        "all parameters and activations are finite; the bad gradient nearest to the loss is that of "
    )
    assert where.split(" of ")[-1].startswith("layers.1.")


def test_all_finite_is_said(model):
    _, _, grads, _ = TrainStep(model, build_optimizer(OptimConfig()), mx.float32, 1.0).gradients(BATCHES, 0)
    assert describe_nonfinite(model, BATCHES, grads, mx.float32).endswith("the sum over them overflowed")
    assert first_bad_layer(model, BATCHES[0]) is None
