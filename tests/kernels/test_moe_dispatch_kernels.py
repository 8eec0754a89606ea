"""The proofs of the dispatch room: formulas, gradients, kernels on the emulator and on a GPU, broken kernels."""

from dataclasses import replace

from forge_mlx.kernels._common.proof import RTOL, disagreements
from forge_mlx.kernels.dispatch import launch, moe_combine, reference
from forge_mlx.kernels.dispatch.cases import CASES, TRAFFIC
from forge_mlx.kernels.dispatch.launch import part_tiling, whole_tiling
from forge_mlx.kernels.dispatch.moe_case import CombineCase, DispatchCase
from forge_mlx.kernels.dispatch.row_scale_case import RowScaleAccumulateCase, RowScaleCase
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_formula_agrees, broken, findings, gpu_engine, mostly_slow, poison, random, thinned
import torch

NAMES = {"ids": lambda case: case.name}
KERNELS = [
    "row_scale_forward",
    "row_scale_backward",
    "moe_dispatch_forward",
    "moe_dispatch_backward",
    "moe_combine_forward",
    "moe_combine_backward",
]
# Tokens that lanes share and tokens that a threadgroup shares; the last are longer than its threads hold.
SCALE = RowScaleCase((33, 40), 5)
WIDE_SCALE = RowScaleCase((5, 264), 70)
ADD = RowScaleAccumulateCase((33, 40), 5, mx.bfloat16, dst=mx.float32)
DISPATCH = DispatchCase((33, 40), 6)
MANY_SLOTS = DispatchCase((5, 8), 64, k=64)
COMBINE = CombineCase((33, 40), 4, k=3, routes="outside")
WIDE_COMBINE = CombineCase((9, 264), 4, k=3, routes="repeated")
LONG_COMBINE = CombineCase((2, 4104), 3, k=2)
PATHS = [SCALE, WIDE_SCALE, ADD, DISPATCH, MANY_SLOTS, COMBINE, WIDE_COMBINE, LONG_COMBINE]


def of_pytorch(case, arrays):
    """The result of a case in PyTorch, of tensors by their names."""
    if isinstance(case, RowScaleCase):
        return arrays.get("dst", 0) + arrays["x"] * arrays["gates"][..., case.e, None]
    indices = torch.tensor(case.numbers())
    order = torch.sort(indices.clamp(min=-1).flatten(), stable=True).indices
    if not isinstance(case, CombineCase):
        return arrays["x"].reshape(case.tokens, case.shape[-1])[order // case.k]
    # As a matrix [E] x [k] of a token: whether its slot is of the expert.
    is_of = (indices[:, None, :] == torch.arange(case.experts)[:, None]).double()
    of_slots = arrays["y"][torch.argsort(order)].reshape(case.tokens, case.k, case.shape[-1])
    gates = arrays["gates"].reshape(case.tokens, case.experts)
    return torch.einsum("ne,nek,nkc->nc", gates, is_of, of_slots).reshape(case.shape)


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], **NAMES)
def test_expected_values_are_those_of_pytorch_in_float64(case):
    def tensor(array):
        return torch.tensor(np.array(array.astype(mx.float32)), dtype=torch.float64)

    inputs = {name: tensor(array).requires_grad_() for name, array in case.inputs().items()}
    ((name, cotangent),) = case.cotangents().items()
    result = of_pytorch(case, inputs)
    gradients = torch.autograd.grad(result, list(inputs.values()), tensor(cotangent))
    named = {name: result.detach()} | {f"d{name}": each for name, each in zip(inputs, gradients, strict=True)}
    expected = case.expected()
    assert expected.keys() == named.keys()
    for name, value in named.items():
        np.testing.assert_allclose(expected[name], value.numpy(), rtol=1e-9, atol=1e-12 * value.abs().max().item())


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_agrees_with_float64(case):
    # A gate's gradient is a sum over a token, whose error is that of its largest terms.
    assert_formula_agrees(case, inherent=1e-6 * case.shape[-1] ** 0.5)


def test_gradient_of_row_scale_is_the_finite_difference():
    random_numbers = np.random.default_rng(0)
    x, dout, gates = (random_numbers.normal(size=shape) for shape in ((4, 3), (4, 3), (4, 2)))
    got = reference.scale_backward(*narrow(x, gates), 1, *narrow(dout))
    assert_differences(lambda x, gates: (x * gates[:, 1:] * dout).sum(), [x, gates], got)


def test_gradient_of_moe_dispatch_is_the_finite_difference():
    random_numbers = np.random.default_rng(0)
    x, drows = random_numbers.normal(size=(3, 2)), random_numbers.normal(size=(6, 2))
    positions = np.array([[3, 0], [4, 1], [2, 5]])
    tokens = np.argsort(positions.reshape(-1)) // 2
    got = reference.dispatch_backward(*narrow(drows), mx.array(positions))
    assert_differences(lambda x: (x[tokens] * drows).sum(), [x], [got])


def test_gradient_of_moe_combine_is_the_finite_difference():
    random_numbers = np.random.default_rng(0)
    y, gates, dout = (random_numbers.normal(size=shape) for shape in ((6, 2), (3, 2), (3, 2)))
    # The second token names an expert twice, the last one names one that is not there.
    indices, positions = np.array([[1, 0], [0, 0], [-1, 1]]), np.array([[4, 1], [2, 3], [0, 5]])

    def loss(y, gates):
        weights = np.where(indices < 0, 0, np.take_along_axis(gates, np.maximum(indices, 0), 1))
        return ((weights[..., None] * y[positions]).sum(1) * dout).sum()

    plan = (mx.array(each) for each in (positions, indices, np.argsort(positions.reshape(-1))))
    got = reference.combine_backward(*narrow(y, gates), *plan, *narrow(dout))
    assert_differences(loss, [y, gates], got)


def narrow(*arrays):
    return [mx.array(each.astype(np.float32)) for each in arrays]


def assert_differences(loss, arrays, gradients):
    """Central differences of a loss by each array."""
    step = 1e-6
    for number, array in enumerate(arrays):
        want = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            moved = [[each.copy() for each in arrays] for _ in range(2)]
            moved[0][number][index] += step
            moved[1][number][index] -= step
            want[index] = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        np.testing.assert_allclose(np.array(gradients[number]), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("case", [RowScaleCase((9, 33), 3), DispatchCase((9, 33), 4), COMBINE], **NAMES)
def test_written_gradient_is_mlx_autodiff_of_the_forward(case, dtype):
    case = replace(case, dtype=dtype)
    plan = case.plan() if isinstance(case, DispatchCase) else None

    def forward(*arrays):
        if isinstance(case, CombineCase):
            return reference.combine_forward(*arrays, plan.positions, plan.indices)
        return reference.dispatch_forward(*arrays, plan.tokens) if plan else reference.scale_forward(*arrays, case.e)

    inputs, cotangents = case.inputs(), list(case.cotangents().values())
    _, wanted = mx.vjp(forward, list(inputs.values()), cotangents)
    found = case.run("formula")
    for name, want in zip(inputs, wanted, strict=True):
        got = found[f"d{name}"]
        assert got.dtype == want.dtype == inputs[name].dtype
        difference = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item()
        assert difference <= 2 * RTOL[dtype] * mx.abs(want.astype(mx.float32)).max().item()


def is_fast(case):
    """Without what compiles a variant of its own for a few elements or two dtypes; the largest are slow ones too."""
    sizes = (case.tokens, case.tokens * case.shape[-1], case.tokens * case.experts, case.tokens * getattr(case, "k", 8))
    return case.gates == mx.float32 and not any(size in range(1, 8) for size in sizes) and case.shape[-1] < 8000


@pytest.mark.parametrize("case", thinned(CASES, is_fast, every=20), **NAMES)
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
@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case, impl):
    first = case.run(impl)
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = case.run(impl)
        assert all(mx.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("columns", [40, 264])
def test_rows_of_experts_that_are_not_there_do_not_count_whatever_they_hold(columns, impl):
    _, plan = reference.moe_dispatch(random((3, columns), 0), mx.array([[0, -1], [2, 1], [7, 0]]))
    absent = [plan.positions[token, slot].item() for token, slot in ((0, 1), (1, 0), (2, 0))]
    is_absent = (mx.arange(6)[:, None] == mx.array(absent)).any(axis=1, keepdims=True)
    y = mx.where(is_absent, float("nan"), random((6, columns), 1))
    dout = mx.where(mx.arange(3)[:, None] == 0, float("inf"), random((3, columns), 2))
    (out,), (dy, dgates) = mx.vjp(
        lambda y, gates: moe_combine(y, gates, plan, impl=impl), [y, random((3, 2), 3)], [dout]
    )
    assert mx.isfinite(out).all()
    assert not dy[mx.array(absent)].any()
    assert mx.isinf(dy[plan.positions[0, 0]]).all()
    assert dgates[0, 1] == dgates[1, 0] == dgates[2, 1] == 0
    assert mx.isfinite(dgates[1:]).all()


@pytest.mark.parametrize("tokens", [1, 31, 33, 1025])
@pytest.mark.parametrize("columns", [1, 4, 5, 127, 128, 129, 4096, 4097])
@pytest.mark.parametrize("vector", [4, 8])
def test_tiles_cover_every_token_once(tokens, columns, vector):
    tiles = part_tiling(tokens, columns, vector)
    across, parts, _ = tiles.grid
    assert across % 32 == tiles.threadgroup[0] % 32 == 0
    assert tokens * tiles.lanes <= across < tokens * tiles.lanes + 32
    assert parts * tiles.lanes * vector >= columns > (parts - 1) * tiles.lanes * vector
    whole = whole_tiling(tokens, columns, vector)
    if whole.lanes:
        assert whole == tiles
        assert whole.grid[1] == 1
    else:
        assert columns > 32 * vector
        assert whole.grid == (tokens * whole.threadgroup[0], 1, 1)
        assert whole.threadgroup[0] in range(32, 1025, 32)
        assert whole.threadgroup[0] == 1024 or columns <= whole.threadgroup[0] * vector < columns + 32 * vector


BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "no barrier in the sum": (BARRIER, "", WIDE_SCALE, "RaceError"),
    "one scratch for all slots": ("scratch + turn * 32", "scratch", WIDE_COMBINE, "RaceError"),
    "the gate of another expert": ("* experts + expert])", "* experts + max(expert, 1) - 1])", SCALE, "out must be"),
    "the gate of another token": ("gates[size_t(token)", "gates[size_t(token / 2)", SCALE, "out must be"),
    "gates of experts that are not there": (" && expert < experts;", ";", COMBINE, "BoundsError"),
    "gates in front of the first": ("expert >= 0 && expert < experts;", "expert < experts;", COMBINE, "Error"),
    "tokens past the end": ("is_token = index < tokens", "is_token = true", SCALE, "BoundsError"),
    "columns past the end": ("clamp(columns - column, 0, M)", "M", RowScaleCase((33, 65), 5), "Error"),
    "no look at the address": (
        " || !is_aligned(source, Chunk::bytes)",
        "",
        RowScaleCase((9, 40), 8, layout="shifted"),
        "AlignmentError",
    ),
    "dst is left out": ("sums[i] + gate", "gate", ADD, "out must be"),
    "the gradient is not scaled": ("gradient[i] *= gate;", "", WIDE_SCALE, "dx must be"),
    "the sum is left out": ("dot = whole.sum(dot, scratch);", "", SCALE, "dgates must be"),
    "every gate gets the gradient": ("each == expert ? dot : 0.0f", "dot", SCALE, "dgates must be"),
    "gates are not cleared": ("static_cast<G>(each == expert", "if (each == expert) G(each == expert", SCALE, "Error"),
    "only the first piece of a token": (
        "column < columns; column += whole.width * N",
        "column < whole.width * N; column += whole.width * N",
        RowScaleCase((2, 4104), 3),
        "Error",
    ),
    "the slot of another token": (
        "values[size_t(token) * slots",
        "values[size_t(token / 2) * slots",
        DISPATCH,
        "Error",
    ),
    "slots past the end": ("is_token && slot < slots ?", "is_token ?", DISPATCH, "Error"),
    "lanes of others": ("ushort(leader + slot)", "ushort(slot)", DISPATCH, "Error"),
    "slots of the first round alone": ("const int slot = first +", "const int slot =", MANY_SLOTS, "Error"),
    "rounds past the last slot": ("metal::min(int(lanes), slots - first)", "int(lanes)", DISPATCH, "Error"),
    "rows are not added": ("total[i] += values[i];", "total[i] = values[i];", DISPATCH, "dx must be"),
    "rows are not weighed": ("total[i] += gate * values[i];", "total[i] += values[i];", COMBINE, "out must be"),
    "weighed rows are not added": ("total[i] += gate *", "total[i] = gate *", COMBINE, "out must be"),
    "the gradient of rows is not weighed": ("0.0f : gate * gradient[i];", "0.0f : gradient[i];", COMBINE, "dy must be"),
    "gates' gradients are not cleared": (
        "dgates[token * experts + each] = 0.0f;",
        "",
        COMBINE,
        "UninitialisedError",
    ),
    "the last slot counts": ("experts + expert] += dot", "experts + expert] = dot", WIDE_COMBINE, "dgates must be"),
    "the last piece counts": ("experts + expert] += dot", "experts + expert] = dot", LONG_COMBINE, "dgates must be"),
    "every member adds": ("&& expert % width == member", "", WIDE_COMBINE, "RaceError"),
    "nobody adds": ("return lanes.is_token && expert", "return !lanes.is_token && expert", COMBINE, "dgates must be"),
    "a gate behind the last": (
        "const int own_expert = index < experts ? index : -1;",
        "const int own_expert = index;",
        COMBINE,
        "Error",
    ),
    "only the first piece of a row": ("const int column = start +", "const int column =", LONG_COMBINE, "Error"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = launch.kernel
    changed = {name: broken(whole(name), old, new) for name in KERNELS}
    assert any(changed[name].source != whole(name).source for name in KERNELS), "the text to replace is not there"
    assert findings([case], "emulator") == []
    monkeypatch.setattr(launch, "kernel", changed.__getitem__)
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


@pytest.mark.parametrize("case", thinned(TRAFFIC, lambda case: case.experts == 64), **NAMES)
def test_rows_move_once_in_16_byte_accesses(case):
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(case.run("emulator"))
    moved: dict[str, list[int]] = {}
    for each in emulator.report().launches:
        for buffer in each.counts.buffers:
            if buffer.name in ("x", "dst", "y", "rows", "drows", "out", "dout", "dx", "dy"):
                sums = moved.setdefault(f"{each.name} {buffer.name}", [0, 0])
                sums[0] += buffer.bytes_read + buffer.bytes_written
                sums[1] += buffer.reads + buffer.writes
    arrays = case.inputs() | case.cotangents()
    sizes = {"dx": "x", "dy": "y", "drows": "rows", "dout": "out"}
    for key, (count, accesses) in moved.items():
        name = key.split()[1]
        if name == "dst" and "dst" not in arrays:
            # Nothing reads what stands there for it.
            assert count == 0
            continue
        assert count == arrays[sizes.get(name, name)].nbytes, key
        assert accesses == count // 16, key
