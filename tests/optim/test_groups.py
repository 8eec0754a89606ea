from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.optim import OptimConfig, build_optimizer
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
import numpy as np
import pytest
import torch

STEPS = 50
GPT2 = GPTConfig(
    vocab_size=23,
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    norm="layer_norm",
    position="learned",
    mlp="gelu",
    bias=True,
    max_seq_len=8,
)
LLAMA = GPTConfig(vocab_size=23, num_layers=2, hidden_size=8, num_heads=2, intermediate_size=24, tie_embeddings=False)


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield


def parameters(config):
    return {name: np.array(array) for name, array in tree_flatten(GPT(config, seed=1).parameters())}


def gradients(params, step, scale=1.0):
    draw = np.random.default_rng(step)
    return {n: (scale * draw.standard_normal(p.shape)).astype(np.float32) for n, p in sorted(params.items())}


def as_tree(arrays):
    return tree_unflatten([(name, mx.array(array)) for name, array in arrays.items()])


def run(config, params, steps=STEPS, factor=lambda _: 1.0, optimizer=None, first=0):
    optimizer = optimizer or build_optimizer(config)
    tree = as_tree(params)
    if first == 0:
        optimizer.init(tree)
    for step in range(first, steps):
        optimizer.set_rate_factor(factor(step))
        tree = optimizer.apply_gradients(as_tree(gradients(params, step)), tree)
        mx.eval(tree, optimizer.state)
    return {name: np.array(array) for name, array in tree_flatten(tree)}, optimizer


def falling(step):
    return 1.0 - step / STEPS


def torch_adamw(config, params, decayed, factor):
    tensors = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in params.items()}
    groups = [
        {"params": [t for n, t in tensors.items() if decayed(n)], "weight_decay": config.weight_decay},
        {"params": [t for n, t in tensors.items() if not decayed(n)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * factor(step)
        for name, grad in gradients(params, step).items():
            tensors[name].grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "config",
    [OptimConfig(lr=1e-2), OptimConfig(lr=3e-3, betas=(0.8, 0.99), eps=1e-3, weight_decay=2.0)],
    ids=["defaults", "other settings"],
)
def test_adamw_is_that_of_torch_with_decay_on_matrices_only(config):
    params = parameters(GPT2)
    found, _ = run(config, params, factor=falling)
    expected = torch_adamw(config, params, lambda name: params[name].ndim == 2, falling)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)


def newton_schulz(matrix, steps):
    """The quintic iteration of Jordan et al. 2024 in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def numpy_muon(config, params, name, factor):
    weight, momentum = params[name].astype(np.float64), np.zeros(params[name].shape)
    mu = config.muon_momentum
    for step in range(STEPS):
        grad = gradients(params, step)[name].astype(np.float64)
        rate = config.muon_lr * factor(step)
        momentum = mu * momentum + (1 - mu) * grad
        direction = newton_schulz((1 - mu) * grad + mu * momentum, config.muon_steps)
        scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight = weight * (1 - rate * config.weight_decay) - rate * scale * direction
    return weight


@pytest.mark.parametrize(
    "config",
    [
        OptimConfig(name="muon"),
        OptimConfig(name="muon", muon_lr=0.1, muon_momentum=0.8, muon_steps=3, weight_decay=1.5, lr=1e-2),
    ],
    ids=["defaults", "other settings"],
)
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(config):
    params = parameters(LLAMA)
    found, _ = run(config, params, factor=falling)
    hidden = {name for name in params if name.startswith("layers.") and params[name].ndim == 2}
    assert len(hidden) == 2 * 7
    others = {name: array for name, array in params.items() if name not in hidden}
    # The gradients of a name follow from all names, so AdamW sees the whole set.
    adamw = torch_adamw(config, params, lambda name: params[name].ndim == 2, falling)
    assert others.keys() == {
        "embed_tokens.weight",
        "lm_head.weight",
        "norm.weight",
        *(f"layers.{i}.{norm}.weight" for i in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")),
    }
    for name in others:
        np.testing.assert_allclose(found[name], adamw[name], rtol=2e-5, atol=2e-6, err_msg=name)
    for name in hidden:
        expected = numpy_muon(config, params, name, falling)
        error = np.abs(found[name] - expected).max()
        assert error < 1e-4 * np.abs(expected).max(), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_grad_scale_is_a_factor_on_the_gradients_of_every_group(name):
    params = parameters(LLAMA)
    config = OptimConfig(name=name, eps=1e-2)
    scaled, plain = build_optimizer(config), build_optimizer(config)
    found = want = as_tree(params)
    for step, scale in enumerate((1.0, 0.01, 3.0)):
        found = scaled.apply_gradients(as_tree(gradients(params, step)), found, mx.array(scale))
        want = plain.apply_gradients(as_tree(gradients(params, step, scale)), want)
    for (key, a), (_, b) in zip(tree_flatten(found), tree_flatten(want), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-5, err_msg=key)


def groups_of(optimizer):
    """The names of the parameters in each group, read from the state's moments."""
    moments = [name.split(".", 2)[1:] for name in optimizer.flat_state() if name.endswith((".m", ".v"))]
    return [
        {name.rsplit(".", 1)[0] for group, name in moments if group == str(index)}
        for index in range(len(optimizer.optimizers))
    ]


def test_each_parameter_is_in_one_group():
    for config in (GPT2, LLAMA):
        params = parameters(config)
        vectors = {name for name in params if params[name].ndim == 1}
        hidden = {name for name in params if name.startswith("layers.")} - vectors
        adamw = build_optimizer(OptimConfig())
        adamw.init(as_tree(params))
        assert groups_of(adamw) == [params.keys() - vectors, vectors]
        muon = build_optimizer(OptimConfig(name="muon"))
        muon.init(as_tree(params))
        assert groups_of(muon) == [hidden, params.keys() - vectors - hidden, vectors]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_model_without_vectors_leaves_the_last_group_empty(name):
    config = LLAMA.model_copy(update={"norm_weight": False})
    params = parameters(config)
    assert all(p.ndim == 2 for p in params.values())
    found, optimizer = run(OptimConfig(name=name), params, steps=2)
    assert found.keys() == params.keys()
    assert all((found[n] != params[n]).any() for n in params)
    assert groups_of(optimizer)[-1] == set()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_state_goes_on_bit_for_bit(name):
    config, params = OptimConfig(name=name), parameters(LLAMA)
    unbroken, _ = run(config, params, steps=6, factor=falling)
    half, optimizer = run(config, params, steps=3, factor=falling)
    saved = {key: mx.array(np.array(array)) for key, array in optimizer.flat_state().items()}
    assert all("." in key for key in saved)
    fresh = build_optimizer(config)
    fresh.init(as_tree(params))
    containers = [id(o.state) for o in fresh.optimizers]
    fresh.load_flat_state(saved)
    # Compiled functions hold on to the containers.
    assert [id(o.state) for o in fresh.optimizers] == containers
    resumed, _ = run(config, half, steps=6, factor=falling, optimizer=fresh, first=3)
    for key, array in unbroken.items():
        np.testing.assert_array_equal(array, resumed[key], err_msg=key)


def test_a_state_that_does_not_fit_is_an_error_and_changes_nothing():
    optimizer = build_optimizer(OptimConfig())
    optimizer.init(as_tree(parameters(LLAMA)))
    own = {key: mx.array(np.array(array)) for key, array in optimizer.flat_state().items()}
    key = "states.0.embed_tokens.weight.m"
    ones = {k: mx.ones_like(a) for k, a in own.items()}
    missing = {k: a for k, a in ones.items() if k != key}
    with pytest.raises(ValueError, match=rf"^\[GroupedOptimizer\] the saved state lacks {key}\.$"):
        optimizer.load_flat_state(missing)
    with pytest.raises(ValueError, match=r"^\[GroupedOptimizer\] the saved state has no place for states\.9\.x\.$"):
        optimizer.load_flat_state({**ones, "states.9.x": mx.array(0)})
    with pytest.raises(ValueError, match=rf"{key} must be mlx\.core\.float32 \(23, 8\) but got .*float32 \(8, 23\)\.$"):
        optimizer.load_flat_state({**ones, key: mx.zeros((8, 23))})
    with pytest.raises(ValueError, match=rf"{key} must be .* but got mlx\.core\.float16 \(23, 8\)\.$"):
        optimizer.load_flat_state({**ones, key: mx.zeros((23, 8), mx.float16)})
    for k, array in optimizer.flat_state().items():
        np.testing.assert_array_equal(np.array(array), np.array(own[k]))


def test_the_rate_factor_acts_on_every_groups_own_peak():
    optimizer = build_optimizer(OptimConfig(name="muon", lr=1e-3, muon_lr=0.02))
    optimizer.set_rate_factor(0.5)
    optimizer.set_rate_factor(0.25)
    assert [float(o.learning_rate) for o in optimizer.optimizers] == pytest.approx([0.005, 0.00025, 0.00025])


@pytest.mark.parametrize("expert_lr", [None, 0.004])
def test_muon_orthogonalises_each_expert_by_itself_at_a_rate_of_its_own(expert_lr):
    config = OptimConfig(name="muon", weight_decay=1.5, muon_expert_lr=expert_lr)
    draw = np.random.default_rng(7)
    experts, router = "layers.0.mlp.experts.up_proj.weight", "layers.0.mlp.router.weight"
    params = {
        experts: draw.standard_normal((3, 6, 4)).astype(np.float32),
        router: draw.standard_normal((3, 4)).astype(np.float32),
    }
    found, _ = run(config, params, factor=falling)
    weight, momentum = params[experts].astype(np.float64), np.zeros((3, 6, 4))
    for step in range(STEPS):
        grad = gradients(params, step)[experts].astype(np.float64)
        rate, mu = (expert_lr or config.muon_lr) * falling(step), config.muon_momentum
        momentum = mu * momentum + (1 - mu) * grad
        direction = [newton_schulz(m, config.muon_steps) for m in (1 - mu) * grad + mu * momentum]
        weight = weight * (1 - rate * config.weight_decay) - rate * (6 / 4) ** 0.5 * np.stack(direction)
    for name, want in ((experts, weight), (router, numpy_muon(config, params, router, falling))):
        assert np.abs(found[name] - want).max() < 1e-4 * np.abs(want).max(), name
