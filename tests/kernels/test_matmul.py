"""The proofs of matmul: its formula, its gradients, its kernels on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import RTOL, disagreements
from forge_mlx.kernels.matmul import launch, reference
from forge_mlx.kernels.matmul.cases import CASES, MatmulCase
from forge_mlx.kernels.matmul.tiles import VARIANTS
from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import MetalError, MetalWarning
from forge_mlx.metal.emulator.settings import current_settings
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_formula_agrees, broken, findings, gpu_engine, poison, random
import torch

BY_NAME = {case.name: case for case in CASES}
FULL = [case for case in CASES if 0 not in (*case.a, *case.b)]
# One case with batches and a sum for each kernel, and one whose depth is split.
PATHS = [
    *(MatmulCase((2, 35, 20), (3, 1, 20, 44), c=(3, 2, 35, 44), transpose="b", variant=each) for each in VARIANTS),
    MatmulCase((5, 400), (400, 9), transpose="b", variant="naive"),
    MatmulCase((20, 530), (530, 18), variant="tiled"),
    MatmulCase((40, 2056), (2056, 24), variant="simdgroup"),
]
# Half of the cases in float32, which is every path of every kernel. Of the others what is not the same there: loads and
# stores, and of simdgroup, which takes long to compile, one product in bfloat16 and one in float16.
WIDE = [case for case in CASES if case.dtype == mx.float32]
FAST = [
    case
    for case in CASES
    if case in WIDE[::2]
    or (case.variant == "simdgroup" and case.dtype == mx.float16 and case.layout == "shifted")
    or (case.variant == "simdgroup" and case.dtype == mx.bfloat16 and case.a == (65, 33))
    or (case.variant != "simdgroup" and case.values == "normal" and case.layout in ("contiguous", "shifted"))
]


def names(cases, fast=()):
    marks = [() if case in fast or not fast else pytest.mark.slow for case in cases]
    return [pytest.param(case, marks=mark, id=case.name) for case, mark in zip(cases, marks, strict=True)]


def test_names_of_cases_are_unique():
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("case", names(FULL))
def test_expected_values_are_those_of_pytorch_in_float64(case):
    primals = [
        torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64).requires_grad_()
        for array in case.inputs().values()
    ]
    dy = torch.tensor(np.array(case.cotangents()["y"].astype(mx.float32)), dtype=torch.float64)
    a, b = (each.mT if name in case.transpose else each for name, each in zip("ab", primals, strict=False))
    y = torch.matmul(a, b) + (primals[2] if len(primals) == 3 else 0)
    expected = case.expected()
    results = [y, *torch.autograd.grad(y, primals, dy)]
    for name, value in zip(expected, results, strict=True):
        got = value.detach().numpy()
        np.testing.assert_allclose(expected[name], got, rtol=1e-9, atol=1e-11 * np.abs(got).max(), err_msg=name)


@pytest.mark.parametrize("case", names(CASES))
def test_formula_agrees_with_float64(case):
    assert_formula_agrees(case)


@pytest.mark.parametrize("transpose_a", [False, True], ids=["a", "a-transposed"])
@pytest.mark.parametrize("transpose_b", [False, True], ids=["b", "b-transposed"])
def test_gradient_of_the_formula_is_the_finite_difference(transpose_a, transpose_b):
    shapes = [(2, 5, 3) if transpose_a else (2, 3, 5), (4, 5) if transpose_b else (5, 4), (3, 1)]
    arrays = [np.array(random(shape, seed), np.float64) for seed, shape in enumerate(shapes)]
    dy = np.array(random((2, 3, 4), 3), np.float64)

    def loss(a, b, c):
        return ((np.swapaxes(a, -1, -2) if transpose_a else a) @ (b.T if transpose_b else b) * dy + c * dy).sum()

    got = reference.backward(*(mx.array(x.astype(np.float32)) for x in (*arrays, dy)), transpose_a, transpose_b)
    for position, at in enumerate(arrays):
        want = np.zeros_like(at)
        for index in np.ndindex(at.shape):
            moved = [[x.copy() for x in arrays] for _ in range(2)]
            moved[0][position][index] += 1e-6
            moved[1][position][index] -= 1e-6
            want[index] = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        np.testing.assert_allclose(np.array(got[position]), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("shapes", [((2, 1, 5, 7), (3, 7, 4), (3, 1, 4)), ((5, 7), (2, 7, 4), (4,))], ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(shapes, dtype):
    primals = [random(shape, seed, dtype) for seed, shape in enumerate(shapes)]

    def forward(a, b, c):
        return reference.forward(a, b, c, False, False, mx.float32)

    (y,), want = mx.vjp(forward, primals, [mx.zeros((2, 3, 5, 4) if len(shapes[0]) == 4 else (2, 5, 4))])
    dy = random(y.shape, 7)
    want = mx.vjp(forward, primals, [dy])[1]
    got = reference.backward(*primals, dy, False, False)
    for name, a, b in zip(("da", "db", "dc"), got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        scale = mx.abs(b.astype(mx.float32)).max().item()
        assert mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() <= 2 * RTOL[dtype] * scale, name


@pytest.mark.parametrize("case", names(CASES, FAST))
def test_kernels_agree_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", names(PATHS))
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", names(CASES))
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


@pytest.mark.parametrize("case", names(CASES))
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


@pytest.mark.parametrize("case", names(PATHS))
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    with emulator.settings(schedules=3, seed=1):
        again = case.run("emulator")
    assert all(mx.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("c", [None, (44,), (35, 44)], ids=str)
def test_simdgroup_knows_no_order_of_lanes(c):
    nvidia = (*current_settings().defines, ("FORGE_TILE_LAYOUT", "2"))
    with emulator.settings(defines=nvidia):
        assert of_forward(MatmulCase((35, 20), (20, 44), c=c, transpose="b", variant="simdgroup")) == []


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_infinities_and_nan_reach_only_their_row_and_column(variant, dtype):
    a, b = np.ones((20, 18), np.float32), np.ones((18, 36), np.float32)
    a[3, 2], b[5, 30] = np.inf, np.nan
    case = MatmulCase((20, 18), (18, 36), dtype, variant=variant)
    y = np.array(case.function("emulator")(mx.array(a).astype(dtype), mx.array(b).astype(dtype)).astype(mx.float32))
    want = np.full((20, 36), 18.0)
    want[3] = np.inf
    want[:, 30] = np.nan
    np.testing.assert_array_equal(y, want)


def path(variant, **options):
    return MatmulCase(**{"a": (40, 20), "b": (20, 36), "variant": variant, **options})


NAIVE, TILED, SIMDGROUP = (path(variant) for variant in VARIANTS)
# Three batches; a repeated, so that its gradient is a sum over batches; c of all elements; a depth that is split.
BATCHED = {variant: path(variant, a=(3, 20, 10), b=(3, 10, 24)) for variant in VARIANTS}
REPEATED = {variant: path(variant, b=(3, 20, 36)) for variant in VARIANTS}
ADDED = {variant: path(variant, c=(40, 36)) for variant in VARIANTS}
SPLIT = path("tiled", a=(17, 530), b=(530, 18))
UNEVEN = path("simdgroup", a=(64, 33), b=(33, 66))
SHIFTED = path("simdgroup", a=(64, 32), b=(32, 64), layout="shifted")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
PART = "if (part > 1)"
A_VALUE, B_VALUE = "a_inside && a_depth < left ?", "b_inside && b_depth < left ?"
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "a batch of a for one of b": (
        "inner * strides[B_INNER]",
        "inner * strides[A_INNER]",
        BATCHED["naive"],
        "y must be",
    ),
    "one batch of c for all": (
        "inner * strides[C_INNER]",
        "0",
        replace(BATCHED["tiled"], c=(3, 20, 24)),
        "y must be",
    ),
    "a split goes on to the end": ("first + metal::min(depth - first, split_depth)", "depth", SPLIT, "y must be"),
    "a split goes past the end": ("metal::min(depth - first, split_depth)", "split_depth", SPLIT, "BoundsError"),
    **{f"{name}: one batch is summed": (PART, "if (false)", case, "da must be") for name, case in REPEATED.items()},
    "naive: threads past the end": ("if (index >= uint(rows) * uint(width))", "if (false)", NAIVE, "BoundsError"),
    "naive: a stays where it is": ("left += a_step;", "", NAIVE, "y must be"),
    "naive: a transposed read as it lies": (
        "transpose_a ? row : row * depth",
        "row * depth",
        replace(NAIVE, transpose="a"),
        "BoundsError",
    ),
    "naive: b transposed read as it lies": (
        "transpose_b ? 1 : width",
        "width",
        replace(NAIVE, transpose="b"),
        "BoundsError",
    ),
    "naive: no c": ("sum += static_cast<float>(c[work.c + row * c_stride + column]);", "", ADDED["naive"], "y must be"),
    "tiled: no barrier before tiles are written": (
        f"// The last tiles have been read.\n      {BARRIER}",
        "",
        TILED,
        "RaceError",
    ),
    "tiled: no barrier before tiles are read": (f"b_value;\n      {BARRIER}", "b_value;", TILED, "UninitialisedError"),
    "tiled: rows past the end of a": (A_VALUE, "a_depth < left ?", TILED, "BoundsError"),
    "tiled: depth past the end of a": (A_VALUE, "a_inside ?", TILED, "BoundsError"),
    "tiled: columns past the end of b": (B_VALUE, "b_depth < left ?", TILED, "BoundsError"),
    "tiled: depth past the end of b": (B_VALUE, "b_inside ?", TILED, "BoundsError"),
    "tiled: rows past the end of y": ("row >= rows || column >= columns", "column >= columns", TILED, "BoundsError"),
    "tiled: columns past the end of y": ("row >= rows || column >= columns", "row >= rows", TILED, "RaceError"),
    "tiled: no c": (
        "sum += static_cast<float>(c[work.c + size_t(row) * c_stride + column]);",
        "",
        ADDED["tiled"],
        "y must be",
    ),
    "simdgroup: no barrier before blocks are written": (
        f"// The last blocks have been read.\n      {BARRIER}",
        "",
        SIMDGROUP,
        "RaceError",
    ),
    "simdgroup: no barrier before blocks are read": (
        f"{BARRIER}\n      if (!has",
        "if (!has",
        SIMDGROUP,
        "UninitialisedError",
    ),
    "simdgroup: every block is whole": ("rows >= ROWS && columns >= COLUMNS", "true", SIMDGROUP, "BoundsError"),
    "simdgroup: no look at the address": (" || !is_aligned(source, 16)", "", SHIFTED, "AlignmentError"),
    "simdgroup: no look at the row's length": ("stride % Own::vector != 0 || ", "", UNEVEN, "AlignmentError"),
    "simdgroup: rows past the end": ("row < rows && column < columns;", "column < columns;", SIMDGROUP, "BoundsError"),
    "simdgroup: columns past the end": ("row < rows && column < columns;", "row < rows;", SIMDGROUP, "BoundsError"),
    "simdgroup: edges are not zeros": (": T(0);", ": T(1);", SIMDGROUP, "must be"),
    "simdgroup: no c": ("sum.fragment(i, j) += added.fragment(0, j);", "", ADDED["simdgroup"], "y must be"),
    "simdgroup: one row of c": ("if (i == 0 || !is_one_row)", "if (i == 0)", ADDED["simdgroup"], "y must be"),
    "simdgroup: whole stores": ("rows - row >= OWN && columns - column >= OWN", "true", SIMDGROUP, "Error"),
    "simdgroup: b of the first simdgroup for all": (": own_column);", ": 0);", SIMDGROUP, "y must be"),
}


def findings_of(case):
    return findings([case], "emulator")


def of_forward(case):
    """The same of the result alone: a third of the kernels to compile."""
    inputs = list(case.inputs().values())
    try:
        y = case.function("emulator")(*inputs)
    except (MetalError, MetalWarning) as error:
        return [type(error).__name__]
    want = case.expected()["y"]
    return [] if np.abs(np.array(y) - want).max() <= 1e-5 * np.abs(want).max() else ["y must be something else"]


# Each of these compiles the largest kernel once more.
SLOW = [fault for fault in BREAKS if fault.startswith("simdgroup") and "barrier" not in fault and "look" not in fault]


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow if fault in SLOW else ()) for fault in BREAKS]
)
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = launch._kernel
    changed = broken(whole(case.variant), old, new)
    assert changed.source != whole(case.variant).source, "the text to replace is not there"
    found = of_forward if sign.startswith("y") or "Error" in sign else findings_of
    assert found(case) == []
    monkeypatch.setattr(launch, "_kernel", lambda _: changed)
    lines = found(case)
    assert any(sign in line for line in lines), lines
