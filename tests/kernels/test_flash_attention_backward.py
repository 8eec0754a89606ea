"""flash_attention_backward from either statistics of the rows, flashback's own case, and how exact gradients are."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import compare, disagreements, to_float64
from forge_mlx.kernels.attention import flash_attention, flash_attention_backward
from forge_mlx.kernels.attention.cases import CASES
from forge_mlx.kernels.attention.flash_case import FlashBackwardCase, FlashCase
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import poison, random, thinned

NAMES = {"ids": lambda case: case.name}
BACKWARD = [case for case in CASES if isinstance(case, FlashBackwardCase)]
FLASHBACK = FlashBackwardCase(1, 8, 8, 1024, 1024, 8, from_maximum=True)
FAST = [case for case in BACKWARD if case.variant == "scalar"]


def test_flashbacks_own_case_is_what_flashback_takes():
    assert list(replace(FLASHBACK, queries=8, keys=8).inputs()) == ["q", "k", "v", "out", "dout", "row_max", "row_sum"]
    assert (FLASHBACK.heads, FLASHBACK.queries, FLASHBACK.keys, FLASHBACK.head_dim) == (8, 1024, 1024, 8)
    assert FLASHBACK.causal


@pytest.mark.parametrize("case", thinned([*BACKWARD, FLASHBACK], FAST.__contains__), **NAMES)
def test_kernels_agree_on_the_emulator(case, monkeypatch):
    poison(monkeypatch)
    with emulator.settings(schedules=1 if case == FLASHBACK else 3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize(
    "case",
    [case for case in BACKWARD if case.variant != "scalar"] + [pytest.param(FLASHBACK, marks=pytest.mark.slow)],
    **NAMES,
)
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


def arrays(dtype=mx.float32):
    q, k, v, dout = (random((1, 2, 9, 8), seed, dtype) for seed in range(4))
    out, lse = flash_attention(q, k, v, return_lse=True, impl="reference")
    return q, k, v, out, dout, lse


def test_either_statistics_give_the_gradients_of_the_op():
    q, k, v, out, dout, lse = arrays()
    want = mx.vjp(lambda *qkv: flash_attention(*qkv, impl="reference"), [q, k, v], [dout])[1]
    largest = mx.where(mx.tri(9, dtype=mx.bool_), q @ k.swapaxes(2, 3) / 8**0.5, -mx.inf).max(-1)
    pair = {"row_max": largest, "row_sum": mx.exp(lse - largest)}
    for statistics in ({"lse": lse}, pair):
        got = flash_attention_backward(q, k, v, out, dout, **statistics, impl="reference")
        for a, b in zip(got, want, strict=True):
            assert mx.abs(a - b).max().item() <= 1e-5 * mx.abs(b).max().item()


LSE = mx.zeros((1, 2, 9))
# Mistake: the statistics, message.
STATISTICS = {
    "none": ({}, "but got none of them"),
    "both": ({"lse": LSE, "row_max": LSE, "row_sum": LSE}, "but got lse and row_max and row_sum"),
    "lse and a half": ({"lse": LSE, "row_sum": LSE}, "but got lse and row_sum"),
    "the maximum alone": ({"row_max": LSE}, "but got row_max"),
    "the sum alone": ({"row_sum": LSE}, "but got row_sum"),
}


@pytest.mark.parametrize("mistake", STATISTICS)
def test_statistics_are_one_of_two_kinds(mistake):
    statistics, message = STATISTICS[mistake]
    q, k, v, out, dout, _ = arrays()
    with pytest.raises(ValueError, match=f"must be either lse, or row_max and row_sum, {message}"):
        flash_attention_backward(q, k, v, out, dout, **statistics)


MISTAKES = {
    "lse of another shape": ({"lse": LSE[0]}, r"lse must have the shape \(1, 2, 9\)"),
    "lse is an integer": ({"lse": LSE.astype(mx.int32)}, "lse must be float32"),
    "a maximum of another shape": (
        {"row_max": LSE[..., :1], "row_sum": LSE},
        r"row_max must have the shape \(1, 2, 9\)",
    ),
    "dlse of another shape": ({"lse": LSE, "dlse": LSE[..., :1]}, r"dlse must have the shape \(1, 2, 9\)"),
    "out of another shape": ({"lse": LSE, "out": mx.zeros((1, 2, 9, 16))}, r"out must have the shape \(1, 2, 9, 8\)"),
    "dout of another dtype": (
        {"lse": LSE, "dout": mx.zeros((1, 2, 9, 8), mx.float16)},
        "dout must have the dtype of q",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise(mistake):
    wrong, message = MISTAKES[mistake]
    given = dict(zip(("q", "k", "v", "out", "dout"), arrays(), strict=False))
    with pytest.raises(ValueError, match=rf"\[flash_attention_backward\] {message}"):
        flash_attention_backward(**{**given, **wrong})


def test_gradient_of_it_raises():
    q, k, v, out, dout, lse = arrays()
    for position in range(5):

        def loss(*given):
            return sum(each.sum() for each in flash_attention_backward(*given, lse=lse, impl="reference"))

        with pytest.raises(ValueError, match="flash_attention_backward"):
            mx.grad(loss, argnums=position)(q, k, v, out, dout)


def test_vmap():
    q, k, v, out, dout, lse = (mx.stack([each, each[:, ::-1]]) for each in arrays())

    def call(*given):
        return flash_attention_backward(*given[:5], lse=given[5], impl="reference")

    got = mx.vmap(call)(q, k, v, out, dout, lse)
    for index in range(2):
        for a, b in zip(got, call(*(each[index] for each in (q, k, v, out, dout, lse))), strict=True):
            assert mx.abs(a[index] - b).max().item() <= 1e-6


def unfused(case):
    """The same in the dtype of q throughout: what attention is where each product and the softmax are operations."""

    def call(q, k, v):
        group = case.heads // case.kv_heads
        k, v = (mx.repeat(each, group, axis=1) for each in (k, v))
        scores = (q * case.options.scale) @ k.swapaxes(2, 3)
        scores = mx.where(mx.array(case.seen()), scores, mx.array(-mx.inf, scores.dtype))
        return mx.softmax(scores, axis=-1) @ v

    (out,), gradients = mx.vjp(call, list(case.inputs().values()), list(case.cotangents().values()))
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


# With documents, so that no engine takes MLX's own op.
DOCUMENTS = FlashCase(1, 2, 2, 256, 256, 64, dtype=mx.bfloat16, segments="documents-200")
EXACT = [DOCUMENTS, replace(DOCUMENTS, heads=4, kv_heads=1), replace(DOCUMENTS, values="3")]


@pytest.mark.parametrize("impl", ["reference", pytest.param("emulator", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", EXACT, **NAMES)
def test_bfloat16_is_no_less_exact_than_the_unfused_path(case, impl):
    with emulator.settings(checks=()):
        ours = case.run(impl)
    theirs, expected = unfused(case), case.expected()
    assert compare(case, ours) == []
    for name, truth in expected.items():
        mine, other = (np.abs(to_float64(each[name]) - truth) for each in (ours, theirs))
        assert mine.max() <= other.max(), name
        assert mine.mean() <= other.mean(), name
