"""The proofs of layer_norm: its formula, its gradient, its kernels on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import RTOL, disagreements, to_float64
from forge_mlx.kernels._common.rows import Sharing
from forge_mlx.kernels.norms import launch, reference
from forge_mlx.kernels.norms.cases import CASES, LayerNormCase
from forge_mlx.metal import emulator
import mlx.core as mx
from norm_proofs import (
    assert_formula_is_exact_to_its_dtype,
    assert_gradients_agree,
    differences,
    found_in_broken,
    random,
)
import numpy as np
import pytest
from room_proofs import gpu_engine, mostly_slow, poison, thinned
import torch

CASES = [case for case in CASES if case.op == "layer_norm"]
BF16 = mx.bfloat16
# One case for each way through the kernels: narrow rows, rows of a threadgroup, long rows, with w and b and with less;
# and rows with which a threadgroup has no registers for w.
NARROW, WIDE, LONG = LayerNormCase((70, 40)), LayerNormCase((9, 264)), LayerNormCase((9, 4104))
CROWDED = LayerNormCase((3, 8192), BF16, BF16, b_dtype=BF16)
PATHS = [
    *(NARROW, WIDE, LONG, CROWDED),
    replace(NARROW, b_dtype=None),
    replace(WIDE, w_dtype=None),
    replace(LONG, w_dtype=None, b_dtype=None),
]
LESS = [
    replace(NARROW, w_dtype=None, b_dtype=None),
    replace(WIDE, w_dtype=None, b_dtype=None),
    replace(LONG, b_dtype=None),
    replace(LONG, w_dtype=None),
]
ALL_PATHS = [*PATHS, *(pytest.param(case, marks=pytest.mark.slow) for case in LESS)]


def named(case):
    return case.name


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], ids=named)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    inputs = {name: torch.tensor(to_float64(array)).requires_grad_() for name, array in case.inputs().items()}
    x = inputs["x"]
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=case.eps) * inputs.get("w", 1) + inputs.get("b", 0)
    dy = torch.tensor(to_float64(case.cotangents()["y"]))
    gradients = torch.autograd.grad(y, list(inputs.values()), dy)
    expected = case.expected()
    for name, value in zip(("y", *(f"d{name}" for name in inputs)), (y, *gradients), strict=True):
        got = value.detach().numpy()
        np.testing.assert_allclose(expected[name], got, rtol=1e-9, atol=1e-11 * np.abs(got).max())


# A mean far from 0 costs float32 digits, whatever is done with them.
@pytest.mark.parametrize("case", [case for case in CASES if not case.offset], ids=named)
def test_formula_agrees_with_float64(case):
    assert_formula_is_exact_to_its_dtype(case)


def test_gradient_of_the_formula_is_the_finite_difference():
    x, w, b = (np.array(random(shape, seed), np.float64) for seed, shape in enumerate([(3, 5), (5,), (5,)]))
    dy, dmean, ds = (np.array(random(shape, seed), np.float64) for seed, shape in enumerate([(3, 5), (3,), (3,)], 3))

    def loss(x, w, b):
        mean = x.mean(-1)
        s = 1 / np.sqrt(x.var(-1) + 0.1)
        y = (x - mean[:, None]) * s[:, None] * w + b
        return (y * dy).sum() + (mean * dmean).sum() + (s * ds).sum()

    arrays = {
        name: mx.array(each.astype(np.float32))[None]
        for name, each in {"x": x, "w": w, "b": b, "dy": dy, "dmean": dmean, "ds": ds}.items()
    }
    _, mean, s = reference.layer_norm_forward(arrays["x"], arrays["w"], arrays["b"], 0.1)
    dx, dw, db = reference.layer_norm_backward(**arrays, mean=mean, s=s)
    for got, want in (
        (dx, differences(lambda x: loss(x, w, b), x)),
        (dw, differences(lambda w: loss(x, w, b), w)),
        (db, differences(lambda b: loss(x, w, b), b)),
    ):
        np.testing.assert_allclose(np.array(got[0]), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", ["w b", "w", "b", ""], ids=["w-b", "w", "b", "neither"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype, given):
    weights = {name: random((2, 33), seed, dtype) for seed, name in enumerate(given.split(), 1)}
    x, dy = random((2, 7, 33), 0, dtype), random((2, 7, 33), 3, dtype)
    cotangents = [dy, random((2, 7), 4), random((2, 7), 5)]

    def forward(x, *arrays):
        named = dict(zip(weights, arrays, strict=True))
        return reference.layer_norm_forward(x, named.get("w"), named.get("b"), 0.1)

    outputs, want = mx.vjp(forward, [x, *weights.values()], cotangents)
    got = reference.layer_norm_backward(x, weights.get("w"), weights.get("b"), *outputs[1:], *cotangents)
    assert [each is not None for each in got] == [True, "w" in given, "b" in given]
    assert_gradients_agree([each for each in got if each is not None], want, dtype)


def is_fast(case):
    """One size for each way of giving less than w and b; mixed dtypes in short rows once and in long ones once."""
    if case.w_dtype is None or case.b_dtype is None:
        given = (case.w_dtype is not None, case.b_dtype is not None)
        return (case.shape[-1], *given) in ((40, True, False), (264, False, True), (8192, False, False))
    is_mixed = {case.w_dtype, case.b_dtype} != {case.dtype}
    return not is_mixed or (case.shape, case.dtype) in (((3, 4104), BF16), ((4, 40), mx.float16))


@pytest.mark.parametrize("case", thinned(CASES, is_fast, every=2), ids=named)
def test_kernels_agree_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", ALL_PATHS, ids=named)
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, ids=named)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


@pytest.mark.parametrize("case", CASES, ids=named)
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


# Narrow rows, rows of a threadgroup, long rows. E[x^2] - E[x]^2 would be off by 0.06 and more here.
@pytest.mark.parametrize("columns", [72, 1000, 5000])
def test_a_mean_far_from_0_costs_what_rounding_x_costs(columns):
    case = LayerNormCase((5, columns), offset=1000)
    y = to_float64(case.run("emulator")["y"])
    # Half a unit in the last place of 1000, of the mean's too, and some for its sum.
    assert np.abs(y - case.expected()["y"]).max() <= 4 * 2**-24 * 1000 * 1.5


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("values", ["1e30", "zeros", "1e-30", "1e34"])
@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_results_of_extreme_rows_are_finite(columns, values, impl):
    for name, result in LayerNormCase((2, columns), values=values).run(impl).items():
        assert mx.isfinite(result).all(), name


@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_rows_whose_variance_leaves_float32_become_b(columns):
    case = LayerNormCase((2, columns), values="1e30")
    results, b = case.run("emulator"), case.inputs()["b"]
    assert mx.array_equal(results["y"], mx.broadcast_to(b, (2, columns)))
    assert not results["dx"].any()


@pytest.mark.parametrize("case", ALL_PATHS, ids=named)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


# Each way through the kernels, with many rows for each threadgroup and with as many threadgroups as rows.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(3, 1), Sharing(1000, 1)], ids=str)
@pytest.mark.parametrize("case", ALL_PATHS, ids=named)
def test_any_sharing_of_rows_gives_the_result(case, sharing, monkeypatch):
    monkeypatch.setattr(launch, "FORWARD", sharing)
    monkeypatch.setattr(launch, "BACKWARD", sharing)
    assert disagreements(case, "emulator") == []


OFFSET = replace(WIDE, offset=1000)
# Three vectors for each thread.
LONGER = LayerNormCase((3, 12300))
EPS = {case: replace(case, eps=0.5) for case in (WIDE, LONG)}
TAIL = LayerNormCase((9, 263), offset=3)
LONG_TAIL = LayerNormCase((9, 4103), offset=3)
DIFFERENCE = "values[i] = i < limit ? values[i] - of_row : 0.0f;"
SECOND_SUM = "rows.sum(squares, scratch + HALF);"
# Fault: text, what takes its place, a case, what must be found. What is in the headers is broken by rms_norm's tests.
BREAKS = {
    "one scratch for both sums": (SECOND_SUM, "rows.sum(squares, scratch);", WIDE, "RaceError"),
    "one scratch for w and b": ("scratch + HALF, bias", "scratch, bias", NARROW, "Error"),
    "one scratch for both sums of long rows": ("scratch + 32, thread", "scratch, thread", LONG, "RaceError"),
    "one scratch for all rows of the gradient": ("scratch + turn * 64", "scratch", WIDE, "RaceError"),
    "scratches that overlap": ("scratch + turn * 64", "scratch + turn * 32", WIDE, "RaceError"),
    "no eps": ("rows.columns + eps", "rows.columns", EPS[WIDE], "y must be"),
    "no eps in long rows": ("columns + eps", "columns", EPS[LONG], "y must be"),
    "variance of values": (DIFFERENCE, "squares[0] += 0.0f;", replace(WIDE, offset=3), "y must be"),
    "columns past the end count": ("i < limit ? values[i] - of_row : 0.0f", "values[i] - of_row", TAIL, "y must be"),
    "columns past the end of long rows": (
        *("i < limit ? values[i] - of_vector : 0.0f", "values[i] - of_vector", LONG_TAIL, "y must be"),
    ),
    "a difference of two means": (
        *("squares[0] / rows.columns + eps", "sum[0] / rows.columns + eps - of_row * of_row", OFFSET, "y must be"),
    ),
    "vectors' means are not joined": ("own_squares += step * (seen * part) * step;", "", LONGER, "y must be"),
    "threads' means are not joined": (" + seen * step * step", "", LONGER, "y must be"),
    "the mean of a thread's vectors": ("own_mean += step * part;", "own_mean += step;", LONGER, "y must be"),
    "mean is not kept": ("mean[rows.first + row] = of_row;", "mean[rows.first + row] = 0;", OFFSET, "dx must be"),
    "no b": ("values[i] += bias[i];", "", WIDE, "y must be"),
    "no b in narrow rows": ("scratch + HALF, bias", "scratch + HALF, weight", NARROW, "must be"),
    "no sum of g": ("sums[0] += g[i];", "", WIDE, "dx must be"),
    "no sum of g in long rows": ("sum_g += g[i];", "", LONG, "dx must be"),
    "db after w": ("    if constexpr (BIAS) {\n      forge::add(db, g);\n    }\n", "", WIDE, "db must be"),
    "no db in long rows": ("forge::add(db, g);", "", LONG, "db must be"),
    "db over dw": ("parts + WEIGHT * rows.columns", "parts", WIDE, "Error"),
    "db over dw in long rows": ("parts + WEIGHT * columns.columns", "parts", LONG, "Error"),
    "parts of dw alone": ("rows.columns * (WEIGHT + BIAS)", "rows.columns", WIDE, "Error"),
    "numbers of another row": ("columns.of_row(numbers, row, 1, 3)", "columns.of_row(numbers, row, 1)", LONG, "dx"),
    "w of another thread": ("aside[rows.column + i]);", "aside[rows.column + (i ^ 1)]);", CROWDED, "dx must be"),
    "w aside is not written": ("aside[rows.column + i] = static_cast<W>(weight[i]);", "", CROWDED, "Error"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    found = found_in_broken(monkeypatch, old, new, case, sign)
    assert any(sign in line for line in found), found
