"""The proofs of embedding: its formula, its gradient, its kernels on the emulator and on a GPU, and broken kernels."""

from dataclasses import replace
import math

from forge_mlx.kernels._common.proof import RTOL, compare, disagreements
from forge_mlx.kernels.embedding import op, reference
from forge_mlx.kernels.embedding.cases import CASES, TRAFFIC, EmbeddingCase
from forge_mlx.kernels.embedding.tiles import chunk_size, tiling
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_formula_agrees, broken, findings, gpu_engine, mostly_slow, poison, thinned
import torch

NAMES = {"ids": lambda case: case.name}
FEW = EmbeddingCase((33, 40), (50,), ids="outside")
WIDE = EmbeddingCase((7, 264), (400,), ids="runs")
NARROW = EmbeddingCase((40, 20), (1500,), ids="runs")
PATHS = [FEW, WIDE, NARROW]
KERNELS = ["embedding_forward", "embedding_segments", "embedding_chunks", "embedding_backward"]


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.table], **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    weight = torch.tensor(np.array(case.inputs()["weight"].astype(mx.float32)), dtype=torch.float64)
    dy = torch.tensor(np.array(case.cotangents()["y"].astype(mx.float32)), dtype=torch.float64)
    known = torch.tensor(((case.numbers() >= 0) & (case.numbers() < case.table[0])).astype(bool))
    ids = torch.tensor(np.where(known.numpy(), case.numbers(), 0).astype(np.int64))
    y = torch.nn.functional.embedding(ids, weight.requires_grad_()) * known[..., None]
    (dweight,) = torch.autograd.grad(y, weight, dy)
    for name, value in (("y", y.detach()), ("dweight", dweight)):
        scale = value.abs().max().item() if value.numel() else 0
        np.testing.assert_allclose(case.expected()[name], value.numpy(), rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    assert_formula_agrees(case)


def test_gradient_of_the_formula_is_the_finite_difference():
    weight, dy = np.random.default_rng(0).normal(size=(2, 3, 2))
    ids = np.array([2, -1, 2])

    def loss(weight):
        return (np.where(ids[:, None] < 0, 0, weight[ids]) * dy).sum()

    want, step = np.zeros_like(weight), 1e-6
    for index in np.ndindex(weight.shape):
        move = np.zeros_like(weight)
        move[index] = step
        want[index] = (loss(weight + move) - loss(weight - move)) / (2 * step)
    arrays = [mx.array(each.astype(np.float32)) for each in (weight, dy)]
    got = reference.backward(arrays[0], mx.array(ids.astype(np.int32)), arrays[1])
    np.testing.assert_allclose(np.array(got), want, rtol=1e-5, atol=1e-6)


# MLX sums an id's rows in the table's own dtype: no id more than twice, so that 16 bits do not tell.
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype):
    weight = mx.random.normal((7, 33), key=mx.random.key(0)).astype(dtype)
    dy = mx.random.normal((5, 33), key=mx.random.key(1)).astype(dtype)
    ids = mx.array([6, -1, 0, 6, 2])
    _, (want,) = mx.vjp(lambda weight: reference.forward(weight, ids), [weight], [dy])
    got = reference.backward(weight, ids, dy)
    assert got.dtype == want.dtype == dtype
    assert mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item() <= RTOL[dtype]
    assert mx.abs(want).max() > 0.5


def is_fast(case):
    """Tables and ids of a few elements, which are declared otherwise, in float32 alone."""
    return case.dtype == mx.float32 or min(case.table[0], math.prod(case.ids_shape)) not in range(1, 8)


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


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("case", [*PATHS, EmbeddingCase((60, 40), (50,), mx.bfloat16, "words")], **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case, impl):
    first = case.run(impl)
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run(impl)
        assert all(mx.array_equal(first[name], again[name]) for name in first)


def test_order_of_the_sum_is_that_of_the_ids():
    ids = mx.array(np.random.default_rng(0).integers(-1, 9, 5000).astype(np.int32))
    sorted_ids, order = op._sorted(ids)
    assert np.array_equal(order, np.argsort(np.array(ids), kind="stable"))
    assert np.array_equal(sorted_ids, np.sort(np.array(ids)))


def test_ids_as_large_as_int32_are_sorted():
    ids = mx.array([2**31 - 2, -1, 0, 2**31 - 2], mx.int32)
    sorted_ids, order = op._sorted(ids)
    assert sorted_ids.tolist() == [-1, 0, 2**31 - 2, 2**31 - 2]
    assert order.tolist() == [1, 2, 0, 3]


def test_one_id_everywhere_is_shared_out_over_threads():
    count = 20_000
    case = EmbeddingCase((3, 4), (count,), ids="one")
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        results = case.run("emulator")
    assert compare(case, results) == []
    chunks, backward = (
        next(each.counts for each in emulator.report().launches if each.name == name)
        for name in ("embedding_chunks", "embedding_backward")
    )
    read = {launch: {each.name: each for each in launch.buffers} for launch in (chunks, backward)}
    # The one thread of that id adds up sums of chunks, and at most two chunks of rows.
    size = chunk_size(count)
    assert 100 <= size <= 300
    assert read[backward]["chunk_sums"].reads == count // size
    assert read[backward]["dy"].reads == count % size
    assert read[chunks]["dy"].reads == count - count % size
    assert chunks.threadgroups * 256 >= count // size


@pytest.mark.parametrize("count", [1, 63, 64, 4096, 100_000, 10**6, 2**31 - 1])
def test_chunks_keep_every_thread_near_the_root(count):
    size = chunk_size(count)
    assert size & (size - 1) == 0
    assert size % 32 == 0
    assert 2 * size + count // size <= max(192, 5 * count**0.5)


@pytest.mark.parametrize("rows", [1, 31, 33, 1025])
@pytest.mark.parametrize("columns", [1, 4, 5, 127, 128, 129, 4096])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_tiles_cover_every_row_once(rows, columns, dtype):
    tiles = tiling(rows, columns, dtype)
    across, parts, _ = tiles.grid
    assert across % 32 == 0
    assert rows * tiles.lanes <= across < rows * tiles.lanes + 32
    width = tiles.lanes * 16 // dtype.size
    assert parts * width >= columns > (parts - 1) * width
    assert tiles.threadgroup[0] % 32 == 0


# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "an unknown id is read": ("id >= 0 && id < weight_shape[0]", "true", replace(FEW, ids="none"), "y must be"),
    "the row beside": ("size_t(max(id, 0)) * columns", "size_t(max(id, 1) - 1) * columns", FEW, "y must be"),
    "the id of another row": (
        "const int read = is_row && member == 0 ? ids[row]",
        "const int read = is_row && member == 0 ? ids[max(row, 1) - 1]",
        FEW,
        "y must be",
    ),
    "rows past the end": (
        "is_row ? clamp(columns - column, 0, N) : 0",
        "clamp(columns - column, 0, N)",
        FEW,
        "BoundsError",
    ),
    "columns past the end": ("clamp(columns - column, 0, N)", "N", EmbeddingCase((7, 33), (9,)), "Error"),
    "unknown ids have a segment": ("    if (id >= 0) {\n      end", "    {\n      end", FEW, "BoundsError"),
    "a segment ends early": ("end[id] = at + 1", "end[id] = at", FEW, "dweight must be"),
    "a segment begins early": ("first[next] = at + 1;", "first[next] = at;", FEW, "dweight must be"),
    "the first segment has no beginning": ("first[id] = 0", "first[id] = 1", WIDE, "dweight must be"),
    "the last segment has no end": ("is_last || next != id", "!is_last && next != id", FEW, "dweight must be"),
    "a whole chunk counts as mixed": (
        "sorted_ids[begin + size - 1] == id",
        "sorted_ids[begin + size - 1] < id",
        NARROW,
        "dweight must be",
    ),
    "rows of a chunk twice": ("begin + start + member]", "begin + member]", WIDE, "dweight must be"),
    "lanes take one row": ("ushort(leader + of_lane)", "leader", WIDE, "dweight must be"),
    "lanes take the simdgroup's rows": ("ushort(leader + of_lane)", "ushort(of_lane)", NARROW, "dweight must be"),
    "chunks are left out": ("chunk < end_chunk;", "chunk < end_chunk - 1;", NARROW, "dweight must be"),
    "chunks begin early": ("(begin + size - 1) / size", "begin / size", NARROW, "dweight must be"),
    "rows behind the chunks are left out": (
        "in_front + behind - end_chunk * size",
        "in_front",
        NARROW,
        "dweight must be",
    ),
    "rows behind are those in front": ("end_chunk * size + mine - in_front", "begin + mine", NARROW, "dweight must be"),
    "rows of others are added": ("start + of_lane < count ? limit : 0", "limit", FEW, "dweight must be"),
    "a simdgroup's own length": ("simd_max(count)", "simd_min(count)", FEW, "dweight must be"),
    "half the rounds": ("min(lanes, longest - start)", "min(lanes, longest - start) / 2", WIDE, "dweight must be"),
    "nothing is added": ("total[i] += values[i];", "total[i] = values[i];", WIDE, "dweight must be"),
    "no look at the address": (
        " || !is_aligned(source, Chunk::bytes)",
        "",
        EmbeddingCase((12, 16), (5, 8), layout="shifted"),
        "AlignmentError",
    ),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = op._kernel
    changed = {name: broken(whole(name), old, new) for name in KERNELS}
    assert any(changed[name].source != whole(name).source for name in KERNELS), "the text to replace is not there"
    assert findings([case], "emulator") == []
    monkeypatch.setattr(op, "_kernel", changed.__getitem__)
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


@pytest.mark.parametrize("case", TRAFFIC, **NAMES)
def test_rows_move_once_in_16_byte_accesses(case):
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(case.run("emulator"))
    launches = {each.name: each.counts.buffers for each in emulator.report().launches}
    forward, *backward = ({each.name: each for each in launches[name]} for name in KERNELS)
    y, weight = case.cotangents()["y"].nbytes, case.inputs()["weight"].nbytes
    assert (forward["weight"].bytes_read, forward["weight"].reads) == (y, y // 16)
    assert (forward["rows"].bytes_written, forward["rows"].writes) == (y, y // 16)
    dweight = backward[2]["dweight"]
    assert (dweight.bytes_written, dweight.writes) == (weight, weight // 16)
    read = [buffers["dy"] for buffers in backward[1:]]
    assert (sum(each.bytes_read for each in read), sum(each.reads for each in read)) == (y, y // 16)
    # What stands beside them: ids, places, bounds, sums of chunks.
    assert forward["ids"].bytes_read <= 0.04 * y
    beside = sum(
        each.bytes_read + each.bytes_written
        for buffers in backward
        for name, each in buffers.items()
        if name in ("sorted_ids", "order", "first", "end", "sums", "chunk_sums")
    )
    assert beside <= 0.05 * case.ideal_bytes()["backward"]
