"""The proofs of rms_norm: its formula, its gradient, its kernels on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import RTOL, disagreements
from forge_mlx.kernels._common.rows import BACKWARD, FORWARD, Sharing, column_tiling, tiling
from forge_mlx.kernels.norms import launch, reference
from forge_mlx.kernels.norms.cases import CASES, RMSNormCase
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

CASES = [case for case in CASES if case.op == "rms_norm"]
BY_NAME = {case.name: case for case in CASES}
# One case for each way through the kernels: narrow rows, rows of a threadgroup, long rows, with and without w.
PATHS = [
    RMSNormCase((70, 40)),
    RMSNormCase((9, 264)),
    RMSNormCase((9, 4104)),
    RMSNormCase((70, 40), w_dtype=None),
    RMSNormCase((9, 264), w_dtype=None),
    RMSNormCase((9, 4104), w_dtype=None),
]


def test_names_of_cases_are_unique():
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], ids=lambda case: case.name)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    x, w, dy = (
        None if array is None else torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64)
        for array in (case.inputs()["x"], case.inputs().get("w"), case.cotangents()["y"])
    )
    primals = [array.requires_grad_() for array in (x, w) if array is not None]
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], w, case.eps)
    gradients = torch.autograd.grad(y, primals, dy)
    expected = case.expected()
    for name, value in zip(("y", "dx", "dw"), (y, *gradients), strict=False):
        got = value.detach().numpy()
        np.testing.assert_allclose(expected[name], got, rtol=1e-9, atol=1e-11 * np.abs(got).max())


# In a row of one element what is left of the gradient is what eps makes of it, far below its terms.
@pytest.mark.parametrize("case", [case for case in CASES if case.shape[-1] != 1], ids=lambda case: case.name)
def test_formula_agrees_with_float64(case):
    assert_formula_is_exact_to_its_dtype(case)


def test_gradient_of_the_formula_is_the_finite_difference():
    x, w = np.array(random((3, 5), 0), np.float64), np.array(random((5,), 1), np.float64)
    dy, dr = np.array(random((3, 5), 2), np.float64), np.array(random((3,), 3), np.float64)

    def loss(x, w):
        r = 1 / np.sqrt((x**2).mean(-1) + 0.1)
        return (x * r[:, None] * w * dy).sum() + (r * dr).sum()

    arrays = [mx.array(each.astype(np.float32))[None] for each in (x, w, dy, dr)]
    _, r = reference.rms_norm_forward(*arrays[:2], 0.1)
    dx, dw = reference.rms_norm_backward(*arrays[:2], r, *arrays[2:])
    np.testing.assert_allclose(np.array(dx[0]), differences(lambda x: loss(x, w), x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(dw[0]), differences(lambda w: loss(x, w), w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [True, False], ids=["w", "no-w"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype, weighted):
    x, w = random((2, 7, 33), 0, dtype), random((2, 33), 1, dtype)
    dy, dr = random((2, 7, 33), 2, dtype), random((2, 7), 3)
    primals = [x, w] if weighted else [x]
    outputs, want = mx.vjp(lambda x, w=None: reference.rms_norm_forward(x, w, 0.1), primals, [dy, dr])
    got = reference.rms_norm_backward(x, w if weighted else None, outputs[1], dy, dr)
    assert (got[1] is not None) == weighted
    assert_gradients_agree(got[: 1 + weighted], want, dtype)


def is_fast(case):
    """Rows without w, very short or many in float32 alone; mixed dtypes in short rows and in long ones."""
    if case.w_dtype is not None and case.w_dtype != case.dtype:
        return (case.shape, case.dtype) in (((4, 40), mx.bfloat16), ((3, 4100), mx.float32))
    return case.dtype == mx.float32 or (
        case.w_dtype is not None and len(case.shape) == 2 and case.shape[-1] not in range(1, 8)
    )


@pytest.mark.parametrize("case", thinned(CASES, is_fast, every=2), ids=lambda case: case.name)
def test_kernels_agree_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", PATHS, ids=lambda case: case.name)
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


# mx.fast.rms_norm rounds once more in 16 bits, and its gradient is no longer accurate of very large rows, nor of rows
# of one element, which it takes from terms that cancel.
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.values in ("normal", "ties", "ranges") and case.shape[-1] != 1],
    ids=lambda case: case.name,
)
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


@pytest.mark.parametrize("values", ["1e30", "zeros", "1e-30", "3e37"])
@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_results_of_extreme_rows_are_finite(columns, values):
    for name, result in RMSNormCase((2, columns), values=values).run("emulator").items():
        assert mx.isfinite(result).all(), name


@pytest.mark.parametrize("case", PATHS, ids=lambda case: case.name)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


# Each way through the kernels, with many rows for each threadgroup and with as many threadgroups as rows.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(3, 1), Sharing(1000, 1), Sharing(1000, 1000)], ids=str)
@pytest.mark.parametrize("case", PATHS, ids=lambda case: case.name)
def test_any_sharing_of_rows_gives_the_result(case, sharing, monkeypatch):
    monkeypatch.setattr(launch, "FORWARD", sharing)
    monkeypatch.setattr(launch, "BACKWARD", sharing)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("batches", [1, 3, 2000])
@pytest.mark.parametrize("rows", [1, 7, 513, 4096, 1_000_003])
@pytest.mark.parametrize("columns", [1, 64, 128, 129, 1000, 4096])
@pytest.mark.parametrize("sharing", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_tiles_cover_every_row_once(batches, rows, columns, sharing):
    for tiles in (
        tiling(batches, rows, columns, mx.float32, sharing),
        column_tiling(batches, rows, columns, mx.float32, sharing),
    ):
        assert tiles.groups * tiles.rows_per_group >= rows > (tiles.groups - 1) * tiles.rows_per_group
        assert tiles.threads % 32 == 0
        assert 32 <= tiles.threads <= 1024
    assert tiles.blocks * tiles.threads * 4 >= columns
    short = tiling(batches, rows, columns, mx.float32, sharing)
    assert short.groups * batches <= max(sharing.groups, batches)
    assert (short.lanes or short.threads) * 4 >= columns
    # Offsets from a threadgroup's first row are ints.
    assert short.rows_per_group * columns < 2**31 or batches * rows * columns > 10**12


NARROW, WIDE, LONG = PATHS[:3]
EPS = {case: replace(case, eps=0.5) for case in PATHS}
TAIL, SHIFTED = RMSNormCase((9, 263)), replace(WIDE, layout="shifted")
LONG_TAIL = RMSNormCase((9, 4103))
BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
UNROLL = "#pragma clang loop unroll(full)\n"
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "no barrier in the reduction": (BARRIER, "", WIDE, "RaceError"),
    "one scratch for all rows": ("scratch + turn * 32", "scratch", WIDE, "RaceError"),
    "no barrier before w is shared": (f"{BARRIER}\n{UNROLL}  for", f"{UNROLL}  for", NARROW, "Error"),
    "no barrier before dw takes the place of w": (
        f"{BARRIER}\n{UNROLL}      for",
        f"{UNROLL}      for",
        NARROW,
        "Race",
    ),
    "no barrier before simdgroups are joined": (f"{BARRIER}\n      for (int of", "for (int of", NARROW, "Race"),
    "no eps": ("rows.columns + eps", "rows.columns", EPS[WIDE], "y must be"),
    "no eps in long rows": ("columns + eps", "columns", EPS[LONG], "y must be"),
    "no 1/C": ("sum[0] / rows.columns + eps", "sum[0] + eps", WIDE, "y must be"),
    "no 1/C in the gradient": ("0.0f, sum[0] / rows.columns", "0.0f, sum[0]", WIDE, "dx must be"),
    "no 1/C in the gradient of long rows": ("(sum[0] + dr[row] * r) / columns", "sum[0]", LONG, "dx must be"),
    "x is read one further": ("load_floats(x + rows.at(row),", "load_floats(x + rows.at(row) + 1,", WIDE, "Bounds"),
    "y is written one further": (
        "store_floats(y + rows.at(row),",
        "store_floats(y + rows.at(row) + 1,",
        WIDE,
        "Bounds",
    ),
    "rows past the end": ("row < count ? limit : 0", "limit", NARROW, "BoundsError"),
    "columns past the end": ("metal::clamp(columns - column, 0, N)", "N", WIDE, "BoundsError"),
    "columns past the end of long rows": ("metal::min(columns - column, N)", "N", LONG_TAIL, "BoundsError"),
    "no w": ("values[i] *= weight[i];", "", WIDE, "y must be"),
    "no w in long rows": ("values[i] *= weight[i];", "", LONG, "y must be"),
    "no w in the gradient": ("g[i] *= weight[i];", "", WIDE, "dx must be"),
    "no w in the gradient of long rows": ("g[i] *= weight[i];", "", LONG, "dx must be"),
    "no w in the sums of long rows": (
        *("g[i] *= weight[i];\n      }\n      sum_g", "}\n      sum_g", LONG, "dx must be"),
    ),
    "1/rms of another row": ("values[first + row] : 0.0f", "values[first] : 0.0f", WIDE, "dx must be"),
    "lanes are not joined": ("sums[i] += metal::simd_shuffle_xor(sums[i], step);", "", NARROW, "dw must be"),
    "half the lanes are joined": ("step < lanes; step *= 2", "2 * step < lanes; step *= 2", NARROW, "y must be"),
    "a part in the place of another": ("part = size_t(group.z) * groups.y + group.y", "part = 0", LONG, "Error"),
    "no look at the address": (" || !is_aligned(source, Chunk::bytes)", "", SHIFTED, "AlignmentError"),
    "no tail": ("i < limit ? static_cast<float>(source[i]) : 0.0f", "source[i]", TAIL, "BoundsError"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    found = found_in_broken(monkeypatch, old, new, case, sign)
    assert any(sign in line for line in found), found


def test_missing_gpu_is_skipped_or_fails_where_one_is_required(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    # Both are expected each time: a skip that comes out of here would pass for a skipped test.
    outcomes = (pytest.skip.Exception, pytest.fail.Exception)
    for value, outcome in ((None, outcomes[0]), ("0", outcomes[0]), ("1", outcomes[1])):
        if value is None:
            monkeypatch.delenv("FORGE_REQUIRE_METAL", raising=False)
        else:
            monkeypatch.setenv("FORGE_REQUIRE_METAL", value)
        with pytest.raises(outcomes) as raised:
            gpu_engine()
        assert raised.type is outcome
