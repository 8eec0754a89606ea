"""The proofs of cross_entropy: its formula, gradients, kernels on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace
import math

from forge_mlx.kernels._common.proof import RTOL, disagreements, to_float64
from forge_mlx.kernels._common.rows import FORWARD, Sharing, vector_size
from forge_mlx.kernels.cross_entropy import op
from forge_mlx.kernels.cross_entropy.cases import CASES, EVERY, CrossEntropyCase, token_losses
from forge_mlx.kernels.cross_entropy.options import Options
from forge_mlx.kernels.cross_entropy.reference import row_gradients, row_losses
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import broken, findings, gpu_engine, mostly_slow, poison, random, thinned
import torch

# One case for each way through the kernels: narrow rows, rows of one vector a thread, longer ones; then with a cap.
NARROW, WIDE, LONG = PLAIN = [CrossEntropyCase((70, 40)), CrossEntropyCase((9, 264)), CrossEntropyCase((9, 4104))]
NARROW_CAP, WIDE_CAP, LONG_CAP = CAPPED = [replace(case, options=EVERY) for case in PLAIN]
PATHS = PLAIN + CAPPED
NAMES = {"ids": lambda case: case.name}
OPTIONS = {
    "plain": Options(),
    "smoothing": Options(label_smoothing=0.2),
    "softcap": Options(softcap=1.5),
    "z_loss": Options(z_loss=0.05),
    "every": EVERY,
}


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def differentiated_by_pytorch(case):
    """Loss, dlogits and dweights in float64."""
    options = case.options
    inputs = {
        name: torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64, requires_grad=True)
        for name, array in case.inputs().items()
    }
    targets = torch.tensor(np.array(case.constants()["targets"]), dtype=torch.int64)
    kept = targets != options.ignore_index
    z = inputs["logits"]
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


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    expected = case.expected()
    for name, value in differentiated_by_pytorch(case).items():
        np.testing.assert_allclose(expected[name], value.numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS)
def test_written_out_gradient_is_the_finite_difference(options):
    random = np.random.default_rng(0)
    logits, targets, step = random.normal(size=(4, 5)) * 2, np.array([1, -100, 4, 0]), 1e-6
    want = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        move = np.zeros_like(logits)
        move[index] = step
        up, down = (token_losses(logits + each, targets, OPTIONS[options])[0].sum() for each in (move, -move))
        want[index] = (up - down) / (2 * step)
    np.testing.assert_allclose(token_losses(logits, targets, OPTIONS[options])[1], want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS)
def test_written_gradient_is_mlx_autodiff_of_the_losses(options):
    logits, targets = random((2, 7, 33), 0), mx.random.randint(0, 33, (2, 7), key=mx.random.key(1))
    targets[:, 2] = -100
    cotangents = [random((2, 7), 2), random((2, 7, 2), 3)]
    (_, parts), (want,) = mx.vjp(lambda logits: row_losses(logits, targets, OPTIONS[options]), [logits], cotangents)
    got = row_gradients(logits, targets, parts, *cotangents, OPTIONS[options])
    assert mx.abs(got - want).max().item() <= 1e-6 * mx.abs(want).max().item()


@pytest.mark.parametrize("options", OPTIONS)
def test_formula_of_a_token_that_does_not_exist_is_nan_and_of_an_ignored_one_0(options):
    logits, targets, ones = random((4, 9), 0), mx.array([3, 9, -100, -1]), mx.ones((4,))
    losses, parts = row_losses(logits, targets, OPTIONS[options])
    gradient = row_gradients(logits, targets, parts, ones, mx.ones((4, 2)), OPTIONS[options])
    assert mx.isnan(losses).tolist() == mx.isnan(gradient).any(axis=1).tolist() == [False, True, False, True]
    assert losses[2].item() == 0
    assert not parts[2].any()
    assert not gradient[2].any()


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    # compare() measures by the formula itself, so it would not notice.
    expected = case.expected()
    for name, result in case.run("formula").items():
        error = np.abs(to_float64(result) - expected[name]).max(initial=0)
        allowed = RTOL[case.dtype] * np.abs(expected[name]).max(initial=0)
        # The gradient of a weight is a difference of losses, which are float32.
        assert error <= allowed + (1e-6 * np.abs(expected["loss"]).max(initial=0) if name == "dweights" else 0), name


def is_fast(case):
    """In 16 bits neither few elements nor many rows, whose arrays are declared otherwise, and a cap in one dtype."""
    rows = math.prod(case.shape[:-1])
    if case.dtype == mx.float32 or rows == 0:
        return True
    return rows < 8 <= rows * case.shape[-1] and (case.dtype, case.options) != (mx.float16, EVERY)


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


# With many rows for each threadgroup and with as many threadgroups as rows.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(3, 1), Sharing(1000, 1), Sharing(1000, 1000)], ids=str)
@pytest.mark.parametrize("case", PLAIN, **NAMES)
def test_any_sharing_of_rows_gives_the_result(case, sharing, monkeypatch):
    monkeypatch.setattr(op, "FORWARD", sharing)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("rows", [1, 7, 513, 4096, 1_000_003])
@pytest.mark.parametrize("columns", [1, 64, 128, 129, 1000, 1024, 1025, 4096, 128256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_threads_of_the_gradient_cover_every_vector_once(rows, columns, dtype):
    blocks, threads, width, rows_per_group, groups = op._column_blocks(rows, columns, dtype)
    assert groups * rows_per_group >= rows > (groups - 1) * rows_per_group
    assert threads % 32 == threads % width == 0
    assert threads <= 256
    size = vector_size(dtype)
    assert blocks * width * size >= columns
    assert (blocks - 1) * width * size < columns
    assert blocks * groups <= max(FORWARD.groups, blocks)


TAIL, SHIFTED = CrossEntropyCase((9, 263)), replace(WIDE, layout="shifted")
LOW, PEAKED = CrossEntropyCase((4, 7), values="low"), CrossEntropyCase((9, 20), values="20")
UNWEIGHTED = replace(WIDE, weighted=False)
SMOOTHED = replace(WIDE, options=Options(label_smoothing=0.1))
BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "no barrier in the reduction": (BARRIER, "", WIDE, "RaceError"),
    "one scratch for all rows": ("scratch + turn * 128", "scratch", WIDE, "RaceError"),
    "lanes are not brought to one largest": (
        "total * metal::precise::exp(own - largest)",
        "total",
        PEAKED,
        "loss must be",
    ),
    "a vector is not brought to the next one's largest": (
        "total *= metal::precise",
        "metal::precise",
        LONG,
        "loss must",
    ),
    "the largest begins at 0": ("largest(-FLT_MAX)", "largest(0.0f)", LOW, "loss must be"),
    "the tail is the largest": (
        "i < limit ? metal::max(largest, x[i]) : largest",
        "metal::max(largest, x[i])",
        LOW,
        "loss must be",
    ),
    "the tail counts": (
        "i < limit ? metal::precise::exp(x[i] - largest) : 0.0f",
        "metal::precise::exp(x[i] - largest)",
        TAIL,
        "loss must be",
    ),
    "an ignored row has a loss": ("if (code == IGNORED)", "if (false)", UNWEIGHTED, "loss must be"),
    "an ignored row has a gradient": (
        "is_kept = code != forge::IGNORED",
        "is_kept = true",
        UNWEIGHTED,
        "dlogits must be",
    ),
    "the target is one further": ("code - column)", "code - column - 1)", WIDE, "loss must be"),
    "the target is one further in the gradient": ("column + i == code", "column + i == code + 1", WIDE, "dlogits must"),
    "a target in another simdgroup is lost": ("scratch[96 + lane]", "target", WIDE, "loss must be"),
    "logits of other simdgroups are lost": ("scratch[64 + lane]", "logits", SMOOTHED, "loss must be"),
    "no smoothing": ("if (smoothing > 0.0f)", "if (false)", SMOOTHED, "loss must be"),
    "the target keeps the share that is smoothed": ("(1.0f - smoothing) * (", "(", SMOOTHED, "loss must be"),
    "no 1/V": ("logits / vocabulary", "logits", SMOOTHED, "loss must be"),
    "no smoothing in the gradient": ("of_sum - of_all", "of_sum", SMOOTHED, "dlogits must be"),
    "no 1/V in the gradient": ("smoothing / vocabulary", "smoothing", SMOOTHED, "dlogits must be"),
    "smoothing takes nothing from the target": ("d * (1.0f - smoothing)", "d", SMOOTHED, "dlogits must be"),
    "no z_loss": ("value + z_loss * l * l", "value", WIDE_CAP, "loss must be"),
    "no z_loss in the gradient": ("(1.0f + 2.0f * z_loss * (largest + spread))", "1.0f", WIDE_CAP, "dlogits must be"),
    "no cap": ("z[i] = forge::capped<CAP>(z[i], cap, inverse_cap);", "", WIDE_CAP, "loss must be"),
    "no cap in the gradient": (
        "forge::capped<CAP>(values[i], cap, inverse_cap)",
        "values[i]",
        WIDE_CAP,
        "dlogits must",
    ),
    "no slope of the cap": ("dz * (1.0f - t * t)", "dz", WIDE_CAP, "dlogits must be"),
    "logits are read one further": ("logits + of_row + column", "logits + of_row + column + 1", LONG, "BoundsError"),
    "the gradient is written one further": (
        "dlogits + row * columns + column",
        "dlogits + row * columns + column + 1",
        replace(WIDE, shape=(1, 264)),
        "BoundsError",
    ),
    "rows past the end": ("is_row && lane % lanes == 0 ?", "lane % lanes == 0 ?", NARROW, "BoundsError"),
    "rows past the end of the gradient": ("is_row ? limit : 0", "limit", NARROW, "BoundsError"),
    "columns past the end": (
        "limit = min(columns - column, N)",
        "limit = N",
        CrossEntropyCase((1, 4102)),
        "BoundsError",
    ),
    "columns past the end of the gradient": (
        "clamp(columns - column, 0, N)",
        "N",
        CrossEntropyCase((1, 4102)),
        "BoundsError",
    ),
    "half the lanes are joined": ("step < lanes; step *= 2", "2 * step < lanes; step *= 2", NARROW, "loss must be"),
    "no look at the address": (" || !is_aligned(source, Chunk::bytes)", "", SHIFTED, "AlignmentError"),
    "no tail": ("i < limit ? static_cast<float>(source[i]) : 0.0f", "source[i]", TAIL, "BoundsError"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = op._kernel
    # The other kernel includes the same headers, and would only be compiled once more.
    name = "cross_entropy_backward" if "gradient" in fault or sign.startswith("dlogits") else "cross_entropy_forward"
    changed = broken(whole(name), old, new)
    assert changed.source != whole(name).source, "the text to replace is not there"
    # Several rows for each threadgroup, so that loops go round.
    monkeypatch.setattr(op, "FORWARD", Sharing(2, 1))
    assert findings([case], "emulator") == []
    monkeypatch.setattr(op, "_kernel", lambda asked: changed if asked == name else whole(asked))
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found
