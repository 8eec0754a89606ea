"""DeepSeek's latent attention against its formula in PyTorch float64; its cache of latents; what it refuses."""

from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.latent_attention import LatentAttention
from forge_mlx.nn.linear import Linear
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
import numpy as np
import pytest
import torch

# Multiples of 8, and sizes that are filled up: of the queries and keys 11 to 16, of the values 6 to 8.
SHAPES = {
    "even": {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "odd": {"kv_lora_rank": 9, "q_lora_rank": 7, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 6},
    "no-q-lora": {"kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 16},
}


def module(shape="odd", **options):
    """A latent attention over 16 channels with 3 heads whose parameters are all random, the norms' scales off 1."""
    attention = LatentAttention(16, num_heads=3, **{**SHAPES[shape], "rope_base": 50.0, "norm_eps": 0.1, **options})
    rng = np.random.default_rng(5)
    attention.update(
        tree_map(lambda p: mx.array(rng.normal(p.ndim == 1, 0.4, p.shape).astype(np.float32)), attention.parameters())
    )
    return attention


def some_x(batch=2, length=9):
    return mx.array(np.random.default_rng(6).standard_normal((batch, length, 16)).astype(np.float32))


def oracle(p, x, shape, positions, seen, *, rope_scale=1.0, rope_periods=None, rope_factor=1.0, scale=None):
    """The published formula with pairs of neighbours as complex numbers: `[B, T, C]` from `[B, T, C]`."""
    nope, rotary, values = (shape[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))

    def norm(y, name):
        return y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt() * p[f"{name}.weight"]

    def rotated(y):
        periods = 50.0 ** (torch.arange(0, rotary, 2).double() / rotary)
        if rope_periods is not None:
            periods = torch.tensor(rope_periods).double()
        turns = positions[:, None, :, None] * rope_scale / periods
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.full_like(turns, rope_factor), turns)).flatten(-2)

    def heads(y):
        return y.unflatten(-1, (3, -1)).transpose(1, 2)

    if "q_proj.weight" in p:
        q = x @ p["q_proj.weight"].T
    else:
        q = norm(x @ p["q_a_proj.weight"].T, "q_a_layernorm") @ p["q_b_proj.weight"].T
    q = heads(q)
    q = torch.cat([q[..., :nope], rotated(q[..., nope:])], -1)
    compressed = x @ p["kv_a_proj_with_mqa.weight"].T
    latent, k_rope = compressed[..., : shape["kv_lora_rank"]], compressed[..., shape["kv_lora_rank"] :]
    kv = heads(norm(latent, "kv_a_layernorm") @ p["kv_b_proj.weight"].T)
    k = torch.cat([kv[..., :nope], rotated(k_rope[:, None]).expand(-1, 3, -1, -1)], -1)
    v = kv[..., nope:]
    assert v.shape[-1] == values
    scale = 1 / np.sqrt(nope + rotary) if scale is None else scale
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return (weights @ v).transpose(1, 2).flatten(2) @ p["o_proj.weight"].T


def tensors(attention):
    return {
        name: torch.tensor(np.array(value.astype(mx.float32)), dtype=torch.float64, requires_grad=True)
        for name, value in tree_flatten(attention.parameters())
    }


def in_order(batch, length):
    """Positions and sight of a row that is one text."""
    return torch.arange(length).double().expand(batch, -1), torch.ones(batch, length, length).bool().tril()


def close(got, want, rtol=1e-5):
    got, want = (x.detach().numpy() if isinstance(x, torch.Tensor) else np.array(x) for x in (got, want))
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def check(attention, shape, x, seen, places, options=None, **documents):
    """Values, and the gradients of x and of every parameter."""
    direction = np.random.default_rng(7).standard_normal(x.shape).astype(np.float32)
    p, tx = tensors(attention), torch.tensor(np.array(x), dtype=torch.float64, requires_grad=True)
    want = oracle(p, tx, SHAPES[shape], places, seen, **(options or {}))
    (want * torch.tensor(direction)).sum().backward()

    def loss(parameters, x):
        attention.update(parameters)
        return (attention(x, **documents) * mx.array(direction)).sum()

    close(attention(x, **documents), want)
    parameters = attention.trainable_parameters()
    of_parameters, of_x = mx.grad(loss, argnums=(0, 1))(parameters, x)
    close(of_x, tx.grad, 2e-5)
    gradients = dict(tree_flatten(of_parameters))
    assert gradients.keys() == p.keys()
    for name, value in gradients.items():
        close(value, p[name].grad, 2e-5)


@pytest.mark.parametrize("length", [1, 9, 133])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_every_gradient_match_float64(shape, length):
    """On both sides of where a CPU takes blocks of queries."""
    places, seen = in_order(2, length)
    check(module(shape, rope_scale=0.7), shape, some_x(2, length), seen, places, {"rope_scale": 0.7})


STRETCHED = {"rope_periods": np.float32([3.0, 40.0]), "rope_factor": 1.3, "scale": 0.7}


@pytest.mark.parametrize("option", [*STRETCHED, "all"])
def test_what_yarn_changes(option):
    options = STRETCHED if option == "all" else {option: STRETCHED[option]}
    places, seen = in_order(2, 9)
    check(module(**options), "odd", some_x(), seen, places, options)


def test_documents_in_a_row():
    ids = np.array([[0, 0, 0, 0, 1, 1, 1, 2, -1], [3] * 9])
    # With gaps: without, rotary scores would be those of the places in the row.
    positions = np.array([[0, 2, 3, 7, 1, 4, 5, 0, 0], [5, 6, 9, 10, 12, 13, 17, 18, 30]])
    seen = torch.tensor((ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0)).tril()
    documents = {"segment_ids": mx.array(ids), "positions": mx.array(positions)}
    check(module(), "odd", some_x(), seen, torch.tensor(positions).double(), **documents)


def test_parameters_have_the_names_and_shapes_of_deepseeks():
    """H = 3 heads of 7 + 4 and 6, latents of 9 and 7."""
    shapes = {name: value.shape for name, value in tree_flatten(module().parameters())}
    assert shapes == {
        "q_a_proj.weight": (7, 16),
        "q_a_layernorm.weight": (7,),
        "q_b_proj.weight": (33, 7),
        "kv_a_proj_with_mqa.weight": (13, 16),
        "kv_a_layernorm.weight": (9,),
        "kv_b_proj.weight": (39, 9),
        "o_proj.weight": (16, 18),
    }
    plain = dict(tree_flatten(module("no-q-lora", norm_weight=False).parameters()))
    assert plain.keys() == {f"{name}.weight" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}


@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (4, 1, 4), (1, 7, 1)], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, "stretched"])
def test_a_cache_changes_nothing(shape, chunks):
    attention, x = module("odd", **STRETCHED) if shape == "stretched" else module(shape), some_x()
    cache, parts, start = KVCache(), [], 0
    for size in chunks:
        parts.append(attention(x[:, start : start + size], cache))
        start += size
    assert cache.offset == 9
    close(mx.concatenate(parts, axis=1), attention(x))


def test_a_cache_holds_the_latent_and_the_rotary_key_alone():
    attention, cache = module(), KVCache()
    attention(some_x(), cache)
    # 256 positions of 2 rows in float32.
    assert cache.nbytes == 4 * 2 * 256 * (9 + 4)


def test_a_single_token_meets_latents_and_no_expanded_keys(monkeypatch):
    attention, x = module(), some_x()
    cache = KVCache()
    attention(x[:, :8], cache)
    want = attention(x)[:, 8:]
    called, call = [], Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, y: (called.append(id(self)), call(self, y))[1])
    close(attention(x[:, 8:], cache), want)
    assert id(attention.o_proj) in called
    assert id(attention.kv_b_proj) not in called


class Doubled(nn.Module):
    """What stands in place of a Linear, as an adapter or a quantised layer does, and computes something else."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def __call__(self, x):
        return 2 * self.linear(x)


class DoubledLinear(Linear):
    """The same, as a subclass."""

    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize("kind", ["module", "subclass"])
def test_a_replaced_kv_b_proj_is_called_for_single_tokens_too(kind):
    attention, x = module(), some_x()
    if kind == "module":
        attention.kv_b_proj = Doubled(attention.kv_b_proj)
    else:
        weight = attention.kv_b_proj.weight
        attention.kv_b_proj = DoubledLinear(9, 39, bias=False)
        attention.kv_b_proj.weight = weight
    cache = KVCache()
    got = mx.concatenate([attention(x[:, i : i + 1], cache) for i in range(9)], axis=1)
    close(got, attention(x))
    assert np.abs(np.array(got) - np.array(module()(x))).max() > 0.1


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_sixteen_bits_lose_what_sixteen_bits_lose(dtype):
    attention, x = module(), some_x()
    attention.update(tree_map(lambda p: p.astype(dtype), attention.parameters()))
    p = {name: value.detach() for name, value in tensors(attention).items()}
    x = x.astype(dtype)
    want = oracle(p, torch.tensor(np.array(x.astype(mx.float32))).double(), SHAPES["odd"], *in_order(2, 9))
    cache = KVCache()
    for got in (attention(x), mx.concatenate([attention(x[:, i : i + 1], cache) for i in range(9)], axis=1)):
        assert got.dtype == dtype
        # Some eight roundings in a row, each of at most 2^-9 and 2^-12 of a value.
        close(got.astype(mx.float32), want, {mx.bfloat16: 2**-6, mx.float16: 2**-9}[dtype])


def test_nothing_in_nothing_out():
    assert module()(mx.zeros((0, 9, 16))).shape == (0, 9, 16)
    assert module()(mx.zeros((2, 0, 16))).shape == (2, 0, 16)


WRONG = {
    "heads": ({"num_heads": 0}, "num_heads must be a whole number of 1 or more but got 0"),
    "kv-rank": ({"kv_lora_rank": 2.0}, r"kv_lora_rank must be a whole number of 1 or more but got 2\.0"),
    "q-rank": ({"q_lora_rank": 0}, "q_lora_rank must be a whole number of 1 or more but got 0"),
    "nope": ({"qk_nope_head_dim": True}, "qk_nope_head_dim must be a whole number of 1 or more but got True"),
    "rope": ({"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even, as pairs rotate, but got 5"),
    "large-q": ({"qk_nope_head_dim": 250}, r"qk_nope_head_dim \+ qk_rope_head_dim must be at most 256 but got 258"),
    "large-v": ({"v_head_dim": 257}, "v_head_dim must be at most 256 but got 257"),
    "scale": ({"scale": 0}, "scale must be a number greater than 0 but got 0"),
    "factor": ({"rope_factor": -1.0}, r"rope_factor must be a number greater than 0 but got -1\.0"),
    "periods": (
        {"rope_periods": np.ones(3)},
        r"rope_periods must have one number for each pair that rotates, 4, but got the shape \(3,\)",
    ),
    "base": ({"rope_base": 0.0}, r"rope_base must be a number greater than 0 but got 0\.0"),
    "rope-scale": ({"rope_scale": "1"}, "rope_scale must be a number greater than 0 but got '1'"),
    "eps": ({"norm_eps": None}, "norm_eps must be a number greater than 0 but got None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named_as_it_is_built(name):
    changes, message = WRONG[name]
    shape = {"num_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    with pytest.raises(ValueError, match=rf"^\[LatentAttention\] {message}"):
        LatentAttention(16, **{**shape, **changes})


def test_documents_and_a_cache_are_refused_together():
    attention, x, ids = module(), some_x(), mx.zeros((2, 9), mx.int32)
    for names in (("segment_ids",), ("positions",), ("segment_ids", "positions")):
        message = rf"\[LatentAttention\] {' and '.join(names)} must be left out with a cache, which holds one text a"
        with pytest.raises(ValueError, match=message):
            attention(x, KVCache(), **dict.fromkeys(names, ids))
