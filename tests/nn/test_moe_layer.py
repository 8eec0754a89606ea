"""The MoE layer against PyTorch in float64 and against its dense way: every expert on every token, gates as weights."""

from forge_mlx.kernels._common.proof import RTOL, to_float64
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.mlp import MLP, GatedMLP
from forge_mlx.nn.moe import Experts, MoELayer, routers, update_selection_bias
from forge_mlx.nn.router import Router
from forge_mlx.nn.routing_record import routing_penalty, routing_records
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
import numpy as np
import pytest
import torch
import torch.nn.functional as F

WIDTH, INSIDE, EXPERTS = 8, 6, 5
ACTS = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "gelu": lambda _, up: F.gelu(up),
    "gelu_tanh": lambda _, up: F.gelu(up, approximate="tanh"),
    "silu": lambda _, up: F.silu(up),
    "relu2": lambda _, up: up.clamp(min=0).square(),
}
FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def some(shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def layer(kind="swiglu", k=2, shared=True, **options):
    """A layer whose parameters are all random."""
    common = None
    if shared:
        common = (GatedMLP if "glu" in kind else MLP)(WIDTH, 2 * INSIDE, activation=kind, bias=False)
    made = MoELayer(Router(WIDTH, EXPERTS, k, **options), Experts(WIDTH, INSIDE, EXPERTS, activation=kind), common)
    for seed, (name, p) in enumerate(tree_flatten(made.parameters())):
        made.load_weights([(name, mx.array(some(p.shape, seed, 0.5)))], strict=False)
    return made


def torch_mlp(p, name, x, kind):
    gate = p.get(f"{name}.gate_proj.weight")
    hidden = ACTS[kind](None if gate is None else x @ gate.T, x @ p[f"{name}.up_proj.weight"].T)
    return hidden @ p[f"{name}.down_proj.weight"].T


def by_torch(made, x, direction, kind):
    """Output and every gradient in float64; the choice is the layer's own, whose formulas test_router.py has."""
    p = {name: torch.tensor(to_float64(value), requires_grad=True) for name, value in tree_flatten(made.parameters())}
    rows = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    chosen = np.array(made.router(mx.array(x)).indices)
    logits = rows @ p["router.weight"].T
    scores = torch.sigmoid(logits) if made.router.scores == "sigmoid" else logits.softmax(-1)
    outs = []
    for token, score, experts in zip(rows, scores, chosen.tolist(), strict=True):
        gates = score[experts]
        gates = gates / gates.sum() if made.router.normalize else gates
        out = torch_mlp(p, "shared_experts", token, kind) if "shared_experts" in made else 0 * token
        for gate, expert in zip(gates, experts, strict=True):
            own = {name: value[expert] for name, value in p.items() if name.startswith("experts.")}
            out = out + gate * made.router.scaling * torch_mlp(own, "experts", token, kind)
        outs.append(out)
    out = torch.stack(outs)
    (out * torch.tensor(direction, dtype=torch.float64)).sum().backward()
    grads = {name: value.grad for name, value in p.items() if not name.endswith("selection_bias")}
    return {name: value.detach().numpy() for name, value in {"out": out, "x": rows.grad, **grads}.items()}


def by_mlx(made, x, direction, **options):
    def loss(params, x):
        made.update(params)
        out = made(x, **options)
        return (out * direction).sum(), out

    params = made.trainable_parameters()
    (_, out), (grads, dx) = mx.value_and_grad(loss, (0, 1))(params, mx.array(x))
    made.update(params)
    return {"out": out, "x": dx, **dict(tree_flatten(grads))}


def assert_close(got, want, rtol=1e-5):
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = np.abs(to_float64(got[name]) - np.array(value).astype(np.float64)).max()
        assert error <= rtol * np.abs(value).max(), name


CASES = {
    **{kind: {"kind": kind} for kind in ACTS},
    "no-shared": {"shared": False},
    "one-expert": {"k": 1, "normalize": False},
    "all-experts": {"k": EXPERTS, "normalize": False},
    "sigmoid-bias-scaling": {"k": 3, "scores": "sigmoid", "selection_bias": True, "scaling": 2.5},
}


@pytest.mark.parametrize("dense", [False, True], ids=["dropless", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient_match_torch(name, dense):
    settings = CASES[name]
    made, x, direction = layer(**settings), some((13, WIDTH), 1), some((13, WIDTH), 2)
    got = by_mlx(made, x, mx.array(direction), dense=dense)
    assert_close(got, by_torch(made, x, direction, settings.get("kind", "swiglu")))


@pytest.mark.parametrize("shape", [(1,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dropless_and_dense_agree(name, shape):
    made, x = layer(**CASES[name]), some((*shape, WIDTH), 3)
    direction = mx.array(some(x.shape, 4))
    dense = by_mlx(made, x, direction, dense=True)
    assert dense["out"].shape == x.shape
    assert_close(by_mlx(made, x, direction), {name: np.array(value) for name, value in dense.items()})


def test_many_tokens_on_few_experts_drop_none():
    """A bias sends every token to the same two experts: they get all, the others nothing and no gradient."""
    made = layer(k=2, shared=False, selection_bias=True)
    made.router.selection_bias = mx.array([-9.0, 9.0, -9.0, 9.0, -9.0])
    x, direction = some((50, WIDTH), 5), some((50, WIDTH), 6)
    with routing_records() as records:
        got = by_mlx(made, x, mx.array(direction))
    assert records[0].load.tolist() == [0, 50, 0, 50, 0]
    assert_close(got, by_torch(made, x, direction, "swiglu"))
    for name, gradient in got.items():
        if name.startswith("experts."):
            assert not mx.any(gradient[mx.array([0, 2, 4])]).item()


def test_padding_changes_the_record_alone():
    made, x = layer(), mx.array(some((2, 3, WIDTH), 7))
    is_token = mx.array([[True, True, False], [True, False, False]])
    with routing_records() as records:
        outs = [made(x), made(x, is_token)]
    assert mx.array_equal(*outs)
    assert [record.tokens.item() for record in records] == [6, 3]
    assert [record.load.sum().item() for record in records] == [12, 6]


@pytest.mark.parametrize(
    ("is_token", "message"),
    [
        (mx.ones((2, 3)), "is_token must be bool but got float32"),
        (mx.ones((2, 3), mx.int32), "is_token must be bool but got int32"),
        (mx.ones((2, 1), mx.bool_), r"is_token must have the shape \(2, 3\), the leading axes of x, but got \(2, 1\)"),
        (mx.ones((2, 3, 1), mx.bool_), r"is_token must have the shape \(2, 3\)"),
        ([[True] * 3] * 2, "is_token must be an mx.array but got list"),
    ],
    ids=["floating", "integers", "broadcast", "axes", "list"],
)
def test_other_masks_are_refused(is_token, message):
    """With records open or not."""
    with pytest.raises(ValueError, match=rf"\[MoELayer\] {message}"):
        layer()(mx.zeros((2, 3, WIDTH)), is_token)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            (Router(WIDTH, 8, 2), Experts(WIDTH, INSIDE, 4, activation="swiglu")),
            "experts must be as many as .*, 8, but",
        ),
        (
            (Router(WIDTH, 4, 2), Experts(WIDTH, INSIDE, 8, activation="swiglu")),
            "experts must be as many as .*, 4, but",
        ),
        ((Router(WIDTH, 4, 2), Experts(9, INSIDE, 4, activation="gelu")), "experts must have the router's .*, 8, but"),
        (
            (
                Router(WIDTH, 4, 2),
                Experts(WIDTH, INSIDE, 4, activation="gelu"),
                MLP(9, INSIDE, activation="gelu", bias=False),
            ),
            "shared_experts must have the router's hidden_size, 8, but got 9",
        ),
    ],
    ids=["fewer", "more", "width", "shared"],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(ValueError, match=rf"\[MoELayer\] {message}"):
        MoELayer(*parts)


@pytest.mark.parametrize("dense", [False, True], ids=["dropless", "dense"])
def test_one_token_may_come_without_leading_axes(dense):
    made, x = layer(k=3), some((WIDTH,), 1)
    assert_close({"out": made(mx.array(x), mx.array(True), dense=dense)}, {"out": np.array(made(mx.array(x[None])))[0]})
    with routing_records() as records:
        made(mx.array(x), mx.array(False), dense=dense)
    assert (records[0].tokens.item(), records[0].load.sum().item()) == (0, 0)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_no_tokens_are_recorded_as_none(shape, groups):
    made = MoELayer(
        Router(WIDTH, 6, 2, groups=groups, selection_bias=True), Experts(WIDTH, INSIDE, 6, activation="swiglu")
    )

    def loss(params, x):
        made.update(params)
        with routing_records() as records:
            out = made(x, mx.ones(shape, mx.bool_))
        penalty = routing_penalty(records, aux_loss_weight=1.0, router_z_loss_weight=1.0)
        return out.sum() + penalty, (out, records)

    params, x = made.trainable_parameters(), mx.zeros((*shape, WIDTH))
    (value, (out, (record,))), (grads, dx) = mx.value_and_grad(loss, (0, 1))(params, x)
    assert (value.item(), out.shape, dx.shape) == (0, x.shape, x.shape)
    assert not any(mx.any(gradient).item() for _, gradient in tree_flatten(grads))
    assert record.load.tolist() == [0] * 6
    assert record.probability_sum.tolist() == [0] * 6
    assert (record.tokens.item(), record.z_sum.item(), record.entropy_sum.item()) == (0, 0, 0)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sixteen_bits_lose_what_they_cost(name):
    """Twice the error of the dense way in the same dtype, and the dtype's rtol."""
    dtype = FLOATS[name]
    made = layer(k=3)
    made.update(tree_map(lambda p: p.astype(dtype), made.trainable_parameters()))
    x, direction = mx.array(some((13, WIDTH), 1)).astype(dtype), some((13, WIDTH), 2)
    truth = by_torch(made, to_float64(x).astype(np.float32), direction, "swiglu")
    reference, results = (by_mlx(made, x, mx.array(direction).astype(dtype), dense=dense) for dense in (True, False))
    for key, want in truth.items():
        error, of_reference = (np.abs(to_float64(each[key]) - want).max() for each in (results, reference))
        assert results[key].dtype == dtype
        assert error <= 2 * of_reference + RTOL[dtype] * np.abs(want).max(), key


@pytest.mark.slow
def test_a_compiled_layer_has_the_same_gradients():
    made, x, direction = layer(), some((6, WIDTH), 1), mx.array(some((6, WIDTH), 2))
    params = made.trainable_parameters()

    def loss(params, x):
        made.update(params)
        return (made(x) * direction).sum()

    got = mx.compile(mx.grad(loss))(params, mx.array(x))
    made.update(params)
    want = by_mlx(made, x, direction)
    assert_close(dict(tree_flatten(got)), {key: want[key] for key, _ in tree_flatten(params)}, 1e-5)


@pytest.mark.slow
def test_the_layer_runs_the_kernels():
    made, x, direction = layer(k=3), some((9, WIDTH), 1), mx.array(some((9, WIDTH), 2))
    want = by_mlx(made, x, direction)
    emulator.reset()
    with use_engine("emulator"), routing_records() as records:
        got = by_mlx(made, x, direction)
        mx.eval(got, records)
    assert_close(got, {name: np.array(value) for name, value in want.items()})
    launched = {launch.name for launch in emulator.report().launches}
    assert {"topk_renorm_forward", "topk_renorm_backward", "expert_counts"} <= launched
    assert {"moe_dispatch_forward", "moe_dispatch_backward", "moe_combine_forward", "moe_combine_backward"} <= launched


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FLOATS)
def test_expert_linear_is_a_product_with_each_block_of_rows(rows, name):
    dtype = FLOATS[name]
    made = ExpertLinear(WIDTH, INSIDE, EXPERTS)
    made.weight = mx.array(some((EXPERTS, INSIDE, WIDTH))).astype(dtype)
    experts = [0, 0, 2, 4, 4, 4]
    x, direction = (mx.array(some((6, rows, n), n)).astype(dtype) for n in (WIDTH, INSIDE))
    a, w, d = (torch.tensor(to_float64(each), requires_grad=True) for each in (x, made.weight, direction))
    want = torch.stack([rows @ w[e].T for rows, e in zip(a, experts, strict=True)])
    (want * d).sum().backward()

    def loss(weight, x):
        made.weight = weight
        out = made(x, mx.array(experts, mx.int32))
        return (out * direction).sum(), out

    (_, out), (dw, dx) = mx.value_and_grad(loss, (0, 1))(made.weight, x)
    for got, value in ((out, want.detach()), (dw, w.grad), (dx, a.grad)):
        assert got.dtype == dtype
        assert np.abs(to_float64(got) - value.numpy()).max() <= RTOL[dtype] * value.abs().max().item()


def test_expert_linear_of_no_rows():
    made = ExpertLinear(WIDTH, INSIDE, EXPERTS)
    out = made(mx.zeros((0, 1, WIDTH)), mx.zeros((0,), mx.int32))
    assert (out.shape, out.dtype) == ((0, 1, INSIDE), mx.float32)
    assert str(made) == "ExpertLinear(input_dims=8, output_dims=6, num_experts=5)"


class Pair(nn.Module):
    """Eleven layers: by name the eleventh would come before the third."""

    def __init__(self):
        super().__init__()
        self.layers = [layer(selection_bias=True) for _ in range(11)]
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize("activation", ["nope", "", None])
def test_an_unknown_activation_is_refused_at_once(activation):
    with pytest.raises(
        ValueError, match=rf"\[Experts\] activation must be among swiglu, .*, relu2.* but got {activation!r}\."
    ):
        Experts(WIDTH, INSIDE, EXPERTS, activation=activation)


def test_routers_come_in_the_order_of_the_layers():
    model = Pair()
    assert all(one is two.router for one, two in zip(routers(model), model.layers, strict=True))
    before = [np.array(each.router.selection_bias) for each in model.layers]
    loads = [mx.array(np.eye(EXPERTS, dtype=np.int32)[i % EXPERTS]) for i in range(11)]
    update_selection_bias(model, loads, 0.5)
    for i, each in enumerate(model.layers):
        step = np.array(each.router.selection_bias) - before[i]
        assert np.allclose(step, [-0.5 if e == i % EXPERTS else 0.5 for e in range(EXPERTS)], atol=1e-6)
