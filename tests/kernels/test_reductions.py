"""The proofs of sum and sum_squares: formula, gradient, kernels on emulator and GPU, broken kernels, traffic."""

from functools import cache

from forge_mlx.kernels._common.proof import compare, disagreements
from forge_mlx.kernels._common.rows import Sharing
from forge_mlx.kernels.reductions import op, reference
from forge_mlx.kernels.reductions.cases import CASES, TRAFFIC, SumCase, SumSquaresCase
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_formula_agrees, broken, findings, gpu_engine, mostly_slow, poison
import torch

NAMES = {"ids": lambda case: case.name}
# One threadgroup, several, several arrays: of each op.
PATHS = [
    case(shapes)
    for case in (SumCase, SumSquaresCase)
    for shapes in (((1000,),), ((9, 4099),), ((40,), (3, 5000), (7,)))
]


def torch_array(array):
    return torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64, requires_grad=True)


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    inputs = {name: torch_array(array) for name, array in case.inputs().items()}
    arrays = [array for name, array in inputs.items() if name != "mul"]
    total = sum((array**2 if case.op == "sum_squares" else array).sum() for array in arrays) * inputs.get("mul", 1)
    gradients = torch.autograd.grad(total, list(inputs.values()), torch.tensor(0.75, dtype=torch.float64))
    expected = case.expected()
    for name, value in zip(("total", *(f"d{name}" for name in inputs)), (total, *gradients), strict=True):
        want = value.detach().numpy()
        # A sum may cancel.
        size = max(1e-300, *(np.abs(array.detach().numpy()).sum() for array in arrays)) if name != "dmul" else 1
        np.testing.assert_allclose(expected[name], want, rtol=1e-9, atol=1e-14 * size)


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    # mx.sum adds one number after the other.
    assert_formula_agrees(case, 2e-5)


@pytest.mark.parametrize("squares", [False, True], ids=["sum", "sum_squares"])
def test_gradient_of_the_formula_is_the_finite_difference(squares):
    x = np.random.default_rng(0).normal(size=(2, 5))
    dtotal = np.array([0.7, -1.3])

    def loss(x):
        return ((x**2 if squares else x).sum(axis=1) * dtotal).sum()

    want, step = np.zeros_like(x), 1e-6
    for index in np.ndindex(x.shape):
        move = np.zeros_like(x)
        move[index] = step
        want[index] = (loss(x + move) - loss(x - move)) / (2 * step)
    (got,) = reference.gradients((mx.array(x.astype(np.float32)),), mx.array(dtotal.astype(np.float32)), squares)
    np.testing.assert_allclose(np.array(got), want, rtol=1e-5)


@pytest.mark.parametrize("squares", [False, True], ids=["sum", "sum_squares"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("total", [reference.total, reference.total_in_rows], ids=["formula", "cpu"])
def test_written_gradient_is_mlx_autodiff_of_the_forward(total, dtype, squares):
    arrays = [mx.random.normal((2, size), key=mx.random.key(size)).astype(dtype) for size in (33, 9001)]
    dtotal = mx.array([0.7, -1.3])
    _, want = mx.vjp(lambda *arrays: total(arrays, squares), arrays, [dtotal])
    got = reference.gradients(tuple(arrays), dtotal, squares)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)), rtol=1e-2)


@pytest.mark.parametrize("case", CASES, **NAMES)
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


def test_reference_engine_is_accurate_where_mx_sum_is_not():
    x = mx.full((20_000_003,), 0.1)
    one = float(np.float32(0.1))
    assert op.sum(x, impl="reference").item() == pytest.approx(x.size * one, rel=1e-5)
    assert op.sum_squares(x, impl="reference").item() == pytest.approx(x.size * one**2, rel=1e-5)


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


# From one threadgroup for all to so many that their sums need a stage between.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(3, 1), Sharing(4, 1), Sharing(1000, 1)], ids=str)
@pytest.mark.parametrize("case", [*PATHS, SumCase(((40, 4096),))], **NAMES)
def test_any_sharing_gives_the_result(case, sharing, monkeypatch):
    monkeypatch.setattr(op, "SHARING", sharing)
    assert disagreements(case, "emulator") == []


def test_many_arrays_are_joined_in_several_stages(monkeypatch):
    monkeypatch.setattr(op, "SHARING", Sharing(2, 1))
    monkeypatch.setattr(op, "THREADS", 32)
    case = SumSquaresCase(((300,),) * 70)
    emulator.reset()
    results = case.run("emulator")
    # Each array has two threadgroups, their 140 sums two more, and those one; then the gradients.
    assert emulator.report().started == 70 + 2 + 70
    assert compare(case, results) == []


def test_infinite_and_nan_elements_reach_the_result():
    for impl in ("emulator", "reference"):
        for size in (40, 5000):
            x = np.ones(size, np.float32)
            x[size // 2] = np.inf
            assert op.sum(mx.array(x), impl=impl).item() == op.sum_squares(mx.array(x), impl=impl).item() == np.inf
            x[size - 1] = np.nan
            assert np.isnan(op.sum(mx.array(x), impl=impl).item())
            assert np.isnan(op.sum_squares(mx.array(x), impl=impl).item())


SHORT, LONG, SOME = SumSquaresCase(((1023,),)), SumCase(((20_005,),)), SumSquaresCase(((40,), (3, 5000), (7,)))
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "no barrier in the reduction": ("metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);", "", LONG, "Race"),
    "no squares": ("SQUARES ? values[i] * values[i] : values[i]", "values[i]", SHORT, "total must be"),
    "squares always": ("SQUARES ? values[i] * values[i] : values[i]", "values[i] * values[i]", LONG, "total must be"),
    "a vector in two": ("left -= step", "left -= 2 * step", LONG, "total must be"),
    "an element of each vector is left out": ("int i = 1; i < N", "int i = 2; i < N", SHORT, "total must be"),
    "past the end of the part": ("min(elements_per_group, columns - first)", "columns - first", LONG, "total must be"),
    "past the end of the row": ("min(elements_per_group, columns - first)", "elements_per_group", LONG, "BoundsError"),
    "past the last vector": ("min(left, N)", "N", SHORT, "BoundsError"),
    "parts overlap": ("x * elements_per_group", "x * (elements_per_group - 4)", LONG, "total must be"),
    "all threads of the first group": ("threadgroup_position_in_grid.x] = sum", "0] = sum", LONG, "Error"),
    "no 2": ("2.0f * dtotal", "dtotal", SHORT, "dx0 must be"),
    "no dtotal": ("2.0f * dtotal[thread_position_in_grid.y]", "2.0f", SOME, "dx0 must be"),
    "dx goes past the end": ("min(columns - int(first), N)", "N", SHORT, "BoundsError"),
    "x is read one further": ("load_floats(x + at,", "load_floats(x + at + 1,", SHORT, "BoundsError"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole, names = op._kernel, ["sum_elements", "sum_squares_backward"]
    changed = {name: broken(whole(name), old, new) for name in names}
    assert any(changed[name].source != whole(name).source for name in names), "the text to replace is not there"
    assert findings([case], "emulator") == []
    monkeypatch.setattr(op, "_kernel", changed.__getitem__)
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


@cache
def counts(case):
    """Launches of a forward and a backward pass, in order: name -> buffer -> (bytes, accesses) read or written."""
    inputs = list(case.inputs().values())
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(mx.vjp(case.function("emulator"), inputs, [mx.array(0.75)]))
    return [
        (
            launch.name,
            {
                each.name: (each.bytes_read, each.reads) if each.bytes_read else (each.bytes_written, each.writes)
                for each in launch.counts.buffers
            },
        )
        for launch in emulator.report().launches
    ]


@pytest.mark.parametrize("case", [case for case in TRAFFIC if len(case.shapes) == 1], **NAMES)
def test_elements_are_read_and_written_once_in_16_byte_accesses(case):
    (x,) = case.inputs().values()
    # The last vector may be a part of one, which goes element by element.
    least = x.nbytes // 16
    once = [(x.nbytes, least + x.nbytes % 16 // x.dtype.size)]
    launches = counts(case)
    assert [launches[0][1]["x"]] == once
    backward = [buffers for name, buffers in launches if name == "sum_squares_backward"]
    assert [each["x"] for each in backward] == [each["dx"] for each in backward]
    assert [each["x"] for each in backward] == (once if case.op == "sum_squares" else [])


@pytest.mark.parametrize("case", TRAFFIC, **NAMES)
def test_the_second_stage_is_small(case):
    nbytes = sum(array.nbytes for name, array in case.inputs().items() if name != "mul")
    launches = [buffers for name, buffers in counts(case) if name == "sum_elements"]
    assert len(launches) == len(case.shapes) + 1
    assert sum(each["x"][0] + each["sums"][0] for each in launches) <= 1.005 * nbytes
