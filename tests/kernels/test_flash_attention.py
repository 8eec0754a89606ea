"""The proofs of flash_attention: its oracle, its formula, its gradients, its kernels on the emulator and on a GPU."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import RTOL, disagreements, to_float64
from forge_mlx.kernels.attention import flash_attention, float64, reference
from forge_mlx.kernels.attention.cases import CASES, FEATURES, has_gradients
from forge_mlx.kernels.attention.covering import covering, every_pair, pairs
from forge_mlx.kernels.attention.flash_case import FlashCase
from forge_mlx.kernels.attention.launch import segment_ranges
from forge_mlx.kernels.attention.options import Options
from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.settings import current_settings
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import gpu_engine, poison, random, thinned
import torch

NAMES = {"ids": lambda case: case.name}
FLASH = [case for case in CASES if case.op == "flash_attention"]
BACKWARD = [case for case in CASES if case.op == "flash_attention_backward"]
FULL = [case for case in CASES if case not in BACKWARD and 0 not in case.seen().shape and case.batch and case.heads]
EVERY = FlashCase(2, 4, 2, 40, 70, 16, 24, window=9, softcap=5.0, segments="padding", sinks=True, with_lse=True)
# Every option at once, in both variants and with heads that several simdgroups share, and none.
PATHS = [
    *(replace(EVERY, variant=variant) for variant in ("mma", "scalar")),
    replace(EVERY, head_dim=136, v_head_dim=72, dtype=mx.bfloat16),
    FlashCase(1, 2, 1, 65, 65, 40),
]


def test_every_value_of_a_feature_meets_every_value_of_the_others():
    chosen = covering(FEATURES, has_gradients)
    assert set().union(*map(pairs, chosen)) == every_pair(FEATURES)
    assert all(map(has_gradients, chosen))
    assert len(chosen) <= 1.05 * max(map(len, FEATURES.values())) * sorted(map(len, FEATURES.values()))[-2]


def test_covering_cases_are_those_combinations():
    cases = FLASH[: len(covering(FEATURES, has_gradients))]
    for name in ("head_dim", "segments", "layout", "dtype", "values", "softcap", "sinks", "with_lse", "variant"):
        assert {getattr(case, name) for case in cases} == set(FEATURES[name]), name
    assert {(case.heads, case.kv_heads) for case in cases} == set(FEATURES["heads"])
    assert {case.window for case in cases} == {None, 1, 7, 40}
    sizes = {1, 7, 8, 9, 31, 32, 33, 63, 65, 100, 129}
    for name in ("queries", "keys"):
        assert sizes <= {getattr(case, name) for case in FLASH}, name
    assert {np.sign(case.queries - case.keys) for case in cases if case.v_size != case.head_dim} == {-1, 0, 1}


def is_small(case):
    """Few enough numbers that float64 and plain operations take some milliseconds."""
    return case.batch * case.heads * case.queries * case.keys * case.head_dim <= 5e5


def with_torch(case):
    """Results and gradients by PyTorch's autograd in float64; lse and "is_seeing" as the cases have them."""
    primals = {name: torch.tensor(to_float64(each), requires_grad=True) for name, each in case.inputs().items()}
    q, (k, v) = primals["q"], (primals[name].repeat_interleave(case.heads // case.kv_heads, 1) for name in "kv")
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * case.options.scale
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    query, key = torch.arange(case.queries)[:, None] + case.keys - case.queries, torch.arange(case.keys)[None]
    hidden = torch.zeros(case.batch, 1, case.queries, case.keys, dtype=torch.bool)
    if case.causal:
        hidden |= key > query
    if case.window is not None:
        hidden |= key <= query - case.window
    if case.segments is not None:
        mine, other = (torch.tensor(np.array(ids)) for ids in case.constants().values())
        hidden |= ((mine[:, :, None] != other[:, None, :]) | (other < 0)[:, None, :])[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    if case.sinks:
        logits = primals["sinks"][None, :, None, None].expand(case.batch, case.heads, case.queries, 1)
        scores = torch.cat([scores, logits], -1)
    is_seeing = (scores > -torch.inf).any(-1)
    # A row of -inf would have no derivative.
    scores = torch.where(is_seeing[..., None], scores, 0)
    p = torch.where(is_seeing[..., None], scores.softmax(-1), 0)[..., : case.keys]
    results = {"out": p @ v, "lse": torch.where(is_seeing, scores.logsumexp(-1), 0), "probs": p}
    cotangents = {name: torch.tensor(to_float64(each)) for name, each in case.cotangents().items()}
    results = {name: results[name] for name in cotangents}
    gradients = torch.autograd.grad(list(results.values()), list(primals.values()), list(cotangents.values()))
    results |= {"is_seeing": is_seeing} if case.with_lse else {}
    return results | {f"d{name}": each for name, each in zip(primals, gradients, strict=True)}


@pytest.mark.parametrize("case", thinned(FULL, is_small), **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    expected, want = case.expected(), with_torch(case)
    assert expected.keys() == want.keys()
    for name, value in want.items():
        value = value.detach().numpy()
        # What is left of a difference of numbers near 1.
        atol = 1e-9 * np.abs(value).max() + 1e-14
        np.testing.assert_allclose(expected[name], value, rtol=1e-7, atol=atol, err_msg=name)


@pytest.mark.parametrize("case", BACKWARD, **NAMES)
def test_explicit_backward_expects_the_gradients_of_the_op(case):
    inputs = {name: to_float64(each) for name, each in case.inputs().items()}
    cotangents = {"out": inputs["dout"], "lse": inputs.get("dlse", np.zeros(case.inputs()["q"].shape[:3]))}
    want = float64.attention(inputs, cotangents, case.options, case.seen())
    expected = case.expected()
    assert expected.keys() == {f"d{name}" for name in inputs if name in ("q", "k", "v", "sinks")}
    # But for out, which the dtype has rounded.
    for name, value in expected.items():
        np.testing.assert_allclose(value, want[name], rtol=0, atol=4 * RTOL[case.dtype] * np.abs(want[name]).max())


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    """`disagreements` measures by the formula itself and would not notice. D is made of out as the dtype rounds it."""
    formula = case.run("formula")
    expected = case.expected_of(to_float64(formula["out"])) if case in FLASH else case.expected()
    assert formula.keys() == expected.keys()
    smallest = 2.0**-24 if case.dtype == mx.float16 else np.finfo(np.float32).tiny
    rtol = RTOL[case.dtype] + rounding_of_scores(case)
    for name, truth in expected.items():
        assert formula[name].shape == truth.shape, name
        error = np.abs(to_float64(formula[name]) - truth).max(initial=0)
        assert error <= rtol * np.abs(truth).max(initial=0) + smallest, name


def rounding_of_scores(case):
    """What rounding the largest score to float32 does to its exponential: with scores of hundreds more than sums do.

    How much of it is seen depends on the order in which a machine's BLAS adds.
    """
    q, k = (to_float64(case.inputs()[name]) for name in "qk")
    scale = case.options.scale or q.shape[-1] ** -0.5
    longest = [np.linalg.norm(each, axis=-1).max(initial=0) for each in (q, k)]
    return 2.0**-24 * scale * longest[0] * longest[1]


# Of the covering design, in the scalar kernels, which compile five times faster; and of the matrix kernels a head that
# no simdgroups share and one that two do. Whatever is empty launches nothing.
FAST = [
    *[case for case in FLASH[:24] if case.variant == "scalar" and case.head_dim <= 96],
    next(case for case in FLASH if case.variant == "mma" and case.head_dim == 64 and case.softcap and case.segments),
    next(case for case in FLASH if case.variant == "mma" and case.head_dim == 80 and case.segments),
    *[case for case in FLASH if 0 in (case.batch, case.heads, case.queries, case.keys)],
    *[case for case in FLASH if case.values == "capped" and case.variant == "scalar"],
]


@pytest.mark.parametrize("case", thinned(FLASH, FAST.__contains__), **NAMES)
def test_kernels_agree_on_the_emulator(case, monkeypatch):
    poison(monkeypatch)
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", thinned(PATHS, PATHS[:1].__contains__), **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = case.run("emulator")
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run("emulator")
        assert all(mx.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    "case", thinned([case for case in PATHS if case.variant != "scalar"], lambda _: False), **NAMES
)
def test_kernels_know_no_order_of_lanes(case):
    nvidia = (*current_settings().defines, ("FORGE_TILE_LAYOUT", "2"))
    with emulator.settings(defines=nvidia):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


@pytest.mark.parametrize("case", thinned([case for case in FLASH if case.variant != "scalar"], is_small), **NAMES)
def test_reference_engine_agrees(case):
    assert disagreements(replace(case, variant="auto"), "reference") == []


def arguments(dtype=mx.float32):
    """q, k, v, ids, sinks, dout and dlse of one small case, for the formula."""
    shapes = {"q": (1, 2, 3, 8), "k": (1, 1, 4, 8), "v": (1, 1, 4, 8), "sinks": (1, 2), "out": (1, 2, 3, 8)}
    arrays = {name: random(shape, seed, dtype) for seed, (name, shape) in enumerate(shapes.items())}
    ids = mx.array([[0, 0, 1]]), mx.array([[0, 0, 0, 1]])
    return arrays, ids, random((1, 2, 3), 9)


def test_gradient_of_the_formula_is_the_finite_difference():
    arrays, ids, dlse = arguments()
    options = Options(0.7, True, 3, 2.5)
    names = ("q", "k", "v", "sinks")
    at = {name: np.array(arrays[name], np.float64) for name in names}
    dout, weight = np.array(arrays["out"], np.float64), np.array(dlse, np.float64)

    def loss(values):
        case_seen = np.array(reference.visible(3, 4, *ids, options))
        k, v = (np.repeat(values[name], 2, 1) for name in "kv")
        s = 2.5 * np.tanh(0.7 * values["q"] @ k.swapaxes(2, 3) / 2.5)
        e = np.where(case_seen, np.exp(s), 0)
        total = e.sum(-1) + np.exp(values["sinks"])[..., None]
        return (e @ v / total[..., None] * dout).sum() + (np.log(total) * weight).sum()

    q, k, v, sinks = (arrays[name] for name in names)
    out, lse = reference.forward(q, k, v, *ids, sinks, options)
    got = reference.backward(q, k, v, *ids, sinks, out, lse, arrays["out"], dlse, options)
    for name, gradient in zip(names, got, strict=True):
        want = np.zeros_like(at[name])
        for index in np.ndindex(want.shape):
            up, down = ({other: array.copy() for other, array in at.items()} for _ in range(2))
            up[name][index] += 1e-6
            down[name][index] -= 1e-6
            want[index] = (loss(up) - loss(down)) / 2e-6
        np.testing.assert_allclose(np.array(gradient), want, rtol=1e-3, atol=1e-5, err_msg=name)


OPTIONS = [Options(0.7, True, None, None), Options(0.7, True, 3, 2.5), Options(0.7, False, None, 2.5)]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("options", OPTIONS, ids=["causal", "window-softcap", "full-softcap"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_written_gradient_is_mlx_autodiff_of_the_forward(dtype, options, with_sinks):
    arrays, ids, dlse = arguments(dtype)
    primals = [arrays[name] for name in ("q", "k", "v")] + ([arrays["sinks"].astype(mx.float32)] if with_sinks else [])

    def forward(q, k, v, sinks=None):
        return reference.forward(q, k, v, *ids, sinks, options)

    (out, lse), want = mx.vjp(forward, primals, [arrays["out"], dlse])
    sinks = primals[3] if with_sinks else None
    got = reference.backward(*primals[:3], *ids, sinks, out, lse, arrays["out"], dlse, options)
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), got, want, strict=False):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        scale = mx.abs(b.astype(mx.float32)).max().item()
        assert mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() <= 2 * RTOL[dtype] * scale, name
    assert len(got) == len(want)


@pytest.mark.parametrize("variant", ["reference", "scalar", pytest.param("mma", marks=pytest.mark.slow)])
def test_document_does_not_change_by_a_bit_with_its_neighbours(variant):
    case = FlashCase(1, 2, 1, 70, 70, 16, softcap=5.0, sinks=True, with_lse=True)
    ids = np.repeat([4, 1, 9, -1], [20, 23, 17, 10])[None]
    mine = np.flatnonzero(ids[0] == 1)
    impl = "reference" if variant == "reference" else "emulator"

    def run(arrays, cotangents):
        def call(q, k, v, sinks):
            options = {"softcap": 5.0, "segment_ids": mx.array(ids), "sinks": sinks, "return_lse": True}
            return flash_attention(q, k, v, variant="auto" if variant == "reference" else variant, impl=impl, **options)

        results, gradients = mx.vjp(call, arrays, cotangents)
        return [np.array(each)[:, :, mine] for each in (*results, *gradients[:3])]

    arrays, cotangents = list(case.inputs().values()), list(case.cotangents().values())
    first = run(arrays, cotangents)
    others = np.delete(np.arange(70), mine)
    for array in (*arrays[:3], *cotangents):
        array[:, :, mx.array(others)] = array[:, :, mx.array(others)] * -3 + 1
    for a, b in zip(first, run(arrays, cotangents), strict=True):
        assert a.any()
        np.testing.assert_array_equal(a, b)


def test_ranges_are_the_least_and_largest_ids_of_blocks():
    ids = mx.array([[3, 1, 2, -1, -7, -1, 0, 9], [5, 5, 5, 5, 5, 5, 5, 5]])
    largest = 2**31 - 1
    assert segment_ranges(ids, 3).tolist() == [[[1, 3], [largest, -1], [0, 9]], [[5, 5]] * 3]
    assert segment_ranges(ids[:1], 16).tolist() == [[[0, 9]]]
