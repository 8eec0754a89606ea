"""A layer of experts from router to result, with mx.gather_mm in between: gradients, transformations, 32 steps."""

from forge_mlx.kernels.dispatch import moe_combine, moe_dispatch
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import random
import torch

# Of all three kernels on the emulator most is compiling.
ENGINES = [pytest.param("emulator", marks=pytest.mark.slow), "reference"]
COLUMNS, INSIDE, EXPERTS, K = 12, 20, 5, 2


def parameters(dtype=mx.float32):
    """Of the router, in float32, and of the experts' three matrices."""
    shapes = {
        "router": (COLUMNS, EXPERTS),
        "gate": (EXPERTS, COLUMNS, INSIDE),
        "up": (EXPERTS, COLUMNS, INSIDE),
        "down": (EXPERTS, INSIDE, COLUMNS),
    }
    return {
        name: random(shape, seed, mx.float32 if name == "router" else dtype) / shape[-2] ** 0.5
        for seed, (name, shape) in enumerate(shapes.items())
    }


def routed(weights, x, *, is_token=None):
    """Gates over all experts, and the indices of the largest: an array that still depends on the router's matrix."""
    p = mx.softmax(x.astype(mx.float32) @ weights["router"], axis=-1)
    indices = mx.argsort(-p, axis=-1)[..., :K]
    is_chosen = (mx.stop_gradient(indices)[..., None] == mx.arange(EXPERTS)).any(axis=-2)
    gates = mx.where(is_chosen, p, 0)
    gates = gates / gates.sum(axis=-1, keepdims=True)
    return gates, indices if is_token is None else mx.where(is_token[..., None], indices.astype(mx.int32), -1)


def layer(weights, x, *, impl, is_token=None):
    """The sum of each token's experts, down(silu(gate) up), times their gates."""
    gates, indices = routed(weights, x, is_token=is_token)
    rows, plan = moe_dispatch(x, indices, impl=impl)

    def product(rows, weight):
        # On a CPU MLX has this product in float32 alone.
        wide = rows.astype(mx.float32), weight.astype(mx.float32)
        return mx.gather_mm(*wide, rhs_indices=plan.experts, sorted_indices=True).astype(rows.dtype)

    gate = product(rows[:, None], weights["gate"])
    inside = gate * mx.sigmoid(gate) * product(rows[:, None], weights["up"])
    return moe_combine(product(inside, weights["down"])[:, 0], gates, plan, impl=impl)


def dense(weights, x, is_token=None):
    """The same in PyTorch: every token through every expert, and a mask."""
    p = torch.softmax(x @ weights["router"], dim=-1)
    chosen = torch.topk(p, K, dim=-1).indices
    mask = torch.zeros_like(p).scatter(-1, chosen, 1.0)
    gates = p * mask / (p * mask).sum(-1, keepdim=True)
    if is_token is not None:
        gates = gates * is_token[..., None]
    gate = torch.einsum("...c,eci->...ei", x, weights["gate"])
    inside = torch.nn.functional.silu(gate) * torch.einsum("...c,eci->...ei", x, weights["up"])
    return torch.einsum("...e,...ei,eic->...c", gates, inside, weights["down"])


def oracle(weights, x, dout, is_token=None):
    """The result of the dense layer and all gradients, in float64."""

    def tensor(array):
        return torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64, requires_grad=True)

    wide, inputs = {name: tensor(each) for name, each in weights.items()}, tensor(x)
    out = dense(wide, inputs, None if is_token is None else torch.tensor(np.array(is_token)))
    gradients = torch.autograd.grad(out, [inputs, *wide.values()], tensor(dout).detach())
    return [each.detach().numpy() for each in (out, *gradients)]


def results(weights, x, dout, impl, is_token=None, transform=lambda function: function):
    """The result of the layer and the gradients of x and of all parameters."""
    names = list(weights)
    function = transform(
        lambda x, *arrays: layer(dict(zip(names, arrays, strict=True)), x, impl=impl, is_token=is_token)
    )
    (out,), gradients = mx.vjp(function, [x, *weights.values()], [dout])
    return [out, *gradients]


def assert_near(got, want, rtol):
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        error = np.abs(np.array(one.astype(mx.float32), np.float64) - other).max()
        assert error <= rtol * np.abs(other).max()
        assert np.abs(other).max() > 0


@pytest.mark.parametrize("transform", ["nothing", "checkpoint"])
@pytest.mark.parametrize("impl", ENGINES)
def test_layer_and_all_gradients_are_those_of_the_dense_one(impl, transform):
    weights, x, dout = parameters(), random((3, 7, COLUMNS), 8), random((3, 7, COLUMNS), 9)
    wrap = mx.checkpoint if transform == "checkpoint" else lambda function: function
    assert_near(results(weights, x, dout, impl, transform=wrap), oracle(weights, x, dout), 1e-5)


@pytest.mark.parametrize("impl", ENGINES)
def test_16_bit_experts_with_gates_in_float32(impl):
    weights = parameters(mx.bfloat16)
    x, dout = (random((40, COLUMNS), seed, mx.bfloat16) for seed in (8, 9))
    found = results(weights, x, dout, impl)
    assert [each.dtype for each in found[:3]] == [mx.bfloat16, mx.bfloat16, mx.float32]
    assert_near(found, oracle(weights, x, dout), 2e-2)


@pytest.mark.parametrize("impl", ENGINES)
def test_tokens_of_padding_take_no_part(impl):
    weights, x, dout = parameters(), random((3, 7, COLUMNS), 8), random((3, 7, COLUMNS), 9)
    is_token = mx.arange(21).reshape(3, 7) % 3 > 0
    found = results(weights, x, dout, impl, is_token)
    assert_near(found, oracle(weights, x, dout, is_token), 1e-5)
    assert not mx.where(is_token[..., None], 0, found[0]).any()
    assert not mx.where(is_token[..., None], 0, found[1]).any()


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_a_selected_gate_of_zero_has_a_gradient(impl):
    x, indices = random((4, 8), 0), mx.array([[0, 1]] * 4)
    rows, plan = moe_dispatch(x, indices, impl=impl)
    gates = mx.array([[0.0, 1.0]] * 4)
    gradient = mx.grad(lambda gates: (moe_combine(rows, gates, plan, impl=impl) * x).sum())(gates)
    assert mx.allclose(gradient, mx.broadcast_to((x * x).sum(axis=1, keepdims=True), (4, 2)))


def test_compiled_step_with_value_and_gradient():
    weights, x, dout = parameters(), random((3, 7, COLUMNS), 8), random((3, 7, COLUMNS), 9)

    def loss(weights, x):
        return (layer(weights, x, impl="reference") * dout).sum()

    step = mx.value_and_grad(loss)
    plain, compiled = step(weights, x), mx.compile(step)(weights, x)
    want = oracle(weights, x, dout)
    for value, gradients in (plain, compiled):
        assert abs(value.item() - (want[0] * np.array(dout)).sum()) <= 1e-4
        assert_near([gradients[name] for name in weights], want[2:], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rtol"), [(mx.float32, 1e-4), (mx.bfloat16, 2e-2)], ids=str)
def test_32_steps_with_and_without_kernels_agree(dtype, rtol):
    inputs = random((33, COLUMNS), 20, dtype)
    targets = mx.array(np.random.default_rng(0).integers(0, COLUMNS, 33))

    def log_probabilities(weights, impl):
        logits = (inputs + layer(weights, inputs, impl=impl)).astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def loss(weights, impl):
        return -mx.take_along_axis(log_probabilities(weights, impl), targets[:, None], axis=-1).mean()

    runs = {}
    for impl in ("emulator", "reference"):
        weights, losses = parameters(dtype), []
        for _ in range(32):
            value, gradients = mx.value_and_grad(loss)(weights, impl)
            weights = {name: (each - 0.3 * gradients[name]).astype(each.dtype) for name, each in weights.items()}
            mx.eval(value, weights)
            losses.append(value.item())
        best = mx.sort(log_probabilities(weights, impl), axis=-1)[:, -3:]
        runs[impl] = {"losses": mx.array(losses), "best": best, **weights}
    emulated, plain = (runs[impl] for impl in ("emulator", "reference"))
    assert emulated["losses"][-1] < 0.8 * emulated["losses"][0]
    for name, want in plain.items():
        assert_near([emulated[name]], [np.array(want.astype(mx.float32))], rtol)
