"""The proofs of the activations: formulas, gradients, kernels on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace
import math

from forge_mlx.kernels._common.proof import RTOL, disagreements, to_float64
from forge_mlx.kernels.activations import cases, launch, reference
from forge_mlx.kernels.activations.cases import (
    CASES,
    OPS,
    GeluCase,
    Relu2Case,
    SigmoidCase,
    SiluCase,
    SoftcapCase,
    SwigluCase,
)
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import broken, findings, gpu_engine, mostly_slow, poison, thinned
import torch

# One case of each function, with a tail.
PATHS = [kind((7, 31), option=option) for kind, option in OPS]
UNARY = ("sigmoid", "silu", "gelu", "gelu_tanh", "relu2", "softcap")
NAMES = {"ids": lambda case: case.name}
CAP = 2.5


def random(shape, seed, dtype=mx.float32):
    return (2 * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def in_torch(case, x):
    """The activation of one tensor."""
    functions = {
        "sigmoid": torch.sigmoid,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: torch.relu(x) ** 2,
        "softcap": lambda x: case.cap * torch.tanh(x / case.cap),
    }
    return functions[case.activation](x)


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


# PyTorch's gradients of the largest x are infinity times 0.
@pytest.mark.parametrize("case", [case for case in CASES if case.values != "1e30"], **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    inputs = [torch.tensor(to_float64(array)).requires_grad_() for array in case.inputs().values()]
    y = in_torch(case, inputs[0])
    y = y * inputs[1] if case.is_gated else y
    gradients = torch.autograd.grad(y, inputs, torch.tensor(to_float64(case.cotangents()["y"])))
    expected = case.expected()
    assert len(expected) == 1 + len(inputs)
    for name, value in zip(expected, (y.detach(), *gradients), strict=True):
        got = value.numpy()
        np.testing.assert_allclose(expected[name], got, rtol=1e-9, atol=1e-12 * np.abs(got).max(initial=0))


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    # compare() measures by the formula itself, so it would not notice.
    expected = case.expected()
    for name, result in case.run("formula").items():
        truth = expected[name]
        error = np.abs(to_float64(result) - truth).max(initial=0)
        smallest = 2.0**-24 if case.dtype == mx.float16 else np.finfo(np.float32).tiny
        assert error <= RTOL[case.dtype] * np.abs(truth).max(initial=0) + smallest, name


@pytest.mark.parametrize("function", UNARY)
def test_slope_is_the_finite_difference(function):
    x = mx.array(np.linspace(-6, 6, 101, dtype=np.float32) + 0.03)
    values = np.array(x, np.float64)

    def in_float64(x):
        case = next(case for case in PATHS if case.activation == function)
        return in_torch(replace(case, option=CAP if function == "softcap" else case.option), torch.tensor(x)).numpy()

    want = (in_float64(values + 1e-5) - in_float64(values - 1e-5)) / 2e-5
    np.testing.assert_allclose(np.array(reference.slope(function, x, CAP)), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("function", UNARY)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype, function):
    x, dy = random((5, 33), 0, dtype), random((5, 33), 1, dtype)
    (_,), (want,) = mx.vjp(lambda x: reference.forward(function, x, CAP), [x], [dy])
    got = reference.backward(function, x, dy, CAP)
    assert got.dtype == want.dtype == dtype
    np.testing.assert_allclose(to_float64(got), to_float64(want), rtol=RTOL[dtype], atol=RTOL[dtype])


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gated_gradient_is_mlx_autodiff_of_the_forward(dtype, function):
    gate, up, dy = (random((5, 33), seed, dtype) for seed in (0, 1, 2))
    _, want = mx.vjp(lambda gate, up: reference.gated_forward(function, gate, up), [gate, up], [dy])
    for a, b in zip(reference.gated_backward(function, gate, up, dy), want, strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(to_float64(a), to_float64(b), rtol=RTOL[dtype], atol=3 * RTOL[dtype])


def is_fast(case):
    """All functions in float32, both kinds of kernels in every dtype: the functions are computed in float32 in each."""
    is_tiny = math.prod(case.shape) in range(1, 8)
    return case.dtype == mx.float32 or (case.op in ("silu", "swiglu") and not is_tiny)


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


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


# relu2 has no tails. What rounding x^2 / 2 or 2 u does to their exponential is the more the further x is out.
@pytest.mark.parametrize(("function", "rtol"), [("sigmoid", 1e-6), ("silu", 1e-6), ("gelu", 3e-5), ("gelu_tanh", 3e-5)])
def test_tails_keep_their_digits(function, rtol):
    x = np.linspace(-12, 12, 97).astype(np.float32)
    case = next(case for case in PATHS if case.activation == function)
    (y,), (slope,) = mx.vjp(case.function("emulator"), [mx.array(x)], [mx.ones(x.shape)])
    for found, truth in zip((y, slope), cases._EXACT[function](x.astype(np.float64)), strict=True):
        normal = np.abs(truth) > 1e-37
        assert normal.sum() > 80
        # The slope of silu and gelu passes through 0, where no digits are left.
        allowed = rtol * np.abs(truth) + np.where(np.abs(x) < 1.6, 1e-6, 0)
        assert (np.abs(np.array(found) - truth) / allowed)[normal].max() <= 1


def test_softcap_keeps_the_digits_of_a_slope_that_is_nearly_0():
    x = np.linspace(20, 40, 41, dtype=np.float32)
    _, (gradient,) = mx.vjp(SoftcapCase((41,), option=2.0).function("emulator"), [mx.array(x)], [mx.ones(x.shape)])
    np.testing.assert_allclose(np.array(gradient), 1 / np.cosh(x.astype(np.float64) / 2) ** 2, rtol=1e-5)


# Function: f of -inf, inf, -3e38 and 3e38, then f' of each.
LIMITS = {
    "sigmoid": ([0, 1, 0, 1], [0, 0, 0, 0]),
    "silu": ([0, math.inf, 0, 3e38], [0, 1, 0, 1]),
    "gelu": ([0, math.inf, 0, 3e38], [0, 1, 0, 1]),
    "gelu_tanh": ([0, math.inf, 0, 3e38], [0, 1, 0, 1]),
    "relu2": ([0, math.inf, 0, math.inf], [0, math.inf, 0, math.inf]),
    "softcap": ([-15, 15, -15, 15], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("impl", ["emulator", "formula"])
@pytest.mark.parametrize("function", LIMITS)
def test_infinities_give_the_limit_and_nan_gives_nan(function, impl):
    x = mx.array([-math.inf, math.inf, -3e38, 3e38, math.nan, 0, 0, 0])
    case = next(case for case in PATHS if case.activation == function)
    if impl == "formula":
        y, gradient = reference.forward(function, x, 15.0), reference.backward(function, x, mx.ones_like(x), 15.0)
    else:
        (y,), (gradient,) = mx.vjp(case.function(impl), [x], [mx.ones_like(x)])
    for got, want in zip((y, gradient), LIMITS[function], strict=True):
        np.testing.assert_allclose(np.array(got)[:4], np.array(want, np.float32), rtol=1e-6)
        assert math.isnan(got[4].item())


@pytest.mark.parametrize("case", [case for case in PATHS if case.is_gated], **NAMES)
def test_gated_limits(case):
    gate, up = mx.array([-math.inf, -3e38, 3e38, 0, 0, 0, 0, 0]), mx.full((8,), 0.5)
    (y,), (dgate, dup) = mx.vjp(case.function("emulator"), [gate, up], [mx.full((8,), 2.0)])
    assert y[:2].tolist() == dgate[:2].tolist() == dup[:2].tolist() == [0, 0]
    assert y[2].item() == pytest.approx(1.5e38)
    assert dgate[2].item() == pytest.approx(1)
    # The slope counts first: dy up alone would overflow.
    _, (dgate, _) = mx.vjp(
        case.function("emulator"), [mx.full((8,), -60.0), mx.full((8,), 1e20)], [mx.full((8,), 1e20)]
    )
    assert mx.isfinite(dgate).all()


SHIFTED, TAIL, BF16 = SiluCase((6, 48), layout="shifted"), SwigluCase((33,)), SwigluCase((33,), mx.bfloat16)
SILU, GELU, TANH = SiluCase((7, 33)), GeluCase((7, 33)), GeluCase((7, 33), option="tanh")
CAPPED = SoftcapCase((64,), option=0.5)
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "x is read one further": ("(x + at,", "(x + at + 1,", SILU, "BoundsError"),
    "dy is read one further": ("(dy + at,", "(dy + at + 1,", SILU, "BoundsError"),
    "y is written one further": ("(y + at,", "(y + at + 1,", SILU, "BoundsError"),
    "dx is written one further": ("(dx + at,", "(dx + at + 1,", SILU, "BoundsError"),
    "dgate is written one further": ("(dgate + at,", "(dgate + at + 1,", TAIL, "BoundsError"),
    "no tail": ("min(size - at, size_t(N))", "N", TAIL, "BoundsError"),
    "half of each vector": ("* N;", "* N / 2;", BF16, "UninitialisedError"),
    "up is the gate": ("load_floats(up + at,", "load_floats(gate + at,", TAIL, "y must be"),
    "no up in dgate": ("(factor[i] * forge", "(forge", TAIL, "dgate must be"),
    "no dy in dup": ("factor[i] = gradient[i] * ", "factor[i] = ", TAIL, "dup must be"),
    "gradients exchanged": (
        "store_floats(dup + at, limit, factor)",
        "store_floats(dup + at, limit, values)",
        TAIL,
        "dup",
    ),
    "no sign in the exponential": ("exp(-metal::fabs(x))", "exp(metal::fabs(x))", SILU, "y must be"),
    "sigmoid of negative x": (
        "value = x < 0.0f ? smaller : larger",
        "value = larger",
        SigmoidCase((7, 33)),
        "y must be",
    ),
    "1 - s of negative x": ("rest = x < 0.0f ? larger : smaller", "rest = smaller", SILU, "dx must be"),
    "slope of silu without 1": ("s.rest, 1.0f)", "s.rest, 0.0f)", SILU, "dx must be"),
    "gelu without a half": ("0.5f * erfc", "erfc", GELU, "y must be"),
    "gelu of -x": ("erfc(-x * SQRT_HALF)", "erfc(x * SQRT_HALF)", GELU, "y must be"),
    "no density": ("metal::fma(at, density,", "metal::fma(at, 0.0f,", GELU, "dx must be"),
    "density without a half": ("exp(-0.5f * at * at)", "exp(-at * at)", GELU, "dx must be"),
    "no 3 in the slope": ("3.0f * detail::CUBIC", "detail::CUBIC", TANH, "dx must be"),
    "no cube": ("metal::fma(CUBIC * x, x, LINEAR)", "LINEAR", TANH, "y must be"),
    "no 2 in the slope of relu2": ("2.0f * detail::at_least", "detail::at_least", Relu2Case((7, 33)), "dx must be"),
    "relu2 of negative x": ("positive = detail::at_least(x, 0.0f)", "positive = x", Relu2Case((7, 33)), "y must be"),
    "no cap": ("cap * metal::precise::tanh", "metal::precise::tanh", CAPPED, "y must be"),
    "cap inside is left out": ("tanh(x / cap)", "tanh(x)", CAPPED, "y must be"),
    "no cap in the slope": ("2.0f * (x / cap)", "2.0f * x", CAPPED, "dx must be"),
    "no 4 in the slope": ("4.0f * s.value", "s.value", CAPPED, "dx must be"),
    "no look at the address": (" || !is_aligned(source, Chunk::bytes)", "", SHIFTED, "AlignmentError"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = launch.kernel
    kind = "gated" if case.is_gated else "activation"
    # Both include the same header. The one in whose result nothing is to be found would only be compiled once more.
    ways = ["forward"] if sign.startswith("y") else ["backward"] if sign.startswith("d") else ["forward", "backward"]
    names = [f"{kind}_{way}" for way in ways]
    changed = {name: broken(whole(name), old, new) for name in names}
    assert any(changed[name].source != whole(name).source for name in names), "the text to replace is not there"
    assert findings([case], "emulator") == []
    monkeypatch.setattr(launch, "kernel", lambda name: changed.get(name) or whole(name))
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


def is_nan_when_broken(monkeypatch, old, new, function, x):
    """Whether y or dx of one number is NaN with a text of functions.h replaced."""
    whole = launch.kernel
    monkeypatch.setattr(launch, "kernel", lambda name: broken(whole(name), old, new))
    case = next(case for case in PATHS if case.activation == function)
    run, numbers = case.function("emulator"), mx.full((8,), x)
    # Each of the two is a kernel to compile.
    if mx.isnan(run(numbers)).any():
        return True
    return mx.isnan(mx.grad(lambda x: run(x).sum())(numbers)).any().item()


# Where x is held, and what comes of infinity without it.
@pytest.mark.parametrize(
    ("old", "function"),
    [
        ("at_least(x, -detail::SILU_END)", "silu"),
        ("at_least(x, -detail::GELU_END)", "gelu"),
        ("within(x, detail::SILU_END)", "silu"),
        ("within(x, detail::GELU_END)", "gelu"),
        ("within(x, detail::GELU_END)", "gelu_tanh"),
    ],
)
def test_limits_need_x_to_be_held(old, function, monkeypatch):
    assert is_nan_when_broken(monkeypatch, f"detail::{old}", "x", function, -math.inf)


def test_numbers_of_the_functions_are_those_of_the_header():
    text = launch.kernel("activation_forward").source.header
    for function, number in launch._NUMBERS.items():
        assert f"constant constexpr int {function.upper()} = {number};" in text
