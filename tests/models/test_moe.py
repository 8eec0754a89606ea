"""The MoE decoder against PyTorch in float64, its counts, start and losses, documents, and generation."""

import math

from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.nn.losses import cross_entropy
from forge_mlx.nn.routing_record import aux_loss, routing_records, z_loss
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
import numpy as np
import pytest
import reference_moe as reference
import torch
import torch.nn.functional as F

SHAPE = {"vocab_size": 37, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "max_seq_len": 40, "num_experts": 8}
FAMILIES = {
    "mixtral": {**SHAPE, "num_kv_heads": 2, "experts_per_token": 2, "intermediate_size": 12, "rope_base": 500.0},
    "olmoe": {
        **SHAPE,
        "experts_per_token": 3,
        "expert_intermediate_size": 10,
        "normalize_gates": False,
        "qk_norm": "joint",
        "num_kv_heads": 2,
        "norm_eps": 0.1,
        "tie_embeddings": False,
    },
    "qwen3-moe": {
        **SHAPE,
        "experts_per_token": 4,
        "intermediate_size": 20,
        "expert_intermediate_size": 10,
        "qk_norm": True,
        "head_dim": 8,
        "dense_layers": 1,
        "norm_eps": 0.1,
    },
    "deepseek-v3": {
        **SHAPE,
        "num_layers": 3,
        "dense_layers": 1,
        "experts_per_token": 3,
        "intermediate_size": 20,
        "expert_intermediate_size": 6,
        "router_scores": "sigmoid",
        "routed_scaling": 2.5,
        "shared_experts": 2,
        "expert_groups": 4,
        "groups_per_token": 2,
        "selection_bias": True,
        "tie_embeddings": False,
    },
    "plain-experts": {
        **SHAPE,
        "experts_per_token": 1,
        "normalize_gates": False,
        "mlp": "relu2",
        "intermediate_size": 12,
        "shared_experts": 1,
    },
}


def build(settings, seed=1, **changes):
    """A model whose every parameter is random: norms' scales off 1, choices decided, biases that change some."""
    model = MoE(MoEConfig(**{**settings, **changes}))
    rng = np.random.default_rng(seed)
    start = []
    for name, p in tree_flatten(model.parameters()):
        value = rng.standard_normal(p.shape) * (0.3 if p.ndim > 1 else 0.2)
        value += name.endswith("norm.weight") and p.ndim == 1
        start.append((name, mx.array((value * (3 if "router.weight" in name else 1)).astype(np.float32))))
    model.update(tree_unflatten(start))
    return model.eval()


def some_tokens(batch=2, length=9, vocab=37, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


def close(got, want, rtol=1e-4):
    assert np.abs(np.array(got) - want).max() <= rtol * np.abs(want).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_every_gradient_match_torch(name):
    model = build(FAMILIES[name])
    tokens, targets = some_tokens(), some_tokens(seed=1)
    p = {
        key: torch.tensor(np.array(value), dtype=torch.float64, requires_grad=True)
        for key, value in tree_flatten(model.parameters())
    }
    want = reference.decoder(p, torch.tensor(tokens).long(), model.config)
    want_loss = F.cross_entropy(want.flatten(0, 1), torch.tensor(targets).long().flatten())
    want_loss.backward()

    got_loss, grads = nn.value_and_grad(model, lambda m: cross_entropy(m(mx.array(tokens)), mx.array(targets)))(model)
    close(model(mx.array(tokens)), want.detach().numpy())
    close(got_loss, want_loss.detach().numpy())
    grads = dict(tree_flatten(grads))
    assert grads.keys() == {key for key in p if not key.endswith("selection_bias")}
    for key, value in grads.items():
        close(value, p[key].grad.numpy())
    assert all(value.grad is None for key, value in p.items() if key.endswith("selection_bias"))


def test_counts_of_parameters():
    """Of the deepseek shape, by hand: one dense and two MoE layers."""
    model = build(FAMILIES["deepseek-v3"])
    outside = 2 * 37 * 16 + 16
    attention, norms = 4 * 16 * 16, 2 * 16
    expert, router, bias = 3 * 16 * 6, 8 * 16, 8
    dense = attention + norms + 3 * 16 * 20
    sparse = attention + norms + router + bias + 2 * expert
    assert model.num_parameters() == outside + dense + 2 * (sparse + 8 * expert)
    assert model.num_active_parameters() == outside + dense + 2 * (sparse + 3 * expert)
    assert model.num_parameters(embeddings=False) == model.num_parameters() - 2 * 37 * 16
    assert model.num_active_parameters(embeddings=False) == model.num_active_parameters() - 2 * 37 * 16


def test_flops_per_token_count_the_chosen_experts_alone():
    model = build(FAMILIES["deepseek-v3"])
    matrices = 3 * 4 * 16 * 16 + 3 * 16 * 20 + 2 * (8 * 16 + (3 + 2) * 3 * 16 * 6) + 16 * 37
    assert model.flops_per_token(12) == 3 * (2 * matrices + 3 * 4 * 16 * 6.5)


def test_parameters_of_mixtral_8x7b_are_the_published_numbers():
    """46.7 billion, of which a token meets 12.9; from one of its 32 layers."""
    one = {"vocab_size": 32000, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "num_layers": 1}
    model = MoE(MoEConfig(**one, num_experts=8, intermediate_size=14336, tie_embeddings=False))
    outside = 2 * 32000 * 4096 + 4096
    total, active = (
        outside + 32 * (count() - outside) for count in (model.num_parameters, model.num_active_parameters)
    )
    assert (total, active) == (46702792704, 12879925248)


@pytest.mark.parametrize("zero", [False, True], ids=["scaled", "zero"])
def test_the_start_is_the_table(zero):
    settings = {**FAMILIES["deepseek-v3"], "hidden_size": 128, "expert_intermediate_size": 64, "init_std": 0.1}
    model = MoE(MoEConfig(**settings, zero_init_residual=zero))
    for key, value in tree_flatten(model.parameters()):
        value = np.array(value)
        if value.ndim == 1:
            assert (value == (1 if key.endswith("norm.weight") else 0)).all()
            continue
        std = 0.1
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            std = 0 if zero else 0.1 / math.sqrt(2 * 3)
        assert abs(value.std() - std) <= 0.05 * std
        assert abs(value.mean()) <= 0.1 * std


def test_the_seed_alone_decides_the_start():
    mx.random.seed(2)
    state = mx.random.state[0].tolist()
    one, two, other = (
        dict(tree_flatten(MoE(MoEConfig(**FAMILIES["mixtral"]), seed=seed).parameters())) for seed in (5, 5, 6)
    )
    assert mx.random.state[0].tolist() == state
    for key, value in one.items():
        assert mx.array_equal(value, two[key])
        assert value.ndim == 1 or not mx.array_equal(value, other[key])
    assert not mx.array_equal(*one["layers.0.mlp.experts.up_proj.weight"][:2])


def test_the_first_layers_are_dense():
    model = build(FAMILIES["deepseek-v3"])
    assert model.moe_layers == [1, 2]
    assert ["router" in layer.mlp for layer in model.layers] == [False, True, True]
    with routing_records() as records:
        model(mx.array(some_tokens()))
    assert len(records) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_no_logit_depends_on_a_later_token(name):
    model = build(FAMILIES[name])
    tokens = some_tokens()
    before = np.array(model(mx.array(tokens)))
    other = tokens.copy()
    other[:, 5] = (other[:, 5] + 1) % 37
    after = np.array(model(mx.array(other)))
    # On a CPU rows of one expert are multiplied together, so that other rows may change how a sum is rounded.
    close(after[:, :5], before[:, :5], 1e-5)
    assert (np.abs(after[:, 5:] - before[:, 5:]).max(axis=(0, 2)) > 1e-3 * np.abs(before).max()).all()


def greedy(model, prompt, count):
    """Greedy continuation that runs the whole sequence again for every token."""
    tokens = prompt
    for _ in range(count):
        following = mx.argmax(model(tokens)[:, -1:], axis=-1).astype(mx.int32)
        tokens = mx.concatenate([tokens, following], axis=1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_same_with_a_cache(name):
    model = build(FAMILIES[name])
    prompt = mx.array(some_tokens(2, 6))
    want = greedy(model, prompt, 15)
    assert len(set(want.reshape(-1).tolist())) > 5
    cache, out = model.make_cache(), []
    model(prompt[:, :4], cache)
    logits = model(prompt[:, 4:], cache)
    for _ in range(15):
        out.append(mx.argmax(logits[:, -1:], axis=-1).astype(mx.int32))
        logits = model(out[-1], cache)
    assert mx.array_equal(mx.concatenate(out, axis=1), want)


GEMMA = {
    **{"num_kv_heads": 2, "sliding_window": 3, "sliding_layers": [1], "rope_local_base": 50.0, "rope_scale": 0.5},
    **{"attention_scale": 0.5, "attention_bias": "qkv", "attention_softcap": 2.0, "embedding_scale": 3.0},
    **{"norm_offset": True, "post_norms": True, "mlp": "geglu_tanh", "qk_norm": True, "intermediate_size": 12},
}


def test_a_mixture_of_one_expert_many_times_is_the_dense_model():
    """All that the decoders share, which is proved of a GPT, holds for an MoE."""
    settings = {**SHAPE, **GEMMA}
    moe = build(settings, num_experts=4)
    del settings["num_experts"]
    dense = GPT(GPTConfig(**settings))
    weights = dict(tree_flatten(moe.parameters()))
    for name, array in list(weights.items()):
        if ".experts." in name:
            weights[name] = mx.broadcast_to(array[:1], array.shape)
            weights[name.replace(".experts", "")] = array[0]
    moe.load_weights([(name, weights[name]) for name, _ in tree_flatten(moe.parameters())])
    dense.load_weights([(name, weights[name]) for name, _ in tree_flatten(dense.parameters())])
    tokens = mx.array(some_tokens())
    close(moe(tokens), np.array(dense(tokens)), 1e-5)
    cache = moe.make_cache()
    parts = [moe(tokens[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    close(mx.concatenate(parts, axis=1), np.array(dense(tokens)), 1e-5)
    routers = 6 * moe.layers[0].mlp.router.weight.size * len(moe.layers)
    chosen = (moe.config.experts_per_token - 1) * 6 * 3 * 12 * moe.config.hidden_size * len(moe.layers)
    assert moe.flops_per_token(9) == dense.flops_per_token(9) + routers + chosen


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_a_document_gives_what_it_gives_alone(name):
    model = build(FAMILIES[name])
    first, second = some_tokens(1, 5), some_tokens(1, 4, seed=3)
    row = mx.array(np.concatenate([first, second, np.zeros((1, 3), np.int32)], axis=1))
    ids = mx.array([[0] * 5 + [1] * 4 + [-1] * 3])
    positions = mx.array([[*range(5), *range(4), *range(3)]])
    with routing_records() as records:
        logits = np.array(model(row, segment_ids=ids, positions=positions))
    close(logits[:, :5], np.array(model(mx.array(first))), 1e-5)
    close(logits[:, 5:9], np.array(model(mx.array(second))), 1e-5)
    # Padding is not counted; ids beyond int32 are padding, as for attention.
    k = model.config.experts_per_token
    assert [(r.tokens.item(), r.load.sum().item()) for r in records] == [(9, 9 * k) for _ in model.moe_layers]
    with routing_records() as records:
        model(row, segment_ids=mx.array(np.array(ids).astype(np.uint32)), positions=positions)
    assert records[0].tokens.item() == 9


def test_routing_penalty_is_the_weighted_sum_over_the_layers():
    model = build(FAMILIES["mixtral"], aux_loss_weight=0.01, router_z_loss_weight=0.003)
    with routing_records() as records:
        model(mx.array(some_tokens()))
    want = sum(0.01 * aux_loss(r).item() + 0.003 * z_loss(r).item() for r in records)
    assert abs(model.routing_penalty(records).item() - want) <= 1e-6 * want
    assert build(FAMILIES["mixtral"]).routing_penalty(records).item() == 0
    with pytest.raises(ValueError, match=r"\[MoE\] records must hold one for each of the 2 MoE layers but got 1\. Run"):
        model.routing_penalty(records[:1])


def test_balance_moves_every_bias_towards_the_mean():
    model = build(FAMILIES["deepseek-v3"], bias_rate=0.01)
    before = [np.array(bias) for bias in model.selection_biases]
    with routing_records() as records:
        model(mx.array(some_tokens()))
    loads = [record.load for record in records]
    model.balance(loads)
    for bias, old, load in zip(model.selection_biases, before, loads, strict=True):
        load = np.array(load).astype(np.float64)
        assert np.allclose(np.array(bias), old + 0.01 * np.sign(load.mean() - load), atol=1e-7)
    with pytest.raises(ValueError, match=r"\[update_selection_bias\] loads must hold one for each of the 2 .* got 1\."):
        model.balance(loads[:1])
    still = build(FAMILIES["mixtral"])
    still.balance(loads)
    assert still.selection_biases == [None, None]


def test_selection_biases_stay_in_checkpoints_and_out_of_training():
    model = build(FAMILIES["deepseek-v3"])
    name = "layers.1.mlp.router.selection_bias"
    for change in (lambda: None, model.unfreeze, model.layers[1].unfreeze, lambda: model.freeze().unfreeze()):
        change()
        assert name in dict(tree_flatten(model.parameters()))
        trainable = dict(tree_flatten(model.trainable_parameters()))
        assert name not in trainable
        assert "layers.1.mlp.router.weight" in trainable


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_sixteen_bits_lose_what_sixteen_bits_lose(dtype):
    model = build(FAMILIES["olmoe"])
    exact = np.array(model(mx.array(some_tokens())))
    model.update(tree_map(lambda p: p.astype(dtype), model.parameters()))
    logits = model(mx.array(some_tokens()))
    assert logits.dtype == dtype
    # Some tokens may be routed otherwise where two experts are as good.
    error = np.abs(np.array(logits.astype(mx.float32)) - exact).max(axis=-1)
    assert np.median(error) <= 0.05 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_training_in_a_compiled_step_lowers_the_loss(name):
    """With both auxiliary losses, records out of the compiled step and the biases moved behind each."""
    model = build(FAMILIES[name], aux_loss_weight=0.01, router_z_loss_weight=0.001).train()
    optimizer = optim.AdamW(3e-3)
    tokens, targets = mx.array(some_tokens(4, 12)), mx.array(some_tokens(4, 12, seed=1))

    def loss(model):
        with routing_records() as records:
            value = cross_entropy(model(tokens), targets)
        return value + model.routing_penalty(records), value, [record.load for record in records]

    def step():
        (_, value, loads), grads = nn.value_and_grad(model, loss)(model)
        optimizer.update(model, grads)
        return value, loads

    state = [model.state, optimizer.state]
    compiled = mx.compile(step, inputs=state, outputs=state)
    losses = []
    for _ in range(60):
        value, loads = compiled()
        model.balance(loads)
        mx.eval(state)
        losses.append(value.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(load.sum().item() == 48 * model.config.experts_per_token for load in loads)


def test_a_gpt_is_no_moe():
    config = MoEConfig(**FAMILIES["mixtral"])
    with pytest.raises(ValueError, match=r"\[GPT\] config must be a GPTConfig but got a MoEConfig\. build_model"):
        GPT(config)
    with pytest.raises(ValueError, match=r"\[MoE\] config must be a MoEConfig but got a GPTConfig\. build_model"):
        MoE(GPTConfig(vocab_size=5))
    with pytest.raises(ValueError, match=r"\[MoE\] vocab_size must be set before .* but got None"):
        MoE(MoEConfig())


def test_head_of_hidden_is_the_call():
    for name, head in (("mixtral", "embed_tokens"), ("olmoe", "lm_head")):
        model = build(FAMILIES[name])
        tokens = mx.array(some_tokens())
        assert mx.array_equal(model.head(model.hidden(tokens)), model(tokens))
        assert model.head_name == head
        assert model.head_weight is model[head].weight
