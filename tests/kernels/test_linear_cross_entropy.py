"""The proofs of linear_cross_entropy: formula, gradients, chunks on the emulator and on a GPU, broken code."""

from dataclasses import replace
from itertools import product

from forge_mlx.kernels._common.proof import RTOL, disagreements
from forge_mlx.kernels.cross_entropy import op as cross_entropy_op
from forge_mlx.kernels.cross_entropy.options import Options
from forge_mlx.kernels.linear_cross_entropy import chunks, functions, reference
from forge_mlx.kernels.linear_cross_entropy.cases import CASES, EVERY, LinearCrossEntropyCase
from forge_mlx.kernels.linear_cross_entropy.chunks import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    SMALL_CHUNK_BYTES,
    SMALL_CHUNK_ROWS,
    chunk_rows,
)
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_formula_agrees, broken, findings, gpu_engine, poison, random
import torch

NAMES = {"ids": lambda case: case.name}
USUAL = LinearCrossEntropyCase((9, 24), 40)
EARLY = ("none", "all", "hidden")
PATHS = [replace(USUAL, early=early, options=EVERY) for early in EARLY]


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def differentiated_by_pytorch(case):
    """Loss and gradients of whole logits in float64."""
    options = case.options
    inputs = {
        name: torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64, requires_grad=True)
        for name, array in case.inputs().items()
    }
    targets = torch.tensor(np.array(case.constants()["targets"]), dtype=torch.int64)
    kept = targets != options.ignore_index
    z = torch.nn.functional.linear(inputs["hidden"], inputs["weight"], inputs.get("bias"))
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    losses = torch.nn.functional.cross_entropy(
        z.reshape(-1, z.shape[-1]),
        targets.flatten(),
        reduction="none",
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
    ).reshape(targets.shape)
    if options.z_loss:
        losses = losses + kept.double() * options.z_loss * torch.logsumexp(z, -1) ** 2
    weights = kept.double() * inputs.get("weights", torch.ones(targets.shape, dtype=torch.float64))
    loss = losses * weights
    if case.reduction != "none":
        loss = loss.sum()
    if case.reduction == "mean" and kept.any():
        loss = loss / weights.sum()
    dloss = torch.tensor(np.array(case.cotangents()["loss"]), dtype=torch.float64)
    gradients = torch.autograd.grad(loss, list(inputs.values()), dloss)
    return {"loss": loss.detach()} | {f"d{name}": each for name, each in zip(inputs, gradients, strict=True)}


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    expected = case.expected()
    for name, value in differentiated_by_pytorch(case).items():
        np.testing.assert_allclose(expected[name], value.numpy(), rtol=1e-9, atol=1e-13)


COMBINATIONS = list(
    product((-100, 3), (0.0, 0.1, 1.0), (True, False), ("mean", "sum", "none"), ("none", "some", "all"))
)


@pytest.mark.parametrize(("ignore_index", "smoothing", "weighted", "reduction", "ignored"), COMBINATIONS)
def test_every_combination_is_that_of_pytorch(ignore_index, smoothing, weighted, reduction, ignored):
    """Loss and gradients of the reference engine, each gradient recomputed or early, with and without the rest."""
    for early, softcap, z_loss in (("none", None, 0.0), ("all", 2.0, 0.0), ("hidden", None, 0.1), ("none", 2.0, 0.1)):
        options = Options(ignore_index, smoothing, softcap, z_loss)
        rest = {"weighted": weighted, "reduction": reduction, "ignored": ignored, "options": options}
        case = LinearCrossEntropyCase((7, 6), 11, early=early, chunk=3, **rest)
        # A target that is drawn may be ignore_index too; then it is ignored in both.
        got, want = case.run("reference"), differentiated_by_pytorch(case)
        for name, value in want.items():
            truth = value.numpy()
            assert got[name].shape == truth.shape
            assert np.abs(np.array(got[name], np.float64) - truth).max() <= 1e-5 * np.abs(truth).max(), (name, early)


def test_written_out_gradient_is_the_finite_difference():
    arrays = {name: np.array(random(shape, 3 + index)) for index, (name, shape) in enumerate(SHAPES.items())}
    targets, dloss = mx.array([1, -100, 6]), np.array([0.7, 0.5, -1.2])

    def loss(**arrays):
        z = 3 * np.tanh((arrays["hidden"] @ arrays["weight"].T + arrays["bias"]) / 3)
        lse = np.log(np.exp(z).sum(-1))
        losses = lse - 0.9 * z[range(3), [1, 0, 6]] - 0.1 * z.mean(-1) + 0.01 * lse**2
        return (losses * dloss)[[0, 2]].sum()

    got = reference.backward(*(mx.array(each) for each in arrays.values()), targets, mx.array(dloss), EVERY)
    for (name, at), gradient in zip(arrays.items(), got, strict=True):
        at = at.astype(np.float64)
        differences = np.zeros_like(at)
        for index in np.ndindex(at.shape):
            move = np.zeros_like(at)
            move[index] = 1e-6
            there, here = (loss(**arrays | {name: at + sign * move}) for sign in (1, -1))
            differences[index] = (there - here) / 2e-6
        np.testing.assert_allclose(np.array(gradient), differences, rtol=1e-4, atol=1e-5)


SHAPES = {"hidden": (3, 5), "weight": (7, 5), "bias": (7,)}


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_losses(dtype, biased):
    primals = [random(shape, index, dtype) for index, shape in enumerate(SHAPES.values())][: 2 + biased]
    targets, dloss = mx.array([1, -100, 6]), random((3,), 7)

    def losses(hidden, weight, bias=None):
        return reference.losses(hidden, weight, bias, targets, EVERY)

    _, want = mx.vjp(losses, primals, [dloss])
    got = reference.backward(*primals, *([] if biased else [None]), targets, dloss, EVERY)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == dtype
        scale = mx.abs(b.astype(mx.float32)).max().item()
        assert mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() <= 2 * RTOL[dtype] * scale


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    assert_formula_agrees(case, differences={"dweights": "loss"})


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_kernels_agree_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    assert all(mx.array_equal(first[name], each) for name, each in case.run("emulator").items())
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_two_runs_of_the_reference_engine_give_the_same_bits(case):
    first, second = case.run("reference"), case.run("reference")
    assert all(mx.array_equal(first[name], second[name]) for name in first)


# Text of the kernels of cross_entropy, what takes its place, what must be found.
BROKEN_KERNELS = {
    "cross_entropy_forward": ("(logits + ", "(logits + 1 + ", "BoundsError"),
    "cross_entropy_backward": ("gradient.at<CAP>(", "0.5f * gradient.at<CAP>(", "dhidden must be"),
}


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("name", BROKEN_KERNELS)
def test_broken_kernel_is_found(name, early, monkeypatch):
    old, new, sign = BROKEN_KERNELS[name]
    whole = cross_entropy_op._kernel
    changed = broken(whole(name), old, new)
    assert changed.source != whole(name).source
    case = replace(USUAL, early=early)
    monkeypatch.setattr(cross_entropy_op, "_kernel", lambda each: changed if each == name else whole(each))
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


@pytest.fixture
def fresh_functions():
    """Functions that are made anew, so that a patched module counts."""
    for each in (functions._gradients, functions._weighted_sum, functions._scaled):
        each.cache_clear()
    yield
    for each in (functions._gradients, functions._weighted_sum, functions._scaled):
        each.cache_clear()


def _first_chunk_only(total, a, b):
    return chunks._product(a, b).astype(mx.float32) if total is None else total


# Fault of the chunks: attribute, what takes its place, what must be found.
BREAKS = {
    "weight's gradient of one chunk": ("_add_product", _first_chunk_only, "dweight must be"),
    "logits without bias": ("_logits", lambda _setup, x, w, _bias: x @ w.T, "loss must be"),
    "a row twice and one not at all": (
        "_slices",
        lambda *_, **__: (slice(0, 4), slice(4, 8), slice(7, 8)),
        "must be",
    ),
    "bias's gradient of one chunk": ("_add_sum", lambda _total, dz: mx.sum(dz, axis=0), "dbias must be"),
}


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("fault", BREAKS)
@pytest.mark.usefixtures("fresh_functions")
def test_broken_chunks_are_found(fault, early, monkeypatch):
    name, replacement, sign = BREAKS[fault]
    monkeypatch.setattr(chunks, name, replacement)
    found = disagreements(replace(USUAL, early=early), "reference")
    assert any(sign in line for line in found), found


@pytest.mark.parametrize("vocabulary", [1, 1000, 2048, 4096, 4097, 128256])
@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1000, 8192])
@pytest.mark.parametrize("device", [mx.cpu, mx.gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("adds_weight", [True, False], ids=["dweight", "no-dweight"])
def test_chunks_share_out_all_rows_and_keep_their_limit(rows, vocabulary, device, adds_weight):
    chunk = chunk_rows(rows, 4 * vocabulary, device, adds_weight=adds_weight)
    fewest = CHUNK_ROWS if adds_weight else SMALL_CHUNK_ROWS[device]
    limit = (CHUNK_BYTES if adds_weight else SMALL_CHUNK_BYTES)[device]
    assert 1 <= chunk <= rows
    assert chunk <= fewest or chunk * 4 * vocabulary <= limit
    # As few chunks as the limit allows, and as even.
    most = max(fewest, limit // (4 * vocabulary))
    count = -(-rows // chunk)
    assert count == -(-rows // most)
    assert chunk * count - rows < count
