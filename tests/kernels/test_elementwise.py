"""The proofs of the element-wise ops: formulas, gradients, kernels on the emulator and on a GPU, and broken kernels."""

import math

from forge_mlx.kernels._common import partial_sums
from forge_mlx.kernels._common.proof import RTOL, disagreements, to_float64
from forge_mlx.kernels._common.rows import Sharing
from forge_mlx.kernels.elementwise import launch, reference
from forge_mlx.kernels.elementwise.cases import (
    CASES,
    FACTOR,
    KINDS,
    AccumulateCase,
    AddBiasCase,
    AddCase,
    AxpyCase,
    MulCase,
    ScaleCase,
)
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import broken, findings, gpu_engine, mostly_slow, poison, thinned
import torch

NAMES = {"ids": lambda case: case.name}
# One case of each op, with a tail and with several threadgroups for the sums.
PATHS = [kind((150, 33)) for kind in KINDS]
FORMULAS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "scale": lambda x, s: x * s,
    "accumulate": lambda dst, src: dst + src,
    "axpy": lambda dst, src, s: dst + s * src,
    "add_bias": lambda x, b: x + b,
}


def in_float64(case):
    """The op of NumPy arrays or of tensors."""
    number = (FACTOR,) if case.has_factor and case.factor is None else ()
    return lambda *arrays: FORMULAS[case.op](*arrays, *number)


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    inputs = [torch.tensor(to_float64(array)).requires_grad_() for array in case.inputs().values()]
    out = in_float64(case)(*inputs)
    gradients = torch.autograd.grad(out, inputs, torch.tensor(to_float64(case.cotangents()["out"])))
    expected = case.expected()
    assert list(expected) == ["out", *(f"d{name}" for name in case.inputs())]
    for name, value in zip(expected, (out.detach(), *gradients), strict=True):
        got = value.numpy()
        np.testing.assert_allclose(expected[name], got, rtol=1e-9, atol=1e-9 * np.abs(got).max(initial=0))


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    # compare() measures by the formula itself, so it would not notice.
    expected, formula = case.expected(), case.run("formula")
    assert formula.keys() == expected.keys()
    for name, truth in expected.items():
        assert formula[name].shape == truth.shape, name
        error = np.abs(to_float64(formula[name]) - truth).max(initial=0)
        smallest = 2.0**-24 if formula[name].dtype == mx.float16 else np.finfo(np.float32).tiny
        assert error <= RTOL[formula[name].dtype] * np.abs(truth).max(initial=0) + smallest, name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op)
def test_written_gradient_is_the_finite_difference(kind):
    case = kind((3, 5))
    inputs = [to_float64(array) for array in case.inputs().values()]
    dout = to_float64(case.cotangents()["out"])
    gradients = case.run("formula")
    for index, name in enumerate(case.inputs()):
        want, step = np.zeros_like(inputs[index]), 1e-6
        for place in np.ndindex(want.shape):
            move = np.zeros_like(want)
            move[place] = step
            ends = [
                in_float64(case)(*inputs[:index], inputs[index] + sign * move, *inputs[index + 1 :]) for sign in (1, -1)
            ]
            want[place] = ((ends[0] - ends[1]) * dout).sum() / (2 * step)
        np.testing.assert_allclose(np.array(gradients[f"d{name}"]), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype, kind):
    case = kind((5, 33), dtype)
    inputs, cotangents = case.inputs(), case.cotangents()
    op = getattr(reference, case.op)
    _, want = mx.vjp(op, list(inputs.values()), list(cotangents.values()))
    got = case.formula(inputs, cotangents)
    for name, gradient in zip(inputs, want, strict=True):
        assert got[f"d{name}"].dtype == gradient.dtype == inputs[name].dtype
        a, b = to_float64(got[f"d{name}"]), to_float64(gradient)
        np.testing.assert_allclose(a, b, rtol=RTOL[dtype], atol=2 * RTOL[dtype])


def is_fast(case):
    """Arrays of a few elements, which are declared otherwise, in float32 alone."""
    return case.dtype == mx.float32 or math.prod(case.shape) >= 32


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


# From one threadgroup for all rows to one for each set of rows.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(3, 1), Sharing(1000, 1)], ids=str)
@pytest.mark.parametrize(
    "case", [AddBiasCase((70, 33)), AddBiasCase((9, 1300)), ScaleCase((70, 133)), AxpyCase((70, 133))], **NAMES
)
def test_any_sharing_gives_the_result(case, sharing, monkeypatch):
    for name in ("ROWS", "COLUMNS", "PRODUCTS"):
        monkeypatch.setattr(launch, name, sharing)
    assert disagreements(case, "emulator") == []


def test_every_height_of_the_column_sums_is_added_up():
    # How many rows lie above each other: each height takes other steps down to 1.
    for rows in range(1, 20):
        case = AddBiasCase((rows, 3))
        assert disagreements(case, "emulator") == []


TAIL, BF16, SHIFTED = MulCase((33,)), MulCase((33,), mx.bfloat16), MulCase((6, 48), layout="shifted")
SUM, MIXED, BIAS = AddCase((33,)), AccumulateCase((7, 41), mx.float32, mx.bfloat16), AddBiasCase((150, 33))
WIDE, BLOCKS, SCALE, AXPY = AddBiasCase((40, 1300)), AddBiasCase((90, 520)), ScaleCase((150, 133)), AxpyCase((150, 133))
NUMBER = ScaleCase((7, 33), factor=None)
# Fault: kernel, text, what takes its place, a case, what must be found.
BREAKS = {
    "product of a sum": ("elementwise", "PRODUCT ?", "true ?", SUM, "out must be"),
    "sum of a product": ("elementwise", "PRODUCT ?", "false ?", TAIL, "out must be"),
    "y is read one further": ("elementwise", "(y + at,", "(y + at + 1,", TAIL, "BoundsError"),
    "y is x": ("elementwise", "load_floats(y + at", "load_floats(x + at", TAIL, "out must be"),
    "out is written one further": ("elementwise", "(out + at,", "(out + at + 1,", TAIL, "BoundsError"),
    "no tail": ("elementwise", "min(size - at, size_t(N))", "N", TAIL, "BoundsError"),
    "half of each vector": ("elementwise", ".x) * N;", ".x) * N / 2;", BF16, "Error"),
    "the wider array's vector": ("elementwise", "sizeof(X) < sizeof(Y)", "sizeof(X) > sizeof(Y)", MIXED, "Uninit"),
    "no look at the address": ("elementwise", " || !is_aligned(source, Chunk::bytes)", "", SHIFTED, "AlignmentError"),
    "no look where it is written": ("mul_backward", "(dx + at", "(dx + 1 + at", TAIL, "BoundsError"),
    "gradients exchanged": (
        "mul_backward",
        "store_floats(dx + at, limit, others)",
        "store_floats(dx + at, limit, values)",
        TAIL,
        "dx must be",
    ),
    "no dout in dx": ("mul_backward", "others[i] *= gradient[i]", "others[i] *= 1.0f", TAIL, "dx must be"),
    "no dout in dy": ("mul_backward", "values[i] *= gradient[i]", "values[i] *= 1.0f", TAIL, "dy must be"),
    "no tail in the gradient": ("mul_backward", "min(size - at, size_t(N))", "N", TAIL, "BoundsError"),
    "no s": ("scaled", "values[i] *= factor", "values[i] *= 1.0f", SCALE, "out must be"),
    "no s in the gradient by a number": ("scaled", "values[i] *= factor", "values[i] *= 1.0f", NUMBER, "dx must be"),
    "no dst": ("scaled", "values[i] += others[i]", "values[i] += 0.0f", AXPY, "out must be"),
    "dst is src": ("scaled", "load_floats(dst + at", "load_floats(src + at", AXPY, "out must be"),
    "no tail in s src": ("scaled", "min(size - before, size_t(N))", "N", SCALE, "BoundsError"),
    "no s in dx": ("scaled_backward", "gradient[i] *= factor", "gradient[i] *= 1.0f", SCALE, "dx must be"),
    "s before the sum": ("scaled_backward", "values[i] * gradient[i]", "values[i] * factor", SCALE, "ds must be"),
    "an element of each vector is left out": (
        "scaled_backward",
        "int i = 1; i < N",
        "int i = 2; i < N",
        AXPY,
        "ds must",
    ),
    "a vector in two": ("scaled_backward", "left -= step", "left -= 2 * step", SCALE, "Error"),
    "past the end of the part": (
        "scaled_backward",
        "min(size - before, size_t(elements_per_group))",
        "size - before",
        SCALE,
        "Race",
    ),
    "past the last vector": ("scaled_backward", "min(left, N)", "N", SCALE, "BoundsError"),
    "no barrier for ds": (
        "scaled_backward",
        "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);",
        "",
        SCALE,
        "Race",
    ),
    "parts of the first only": (
        "scaled_backward",
        "+ threadgroup_position_in_grid.x] = sum",
        "] = sum",
        SCALE,
        "Error",
    ),
    "no b": ("add_bias", "values[i] += bias[i]", "values[i] += 0.0f", BIAS, "out must be"),
    "b of the next column": ("add_bias", "rows.own_lane * N,", "0,", BIAS, "Warning"),
    "every row reads b": ("add_bias", "rows.own_row == 0", "true", BIAS, "Race"),
    "no barrier behind b": (
        "add_bias",
        "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);",
        "",
        BIAS,
        "Race",
    ),
    "one row at once": ("add_bias", "row += rows.high", "row += 2 * rows.high", BIAS, "Uninit"),
    "columns of the first block": ("add_bias", "(group.x * lanes + own_lane)", "(own_lane)", WIDE, "Race"),
    "rows past the batch": (
        "add_bias",
        "metal::min(rows_per_group, shape[1] - before)",
        "rows_per_group",
        BIAS,
        "Bounds",
    ),
    "past the last column": ("add_bias", "metal::clamp(columns - column, 0, N)", "N", BIAS, "BoundsError"),
    "the rows of the first group": ("add_bias", "+ before;", "+ 0;", AddBiasCase((5000, 33)), "Error"),
    "no barrier for db": ("column_sums", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", BIAS, "Error"),
    "half of the height": ("column_sums", "height = below", "height = below / 2", BIAS, "db must be"),
    "odd heights lose a row": ("column_sums", "(height + 1) / 2", "height / 2", BIAS, "db must be"),
    "own sums twice": ("column_sums", "+ below * width)", "+ 0 * width)", BIAS, "Error"),
    "parts of the first group only": (
        "column_sums",
        "before + threadgroup_position_in_grid.y",
        "before",
        BLOCKS,
        "Error",
    ),
    "a row of two": ("column_sums", "row += rows.high", "row += 2 * rows.high", BIAS, "db must be"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    name, old, new, case, sign = BREAKS[fault]
    whole = launch.kernel
    changed = broken(whole(name), old, new)
    assert changed.source != whole(name).source, "the text to replace is not there"
    assert findings([case], "emulator") == []
    monkeypatch.setattr(launch, "kernel", lambda each: changed if each == name else whole(each))
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


@pytest.mark.parametrize("case", [BLOCKS, SCALE, AXPY], **NAMES)
def test_broken_second_stage_is_found(case, monkeypatch):
    changed = broken(partial_sums._kernel(), "sum += scratch", "sum = scratch")
    assert findings([case], "emulator") == []
    monkeypatch.setattr(partial_sums, "_kernel", lambda: changed)
    assert any("must be within" in line for line in findings([case], "emulator"))
