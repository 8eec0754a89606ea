"""The decoder against PyTorch in float64, its counts, its start, dropout, causality and generation."""

import math

from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.nn.losses import cross_entropy
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
import numpy as np
import pytest
import reference_gpt as reference
import torch
import torch.nn.functional as F

SHAPE = {"vocab_size": 37, "num_layers": 2, "hidden_size": 24, "num_heads": 4, "max_seq_len": 12}
GPT2 = {**SHAPE, "norm": "layer_norm", "position": "learned", "bias": True}
LLAMA = {**SHAPE, "num_kv_heads": 2, "mlp": "swiglu", "intermediate_size": 20, "rope_base": 500.0}
QWEN3 = {**LLAMA, "qk_norm": True, "head_dim": 8, "norm_eps": 0.1}
GPT_OSS = {**LLAMA, "sliding_window": 4, "attention_sinks": True, "attention_softcap": 2.0}
MODDED = {**SHAPE, "norm_weight": False, "qk_norm": True, "mlp": "relu2", "logit_softcap": 2.0}

CASES = {
    "gpt2": ({**GPT2, "mlp": "gelu_tanh"}, "gpt2", {"gelu": "tanh"}),
    "gpt2-erf": ({**GPT2, "mlp": "gelu"}, "gpt2", {"gelu": "none"}),
    "llama": ({**LLAMA, "tie_embeddings": False}, "llama", {"base": 500.0, "mlp": "swiglu"}),
    "qwen3-tied": (QWEN3, "llama", {"base": 500.0, "mlp": "swiglu"}),
    "qwen3-untied": ({**QWEN3, "tie_embeddings": False}, "llama", {"base": 500.0, "mlp": "swiglu"}),
    "geglu-scaled-rope": (
        {**LLAMA, "mlp": "geglu", "rope_scale": 0.5},
        "llama",
        {"base": 500.0, "mlp": "geglu", "scale": 0.5},
    ),
    "no-positions": (
        {k: v for k, v in LLAMA.items() if k != "rope_base"} | {"mlp": "silu", "position": "none"},
        "llama",
        {"base": None, "mlp": "silu"},
    ),
    "window-sinks-softcap": (
        GPT_OSS,
        "llama",
        {"base": 500.0, "mlp": "swiglu", "window": 4, "attention_cap": 2.0},
    ),
    "modded": (
        {**MODDED, "tie_embeddings": False},
        "llama",
        {"base": 10000.0, "mlp": "relu2", "cap": 2.0},
    ),
    "modded-token-shift": (
        {**MODDED, "token_shift": True},
        "llama",
        {"base": 10000.0, "mlp": "relu2", "cap": 2.0},
    ),
}
FAMILIES = {
    "gpt2": CASES["gpt2"][0],
    "qwen3": QWEN3,
    "modded": MODDED,
    "token-shift": {**MODDED, "token_shift": True},
    "window-sinks-softcap": GPT_OSS,
}


def build(settings, seed=1):
    """A model whose every parameter is random: norms' scales off 1, biases off 0, scores far from uniform."""
    model = GPT(GPTConfig(**settings))
    rng = np.random.default_rng(seed)
    start = []
    for name, p in tree_flatten(model.parameters()):
        value = rng.standard_normal(p.shape) * (0.3 if p.ndim > 1 else 0.2)
        start.append((name, mx.array((value + (name.endswith("norm.weight") and p.ndim == 1)).astype(np.float32))))
    model.update(tree_unflatten(start))
    return model.eval()


def some_tokens(batch=3, length=11, vocab=37, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


def close(got, want, rtol=1e-4):
    assert np.abs(np.array(got) - want).max() <= rtol * np.abs(want).max()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_every_gradient_match_torch(name):
    settings, function, options = CASES[name]
    model = build(settings)
    config = model.config
    tokens, targets = some_tokens(), some_tokens(seed=1)
    p = {
        key: torch.tensor(np.array(value), dtype=torch.float64, requires_grad=True)
        for key, value in tree_flatten(model.parameters())
    }
    want = getattr(reference, function)(
        p,
        torch.tensor(tokens).long(),
        num_layers=config.num_layers,
        head_dim=config.head_size,
        eps=config.norm_eps,
        **options,
    )
    want_loss = F.cross_entropy(want.flatten(0, 1), torch.tensor(targets).long().flatten())
    want_loss.backward()

    def loss(model):
        return cross_entropy(model(mx.array(tokens)), mx.array(targets))

    got_loss, grads = nn.value_and_grad(model, loss)(model)
    close(model(mx.array(tokens)), want.detach().numpy())
    close(got_loss, want_loss.detach().numpy())
    grads = dict(tree_flatten(grads))
    assert grads.keys() == p.keys()
    # A key's bias moves all scores of a query alike, so its gradient is 0 but for rounding.
    constant = {key for key in p if key.endswith("k_proj.bias")}
    for key in p.keys() - constant:
        close(grads[key], p[key].grad.numpy())
    for key in constant:
        assert np.abs(np.array(grads[key])).max() <= 1e-6


@pytest.mark.parametrize("name", CASES)
def test_counts_of_parameters(name):
    settings = CASES[name][0]
    model = GPT(GPTConfig(**settings))
    sizes = {key: value.size for key, value in tree_flatten(model.parameters())}
    assert any(key.endswith("norm.weight") for key in sizes) == model.config.norm_weight
    assert model.num_parameters() == sum(sizes.values())
    inside = sum(size for key, size in sizes.items() if key.startswith(("layers.", "norm.", "token_shift.")))
    assert model.num_parameters(embeddings=False) == inside
    tables = 37 * 24 * (1 if model.config.tie_embeddings else 2)
    tables += 12 * 24 if model.config.position == "learned" else 0
    assert model.num_parameters() - inside == tables


def test_parameters_of_gpt2_small_are_the_published_number():
    published, blocks = 124439808, 12
    block = 12 * 768**2 + 13 * 768
    one = {"vocab_size": 50257, "hidden_size": 768, "num_heads": 12, "max_seq_len": 1024, "num_layers": 1}
    one |= {"norm": "layer_norm", "position": "learned", "mlp": "gelu_tanh", "bias": True}
    assert GPT(GPTConfig(**one)).num_parameters() + (blocks - 1) * block == published


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        # q, k, v, o 24x24, MLP 24x96 up and down, head 24x37; scores and values over 6.5 of 12 keys.
        ({**GPT2, "mlp": "gelu"}, 3 * (2 * (2 * (4 * 24 * 24 + 2 * 24 * 96) + 4 * 24 * 6.5) + 2 * 24 * 37)),
        # q and o 24x32, k and v 24x16 (2 of 4 heads of 8), gate, up and down 24x20.
        (QWEN3, 3 * (2 * (2 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 20) + 4 * 32 * 6.5) + 2 * 24 * 37)),
        ({**MODDED, "tie_embeddings": False}, 3 * (2 * (2 * 12 * 24 * 24 + 4 * 24 * 6.5) + 2 * 24 * 37)),
        # A window of 5 of 12: 1 + 2 + 3 + 4 keys, and 8 times 5. One of 12 or more hides nothing.
        (
            {**MODDED, "tie_embeddings": False, "sliding_window": 5},
            3 * (2 * (2 * 12 * 24 * 24 + 4 * 24 * 50 / 12) + 2 * 24 * 37),
        ),
        (
            {**MODDED, "tie_embeddings": False, "sliding_window": 90},
            3 * (2 * (2 * 12 * 24 * 24 + 4 * 24 * 6.5) + 2 * 24 * 37),
        ),
        # The window in one of two layers.
        (
            {**MODDED, "tie_embeddings": False, "sliding_window": 5, "sliding_layers": [1]},
            3 * (2 * 2 * 12 * 24 * 24 + 4 * 24 * (50 / 12 + 6.5) + 2 * 24 * 37),
        ),
    ],
    ids=["gpt2", "qwen3", "modded", "window", "wide-window", "window-in-one-layer"],
)
def test_flops_per_token_by_hand(settings, by_hand):
    assert GPT(GPTConfig(**settings)).flops_per_token(12) == by_hand


@pytest.mark.parametrize("name", FAMILIES)
def test_no_logit_depends_on_a_later_token(name):
    model = build(FAMILIES[name])
    tokens = some_tokens()
    before = np.array(model(mx.array(tokens)))
    for t in (1, 5, 10):
        other = tokens.copy()
        other[:, t] = (other[:, t] + 1) % 37
        after = np.array(model(mx.array(other)))
        assert np.array_equal(after[:, :t], before[:, :t])
        changed = (after[:, t:] != before[:, t:]).any(axis=(0, 2))
        # Each layer carries it as far as its window reaches.
        window = model.config.sliding_window
        reach = len(changed) if window is None else 2 * (window - 1) + 1
        assert changed.tolist() == [age < reach for age in range(len(changed))]


def test_head_of_hidden_is_the_call():
    for settings in (QWEN3, {**MODDED, "tie_embeddings": False}):
        model = build(settings)
        tokens = mx.array(some_tokens())
        hidden = model.hidden(tokens)
        assert hidden.shape == (3, 11, 24)
        assert mx.array_equal(model.head(hidden), model(tokens))
        assert model.head_weight.shape == (37, 24)


def parameters(model):
    return dict(tree_flatten(model.parameters()))


def test_the_seed_alone_decides_the_start():
    mx.random.seed(1)
    one = parameters(GPT(GPTConfig(**QWEN3), seed=5))
    mx.random.seed(2)
    state = mx.random.state[0].tolist()
    two = parameters(GPT(GPTConfig(**QWEN3), seed=5))
    assert mx.random.state[0].tolist() == state
    other = parameters(GPT(GPTConfig(**QWEN3), seed=6))
    for key, value in one.items():
        assert mx.array_equal(value, two[key])
        assert value.ndim == 1 or not mx.array_equal(value, other[key])


@pytest.mark.parametrize("zero", [False, True], ids=["scaled", "zero"])
def test_the_start_is_the_table(zero):
    settings = {**GPT2, "hidden_size": 256, "mlp": "gelu", "init_std": 0.1, "zero_init_residual": zero}
    settings["attention_sinks"] = True
    model = GPT(GPTConfig(**settings, tie_embeddings=False))
    for key, value in parameters(model).items():
        value = np.array(value)
        if value.ndim == 1:
            assert (value == (1 if key.endswith("norm.weight") else 0)).all()
            continue
        std = 0.1
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            std = 0 if zero else 0.1 / math.sqrt(2 * 2)
        assert abs(value.std() - std) <= 0.03 * std
        assert abs(value.mean()) <= 0.1 * std
    first = parameters(model)["layers.0.self_attn.q_proj.weight"]
    assert not mx.array_equal(first, parameters(model)["layers.1.self_attn.q_proj.weight"])


def test_an_offset_norm_starts_at_0_which_is_a_plain_one_at_1():
    offset, plain = (GPT(GPTConfig(**QWEN3, norm_offset=on, post_norms=True)) for on in (True, False))
    norms = {key for key in parameters(offset) if key.endswith("norm.weight")}
    assert len(norms) == 2 * 6 + 1
    for key, value in parameters(offset).items():
        assert mx.array_equal(value, parameters(plain)[key] - (key in norms))
    tokens = mx.array(some_tokens())
    assert mx.array_equal(offset(tokens), plain(tokens))


def test_zero_residuals_start_as_the_identity():
    model = GPT(GPTConfig(**{**MODDED, "zero_init_residual": True}))
    tokens = mx.array(some_tokens())
    assert mx.array_equal(model.hidden(tokens), model.norm(model.embed_tokens(tokens)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_loss_is_about_the_logarithm_of_the_vocabulary(name):
    model = GPT(GPTConfig(**{**FAMILIES[name], "hidden_size": 64, "vocab_size": 500}))
    tokens = mx.array(some_tokens(8, 12, 500))
    targets = mx.array(some_tokens(8, 12, 500, seed=1))
    assert abs(cross_entropy(model(tokens), targets).item() - math.log(500)) < 0.1


def test_dropout_is_off_in_evaluation_and_random_but_reproducible_in_training():
    plain, model = build(QWEN3), build({**QWEN3, "dropout": 0.5})
    tokens = mx.array(some_tokens())
    assert mx.array_equal(model.eval()(tokens), plain(tokens))
    model.train()
    mx.random.seed(3)
    first, second = model(tokens), model(tokens)
    mx.random.seed(3)
    again = model(tokens)
    assert not mx.array_equal(first, second)
    assert mx.array_equal(first, again)
    assert not mx.array_equal(first, plain(tokens))


def test_dropout_follows_both_halves_of_a_block_and_keeps_the_expectation():
    model = build({**MODDED, "num_layers": 1, "dropout": 0.25}).train()
    block, x = model.layers[0], mx.ones((1, 3, 24))
    mx.random.seed(0)
    for half, start in (("self_attn", x), ("mlp", x)):
        other = "mlp" if half == "self_attn" else "self_attn"
        keep = block[other]
        block[other] = lambda x, *_, **__: mx.zeros_like(x)
        model.eval()
        exact = block(x) - start
        model.train()
        draws = mx.stack([block(x) - start for _ in range(2000)])
        block[other] = keep
        dropped = mx.abs(draws) < 1e-6
        assert abs(dropped.mean().item() - 0.25) < 0.01
        assert mx.allclose(mx.where(dropped, exact / 0.75, draws), exact / 0.75, rtol=1e-4, atol=1e-5).item()
        assert mx.abs(draws.mean(axis=0) - exact).max().item() < 0.06 * mx.abs(exact).max().item()


def test_dropout_follows_the_embedding():
    model = build({**MODDED, "num_layers": 1, "dropout": 0.25}).train()
    seen = []
    model.layers = [lambda x, _, **__: seen.append(x) or x]
    tokens = mx.zeros((100, 12), mx.int32)
    model.hidden(tokens)
    row = model.embed_tokens.weight[0]
    zero = seen[0] == 0
    assert abs(zero.mean().item() - 0.25) < 0.01
    assert mx.allclose(seen[0], mx.where(zero, 0, row / 0.75), rtol=1e-5).item()


def greedy(model, prompt, count):
    """Greedy continuation that runs the whole sequence again for every token."""
    tokens = prompt
    for _ in range(count):
        following = mx.argmax(model(tokens)[:, -1:], axis=-1).astype(mx.int32)
        tokens = mx.concatenate([tokens, following], axis=1)
    return tokens[:, prompt.shape[1] :]


def cached(model, prompt, count, chunks):
    """The same from a cache, the prompt given in chunks."""
    cache, out = model.make_cache(), []
    logits = None
    start = 0
    for size in chunks:
        logits = model(prompt[:, start : start + size], cache)
        start += size
    for _ in range(count):
        out.append(mx.argmax(logits[:, -1:], axis=-1).astype(mx.int32))
        logits = model(out[-1], cache)
    return mx.concatenate(out, axis=1)


@pytest.mark.parametrize("chunks", [(6,), (4, 2), (1,) * 6, (3, 1, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_same_with_a_cache(name, chunks):
    model = build({**FAMILIES[name], "max_seq_len": 40})
    prompt = mx.array(some_tokens(2, 6))
    want = greedy(model, prompt, 20)
    assert len(set(want.reshape(-1).tolist())) > 5
    assert mx.array_equal(cached(model, prompt, 20, chunks), want)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_from_a_cache_are_those_of_the_whole_sequence(name):
    """Past a growth of the cache (256) and past the size at which the CPU splits queries (128)."""
    model = build({**FAMILIES[name], "max_seq_len": 300})
    tokens = mx.array(some_tokens(1, 300))
    cache = model.make_cache()
    parts = [model(tokens[:, a:b], cache) for a, b in ((0, 250), (250, 255), (255, 256), (256, 257), (257, 300))]
    close(mx.concatenate(parts, axis=1), np.array(model(tokens)))
    assert {layer.offset for layer in cache[:2]} == {300}


def test_learned_positions_end_with_a_clear_error():
    model = build(FAMILIES["gpt2"])
    model(mx.zeros((1, 12), mx.int32))
    message = r"\[GPT\] learned positions end at max_seq_len, 12, but got 13 tokens\. Shorten"
    with pytest.raises(ValueError, match=message):
        model(mx.zeros((1, 13), mx.int32))
    cache = model.make_cache()
    model(mx.zeros((1, 12), mx.int32), cache)
    with pytest.raises(ValueError, match=message):
        model(mx.zeros((1, 1), mx.int32), cache)
    assert cache[0].offset == 12
    assert build(QWEN3)(mx.zeros((1, 20), mx.int32)).shape == (1, 20, 37)


def test_wrong_inputs_are_named():
    model = build(QWEN3)
    with pytest.raises(ValueError, match=r"tokens must be integers of shape \[B, T\] but got .*int32 of \(3,\)"):
        model(mx.zeros((3,), mx.int32))
    with pytest.raises(ValueError, match=r"tokens must be integers .* but got mlx.core.float32"):
        model(mx.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"parts \['KVCache', 'KVCache'\] but got \['KVCache'\]\. Use make_cache"):
        model(mx.zeros((1, 3), mx.int32), model.make_cache()[:1])
    with pytest.raises(ValueError, match=r"vocab_size must be set before .* but got None"):
        GPT(GPTConfig())


@pytest.mark.slow
def test_a_compiled_step_has_the_same_gradients():
    model = build(MODDED)
    tokens, targets = mx.array(some_tokens()), mx.array(some_tokens(seed=1))

    def loss(p, tokens, targets):
        model.update(p)
        return cross_entropy(model(tokens), targets)

    p = model.trainable_parameters()
    want = dict(tree_flatten(mx.grad(loss)(p, tokens, targets)))
    got = dict(tree_flatten(mx.compile(mx.grad(loss))(p, tokens, targets)))
    model.update(p)
    for key, value in want.items():
        close(got[key], np.array(value), 1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_quantised_model_runs(tied, position):
    config = GPTConfig(
        vocab_size=96, num_layers=1, hidden_size=64, num_heads=2, max_seq_len=8, tie_embeddings=tied, position=position
    )
    model = GPT(config)
    tokens = mx.array([[5, 17, 3]])
    logits = model(tokens)
    counts = model.num_parameters(), model.num_parameters(embeddings=False), model.flops_per_token(5)
    nn.quantize(model, group_size=32, bits=8)
    assert (model.num_parameters(), model.num_parameters(embeddings=False), model.flops_per_token(5)) == counts
    assert mx.abs(model(tokens) - logits).max() <= 0.05 * mx.abs(logits).max()
    with pytest.raises(
        ValueError, match="head_weight must be the matrix of an Embedding or a Linear but the head is a Q"
    ):
        _ = model.head_weight
