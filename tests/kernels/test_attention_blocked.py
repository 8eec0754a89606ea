"""Attention in plain operations through blocks of queries: the formulas' results, in memory that grows with T."""

from attention_proofs import PROBLEMS, Problem, assert_near, numpy64
from forge_mlx.kernels._common.proof import RTOL
from forge_mlx.kernels.attention import blocked, flash_attention, reference
from forge_mlx.kernels.attention.options import Options
import mlx.core as mx
import pytest
from room_proofs import random


def rows_of(monkeypatch, rows):
    monkeypatch.setattr(blocked, "block_rows", lambda *_: rows)


def both_passes(module, problem):
    arranged = problem.arrange(problem.inputs())
    results = module.forward(*arranged, problem.options)
    return [*results, *module.backward(*arranged, *results, *problem.cotangents(), problem.options)]


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_those_of_the_formulas(name, rows, monkeypatch):
    rows_of(monkeypatch, rows)
    problem = PROBLEMS[name]
    got, want = both_passes(blocked, problem), both_passes(reference, problem)
    assert [array.dtype for array in got] == [array.dtype for array in want]
    # Apart from the order of sums, which may round to another neighbour of the dtype.
    rtol = 2e-6 if problem.dtype == mx.float32 else RTOL[problem.dtype]
    assert_near(got, [numpy64(array) for array in want], rtol)


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_nothing_to_see(lengths, sinks):
    problem = Problem(lengths=lengths, sinks=sinks)
    got, want = both_passes(blocked, problem), both_passes(reference, problem)
    assert_near(got, [numpy64(array) for array in want], 0)


@pytest.mark.parametrize("shape", [(0, 2, 2), (2, 0, 0)], ids=["no batch", "no heads"])
def test_nothing_at_all(shape):
    batch, heads, kv_heads = shape
    q, k = mx.zeros((batch, heads, 5, 8)), mx.zeros((batch, kv_heads, 7, 8))
    options = Options(1.0, True, None, None)
    out, lse = blocked.forward(q, k, k, None, None, None, options)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    found = blocked.backward(q, k, k, None, None, None, out, lse, out, lse, options)
    assert [array.shape for array in found] == [q.shape, k.shape, k.shape]


# Options, T and S; first and last key of each block of 4 queries.
RANGES = {
    "full": (Options(1.0, False, None, None), 10, 6, [(0, 6)] * 3),
    "causal": (Options(1.0, True, None, None), 10, 10, [(0, 4), (0, 8), (0, 10)]),
    "more keys": (Options(1.0, True, None, None), 5, 20, [(0, 19), (0, 20)]),
    "more queries": (Options(1.0, True, None, None), 10, 4, [(0, 4)]),
    "window": (Options(1.0, True, 3, None), 10, 10, [(0, 4), (2, 8), (6, 10)]),
    "window, more keys": (Options(1.0, True, 3, None), 8, 20, [(10, 16), (14, 20)]),
    "window, more queries": (Options(1.0, True, 2, None), 10, 7, [(0, 4), (3, 7)]),
}


@pytest.mark.parametrize("name", RANGES)
def test_only_keys_between_the_bounds_are_read(name, monkeypatch):
    rows_of(monkeypatch, 4)
    options, queries, keys, want = RANGES[name]
    q = random((1, 2, queries, 8), 0)
    # Each key's first element is its index.
    k = mx.broadcast_to(mx.arange(keys, dtype=mx.float32)[:, None], (1, 2, keys, 8))
    seen = []
    scores = reference.scores

    def see(q, k, options):
        seen.append((int(k[0, 0, 0, 0]), int(k[0, 0, -1, 0]) + 1))
        return scores(q, k, options)

    monkeypatch.setattr(reference, "scores", see)
    out, lse = blocked.forward(q, k, k, None, None, None, options)
    assert seen == want
    seen.clear()
    blocked.backward(q, k, k, None, None, None, out, lse, q, lse, options)
    assert seen == want[::-1]


def test_rows_of_a_block_follow_from_the_bytes_of_its_scores():
    plain, window = Options(1.0, True, None, None), Options(1.0, True, 128, None)
    for device, budget in blocked.BLOCK_BYTES.items():
        for batch_heads in (1, 12, 256):
            for keys in (64, 1024, 65536):
                for options in (plain, window):
                    rows = blocked.block_rows(batch_heads, keys, options, device)
                    width = keys if options is plain else min(keys, rows + 127)
                    assert rows in (16, 32, 64, 128, 256, 512)
                    assert rows == 16 or 4 * batch_heads * rows * width <= budget
                    more = keys if options is plain else min(keys, 2 * rows + 127)
                    assert rows == 512 or 4 * batch_heads * 2 * rows * more > budget
    assert blocked.block_rows(12, 65536, window, mx.cpu) > blocked.block_rows(12, 65536, plain, mx.cpu)


def peak(work):
    """Bytes over what was there before."""
    mx.clear_cache()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = work()
    mx.synchronize()
    del found
    return mx.get_peak_memory() - before


def both_passes_at(length, dtype, compiled, **options):
    """Loss and gradients of attention over so many tokens, as a call that evaluates them."""
    arrays = [random((1, 2, length, 16), seed, dtype) for seed in range(3)]
    if options.pop("documents", False):
        options["segment_ids"] = mx.arange(length)[None] // 100
    mx.eval(arrays, options.get("segment_ids", []))

    def loss(q, k, v):
        out, lse = flash_attention(q, k, v, return_lse=True, impl="reference", **options)
        return (out.astype(mx.float32) ** 2).sum() + lse.sum()

    gradients = mx.value_and_grad(loss, argnums=(0, 1, 2))
    gradients = mx.compile(gradients) if compiled else gradients

    def work():
        found = gradients(*arrays)
        mx.eval(found)
        return found

    return work


MASKS = {
    "documents": {"documents": True},
    "window": {"window": 64},
    "softcap": {"softcap": 20.0},
    "full": {"causal": False, "documents": True},
}
USES = {
    "float32": (mx.float32, False),
    "bfloat16": (mx.bfloat16, False),
    "compiled": (mx.float32, True),
}
FAST = {("documents", "float32"), ("window", "bfloat16"), ("documents", "compiled")}


@pytest.mark.parametrize(
    ("mask", "use"),
    [pytest.param(mask, use, marks=() if (mask, use) in FAST else pytest.mark.slow) for mask in MASKS for use in USES],
)
def test_memory_grows_with_the_length(mask, use, monkeypatch):
    # The same few rows at each length.
    rows_of(monkeypatch, 16)
    dtype, compiled = USES[use]
    lengths = (256, 512, 1024)
    peaks = [peak(both_passes_at(length, dtype, compiled, **MASKS[mask])) for length in lengths]
    # Arrays of all scores would grow 16 times. MLX's CPU back end allocates ahead, now more and now less.
    assert peaks[2] < 5.5 * peaks[0], peaks
    # A third of an array of all scores at the last.
    assert peaks[2] < 4 * 2 * lengths[2] ** 2 / 3, peaks


def test_gradients_of_keys_are_summed_in_float32(monkeypatch):
    # 1 and 256 times 2^-9: a sum in bfloat16 would stay at 1.
    rows_of(monkeypatch, 1)
    q = mx.zeros((1, 1, 257, 8), mx.bfloat16)
    k, v = (mx.zeros((1, 1, 1, 8), mx.bfloat16) for _ in range(2))
    options = Options(1.0, False, None, None)
    out, lse = blocked.forward(q, k, v, None, None, None, options)
    dout = mx.concatenate([mx.full((1, 1, 256, 8), 2.0**-9), mx.ones((1, 1, 1, 8))], axis=2).astype(mx.bfloat16)
    *_, dv = blocked.backward(q, k, v, None, None, None, out, lse, dout, lse, options)
    assert mx.all(dv == 1.5)
