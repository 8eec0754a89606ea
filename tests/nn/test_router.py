"""Routing against the published formulas in NumPy, gradients against PyTorch, ties, groups and the selection bias."""

from functools import partial

from forge_mlx.nn.router import Router
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
import numpy as np
import pytest
import torch

TOKENS, WIDTH, EXPERTS, CHOSEN = 50, 12, 16, 4

SETTINGS = {
    "mixtral": {},
    "olmoe": {"normalize": False},
    "qwen3-moe": {"normalize": True},
    "deepseek-v3": {
        "scores": "sigmoid",
        "scaling": 2.5,
        "groups": 4,
        "groups_per_token": 2,
        "selection_bias": True,
    },
    "deepseek-v3-one-group": {"scores": "sigmoid", "scaling": 1.5, "selection_bias": True},
    "softmax-groups": {"normalize": False, "groups": 8, "groups_per_token": 3},
}


def exp_normalised(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def largest(values, k):
    """The k largest, best first, ties to the lowest index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def mixtral(logits, _bias):
    """Jiang et al. 2024: Softmax(TopK(x W)), over the chosen logits alone."""
    chosen = largest(logits, CHOSEN)
    return chosen, exp_normalised(logits[chosen])


def olmoe(logits, _bias):
    """Muennighoff et al. 2024: the softmax over all experts, of which the k largest count as they are."""
    p = exp_normalised(logits)
    chosen = largest(p, CHOSEN)
    return chosen, p[chosen]


def qwen3_moe(logits, _bias):
    """Qwen3 (2025): the same, divided by the sum of the k."""
    chosen, gates = olmoe(logits, _bias)
    return chosen, gates / gates.sum()


def deepseek_v3(logits, bias, *, groups=4, kept=2, scaling=2.5):
    """DeepSeek-V3 (2024), equations 12 to 16, and its node-limited routing: of each group the best two count."""
    s = 1 / (1 + np.exp(-logits))
    wish = s + bias
    if groups > 1:
        by_group = wish.reshape(groups, -1)
        of_group = np.sort(by_group, axis=1)[:, -2:].sum(axis=1)
        out = np.setdiff1d(range(groups), largest(of_group, kept))
        by_group[out] = -np.inf
    chosen = largest(wish, CHOSEN)
    return chosen, s[chosen] / (s[chosen].sum() + 1e-20) * scaling


def softmax_groups(logits, _bias):
    p = exp_normalised(logits)
    wish = p.copy().reshape(8, -1)
    wish[np.setdiff1d(range(8), largest(np.sort(wish, axis=1)[:, -2:].sum(axis=1), 3))] = -np.inf
    chosen = largest(wish.reshape(-1), CHOSEN)
    return chosen, p[chosen]


FORMULAS = {
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen3-moe": qwen3_moe,
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-one-group": partial(deepseek_v3, groups=1, scaling=1.5),
    "softmax-groups": softmax_groups,
}


def some(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def build(name, **changes):
    router = Router(WIDTH, EXPERTS, CHOSEN, **{**SETTINGS[name], **changes})
    router.weight = mx.array(some((EXPERTS, WIDTH), 1))
    if "selection_bias" in router:
        router.selection_bias = mx.array(0.3 * some(EXPERTS, 2))
    return router


@pytest.mark.parametrize("name", SETTINGS)
def test_routing_is_the_published_formula(name):
    router, x = build(name), some((TOKENS, WIDTH))
    bias = np.array(router.get("selection_bias", mx.zeros(EXPERTS))).astype(np.float64)
    gates, indices, _, logits = router(mx.array(x).reshape(5, 10, WIDTH))
    assert (gates.shape, indices.shape, logits.shape) == ((5, 10, EXPERTS), (5, 10, CHOSEN), (5, 10, EXPERTS))
    assert (gates.dtype, indices.dtype, logits.dtype) == (mx.float32, mx.int32, mx.float32)
    all_logits = x.astype(np.float64) @ np.array(router.weight).astype(np.float64).T
    want = np.zeros((TOKENS, EXPERTS))
    for row, chosen, one in zip(want, np.array(indices).reshape(TOKENS, CHOSEN), all_logits, strict=True):
        experts, weights = FORMULAS[name](one, bias)
        assert chosen.tolist() == experts
        row[experts] = weights
    assert np.abs(np.array(gates).reshape(want.shape) - want).max() <= 1e-6 * np.abs(want).max()


def test_bias_and_groups_decide_something():
    """Else the test above would hold without them."""
    x = mx.array(some((TOKENS, WIDTH)))
    full = build("deepseek-v3")(x).indices
    without_bias = build("deepseek-v3")
    without_bias.selection_bias = mx.zeros(EXPERTS)
    for other in (without_bias, build("deepseek-v3", groups=1, groups_per_token=1)):
        assert (np.sort(np.array(other(x).indices)) != np.sort(np.array(full))).any(axis=1).sum() > 10


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_match_torch(name):
    router, x, direction = build(name), some((TOKENS, WIDTH)), some((TOKENS, EXPERTS), 3)
    _, indices, _, _ = router(mx.array(x))
    chosen = torch.tensor(np.array(indices)).long()
    inputs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, np.array(router.weight))]
    logits = inputs[0] @ inputs[1].T
    scores = torch.sigmoid(logits) if router.scores == "sigmoid" else logits.softmax(-1)
    gates = scores.gather(1, chosen)
    if router.normalize:
        gates = gates / gates.sum(-1, keepdim=True)
    wants = torch.autograd.grad((gates * router.scaling * torch.tensor(direction).gather(1, chosen)).sum(), inputs)

    def loss(x, weight):
        router.weight = weight
        return (router(x).gates * mx.array(direction)).sum()

    for got, want in zip(mx.grad(loss, (0, 1))(mx.array(x), router.weight), wants, strict=True):
        assert np.abs(np.array(got) - want.numpy()).max() <= 1e-5 * want.abs().max().item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_sixteen_bits_are_routed_in_float32(dtype):
    router, x = build("deepseek-v3"), mx.array(some((TOKENS, WIDTH))).astype(dtype)
    router.weight = router.weight.astype(dtype)
    got = router(x)
    router.weight = router.weight.astype(mx.float32)
    for one, two in zip(got, router(x.astype(mx.float32)), strict=True):
        assert one.dtype == two.dtype
        assert mx.array_equal(one, two)


def test_ties_go_to_the_lowest_indices():
    router = Router(WIDTH, 8, 3)
    router.weight = mx.zeros((8, WIDTH))
    gates, indices, _, _ = router(mx.ones((2, WIDTH)))
    assert indices.tolist() == [[0, 1, 2]] * 2
    assert np.allclose(np.array(gates)[:, :3], 1 / 3)
    grouped = Router(WIDTH, 8, 3, groups=4, groups_per_token=2)
    grouped.weight = mx.zeros((8, WIDTH)).at[6].add(1.0)
    assert grouped(mx.ones((1, WIDTH))).indices.tolist() == [[6, 0, 1]]


def test_a_group_counts_with_its_best_two():
    """The best expert alone loses against two good ones, and its group is out."""
    router = Router(1, 4, 2, scores="sigmoid", groups=2, groups_per_token=1)
    router.weight = mx.array([[3.0], [-9.0], [1.0], [1.0]])
    assert sorted(router(mx.ones((1, 1))).indices[0].tolist()) == [2, 3]


def test_a_compiled_router_decides_the_same():
    router, x = build("deepseek-v3"), mx.array(some((TOKENS, WIDTH)))
    got = mx.compile(lambda x: tuple(router(x)))(x)
    assert mx.array_equal(got[1], router(x).indices)
    assert mx.allclose(got[0], router(x).gates, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "unfreeze",
    [
        lambda router: router.unfreeze(),
        lambda router: router.unfreeze(keys=["selection_bias"]),
        lambda router: router.unfreeze(keys=["weight", "selection_bias"], recurse=False, strict=True),
        lambda router: router.freeze().unfreeze(),
    ],
    ids=["all", "by-name", "strictly", "after-freeze"],
)
def test_a_selection_bias_is_never_trainable(unfreeze):
    router = build("deepseek-v3")
    assert [name for name, _ in tree_flatten(router.trainable_parameters())] == ["weight"]
    unfreeze(router)
    assert [name for name, _ in tree_flatten(router.trainable_parameters())] == ["weight"]
    assert sorted(name for name, _ in tree_flatten(router.parameters())) == ["selection_bias", "weight"]
    assert router.freeze().trainable_parameters() == {}


def test_a_selection_bias_has_no_gradient():
    router, x = build("deepseek-v3"), mx.array(some((TOKENS, WIDTH)))

    def loss(bias):
        router.selection_bias = bias
        return (router(x).gates * mx.array(some((TOKENS, EXPERTS), 3))).sum()

    bias = router.selection_bias
    assert not mx.any(mx.grad(loss)(bias)).item()
    router.selection_bias = bias


def test_balance_steps_by_the_sign():
    router = Router(WIDTH, 4, 2, selection_bias=True)
    router.balance(mx.array([10, 0, 5, 5]), 0.25)
    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    router.balance(mx.array([5, 5, 5, 5]), 0.25)
    router.balance(mx.array([7, 8, 9, 9]), 0)
    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    # A difference of 1 in more than float32 counts.
    router.balance(mx.array([2**30, 2**30, 2**30 + 1, 2**30 - 1]), 0.5)
    assert router.selection_bias.tolist() == [-0.25, 0.25, -0.5, 0.5]


@pytest.mark.parametrize(
    ("load", "rate", "message"),
    [
        (mx.ones(4), 0.1, r"\[Router.balance\] load must be integers but got float32"),
        (mx.ones(3, mx.int32), 0.1, r"\[Router.balance\] load must have the shape \(4,\), that of the selection bias"),
        ([1, 2, 3, 4], 0.1, r"\[Router.balance\] load must be an mx.array but got list"),
        (mx.ones(4, mx.int32), -0.1, r"\[Router.balance\] rate must be a finite number of 0 or more but got -0.1"),
        (
            mx.ones(4, mx.int32),
            float("nan"),
            r"\[Router.balance\] rate must be a finite number of 0 or more but got nan",
        ),
        (
            mx.ones(4, mx.int32),
            float("inf"),
            r"\[Router.balance\] rate must be a finite number of 0 or more but got inf",
        ),
        (mx.ones(4, mx.int32), None, r"\[Router.balance\] rate must be a finite number of 0 or more but got None"),
        (mx.ones(4, mx.int32), 1e39, r"\[Router.balance\] rate must be within float32's range, .* but got 1e\+39"),
    ],
    ids=["floating", "shape", "list", "negative", "nan", "inf", "none", "large"],
)
def test_balance_refuses(load, rate, message):
    with pytest.raises(ValueError, match=message):
        Router(WIDTH, 4, 2, selection_bias=True).balance(load, rate)


TO_16_BITS = {
    "model": lambda router: nn.Sequential(nn.Linear(4, 4), router).set_dtype(mx.bfloat16),
    "router": lambda router: router.set_dtype(mx.float16),
    "update": lambda router: router.update(tree_map(lambda p: p.astype(mx.bfloat16), router.parameters())),
    "load": lambda router: router.load_weights(
        [(n, p.astype(mx.float16)) for n, p in tree_flatten(router.parameters())]
    ),
    "assigned": lambda router: setattr(router, "selection_bias", mx.zeros(4, mx.bfloat16)),
}


@pytest.mark.parametrize("way", TO_16_BITS)
def test_a_bias_moves_in_float32_in_a_model_of_16_bits(way):
    router = Router(WIDTH, 4, 2, selection_bias=True)
    TO_16_BITS[way](router)
    assert (router.weight.dtype == mx.float32) == (way == "assigned")
    assert router.selection_bias.dtype == mx.float32
    for _ in range(2000):
        router.balance(mx.array([10, 0, 5, 5]), 0.001)
        mx.eval(router.selection_bias)
    assert np.abs(np.array(router.selection_bias) - [-2, 2, 0, 0]).max() <= 1e-4


def test_balance_needs_a_bias():
    with pytest.raises(ValueError, match=r"\[Router.balance\] there must be a selection bias"):
        Router(WIDTH, 4, 2).balance(mx.ones(4, mx.int32), 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts_per_token": 0}, "experts_per_token must be 1 to num_experts, 8, but got 0"),
        ({"experts_per_token": 9}, "experts_per_token must be 1 to num_experts, 8, but got 9"),
        ({"groups": 3}, "groups must divide num_experts, 8, but got 3"),
        ({"groups": 0}, "groups must divide num_experts, 8, but got 0"),
        ({"groups": 4, "groups_per_token": 5}, "groups_per_token must be 1 to groups, 4, but got 5"),
        ({"groups": 4, "groups_per_token": 0}, "groups_per_token must be 1 to groups, 4, but got 0"),
        ({"groups": 8, "groups_per_token": 8}, "groups must leave 2 or more experts in a group"),
        ({"groups": 4, "experts_per_token": 3}, "experts_per_token must be at most the experts in .*, 2, but got 3"),
        ({"scores": "tanh"}, "scores must be softmax or sigmoid but got 'tanh'"),
        ({"hidden_size": 0}, "hidden_size must be 1 or more but got 0"),
        ({"hidden_size": 8.0}, "hidden_size must be an integer but got 8.0"),
        ({"num_experts": 2000}, "num_experts must be 1 to 1024 but got 2000"),
        ({"num_experts": 0}, "num_experts must be 1 to 1024 but got 0"),
        ({"experts_per_token": 2.0}, "experts_per_token must be an integer but got 2.0"),
        ({"experts_per_token": True}, "experts_per_token must be an integer but got True"),
        ({"groups": 2.0}, "groups must be an integer but got 2.0"),
        ({"groups_per_token": None}, "groups_per_token must be an integer but got None"),
        ({"normalize": 1}, "normalize must be a bool but got 1"),
        ({"selection_bias": 0}, "selection_bias must be a bool but got 0"),
        ({"scaling": 0}, "scaling must be a finite number over 0 but got 0"),
        ({"scaling": -1.0}, "scaling must be a finite number over 0 but got -1.0"),
        ({"scaling": float("nan")}, "scaling must be a finite number over 0 but got nan"),
        ({"scaling": float("inf")}, "scaling must be a finite number over 0 but got inf"),
        ({"scaling": 1e39}, "scaling must be within float32's range, .* but got 1e.39"),
        ({"scaling": "2"}, "scaling must be a Python number but got '2'"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_impossible_choices_are_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"\[Router\] {message}"):
        Router(**{"hidden_size": WIDTH, "num_experts": 8, "experts_per_token": 2, **arguments})


@pytest.mark.parametrize("name", SETTINGS)
def test_one_token_may_come_without_leading_axes_and_none_may_come(name):
    router, x = build(name), mx.array(some((3, WIDTH)))
    for one, both in zip(router(x[1]), router(x), strict=True):
        assert one.shape == both.shape[1:]
        # A product with one row may be summed in another order.
        assert mx.allclose(one, both[1], rtol=1e-5, atol=1e-6)
    for shape in ((0,), (2, 0, 3)):
        widths = [each.shape for each in router(mx.zeros((*shape, WIDTH)))]
        assert widths == [(*shape, EXPERTS), (*shape, CHOSEN), (*shape, EXPERTS), (*shape, EXPERTS)]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (mx.ones((2, WIDTH + 1)), r"x must have the shape \(2, 12\), whose last axis is the router's .*, 12, but got"),
        (mx.ones((2, WIDTH), mx.int32), "x must be float32, float16 or bfloat16 but got int32"),
        (mx.array(1.0), "x must have 1 or more axes"),
        (np.ones((2, WIDTH)), "x must be an mx.array but got numpy.ndarray"),
    ],
    ids=["width", "integers", "scalar", "numpy"],
)
def test_other_tokens_are_refused(x, message):
    with pytest.raises(ValueError, match=rf"\[Router\] {message}"):
        Router(WIDTH, 8, 2)(x)
