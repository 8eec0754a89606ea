"""The proofs of add_rms_norm: its formula, its gradient, its kernels on the emulator and on a GPU, broken kernels."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import RTOL, disagreements, to_float64
from forge_mlx.kernels._common.rows import Sharing
from forge_mlx.kernels.norms import add_rms_norm, launch, reference
from forge_mlx.kernels.norms.cases import CASES, AddRMSNormCase
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
from room_proofs import broken, gpu_engine, mostly_slow, poison, thinned
import torch

CASES = [case for case in CASES if case.op == "add_rms_norm"]
BF16 = mx.bfloat16
# One case for each way through the kernels: narrow rows, rows of a threadgroup, long rows, with and without w.
NARROW, WIDE, LONG = AddRMSNormCase((70, 40)), AddRMSNormCase((9, 264)), AddRMSNormCase((9, 4104))
PATHS = [NARROW, WIDE, LONG, *(replace(case, w_dtype=None) for case in (NARROW, WIDE, LONG))]


ROUNDED = "static_cast<float>(static_cast<R>(values[i] + others[i]))"
whole = launch.kernel


def named(case):
    return case.name


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], ids=named)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    inputs = {name: torch.tensor(to_float64(array)).requires_grad_() for name, array in case.inputs().items()}
    exact = inputs["x"] + inputs["residual"]
    # Rounding has a derivative of 1.
    dtype = {mx.float32: torch.float32, mx.float16: torch.float16, BF16: torch.bfloat16}[case.cotangents()["r"].dtype]
    r = exact + (exact.float().to(dtype).double() - exact).detach()
    y = torch.nn.functional.rms_norm(r, r.shape[-1:], inputs.get("w"), case.eps)
    cotangents = [torch.tensor(to_float64(array)) for array in case.cotangents().values()]
    gradients = torch.autograd.grad([y, r], list(inputs.values()), cotangents)
    expected = case.expected()
    for name, value in zip(("y", "r", *(f"d{name}" for name in inputs)), (y, r, *gradients), strict=True):
        got = value.detach().numpy()
        np.testing.assert_allclose(expected[name], got, rtol=1e-9, atol=1e-11 * np.abs(got).max())


@pytest.mark.parametrize("case", CASES, ids=named)
def test_formula_agrees_with_float64(case):
    assert_formula_is_exact_to_its_dtype(case)


def test_gradient_of_the_formula_is_the_finite_difference():
    shapes = {"x": (3, 5), "residual": (3, 5), "w": (5,), "dy": (3, 5), "dr": (3, 5), "ds": (3,)}
    numbers = {name: np.array(random(shape, seed), np.float64) for seed, (name, shape) in enumerate(shapes.items())}

    def loss(**changed):
        x, residual, w, dy, dr, ds = (numbers | changed).values()
        r = x + residual
        s = 1 / np.sqrt((r**2).mean(-1) + 0.1)
        return (r * s[:, None] * w * dy).sum() + (r * dr).sum() + (s * ds).sum()

    arrays = {name: mx.array(each.astype(np.float32))[None] for name, each in numbers.items()}
    _, r, s = reference.add_rms_norm_forward(arrays["x"], arrays["residual"], arrays["w"], 0.1)
    gradients = reference.add_rms_norm_backward(**arrays, r=r, s=s)
    for name, got in zip(("x", "residual", "w"), gradients, strict=True):
        want = differences(lambda array, name=name: loss(**{name: array}), numbers[name])
        np.testing.assert_allclose(np.array(got[0]), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [True, False], ids=["w", "no-w"])
@pytest.mark.parametrize("dtypes", [*((dtype, dtype) for dtype in RTOL), (BF16, mx.float32)], ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtypes, weighted):
    rows = [random((2, 7, 33), seed, dtype) for seed, dtype in enumerate(dtypes)]
    r_dtype = mx.result_type(*rows)
    primals = [*rows, random((2, 33), 2, dtypes[0])][: 2 + weighted]
    cotangents = [random((2, 7, 33), 3, r_dtype), random((2, 7, 33), 4, r_dtype), random((2, 7), 5)]
    outputs, want = mx.vjp(
        lambda x, residual, w=None: reference.add_rms_norm_forward(x, residual, w, 0.1), primals, cotangents
    )
    got = reference.add_rms_norm_backward(*rows, primals[2] if weighted else None, *outputs[1:], *cotangents)
    assert (got[2] is not None) == weighted
    assert_gradients_agree(got[: 2 + weighted], want, dtypes[0])


def is_fast(case):
    """Mixed dtypes in short rows alone, and w of another dtype in rms_norm's tests."""
    if case.residual_dtype is not None:
        return case.shape[-1] == 40
    return case.w_dtype is None or case.w_dtype == case.dtype


@pytest.mark.parametrize("case", thinned(CASES, is_fast, every=2), ids=named)
def test_kernels_agree_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", PATHS, ids=named)
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, ids=named)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


# The norm is that of mx.fast.rms_norm: test_rms_norm.py says where it is less accurate.
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.values in ("normal", "ties", "ranges") and case.shape[-1] != 1],
    ids=named,
)
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


@pytest.mark.parametrize("case", CASES, ids=named)
def test_sum_is_mlxs_to_the_bit(case):
    inputs = case.inputs()
    assert mx.array_equal(case.run("emulator")["r"], inputs["x"] + inputs["residual"], equal_nan=True)


@pytest.mark.parametrize("columns", [40, 8200])
def test_norm_is_that_of_the_rounded_sum(columns, monkeypatch):
    x, residual = (random((3, columns), seed, BF16) for seed in (0, 1))
    w = random((columns,), 2)

    def error():
        y, r = add_rms_norm(x, residual, w, impl="emulator")
        want = reference.rms_norm(r, w)
        return (mx.abs(y - want).max() / mx.abs(want).max()).item()

    assert error() <= 2e-6
    monkeypatch.setattr(launch, "kernel", lambda name: broken(whole(name), ROUNDED, "values[i] + others[i]"))
    # Long rows are read again rounded: only the mean of their squares is off.
    assert error() > 2e-5


@pytest.mark.parametrize("values", ["1e30", "zeros", "1e-30", "3e37"])
@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_results_of_extreme_rows_are_finite(columns, values):
    for name, result in AddRMSNormCase((2, columns), values=values).run("emulator").items():
        assert mx.isfinite(result).all(), name


@pytest.mark.parametrize("case", PATHS, ids=named)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


# Each way through the kernels, with many rows for each threadgroup and with as many threadgroups as rows.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(3, 1), Sharing(1000, 1)], ids=str)
@pytest.mark.parametrize("case", PATHS, ids=named)
def test_any_sharing_of_rows_gives_the_result(case, sharing, monkeypatch):
    monkeypatch.setattr(launch, "FORWARD", sharing)
    monkeypatch.setattr(launch, "BACKWARD", sharing)
    assert disagreements(case, "emulator") == []


EPS = {case: replace(case, eps=0.5) for case in (WIDE, LONG)}
ADDED = "      forge::add(n, g);\n"
# Fault: text, what takes its place, a case, what must be found. What rms_norm has too is broken by its tests.
BREAKS = {
    "one scratch for all rows": ("scratch + turn * 32", "scratch", WIDE, "RaceError"),
    "no residual": (ROUNDED, "values[i]", WIDE, "y must be"),
    "no residual in long rows": (ROUNDED, "values[i]", LONG, "y must be"),
    "residual of another row": ("residual + rows.at(row)", "residual + rows.at(0)", WIDE, "r must be"),
    "the sum is the normalised one": (
        *("store_floats(total + rows.at(row), limit, values);", "store_floats(total + rows.at(row), 0, values);"),
        *(WIDE, "Error"),
    ),
    "no eps": ("rows.columns + eps", "rows.columns", EPS[WIDE], "y must be"),
    "no eps in long rows": ("columns + eps", "columns", EPS[LONG], "y must be"),
    "1/rms is not kept": ("inverse_rms[rows.first + row] = s;", "inverse_rms[row] = s;", NARROW, "Error"),
    "no dr": (ADDED, "", WIDE, "dx must be"),
    "no dr in long rows": (ADDED, "", LONG, "dx must be"),
    "dr of another row": ("others + rows.at(row)", "others + rows.at(0)", WIDE, "dx must be"),
    "dr of another long row": ("others + columns.at(row)", "others + columns.at(0)", LONG, "dx must be"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    found = found_in_broken(monkeypatch, old, new, case, sign)
    assert any(sign in line for line in found), found
