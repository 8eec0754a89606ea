import math

from forge_mlx import sampling
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.sampling import PREFILL_TOKENS, Sampler, generate_tokens
import mlx.core as mx
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that stay, by the definitions, in float64 and one token at a time."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable").tolist()
    probabilities = softmax(logits)
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        share = probabilities[order] / probabilities[order].sum()
        nucleus, total = [], 0.0
        for token, part in zip(order, share, strict=True):
            if total >= top_p:
                break
            nucleus.append(token)
            total += part
        order = nucleus
    return {t for t in order if probabilities[t] >= min_p * probabilities.max()}


def filtered(logits, **settings):
    return np.array(Sampler(**settings).filtered(mx.array(logits)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 50},
        {"top_k": 500},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 12, "top_p": 0.8},
        {"top_p": 0.9, "min_p": 0.3},
        {"top_k": 9, "top_p": 0.85, "min_p": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("hidden", [False, True], ids=["all finite", "some at -inf"])
def test_filters_keep_what_the_definitions_keep(settings, hidden):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        logits = (draw.standard_normal(50) * draw.choice([0.3, 2.0, 8.0])).astype(np.float32)
        if hidden:
            logits[draw.permutation(50)[:30]] = -np.inf
        found = filtered(logits, **settings)
        stay = {int(t) for t in np.flatnonzero(found > -np.inf)}
        assert stay == {t for t in kept(logits, **settings) if logits[t] > -np.inf}
        for token in stay:
            assert found[token] == logits[token]


def test_ties_fill_top_k_and_the_nucleus_exactly():
    logits = np.zeros(10, np.float32)
    assert (filtered(logits, top_k=3) == 0).sum() == 3
    # Three of ten equal tokens sum to 0.3 and do not reach 0.35.
    assert (filtered(logits, top_p=0.35) == 0).sum() == 4
    assert (filtered(logits, min_p=1.0) == 0).sum() == 10
    assert (filtered(logits, top_k=5, top_p=0.5) == 0).sum() == 3


def test_one_token_always_stays():
    logits = np.array([1.0, 9.0, 2.0], np.float32)
    for settings in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-9, "min_p": 1.0}):
        np.testing.assert_array_equal(filtered(logits, **settings), [-np.inf, 9.0, -np.inf])


def test_16_bit_logits_are_filtered_in_float32():
    logits = mx.array([1.0, 2.0, 3.0], mx.bfloat16)
    found = Sampler(top_k=2).filtered(logits)
    assert found.dtype == mx.float32
    assert found.tolist() == [-math.inf, 2.0, 3.0]


def test_temperature_0_takes_the_largest_and_draws_nothing(monkeypatch):
    monkeypatch.setattr(mx.random, "categorical", pytest.fail)
    logits = mx.array(np.random.default_rng(0).standard_normal(100).astype(np.float32))
    for seed in range(5):
        assert Sampler(temperature=0, top_k=3)(logits, mx.random.key(seed)) == int(mx.argmax(logits))


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 4}, {"temperature": 1.5, "top_p": 0.8}],
    ids=str,
)
def test_draws_follow_the_distribution(settings):
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -np.inf], np.float32)
    stay = sorted(kept(logits, **{k: v for k, v in settings.items() if k != "temperature"}))
    stay = [t for t in stay if logits[t] > -np.inf]
    expected = np.zeros(6)
    expected[stay] = softmax(logits[stay].astype(np.float64) / settings["temperature"])
    draws = 2000
    sampler, row = Sampler(**settings), mx.array(logits)
    counts = np.bincount([sampler(row, key) for key in mx.random.split(mx.random.key(1), draws)], minlength=6)
    assert counts[expected == 0].sum() == 0
    chi2 = ((counts - draws * expected)[stay] ** 2 / (draws * expected[stay])).sum()
    # 99.99 % of chi-square with up to 4 degrees of freedom; the keys are fixed.
    assert chi2 < 23.5


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = mx.array([79.0, 60.0, -math.inf, 80.0])
    assert {Sampler(temperature=1e-37)(logits, mx.random.key(s)) for s in range(20)} == {3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0 and finite but got -0.1."),
        ({"temperature": math.nan}, "temperature must be at least 0 and finite but got nan."),
        ({"temperature": math.inf}, "temperature must be at least 0 and finite but got inf."),
        ({"top_k": -1}, "top_k must be at least 0 (0: off) but got -1."),
        ({"top_p": 0.0}, "top_p must lie in (0, 1] (1: off) but got 0.0."),
        ({"top_p": 1.1}, "top_p must lie in (0, 1] (1: off) but got 1.1."),
        ({"top_p": math.nan}, "top_p must lie in (0, 1] (1: off) but got nan."),
        ({"min_p": -0.1}, "min_p must lie in [0, 1] (0: off) but got -0.1."),
        ({"min_p": 1.5}, "min_p must lie in [0, 1] (0: off) but got 1.5."),
    ],
)
def test_settings_outside_their_range(settings, message):
    with pytest.raises(ValueError, match="Sampler") as caught:
        Sampler(**settings)
    assert str(caught.value) == f"[Sampler] {message}"


V = 31
FAMILIES = {
    "rope": {"num_kv_heads": 1, "max_seq_len": 64},
    "learned": {"position": "learned", "norm": "layer_norm", "mlp": "gelu", "bias": True, "max_seq_len": 1200},
}


def model(family="rope"):
    config = {"vocab_size": V, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "init_std": 0.4}
    net = GPT(GPTConfig.model_validate(config | FAMILIES[family]), seed=4)
    net.eval()
    return net


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, V, length).tolist()


def generated(net, tokens, sampler=None, max_tokens=8, **options):
    return list(generate_tokens(net, tokens, sampler or Sampler(temperature=0), max_tokens, **options))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "length", [1, 5, PREFILL_TOKENS - 1, PREFILL_TOKENS, PREFILL_TOKENS + 1, 2 * PREFILL_TOKENS + 3]
)
def test_greedy_text_is_the_same_with_and_without_cache(family, length):
    net = model(family)
    tokens = prompt(length)
    cached = generated(net, tokens)
    assert cached == generated(net, tokens, use_cache=False)
    assert len(cached) == 8
    # By hand: the largest logit after the text so far.
    text = list(tokens)
    for token in cached[:3]:
        assert token == int(mx.argmax(net(mx.array([text]))[0, -1]))
        text.append(token)


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 4)
    net = model()
    lengths, rows = [], []

    class Watched:
        make_cache = net.make_cache

        def hidden(self, tokens, cache=None):
            lengths.append(tokens.shape[1])
            return net.hidden(tokens, cache)

        def head(self, hidden):
            rows.append(hidden.shape[:-1])
            return net.head(hidden)

    assert generated(Watched(), prompt(10), max_tokens=3) == generated(net, prompt(10), max_tokens=3, use_cache=False)
    assert lengths == [4, 4, 2, 1, 1]
    # Logits of the last position alone.
    assert set(rows) == {(1,)}


def test_the_stop_token_ends_the_text_and_is_not_given():
    net = model()
    whole = generated(net, prompt(5), Sampler(1.0), max_tokens=30, seed=3)
    stop = whole[10]
    first = whole.index(stop)
    assert generated(net, prompt(5), Sampler(1.0), max_tokens=30, seed=3, stop={stop, V}) == whole[:first]


def test_rows_beyond_the_tokenizer_s_vocabulary_are_never_drawn():
    net, hot = model(), Sampler(temperature=50.0)
    every = generated(net, prompt(3), hot, max_tokens=60)
    assert max(every) >= 20
    some = generated(net, prompt(3), hot, max_tokens=60, vocab_size=20)
    assert len(some) == 60
    assert max(some) < 20


def test_the_seed_decides_and_the_global_random_state_is_not_touched():
    net = model()

    def text(seed):
        return generated(net, prompt(5), Sampler(1.0), max_tokens=12, seed=seed)

    mx.random.seed(1)
    state = mx.random.state[0].tolist()
    first = text(7)
    assert mx.random.state[0].tolist() == state
    mx.random.seed(2)
    assert text(7) == first
    assert text(8) != first


def test_each_token_is_a_new_draw():
    class Uniform:
        def make_cache(self):
            return []

        def hidden(self, tokens, cache):
            assert cache == []
            return mx.zeros((*tokens.shape, V))

        def head(self, hidden):
            return hidden

    assert len(set(generated(Uniform(), [0], Sampler(1.0), max_tokens=20))) > 5


def test_no_more_than_max_tokens_and_a_prompt_is_needed():
    assert generated(model(), prompt(3), max_tokens=0) == []
    with pytest.raises(ValueError, match=r"^\[generate_tokens\] prompt must hold at least one token but got none\.$"):
        generated(model(), [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_goes_on_where_it_is(family):
    net, tokens = model(family), prompt(40)
    cache = net.make_cache()
    first = generated(net, tokens[:25], max_tokens=4, cache=cache)
    assert cache[0].offset == 25 + 3
    whole = [*tokens[:25], *first, *tokens[25:]]
    rest = generated(net, [first[-1], *tokens[25:]], max_tokens=6, cache=cache)
    assert rest == generated(net, whole, max_tokens=6, use_cache=False)
    with pytest.raises(ValueError, match=r"^\[generate_tokens\] cache must be None with use_cache=False"):
        generated(net, tokens, cache=cache, use_cache=False)
