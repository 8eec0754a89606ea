"""The proofs of softmax: its formula, its gradient, its kernels on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace
import math

from forge_mlx.kernels._common.proof import RTOL, disagreements, to_float64
from forge_mlx.kernels._common.rows import Sharing
from forge_mlx.kernels.softmax import op, reference
from forge_mlx.kernels.softmax.cases import CASES, SoftmaxCase
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import broken, findings, gpu_engine, mostly_slow, poison, random, thinned
import torch

# One case for each way through the kernels: narrow rows, rows of a threadgroup, long rows.
NARROW, WIDE, LONG = PATHS = [SoftmaxCase((70, 40)), SoftmaxCase((9, 264)), SoftmaxCase((9, 4104))]
NAMES = {"ids": lambda case: case.name}


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    x, dp = (
        torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64)
        for array in (case.inputs()["x"], case.cotangents()["p"])
    )
    p = torch.softmax(x.requires_grad_(), dim=-1)
    (dx,) = torch.autograd.grad(p, x, dp)
    for name, value in (("p", p.detach()), ("dx", dx)):
        np.testing.assert_allclose(case.expected()[name], value.numpy(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    # compare() measures by the formula itself, so it would not notice.
    expected, largest = case.expected(), np.abs(to_float64(case.cotangents()["p"])).max(initial=0)
    # The gradient of a peaked row is a small difference, of a p that was rounded to the dtype.
    rounding = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-9}[case.dtype]
    for name, result in case.run("formula").items():
        error = np.abs(to_float64(result) - expected[name]).max(initial=0)
        allowed = RTOL[case.dtype] * np.abs(expected[name]).max(initial=0)
        assert error <= allowed + (rounding * largest if name == "dx" else 0), name


def test_gradient_of_the_formula_is_the_finite_difference():
    x, dp = np.array(random((3, 5), 0), np.float64), np.array(random((3, 5), 1), np.float64)

    def loss(x):
        exponentials = np.exp(x)
        return (exponentials / exponentials.sum(-1, keepdims=True) * dp).sum()

    want, step = np.zeros_like(x), 1e-6
    for index in np.ndindex(x.shape):
        move = np.zeros_like(x)
        move[index] = step
        want[index] = (loss(x + move) - loss(x - move)) / (2 * step)
    p = reference.forward(mx.array(x.astype(np.float32)))
    got = reference.backward(p, mx.array(dp.astype(np.float32)))
    np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype):
    x, dp = random((2, 7, 33), 0, dtype), random((2, 7, 33), 1, dtype)
    (p,), (want,) = mx.vjp(reference.forward, [x], [dp])
    got = reference.backward(p, dp)
    assert got.dtype == want.dtype == dtype
    difference = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item()
    assert difference <= 2 * RTOL[dtype] * mx.abs(want.astype(mx.float32)).max().item()


def is_fast(case):
    """Arrays of a few elements, which are declared otherwise, in float32 alone."""
    return case.dtype == mx.float32 or math.prod(case.shape) not in range(1, 8)


@pytest.mark.parametrize("case", thinned(CASES, is_fast, every=2), **NAMES)
def test_kernels_agree_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


@pytest.mark.parametrize("columns", [5, 40, 264, 4104])
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_rows_that_are_not_numbers_are_those_of_mlx(columns, impl):
    x = np.array(random((5, columns), 0))
    x[0] = -np.inf
    x[1, columns // 2] = np.inf
    x[2, columns - 1] = np.nan
    x[3, 1:] = -np.inf
    got = np.array(SoftmaxCase((5, columns)).function(impl)(mx.array(x)))
    want = np.array(mx.softmax(mx.array(x), axis=-1, precise=True))
    np.testing.assert_allclose(got, want, rtol=1e-5, equal_nan=True)
    assert np.isnan(got[:3]).all()
    assert got[3].tolist() == [1] + [0] * (columns - 1)


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


# With many rows for each threadgroup and with as many threadgroups as rows.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(3, 1), Sharing(1000, 1), Sharing(1000, 1000)], ids=str)
@pytest.mark.parametrize("case", PATHS[:2], **NAMES)
def test_any_sharing_of_rows_gives_the_result(case, sharing, monkeypatch):
    monkeypatch.setattr(op, "FORWARD", sharing)
    assert disagreements(case, "emulator") == []


TAIL, SHIFTED = SoftmaxCase((9, 263)), replace(WIDE, layout="shifted")
FEW, LOW = SoftmaxCase((9, 20), values="20"), SoftmaxCase((3, 7), values="low")
BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "no barrier in the reduction": (BARRIER, "", WIDE, "RaceError"),
    "one scratch for all rows": ("scratch + turn * 64", "scratch", WIDE, "RaceError"),
    "one scratch for all rows of the gradient": ("scratch + turn * 32", "scratch", WIDE, "RaceError"),
    "each thread keeps its own largest": (
        "precise::exp(own_largest - sum.largest) / sum.total",
        "1 / sum.total",
        FEW,
        "p must",
    ),
    "lanes are not brought to one largest": ("total * metal::precise::exp(own - largest)", "total", WIDE, "p must be"),
    "a vector is not brought to the next one's largest": (
        "total *= metal::precise",
        "metal::precise",
        LONG,
        "p must be",
    ),
    "the largest begins at 0": ("largest(-FLT_MAX)", "largest(0.0f)", LOW, "p must be"),
    "the tail counts": (
        "i < limit ? metal::precise::exp(x[i] - largest) : 0.0f",
        "metal::precise::exp(x[i] - largest)",
        TAIL,
        "p must",
    ),
    "the tail is the largest": (
        "i < limit ? metal::max(largest, x[i]) : largest",
        "metal::max(largest, x[i])",
        LOW,
        "p must",
    ),
    "no sum in the gradient": ("g[i] - sum[0]", "g[i]", WIDE, "dx must be"),
    "no sum in the gradient of long rows": ("g[i] - sum[0]", "g[i]", LONG, "dx must be"),
    "no p in the gradient of long rows": ("sum[0] += values[i] * g[i]", "sum[0] += g[i]", LONG, "dx must be"),
    "no total in long rows": ("1.0f / sum.total", "1.0f", LONG, "p must be"),
    "x is read one further": ("(x + at,", "(x + at + 1,", WIDE, "BoundsError"),
    "p is written one further": ("store_floats(p + at,", "store_floats(p + at + 1,", WIDE, "BoundsError"),
    "rows past the end": (
        "row < count ? clamp(columns - column, 0, N) : 0",
        "clamp(columns - column, 0, N)",
        NARROW,
        "BoundsError",
    ),
    "columns past the end": ("clamp(columns - column, 0, N)", "N", replace(WIDE, shape=(1, 264)), "BoundsError"),
    "a long row goes past its end": (
        "limit = min(columns - column, N)",
        "limit = N",
        SoftmaxCase((2, 4102)),
        "BoundsError",
    ),
    "half the lanes are joined": ("step < lanes; step *= 2", "2 * step < lanes; step *= 2", NARROW, "p must be"),
    "no look at the address": (" || !is_aligned(source, Chunk::bytes)", "", SHIFTED, "AlignmentError"),
    "no tail": ("i < limit ? static_cast<float>(source[i]) : 0.0f", "source[i]", TAIL, "BoundsError"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = op._kernel
    # The others include the same headers, and would only be compiled once more.
    ways = ["forward"] if sign.startswith("p") else ["backward"] if sign.startswith("d") else ["forward", "backward"]
    names = [f"softmax_{way}{'_long' if case.shape[-1] > 4096 else ''}" for way in ways]
    changed = {name: broken(whole(name), old, new) for name in names}
    assert any(changed[name].source != whole(name).source for name in names), "the text to replace is not there"
    # Several rows for each threadgroup, so that loops go round.
    monkeypatch.setattr(op, "FORWARD", Sharing(2, 1))
    assert findings([case], "emulator") == []
    monkeypatch.setattr(op, "_kernel", lambda name: changed.get(name) or whole(name))
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found
