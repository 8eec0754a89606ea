"""Checkpointed modules: gradients to the bit, masks drawn twice alike, no placeholder left, other dropouts refused."""

from forge_mlx.nn.dropout import Dropout, dropout_keys, generator_state
from forge_mlx.nn.mlp import MLP
from forge_mlx.nn.recompute import recomputed
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import pytest


class Layer(nn.Module):
    """x + dropout(mlp(x)) times a factor."""

    def __init__(self, dropout):
        super().__init__()
        self.mlp = MLP(8, 16, activation="silu", bias=True)
        self.dropout = dropout

    def __call__(self, x, factor=1.0, *, shift=0.0):
        return factor * (x + self.dropout(self.mlp(self.dropout(x)))) + shift


def gradients(layer, run, x, **arguments):
    """The value, the gradients of the trainable parameters and of x, and the generator's state behind it."""
    mx.random.seed(4)
    held = layer.trainable_parameters()

    def loss(parameters, x):
        layer.update(parameters)
        return mx.sin(run(run(x, 1.5, **arguments))).sum()

    value, grads = mx.value_and_grad(loss, argnums=(0, 1))(held, x)
    layer.update(held)
    mx.eval(value, grads)
    return value, dict(tree_flatten(grads)), mx.random.state[0].tolist()


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "biases-alone"])
def test_gradients_are_the_same_to_the_bit(frozen):
    mx.random.seed(0)
    layer, x = Layer(Dropout(0.5)).train(), mx.random.normal((5, 8))
    if frozen:
        layer.freeze()
        layer.unfreeze(keys="bias", strict=False)
    want, got = (gradients(layer, run, x, shift=mx.ones((8,))) for run in (layer, recomputed(layer)))
    assert got[0].item() == want[0].item()
    assert got[1].keys() == want[1].keys()
    assert len(got[1]) == (3 if frozen else 5)
    assert all(mx.array_equal(got[1][name], grad) for name, grad in want[1].items())
    assert got[2] == want[2]


def test_the_module_keeps_its_own_arrays():
    layer, x = Layer(Dropout(0.5)).train(), mx.ones((5, 8))
    before = dict(tree_flatten(layer.parameters()))
    run = recomputed(layer)
    mx.eval(mx.grad(lambda x: run(x).sum())(x))
    assert all(array is before[name] for name, array in tree_flatten(layer.parameters()))


def test_dropout_draws_what_mlx_draws():
    x = mx.ones((40, 40))
    mx.random.seed(6)
    want = [nn.Dropout(0.3)(x) for _ in range(2)]
    mx.random.seed(6)
    state = generator_state()
    with dropout_keys(state) as keys:
        again = [Dropout(0.3)(x) for _ in range(2)]
        assert mx.array_equal(Dropout(0.3).eval()(x), x)
    assert keys.drawn == 2
    assert mx.array_equal(generator_state(), state)
    for drawn in (again, [Dropout(0.3)(x) for _ in range(2)]):
        assert all(mx.array_equal(one, other) for one, other in zip(drawn, want, strict=True))
    assert not mx.array_equal(*want)


def test_a_dropout_that_cannot_be_drawn_again_is_refused():
    layer, x = Layer(nn.Dropout(0.5)), mx.ones((5, 8))
    with pytest.raises(ValueError, match=r"\[recomputed\] dropout must be a forge_mlx.nn.dropout.Dropout, .* of mlx"):
        recomputed(layer.train())
    assert mx.array_equal(recomputed(layer.eval())(x), layer(x))
    mx.eval(recomputed(Layer(nn.Dropout(0.0)).train())(x))
