"""Plain causal attention against float64, on both sides of where a CPU takes blocks; the module and its options."""

from functools import partial

from forge_mlx.kernels.attention import flash_attention
from forge_mlx.nn.attention import Attention
from forge_mlx.nn.kv_cache import KVCache
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
import numpy as np
import pytest
import torch


def oracle(q, k, v, scale):
    """Softmax attention in PyTorch float64: query i of T sees keys 0 to S - T + i."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    return torch.einsum("bhts,bhsd->bhtd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 9), (5, 5), (3, 8), (127, 127), (128, 128), (131, 131), (130, 259), (513, 513)],
)
def test_values_and_gradients_match_float64(queries, keys, kv_heads):
    rng = np.random.default_rng(queries)
    shapes = [(2, 4, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8), (2, 4, queries, 8)]
    q, k, v, direction = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v)]
    want = oracle(*inputs, 0.7)
    wants = torch.autograd.grad((want * torch.tensor(direction)).sum(), inputs)

    got, grads = mx.vjp(
        lambda q, k, v: flash_attention(q, k, v, scale=0.7),
        list(map(mx.array, (q, k, v))),
        [mx.array(direction)],
    )
    for a, b in zip([*got, *grads], [want.detach(), *wants], strict=True):
        assert a.shape == b.shape
        assert np.abs(np.array(a) - b.numpy()).max() <= 1e-5 * b.abs().max().item()


FEATURES = {"window": 3, "softcap": 1.5, "sinks": True}


def module(head_dim=8, **options):
    """An attention whose parameters are all random, sinks too."""
    attention = Attention(16, num_heads=4, num_kv_heads=2, head_dim=head_dim, **options)
    rng = np.random.default_rng(5)
    attention.update(
        tree_map(lambda p: mx.array(rng.normal(0, 0.3, p.shape).astype(np.float32)), attention.parameters())
    )
    return attention


def some_x(batch=2, length=9):
    return mx.array(np.random.default_rng(6).standard_normal((batch, length, 16)).astype(np.float32))


@pytest.mark.parametrize("head_dim", [8, 6, 20])
def test_module_attends_as_its_options_say(head_dim):
    """Against the formula in float64, with everything on; also for heads that are filled up to a multiple of 8."""
    attention, x = module(head_dim, rope_base=None, **FEATURES), some_x()
    ids = np.array([[0, 0, 0, 0, 1, 1, 1, 2, -1], [3] * 9])
    p = {name: np.array(value).astype(np.float64) for name, value in tree_flatten(attention.parameters())}

    def heads(name):
        return (np.array(x) @ p[f"{name}_proj.weight"].T).reshape(2, 9, -1, head_dim).swapaxes(1, 2)

    q, k, v = heads("q"), *(heads(name).repeat(2, axis=1) for name in "kv")
    scores = 1.5 * np.tanh(q @ k.swapaxes(-1, -2) / np.sqrt(head_dim) / 1.5)
    age = np.arange(9)[:, None] - np.arange(9)
    seen = (ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0) & (age >= 0) & (age < 3)
    weights = np.exp(scores) * seen[:, None]
    out = weights / (weights.sum(-1, keepdims=True) + np.exp(p["sinks"])[:, None, None]) @ v
    want = out.swapaxes(1, 2).reshape(2, 9, -1) @ p["o_proj.weight"].T
    got = np.array(attention(x, segment_ids=mx.array(ids)))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (4, 1, 4)], ids=str)
def test_a_cache_keeps_window_softcap_and_sinks(chunks):
    attention, x = module(**FEATURES), some_x()
    cache, parts, start = KVCache(), [], 0
    for size in chunks:
        parts.append(attention(x[:, start : start + size], cache))
        start += size
    got, want = np.array(mx.concatenate(parts, axis=1)), np.array(attention(x))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_documents_and_a_cache_are_refused_together():
    attention, x, ids = module(), some_x(), mx.zeros((2, 9), mx.int32)
    for names in (("segment_ids",), ("positions",), ("segment_ids", "positions")):
        message = rf"\[Attention\] {' and '.join(names)} must be left out with a cache, which holds one text a row\."
        with pytest.raises(ValueError, match=message):
            attention(x, KVCache(), **dict.fromkeys(names, ids))


def test_a_joint_norm_is_over_all_heads_together():
    attention, x = module(rope_base=None, qk_norm_eps=0.1, qk_norm_joint=True), some_x()
    assert (attention.q_norm.weight.shape, attention.k_norm.weight.shape) == ((32,), (16,))
    # Folded into the projections' outputs, where it is one vector: attention without a norm must agree.
    plain = module(rope_base=None)
    plain.update(attention.parameters(), strict=False)

    def normalised(name):
        y = np.array(attention[f"{name}_proj"](x)).astype(np.float64)
        y /= np.sqrt((y**2).mean(axis=-1, keepdims=True) + 0.1)
        return lambda _: mx.array((y * np.array(attention[f"{name}_norm"].weight)).astype(np.float32))

    plain.q_proj, plain.k_proj = normalised("q"), normalised("k")
    assert np.abs(np.array(attention(x)) - np.array(plain(x))).max() <= 1e-5 * np.abs(np.array(plain(x))).max()
    with pytest.raises(
        ValueError, match=r"\[Attention\] qk_norm_joint must be left out without a norm but qk_norm_eps"
    ):
        module(qk_norm_joint=True)


def test_sinks_are_parameters_that_start_at_0():
    sinks = Attention(16, num_heads=4, num_kv_heads=2, head_dim=8, sinks=True).sinks
    assert sinks.tolist() == [0.0] * 4
    assert "sinks" not in Attention(16, num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("variant", ["scalar", pytest.param("mma", marks=pytest.mark.slow)])
def test_a_document_stays_the_same_to_the_bit_on_the_emulator(variant, monkeypatch):
    """Its outputs and its gradient, whatever its neighbours hold and wherever they end.

    Only attention itself runs there; tests/models has all of a model.
    """
    emulated = partial(flash_attention, impl="emulator", variant=variant)
    monkeypatch.setattr("forge_mlx.nn.attention.flash_attention", emulated)
    attention, x = module(**FEATURES), some_x(1, 20)
    other = mx.where((mx.arange(20) < 5)[:, None] | (mx.arange(20) >= 13)[:, None], -2 * x, x)
    here = slice(5, 13)

    def loss(x, ids, positions):
        out = attention(x, segment_ids=ids, positions=positions)[:, here]
        return mx.sin(3 * out).sum(), out

    found = []
    for rows, lengths in ((x, (5, 8, 7)), (other, (2, 3, 8, 4, 3))):
        ids = mx.array(np.repeat(np.arange(len(lengths)), lengths)[None])
        positions = mx.array(np.concatenate([np.arange(n) for n in lengths])[None])
        (_, out), dx = mx.value_and_grad(loss)(rows, ids, positions)
        assert mx.abs(dx[:, here]).min() > 0
        assert not mx.any(dx[:, :5]).item()
        assert not mx.any(dx[:, 13:]).item()
        found.append((np.array(out), np.array(dx[:, here])))
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one, two)


@pytest.mark.parametrize("head_dim", [257, 264])
def test_plain_attention_takes_heads_of_any_size(head_dim):
    """Against the formula in float64; and the same through a cache."""
    attention, x = module(head_dim, rope_base=None), some_x()
    p = {name: np.array(value).astype(np.float64) for name, value in tree_flatten(attention.parameters())}

    def heads(name):
        return torch.tensor((np.array(x) @ p[f"{name}_proj.weight"].T).reshape(2, 9, -1, head_dim).swapaxes(1, 2))

    out = oracle(*map(heads, "qkv"), head_dim**-0.5).numpy()
    want = out.swapaxes(1, 2).reshape(2, 9, -1) @ p["o_proj.weight"].T
    cache = KVCache()
    parts = [attention(x[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    for got in (attention(x), mx.concatenate(parts, axis=1)):
        assert np.abs(np.array(got) - want).max() <= 1e-5 * np.abs(want).max()


def test_scale_and_periods_are_those_that_are_given():
    """Twice the scale is twice the queries; the periods of a base are that base."""
    x = some_x()
    doubled, plain = module(scale=2 * 8**-0.5), module()
    plain.q_proj.weight = 2 * plain.q_proj.weight
    assert mx.allclose(doubled(x), plain(x), rtol=1e-4, atol=1e-6)
    assert not mx.allclose(doubled(x), module()(x), rtol=1e-2)
    periods = (500.0 ** (np.arange(4) / 4)).astype(np.float32)
    given, of_base = module(rope_periods=periods, rope_scale=0.5), module(rope_base=500.0, rope_scale=0.5)
    assert given.parameters().keys() == of_base.parameters().keys()
    caches = KVCache(), KVCache()
    for _ in range(2):
        got, want = (np.array(each(x, cache)) for each, cache in zip((given, of_base), caches, strict=True))
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    # With gaps: attention depends on differences of positions alone.
    positions = mx.array([[0, 3, 4, 9, 10, 20, 21, 22, 40]] * 2)
    got, want = (np.array(each(x, positions=positions)) for each in (given, of_base))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert np.abs(got - np.array(given(x))).max() > 1e-2 * np.abs(want).max()


@pytest.mark.parametrize(("bias", "names"), [(False, ""), (True, "qkvo"), ("qkv", "qkv")])
def test_which_projections_have_a_bias(bias, names):
    attention = module(bias=bias)
    assert {name for name in "qkvo" if "bias" in attention[f"{name}_proj"]} == set(names)


WRONG = {
    "bias": ({"bias": "kv"}, "bias must be True, False or \"qkv\" but got 'kv'"),
    "scale": ({"scale": 0.0}, "scale must be a number greater than 0 but got 0.0"),
    "periods": (
        {"rope_periods": np.ones(8, np.float32)},
        r"rope_periods must have one number for each pair of a head, 4, but got the shape \(8,\)",
    ),
    "periods-without-rotation": (
        {"rope_periods": np.ones(4, np.float32), "rope_base": None},
        "rope_periods must be left out without rotary positions but rope_base is None",
    ),
    "head_dim=0": ({"head_dim": 0}, "head_dim must be a whole number of 1 or more but got 0"),
    "num_heads=0": ({"num_heads": 0}, "num_heads must be a whole number of 1 or more but got 0"),
    "kv-heads": ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, 3, but got 4"),
    "window": ({"window": 0}, "window must be a whole number of 1 or more but got 0"),
    "softcap": ({"softcap": 0.0}, "softcap must be a number greater than 0 but got 0.0"),
    "large-window": ({"head_dim": 264, "window": 3}, "head_dim must be at most 256 with window but got 264"),
    "large-sinks": (
        {"head_dim": 257, "sinks": True, "softcap": 1.0},
        "head_dim must be at most 256 with softcap and sinks but got 257",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named_as_it_is_built(name):
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=rf"^\[Attention\] {message}"):
        Attention(16, **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **changes})


def test_wrong_documents_are_named():
    ids = mx.zeros((2, 9), mx.int32)
    with pytest.raises(ValueError, match=r"\[Attention\] head_dim must be at most 256 with segment_ids but got 264"):
        module(264)(some_x(), segment_ids=ids)
