"""Attention at the ends of the range: huge scores, NaN, no keys, options out of range; and which path a CPU takes."""

from functools import partial

from forge_mlx.kernels.attention import attention, flash_attention, flash_attention_backward
from forge_mlx.metal.engine import use_engine
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import random

ENGINES = [("reference", "auto"), ("emulator", "scalar"), ("emulator", "mma")]
Q, K = random((1, 1, 24, 8), 0), random((1, 1, 24, 8), 1)


def largest(array):
    return mx.abs(array).max().item()


@pytest.mark.parametrize(("impl", "variant"), ENGINES)
def test_probabilities_stay_at_most_1_whatever_the_scores(impl, variant):
    def loss(v, scale):
        out, _ = flash_attention(Q, K, v, scale=scale, return_lse=True, impl=impl, variant=variant)
        return out.sum()

    for scale in (1e6, 1e9):
        # A value is weighed by at most 1 for each query.
        assert largest(mx.grad(partial(loss, scale=scale))(K)) <= 24


@pytest.mark.parametrize(("impl", "variant"), ENGINES)
@pytest.mark.parametrize("place", ["sinks", "q", "k"])
def test_nan_is_not_taken_for_nothing_to_see(impl, variant, place):
    nan = mx.full((1, 1, 1, 8), mx.nan)
    arrays = {"q": Q, "k": K, "v": K, "sinks": mx.zeros((1,))}
    arrays[place] = (
        mx.full((1,), mx.nan) if place == "sinks" else mx.concatenate([nan, arrays[place][:, :, 1:]], axis=2)
    )
    out, lse = flash_attention(**arrays, return_lse=True, impl=impl, variant=variant)
    assert mx.isnan(out[0, 0, 0]).all()
    assert mx.isnan(lse[0, 0, 0])


@pytest.mark.parametrize("impl", ["reference", "emulator"])
def test_sinks_have_their_gradient_without_keys(impl):
    none, sinks = mx.zeros((1, 2, 0, 8)), mx.array([0.5, -1.0])
    q, dlse = random((1, 2, 3, 8), 0), random((1, 2, 3), 1)
    out, lse = flash_attention(q, none, none, sinks=sinks, return_lse=True, impl=impl)
    dsinks = flash_attention_backward(q, none, none, out, out, lse=lse, dlse=dlse, sinks=sinks, impl=impl)[3]
    # lse is the sink itself.
    np.testing.assert_allclose(np.array(dsinks), np.array(dlse.sum((0, 2))), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"softcap": 1e-30}, r"softcap must lie in 1e-10 to 1e\+30 or be None but got 1e-30\."),
        ({"softcap": 3e38}, r"softcap must lie in 1e-10 to 1e\+30 or be None but got 3e\+38\."),
        ({"segment_ids": [mx.zeros((1, 24), mx.int32)] * 2}, r"segment_ids must be an mx\.array or a tuple of two but"),
        ({"q": mx.zeros((1, 1, 24, 264))}, r"head_dim must be a multiple of 8 from 8 to 256 but got 264\.$"),
        ({"q": mx.zeros((1, 1, 24, 12))}, r"head_dim must be .* but got 12\. Pad the heads with zeros, and give the"),
    ],
    ids=["tiny cap", "huge cap", "list of ids", "head too large", "head between"],
)
def test_what_cannot_be_computed_is_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"^\[flash_attention\] {message}"):
        flash_attention(**{"q": Q, "k": K, "v": K} | arguments)


@pytest.mark.parametrize(("softcap", "scale"), [(1e-10, 1.0), (1e30, 1.0), (1.0, 1e30)])
@pytest.mark.parametrize(("impl", "variant"), ENGINES)
def test_caps_at_the_ends_of_their_range_give_numbers(impl, variant, softcap, scale):
    def loss(q):
        return flash_attention(q, K, K, scale=scale, softcap=softcap, impl=impl, variant=variant).sum()

    assert mx.isfinite(mx.grad(loss)(Q)).all()


def test_engine_that_the_context_asks_for_is_named_by_attention():
    with use_engine("emulator"), pytest.raises(ValueError, match=r"but got emulator \(use_engine\)\. Give impl="):
        attention(Q, K, K)
    with use_engine("emulator"):
        attention(Q, K, K, impl="reference")


@pytest.mark.parametrize(
    ("queries", "dtype", "wanted"),
    [(127, mx.float32, True), (128, mx.float32, False), (8, mx.float16, False), (8, mx.bfloat16, False)],
    ids=str,
)
def test_a_cpu_takes_mlx_for_few_queries_in_float32_alone(queries, dtype, wanted, monkeypatch):
    taken = []
    fast = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda *a, **b: taken.append("mlx") or fast(*a, **b))
    q = random((1, 1, queries, 8), 0, dtype)
    flash_attention(q, q, q)
    assert taken == (["mlx"] if wanted else [])


def test_probabilities_sum_to_1_whatever_the_scores():
    # Equal keys: lse is no score, and is rounded.
    keys = mx.broadcast_to(K[:, :, :1], K.shape)
    probs = attention(Q, keys, K, scale=1e4, return_probs=True)[1]
    np.testing.assert_allclose(np.array(probs.sum(-1)), 1, atol=1e-6)


def test_scores_past_float16_are_no_trouble_on_a_cpu():
    q = (random((1, 1, 32, 64), 0) * 120).astype(mx.float16)
    v = random((1, 1, 32, 64), 1, mx.float16)
    assert mx.isfinite(flash_attention(q, q, v)).all()
    assert mx.isfinite(mx.grad(lambda v: flash_attention(q, q, v).sum())(v)).all()
