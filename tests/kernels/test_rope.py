"""The proofs of rope: its formula, its gradients, its kernel on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import RTOL, compare, disagreements
from forge_mlx.kernels.rope import op, reference
from forge_mlx.kernels.rope.cases import CASES, TRAFFIC, RopeCase
from forge_mlx.kernels.rope.tiles import MAX_COLUMNS, tiling
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_formula_agrees, broken, findings, gpu_engine, mostly_slow, poison, random, thinned
import torch

NAMES = {"ids": lambda case: case.name}
PLAIN = RopeCase((2, 5, 7, 40), at="rows")
NEIGHBOURS = RopeCase((2, 5, 7, 40), traditional=True, at="packed")
PART = RopeCase((2, 5, 7, 44), dims=24)
PATHS = [PLAIN, NEIGHBOURS, PART, replace(PART, layout="sliced"), replace(PLAIN, freqs=True)]


def with_torch(case):
    """y, dx and dfreqs by PyTorch in float64."""
    arrays = {name: np.array(each.astype(mx.float32), np.float64) for name, each in case.inputs().items()}
    dims = case.shape[-1] if case.dims is None else case.dims
    x = torch.tensor(arrays["x"], requires_grad=True)
    if case.freqs:
        freqs = torch.tensor(arrays["freqs"], requires_grad=True)
        inverse = 1 / freqs
    else:
        # As float32 holds them: what a base means is a part of the op.
        inverse = torch.tensor(np.float32(case.base ** (-np.arange(0, dims, 2) / dims))).double()
    angle = torch.tensor(case.token_positions() * case.scale)[:, None, :, None] * inverse
    a, b = (x[..., :dims:2], x[..., 1:dims:2]) if case.traditional else x[..., :dims].chunk(2, dim=-1)
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    turned = torch.stack(turned, -1).flatten(-2) if case.traditional else torch.cat(turned, -1)
    y = torch.cat([turned, x[..., dims:]], dim=-1)
    dy = torch.tensor(np.array(case.cotangents()["y"].astype(mx.float32), np.float64))
    gradients = torch.autograd.grad(y, [x, freqs] if case.freqs else [x], dy)
    return dict(zip(("y", "dx", "dfreqs"), (y.detach(), *gradients), strict=False))


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    expected, want = case.expected(), with_torch(case)
    assert expected.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(expected[name], value.numpy(), rtol=1e-8, atol=1e-9 * value.abs().max().item())


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    # An angle is a product in float32; test_angles_are_as_right_as_their_product has it alone.
    furthest = max(np.abs(np.array(each)).max() for each in case._where() if each is not None) + case.shape[2]
    assert_formula_agrees(case, furthest * case.scale * 2.0**-23)


def test_gradients_of_the_formula_are_finite_differences():
    x, freqs = np.array(random((1, 2, 3, 6), 0), np.float64), np.array([0.7, 1.9, 5.0])
    dy = np.array(random((1, 2, 3, 6), 1), np.float64)

    def loss(x, freqs):
        angle = np.arange(3)[:, None] * 0.5 / freqs
        a, b = x[..., :3], x[..., 3:]
        turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)
        return (turned * dy).sum()

    def differences(function, at, step=1e-6):
        found = np.zeros_like(at)
        for index in np.ndindex(at.shape):
            move = np.zeros_like(at)
            move[index] = step
            found[index] = (function(at + move) - function(at - move)) / (2 * step)
        return found

    inverse = mx.array((1 / freqs).astype(np.float32))[None]
    arrays = [mx.array(each.astype(np.float32)) for each in (x, dy)]
    dx, dinverse = reference.backward(arrays[0], mx.zeros((1, 1), mx.int32), inverse, arrays[1], 0.5, False)
    np.testing.assert_allclose(np.array(dx), differences(lambda x: loss(x, freqs), x), rtol=1e-4, atol=1e-5)
    of_freqs = differences(lambda freqs: loss(x, freqs), freqs)
    np.testing.assert_allclose(-np.array(dinverse[0]) / freqs**2, of_freqs, rtol=1e-4)


@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype, traditional):
    x, dy, inverse = random((2, 3, 5, 14), 0, dtype), random((2, 3, 5, 14), 1, dtype), mx.abs(random((2, 5), 2))
    positions = mx.array([[3], [9]])
    _, want = mx.vjp(lambda x, each: reference.forward(x, positions, each, 0.5, traditional), [x, inverse], [dy])
    got = reference.backward(x, positions, inverse, dy, 0.5, traditional)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        scale = mx.abs(b.astype(mx.float32)).max().item()
        assert mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() <= 2 * RTOL[dtype] * scale


def is_fast(case):
    """Positions of every token, and arrays of a few elements, which are declared otherwise, in float32 alone."""
    return case.dtype == mx.float32 or ((case.dims or case.shape[-1]) >= 16 and case.at != "packed")


@pytest.mark.parametrize("case", thinned(CASES, is_fast, every=2), **NAMES)
def test_kernel_agrees_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_kernel_overwrites_what_the_output_held(case, monkeypatch):
    poison(monkeypatch)
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_kernel_agrees_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_reference_engine_agrees(case):
    assert disagreements(case, "reference") == []


# What the reference is on a GPU. There mx.fast.rope has no gradient for freqs; its frequencies are less exact.
FAST = [each for each in CASES if not each.freqs and each.at in ("0", "7", "rows") and 0 not in each.shape]


@pytest.mark.parametrize("case", FAST, **NAMES)
def test_mx_fast_rope_has_the_same_meaning(case, monkeypatch):
    called = []
    fast = mx.fast.rope
    monkeypatch.setattr(mx.fast, "rope", lambda *args, **options: called.append(1) or fast(*args, **options))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    results = case.run("reference")
    assert called == [1]
    assert compare(case, results) == []


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("position", [1000, 100_000, 1_000_000])
def test_angles_are_as_right_as_their_product(position, impl):
    dims = 64
    x = mx.zeros((1, 1, 1, dims))
    x[..., : dims // 2] = 1
    y = np.array(op.rope(x, offset=position, impl=impl), np.float64)[0, 0, 0]
    exact = position * np.float64(np.float32(10000.0 ** (-np.arange(0, dims, 2) / dims)))
    off = np.angle((y[: dims // 2] + 1j * y[dims // 2 :]) * np.exp(-1j * exact))
    # Half a unit in the last place of the product, and the few of sine and cosine.
    assert (np.abs(off) <= 0.5 * np.spacing(exact.astype(np.float32)) + 5e-7).all()


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(("max_heads", "enough"), [(1, 1), (2, 1), (3, 1), (8, 1), (8, 10**9)])
@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_any_sharing_of_heads_gives_the_result(case, max_heads, enough, monkeypatch):
    monkeypatch.setattr(op, "tiling", lambda *args: tiling(*args, max_heads=max_heads, enough_threads=enough))
    assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 7, 5, 62), (8, 32, 1, 128), (4, 32, 4096, 128), (1, 2, 3, 5000)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_tiles_cover_every_element_once(shape, dtype):
    vector = 16 // dtype.size
    for dims in {2, shape[-1] // 4 * 2 or 2, shape[-1]}:
        tiles = tiling(shape, dims, dtype)
        pairs, rest = -(-dims // 2 // vector), -(-(shape[-1] - dims) // vector)
        assert tiles.columns == tiles.grid[0] == pairs + rest
        assert tiles.grid[1:] == (shape[2], shape[0] * -(-shape[1] // tiles.heads))
        assert tiles.threadgroup[0] <= MAX_COLUMNS
        assert np.prod(tiles.threadgroup) <= 256


# Fault: text, what takes its place, a case, what must be found.
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SHIFTED, TAIL = replace(PLAIN, layout="shifted"), RopeCase((1, 2, 3, 62))
BREAKS = {
    "no barrier": (BARRIER, "", PLAIN, "RaceError"),
    "frequencies are read beside": (
        "forge::load_with_step(\n        inverse",
        "forge::load_with_step(1 +\n        inverse",
        PLAIN,
        "Error",
    ),
    "the gradient turns on": ("direction * precise::sincos", "precise::sincos", PLAIN, "dx must be"),
    "sine for cosine": (
        "const float turned = a * cosine - b * sine",
        "const float turned = a * sine - b * cosine",
        PLAIN,
        "y must be",
    ),
    "plus for minus": ("a * cosine - b * sine", "a * cosine + b * sine", PLAIN, "y must be"),
    "no scale": ("(counted ? token : 0)) * scale", "(counted ? token : 0))", replace(PLAIN, scale=0.5), "y must be"),
    "no count": ("own_position + (counted ? token : 0)", "own_position", PLAIN, "y must be"),
    "counted twice": ("own_position + (counted ? token : 0)", "own_position + token", NEIGHBOURS, "y must be"),
    "one offset for all": ("positions[of_batch * positions_strides[0]", "positions[0", PLAIN, "y must be"),
    "heads overlap": ("z % blocks * each", "z % blocks", PLAIN, "RaceError"),
    "a head too many": ("min(first_head + each, heads)", "first_head + each", PLAIN, "Error"),
    "x in row order": (
        "first_head * step_of_heads + token * x_strides[2]",
        "(first_head * length + token) * size",
        replace(PLAIN, layout="heads"),
        "must be",
    ),
    "next head in row order": (
        "source += step_of_heads",
        "source += next_head",
        replace(PLAIN, layout="heads"),
        "Error",
    ),
    "no step": ("step == 1", "true", replace(PART, layout="sliced"), "must be"),
    "no step behind the pairs": (
        "source + column * step",
        "source + column",
        replace(PART, layout="sliced"),
        "must be",
    ),
    "no step in neighbours": ("2 * pair * step", "2 * pair", replace(NEIGHBOURS, layout="sliced"), "must be"),
    "the rest is shifted": ("2 * pairs + (thread", "2 * pairs + 1 + (thread", PART, "Error"),
    "no tail": ("clamp(pairs - pair, 0, N)", "N", TAIL, "Error"),
    "no tail of the rest": ("min(size - column, N)", "N", replace(PART, shape=(2, 5, 7, 47)), "Error"),
    "no look at the address": (" || !is_aligned(source, Chunk::bytes)", "", SHIFTED, "AlignmentError"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = op._kernel()
    changed = broken(whole, old, new)
    assert changed.source != whole.source, "the text to replace is not there"
    # Several heads for each thread, the last one with fewer.
    monkeypatch.setattr(op, "tiling", lambda *args: tiling(*args, max_heads=3, enough_threads=1))
    assert findings([case], "emulator") == []
    monkeypatch.setattr(op, "_kernel", lambda: changed)
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


@pytest.mark.parametrize("case", TRAFFIC, **NAMES)
def test_elements_move_once_in_16_byte_accesses(case):
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(case.run("emulator"))
    nbytes = case.inputs()["x"].nbytes
    launches = emulator.report().launches
    assert len(launches) == 2
    for launch in launches:
        buffers = {each.name: each for each in launch.counts.buffers}
        assert (buffers["x"].bytes_read, buffers["x"].reads) == (nbytes, nbytes // 16)
        assert (buffers["y"].bytes_written, buffers["y"].writes) == (nbytes, nbytes // 16)
        others = sum(buffers[name].bytes_read for name in ("positions", "inverse"))
        assert 2 * nbytes + others <= 1.05 * case.ideal_bytes()["forward"]
