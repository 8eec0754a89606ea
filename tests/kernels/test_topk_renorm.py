"""The proofs of topk_renorm: its formula, its gradient, its kernels on the emulator and on a GPU, broken kernels."""

from dataclasses import replace
import math

from forge_mlx.kernels._common.proof import RTOL, disagreements
from forge_mlx.kernels.routing import reference, topk_op
from forge_mlx.kernels.routing.cases import CASES, TRAFFIC, TopkCase
from forge_mlx.kernels.routing.tiles import row_tiling
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_formula_agrees, broken, findings, gpu_engine, mostly_slow, poison, random, thinned
import torch

CASES = [case for case in CASES if case.op == "topk_renorm"]
TRAFFIC = [case for case in TRAFFIC if case.op == "topk_renorm"]
NAMES = {"ids": lambda case: case.name}
# Some lanes a row, half a simdgroup, several vectors a lane.
NARROW = TopkCase((70, 24), 4, mx.bfloat16, "experts")
WIDE = TopkCase((9, 128), 6, mx.float16, "tokens")
LONG = TopkCase((9, 300), 40, values="few")
PATHS = [NARROW, WIDE, LONG]


def scores(case):
    """p + bias as float32 has them."""
    added = [np.array(bias.astype(mx.float32)) for bias in case.constants().values()]
    return sum(added, np.array(case.inputs()["p"].astype(mx.float32)))


def has_ties(case):
    rows = np.sort(scores(case), axis=-1)
    return bool((rows[..., 1:] == rows[..., :-1]).any())


WITHOUT_TIES = [case for case in CASES if 0 not in case.shape and not has_ties(case)]


def test_most_cases_have_no_ties_and_many_have_some():
    assert len(WITHOUT_TIES) > 60
    assert len(CASES) - len(WITHOUT_TIES) > 30


@pytest.mark.parametrize("case", WITHOUT_TIES, **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    p, dgates = (
        torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64)
        for array in (case.inputs()["p"], case.cotangents()["gates"])
    )
    indices = torch.topk(torch.tensor(scores(case)), case.k, dim=-1).indices
    chosen = torch.gather(p.requires_grad_(), -1, indices)
    if case.normalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + case.eps)
    gates = torch.zeros_like(p).scatter(-1, indices, chosen)
    (dp,) = torch.autograd.grad(gates, p, dgates)
    assert np.array_equal(case.indices(), indices.numpy())
    for name, value in (("gates", gates.detach()), ("dp", dp)):
        # One gate of 1 has a gradient of 0, the difference of numbers around 1.
        scale = max(value.abs().max().item(), name == "dp")
        np.testing.assert_allclose(case.expected()[name], value.numpy(), rtol=1e-9, atol=1e-12 * scale)


def test_expected_indices_are_those_of_a_search_by_hand():
    for case in (LONG, replace(LONG, bias="experts"), replace(NARROW, bias="closed")):
        for row, indices in zip(scores(case), case.indices(), strict=True):
            left = list(range(case.shape[-1]))
            for index in indices.tolist():
                best = left[0]
                for each in left:
                    best = each if row[each] > row[best] else best
                assert index == best
                left.remove(best)


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    assert_formula_agrees(case)


@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_of_the_formula_is_the_finite_difference(normalize):
    random = np.random.default_rng(0)
    p, dgates = random.uniform(0.1, 1, (3, 6)), random.normal(size=(3, 6))
    bias = np.array([0, 5, 0, -9, 0, 0])
    chosen = np.argsort(-(p + bias), axis=-1)[:, :3]
    mask = np.zeros_like(p)
    np.put_along_axis(mask, chosen, 1, axis=-1)

    def loss(p):
        gates = mask * p / ((mask * p).sum(-1, keepdims=True) + 0.25 if normalize else 1)
        return (gates * dgates).sum()

    want, step = np.zeros_like(p), 1e-6
    for index in np.ndindex(p.shape):
        move = np.zeros_like(p)
        move[index] = step
        want[index] = (loss(p + move) - loss(p - move)) / (2 * step)
    got = reference.backward(
        mx.array(p.astype(np.float32)), mx.array(chosen), mx.array(dgates.astype(np.float32)), normalize, 0.25
    )
    np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype, normalize):
    p, dgates = mx.softmax(random((2, 7, 33), 0), axis=-1).astype(dtype), random((2, 7, 33), 1, dtype)
    bias = random((33,), 2)

    def gates(p):
        return reference.forward(p, bias, 5, normalize, 1e-3)[0]

    (_,), (want,) = mx.vjp(gates, [p], [dgates])
    got = reference.backward(p, reference.select(p, bias, 5), dgates, normalize, 1e-3)
    assert got.dtype == want.dtype == dtype
    difference = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item()
    assert difference <= 2 * RTOL[dtype] * mx.abs(want.astype(mx.float32)).max().item()


# One variant of the kernels a dtype, so that all ways of a bias are among the fast tests.
FAST_BIAS = {mx.float32: None, mx.float16: "tokens", mx.bfloat16: "experts"}


def is_fast(case):
    """Arrays of a few elements are declared otherwise, and more than 32 vectors a row are another variant."""
    is_usual = case.normalize and (case.bias, case.bias_dtype) == (FAST_BIAS[case.dtype], mx.float32)
    return is_usual and 8 <= case.shape[-1] <= 128 and math.prod(case.shape[:-1]) * case.k >= 8


@pytest.mark.parametrize("case", thinned(CASES, is_fast), **NAMES)
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


@pytest.mark.parametrize("rows", [1, 31, 33, 1025])
@pytest.mark.parametrize("experts", [1, 4, 5, 8, 9, 128, 129, 256, 257, 1023, 1024])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_tiles_cover_every_row_once(rows, experts, dtype):
    tiles = row_tiling(rows, experts, dtype)
    (threads, *_), held = tiles.grid, tiles.lanes * tiles.vectors * 16 // dtype.size
    assert threads % 32 == tiles.threadgroup[0] % 32 == 0
    assert rows * tiles.lanes <= threads < rows * tiles.lanes + 32
    assert held >= experts > held // 2 - 16 // dtype.size
    assert tiles.vectors == 1 or tiles.lanes == 32
    # A bit for each element of a lane.
    assert tiles.vectors * 16 // dtype.size <= 32


@pytest.mark.parametrize("case", thinned(TRAFFIC, is_fast), **NAMES)
def test_numbers_move_once_in_16_byte_accesses(case):
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        case.run("emulator")
    forward, backward = ({each.name: each for each in launch.counts.buffers} for launch in emulator.report().launches)
    nbytes, named = case.inputs()["p"].nbytes, math.prod(case.shape[:-1]) * case.k
    for read in (forward["p"], *([forward["bias"]] if case.bias == "tokens" else [])):
        size = nbytes if read.name == "p" else case.constants()["bias"].nbytes
        assert (read.bytes_read, read.reads) == (size, size // 16)
    for written in (forward["gates"], backward["dp"]):
        assert (written.bytes_written, written.writes) == (nbytes, nbytes // 16)
    assert forward["indices"].writes == backward["indices"].reads == backward["dgates"].reads == named
    assert "p" not in backward or backward["p"].reads == named * case.normalize


ONE = TopkCase((5, 8), 3)
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "the highest index of equals": (
        "other_index < index",
        "other_index > index",
        TopkCase((9, 40), 5, values="few"),
        "off must",
    ),
    "the last of equals in a lane": ("keys[v][i] > best.key", "keys[v][i] >= best.key", LONG, "indices_off must"),
    "the larger key is not taken": ("other_key > key || ", "", NARROW, "indices_off must"),
    "half the lanes are joined": ("step < lanes; step *= 2", "2 * step < lanes; step *= 2", NARROW, "indices_off must"),
    "NaN and negative numbers in the order of their bits": (
        "const bool is_negative = magnitude != 0 && bits >> 31 != 0",
        "const bool is_negative = false",
        TopkCase((9, 40), 5, values="normal", normalize=False),
        "indices_off must",
    ),
    "negative numbers are not turned round": (
        "is_negative ? ~bits",
        "is_negative ? (bits & 0x7fffffffu) + 1",
        TopkCase((9, 40), 40, values="normal", normalize=False),
        "indices_off must",
    ),
    "what is taken is taken again": ("== best.index ? 0 : keys", "== -1 ? 0 : keys", ONE, "must be"),
    "no bias of the experts": (
        "score += i < limit ? shared_bias[column + i] : 0.0f",
        "score += 0.0f",
        NARROW,
        "off must",
    ),
    "no bias of the tokens": ("score += added[i]", "score += 0.0f", WIDE, "indices_off must"),
    "the bias of the first token": ("bias + begin + column", "bias + column", WIDE, "indices_off must"),
    "no barrier behind the bias": ("    threadgroup_barrier(mem_flags::mem_threadgroup);", "", NARROW, "RaceError"),
    "the tail is chosen": (
        "i < limit ? forge::order_key(score) : 0",
        "forge::order_key(score)",
        TopkCase((5, 6), 6, values="normal", normalize=False),
        "BoundsError",
    ),
    "gates of the biased scores": (
        "float score = values[v][i]",
        "thread float& score = values[v][i]",
        NARROW,
        "gates must",
    ),
    "no eps": (", lanes) + eps;\n  }", ", lanes);\n  }", TopkCase((9, 40), 5, eps=0.5), "gates must"),
    "sum of all": ("keys[v][i] == 0 ? values[v][i] : 0.0f", "values[v][i]", NARROW, "gates must"),
    "gates everywhere": ("keys[v][i] == 0 ? values[v][i] / total : 0.0f", "values[v][i] / total", NARROW, "gates must"),
    "each lane has a sum of its own": ("forge::over_lanes<forge::Sum>(sum, lanes)", "sum", NARROW, "must be within"),
    "rows past the end": (
        "is_row ? clamp(columns - column, 0, N) : 0",
        "clamp(columns - column, 0, N)",
        TopkCase((9, 24), 4),
        "BoundsError",
    ),
    "columns past the end": ("clamp(columns - column, 0, N)", "N", TopkCase((9, 26), 4), "Error"),
    "indices of rows past the end": ("is_row && member == 0", "member == 0", TopkCase((9, 24), 4), "BoundsError"),
    "indices in reverse": ("* k + turn]", "* k + k - 1 - turn]", NARROW, "indices_off must"),
    "an index of another lane": ("ushort(leader + turn)", "ushort(turn)", NARROW, "Error"),
    "indices past the first lanes are left out": (
        "start < k; start += lanes",
        "start < 1; start += lanes",
        LONG,
        "dp must",
    ),
    "turns of other rows": ("is_row && mine < k ?", "is_row ?", replace(NARROW, k=3), "Error"),
    "the place in the vector only": ("vector / 32 * N + index % N", "index % N", LONG, "dp must"),
    "no dot product": ("(g[v][i] - dot) / total", "g[v][i] / total", NARROW, "dp must"),
    "the dot product without the gates": ("gates[v][i] / total * g[v][i]", "g[v][i]", NARROW, "dp must"),
    "a gradient beside the selection": (
        "? (g[v][i] - dot) / total : 0.0f",
        "? (g[v][i] - dot) / total : -dot",
        NARROW,
        "dp must",
    ),
    "no scale in the gradient": ("(g[v][i] - dot) / total", "g[v][i] - dot", NARROW, "dp must"),
    "the dot product of a lane": ("dot = forge::over_lanes<forge::Sum>(dot, lanes)", "dot = dot", NARROW, "dp must"),
    "the gradient of another element": ("dgates[at + i]", "dgates[at]", NARROW, "dp must"),
    "no look at the address": (
        " || !is_aligned(source, Chunk::bytes)",
        "",
        TopkCase((6, 48), 3, layout="shifted"),
        "AlignmentError",
    ),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = topk_op._kernel
    names = ["topk_renorm_forward", "topk_renorm_backward"]
    changed = {name: broken(whole(name), old, new) for name in names}
    assert any(changed[name].source != whole(name).source for name in names), "the text to replace is not there"
    assert findings([case], "emulator") == []
    monkeypatch.setattr(topk_op, "_kernel", changed.__getitem__)
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found
