"""The indices of topk_renorm in what is differentiated and compiled, and 32 steps of a small mixture of experts."""

from functools import partial

from forge_mlx.kernels.routing import expert_counts, topk_renorm
import mlx.core as mx
import pytest
from room_proofs import assert_close, random

ENGINES = ["emulator", "reference"]


def dense(p, k, bias=None):
    """The gates by a mask, with MLX's own gradients of every order."""
    indices = mx.stop_gradient(mx.argsort(-(p if bias is None else p + bias), axis=-1)[..., :k])
    mask = mx.put_along_axis(mx.zeros(p.shape), indices, mx.array(1.0), axis=-1)
    return p * mask / (p * mask).sum(-1, keepdims=True), indices.astype(mx.int32)


EXPERTS = random((6, 5, 5), 7)


def by_take(_p, gates, indices):
    return (mx.take_along_axis(gates, indices, axis=-1) ** 3).sum()


def by_take_of_p(p, _gates, indices):
    return (mx.take_along_axis(p, indices, axis=-1) ** 3).sum()


def by_gather_mm(p, gates, indices):
    x = p[..., :5].reshape(-1, 1, 1, 5)
    rows = mx.gather_mm(x, EXPERTS, rhs_indices=indices.reshape(-1, indices.shape[-1]))[..., 0, :]
    return (rows * mx.take_along_axis(gates, indices, axis=-1).reshape(*rows.shape[:2], 1)).sum()


def by_counts(p, gates, indices):
    counts = expert_counts(indices, 6)
    return (counts.astype(mx.float32) * p.mean(axis=0) + gates.mean(axis=0)).square().sum()


def by_argsort(p, gates, indices):
    order = mx.argsort(indices.flatten())
    return (gates.flatten()[order] ** 3).sum() + (p[order // indices.shape[-1]] ** 2 * indices.sum()).sum()


def by_indices_alone(p, _gates, indices):
    return (indices.astype(mx.float32) * p.sum(axis=-1, keepdims=True)).sum()


def by_embedding(p, gates, indices):
    return (EXPERTS[indices].sum(axis=(-1, -2)) * mx.take_along_axis(p + gates, indices, axis=-1)).sum()


USES = {
    use.__name__: use
    for use in (by_take, by_take_of_p, by_gather_mm, by_counts, by_argsort, by_indices_alone, by_embedding)
}


def loss_of(use, route):
    bias = random((6,), 1) / 10

    def loss(logits):
        p = mx.softmax(logits, axis=-1)
        return use(p, *route(p, 3, bias))

    return loss


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("name", USES)
def test_indices_in_what_is_differentiated(name, impl):
    logits, loss = random((7, 6), 0), loss_of(USES[name], partial(topk_renorm, impl=impl))
    want_value, want = mx.value_and_grad(loss_of(USES[name], dense))(logits)
    for function in (loss, mx.checkpoint(loss)):
        assert_close(mx.grad(function)(logits), want, 1e-4)
        value, gradient = mx.value_and_grad(function)(logits)
        assert_close(value, want_value)
        assert_close(gradient, want, 1e-4)


# On a CPU each is compiled as C++, which takes seconds.
COMPILED = [
    pytest.param(name, way, id=f"{name}-{way}", marks=[] if (name, way) == ("by_gather_mm", "of") else pytest.mark.slow)
    for name in USES
    for way in ("of", "in")
]


@pytest.mark.parametrize(("name", "way"), COMPILED)
def test_indices_in_what_is_differentiated_and_compiled(name, way):
    logits, loss = random((7, 6), 0), loss_of(USES[name], topk_renorm)
    function = mx.compile(mx.value_and_grad(loss)) if way == "of" else mx.value_and_grad(mx.compile(loss))
    value, gradient = function(logits)
    want_value, want = mx.value_and_grad(loss_of(USES[name], dense))(logits)
    assert_close(value, want_value)
    assert_close(gradient, want, 1e-4)


STEPS = 32


def train(impl):
    """Losses, the last probabilities and the weights of a small mixture of experts, dense but for its gates."""
    x, targets = random((24, 5), 3), mx.arange(24) % 4
    weights = {"router": random((5, 8), 4), "experts": random((8, 5, 4), 5) / 2}
    bias, losses = mx.zeros((8,)), []

    def logits(weights, bias):
        gates, indices = topk_renorm(mx.softmax(x @ weights["router"], axis=-1), 2, bias, impl=impl)
        return mx.einsum("ne,nc,ecd->nd", gates, x, weights["experts"]), indices

    def loss(weights, bias):
        out, indices = logits(weights, bias)
        log_p = out - mx.logsumexp(out, axis=-1, keepdims=True)
        return -mx.take_along_axis(log_p, targets[:, None], axis=-1).mean(), indices

    for _ in range(STEPS):
        (value, indices), gradients = mx.value_and_grad(loss)(weights, bias)
        weights = {name: weights[name] - 0.5 * gradients[name] for name in weights}
        counts = expert_counts(indices, 8, impl=impl)
        bias = bias + 0.001 * mx.sign(counts.mean() - counts)
        losses.append(value)
        mx.eval(weights, bias, losses)
    return losses, mx.softmax(logits(weights, bias)[0], axis=-1), weights, bias


def test_32_steps_with_kernels_on_and_off_agree():
    (losses, p, weights, bias), (want_losses, want_p, want_weights, want_bias) = map(train, ("emulator", "reference"))
    assert_close(mx.stack(losses), mx.stack(want_losses))
    assert_close(mx.log(p), mx.log(want_p), 1e-4)
    assert all(weights[name].any() for name in weights)
    for name in weights:
        assert_close(weights[name], want_weights[name], 1e-4)
    assert mx.array_equal(bias, want_bias)
    assert bias.any()
    assert losses[-1] < 0.7 * losses[0]
