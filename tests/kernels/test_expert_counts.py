"""expert_counts: its formula, its kernels on the emulator and on a GPU, broken kernels, and what its callers see."""

from dataclasses import replace
from functools import partial
import math

from forge_mlx.kernels._common.proof import RTOL, disagreements
from forge_mlx.kernels.routing import counts_op, expert_counts, reference, topk_renorm
from forge_mlx.kernels.routing.cases import CASES, TRAFFIC
from forge_mlx.kernels.routing.counts_cases import INTEGERS, CountsCase
from forge_mlx.kernels.routing.tiles import count_tiling, indices_per_group, rows_per_group
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import broken, findings, gpu_engine, mostly_slow, poison, random, thinned

CASES = [case for case in CASES if case.op == "expert_counts"]
TRAFFIC = [case for case in TRAFFIC if case.op == "expert_counts"]
NAMES = {"ids": lambda case: case.name}
ENGINES = ["emulator", "reference"]
FUNCTIONS = {"op": expert_counts, "reference": reference.expert_counts}
# Several threadgroups, and more experts than one counts.
INDICES, MANY = CountsCase((700, 8), 40, indices="outside"), CountsCase((70, 40), 1500, indices="any")
GATES, WIDE = CountsCase((1300, 24), 24), CountsCase((300, 1500), 1500, mx.float16, k=8)
PATHS = [INDICES, MANY, GATES, WIDE]


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_expected_counts_are_those_of_a_loop(case):
    counts = [0] * case.experts
    (array,) = case.inputs().values()
    for place, number in np.ndenumerate(np.array(array.astype(mx.float32) if case.indices is None else array)):
        if case.indices is None:
            counts[place[-1]] += number != 0
        elif 0 <= int(number) < case.experts:
            counts[int(number)] += 1
    assert case.counts().tolist() == counts


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_formula_and_reference_engine_count_exactly(case):
    for impl in ("formula", "reference"):
        assert not case.run(impl)["counts_off"].any()
    assert disagreements(case, "reference") == []


def is_fast(case):
    """What has few elements is declared otherwise."""
    return math.prod(case.shape) >= 8 and case.indices_dtype == mx.int32


@pytest.mark.parametrize("case", thinned(CASES, is_fast, every=2), **NAMES)
def test_kernels_agree_on_the_emulator(case):
    with emulator.settings(schedules=3):
        assert disagreements(case, "emulator") == []


@pytest.mark.parametrize("case", CASES, **NAMES)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    assert disagreements(case, engine) == []


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_every_order_of_threads_gives_the_same_counts(case):
    assert count_groups(case) > 1
    for seed in (0, 1, 2):
        with emulator.settings(schedules=3, seed=seed):
            assert not case.run("emulator")["counts_off"].any()


def count_groups(case):
    emulator.reset()
    case.run("emulator")
    (launch,) = emulator.report().launches
    return launch.counts.threadgroups


@pytest.mark.parametrize("items", [1, 255, 256, 5000, 10**6, 2**31 - 1])
@pytest.mark.parametrize("experts", [1, 64, 1024, 1025, 5000])
def test_tiles_cover_every_item_and_expert_once(items, experts):
    leasts = [indices_per_group(experts), *(rows_per_group(experts, dtype) for dtype in RTOL)]
    for tiles in (count_tiling(items, experts, least) for least in leasts):
        groups = tiles.grid[0] // 256
        assert tiles.grid[0] == groups * 256
        assert groups * tiles.per_group >= items > (groups - 1) * tiles.per_group
        assert groups <= 512
        assert tiles.grid[1] * 1024 >= experts > (tiles.grid[1] - 1) * 1024


@pytest.mark.parametrize("case", TRAFFIC, **NAMES)
def test_everything_is_read_once(case):
    emulator.reset()
    with emulator.settings(checks=("bounds",)):
        case.run("emulator")
    (launch,) = emulator.report().launches
    read = {each.name: each for each in launch.counts.buffers}["gates" if case.indices is None else "indices"]
    nbytes = case.inputs()["indices"].nbytes
    assert (read.bytes_read, read.reads) == (nbytes, nbytes // (16 if case.indices is None else 4))


# Fault: text, what takes its place, a case, what must be found.
BREAKS = {
    "nothing is cleared": (
        "atomic_store_explicit(&found[i], 0",
        "atomic_store_explicit(&found[0], 0",
        INDICES,
        "Error",
    ),
    "no barrier behind the clearing": (
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  const long begin",
        "  const long begin",
        INDICES,
        "Error",
    ),
    "no barrier before the sum": (
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for",
        "  for",
        GATES,
        "counts_off must",
    ),
    "negative indices": ("expert >= first && ", "", CountsCase((700, 8), 40, indices="none"), "Error"),
    "indices past the experts": (" && expert < first + end", "", INDICES, "Error"),
    "all blocks have the first experts": (
        "expert >= first && expert < first + end",
        "expert >= 0 && expert < end",
        MANY,
        "BoundsError",
    ),
    "each threadgroup reads all": (
        "min(begin + indices_per_group, long(indices_shape[0]))",
        "indices_shape[0]",
        INDICES,
        "counts_off must",
    ),
    "past the last index": (
        "min(begin + indices_per_group, long(indices_shape[0]))",
        "begin + indices_per_group",
        INDICES,
        "BoundsError",
    ),
    "the last threadgroup alone": (
        "atomic_fetch_add_explicit(&counts",
        "atomic_store_explicit(&counts",
        INDICES,
        "counts_off must",
    ),
    "one index a thread": (
        "atomic_fetch_add_explicit(&found[int(expert - first)], 1",
        "atomic_store_explicit(&found[int(expert - first)], 1",
        INDICES,
        "counts_off must",
    ),
    "every thread has all rows": ("row = begin + own_row", "row = begin", GATES, "counts_off must"),
    "threads past the rows at once": (
        "own_row < rows_at_once ? min(end - column, N) : 0",
        "min(end - column, N)",
        GATES,
        "counts_off must",
    ),
    "columns past the end": ("min(end - column, N) : 0", "N : 0", CountsCase((1300, 26), 26), "Error"),
    "rows past the end": (
        "min(begin + rows_per_group, long(gates_shape[0]))",
        "begin + rows_per_group",
        GATES,
        "BoundsError",
    ),
    "the first columns only": ("row * columns + first + column", "row * columns + column", WIDE, "counts_off must"),
    "a count of one": ("own[i] += ", "own[i] |= ", GATES, "counts_off must"),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS))
def test_broken_source_is_found(fault, monkeypatch):
    old, new, case, sign = BREAKS[fault]
    whole = counts_op._kernel
    names = ["expert_counts", "expert_counts_gates"]
    changed = {name: broken(whole(name), old, new) for name in names}
    assert any(changed[name].source != whole(name).source for name in names), "the text to replace is not there"
    assert findings([case], "emulator") == []
    monkeypatch.setattr(counts_op, "_kernel", changed.__getitem__)
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


IDS = mx.array([[0, 1], [1, 3]])
# Mistake: arguments, message.
MISTAKES = {
    "bools": ((IDS > 1, 4), r"\[expert_counts\] indices must be integers but got bool"),
    "complex numbers": ((IDS.astype(mx.complex64), 4), "indices must be integers but got complex64"),
    "no experts": ((IDS, 0), r"\[expert_counts\] num_experts must be an integer of 1 or more but got 0."),
    "a float": ((IDS, 4.0), "num_experts must be an integer of 1 or more but got 4.0."),
    "a truth value": ((IDS, True), "num_experts must be an integer of 1 or more but got True."),
    "gates of other experts": (
        (mx.ones((3, 4)), 5),
        r"\[expert_counts\] num_experts must be the last axis of gates, 4, but got 5.",
    ),
    "gates without axes": ((mx.array(1.0), 1), r"indices must have 1 or more axes but got the shape \(\)."),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](*arguments)


def test_unknown_and_missing_engines_raise():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        expert_counts(IDS, 4, impl="emulater")
    with pytest.raises(RuntimeError, match=r"\[expert_counts\] engine cuda cannot run"):
        expert_counts(IDS, 4, impl="cuda")


@pytest.mark.parametrize("impl", ENGINES)
def test_counts_of_what_topk_renorm_returns(impl):
    gates, indices = topk_renorm(mx.softmax(random((5, 7, 12), 0), axis=-1), 3, impl=impl)
    counts = expert_counts(indices, 12, impl=impl)
    assert (counts.dtype, counts.shape, counts.sum().item()) == (mx.int32, (12,), 5 * 7 * 3)
    assert counts.tolist() == np.bincount(np.array(indices).ravel(), minlength=12).tolist()
    assert expert_counts(gates, np.int64(12), impl=impl).tolist() == counts.tolist()


# On the emulator each dtype is a kernel of its own.
OF_DTYPES = [
    pytest.param(dtype, impl, id=f"{dtype}-{impl}", marks=pytest.mark.slow if is_slow else [])
    for dtype in INTEGERS
    for impl in ENGINES
    for is_slow in [impl == "emulator" and dtype not in (mx.int32, mx.uint64)]
]


@pytest.mark.parametrize(("dtype", "impl"), OF_DTYPES)
def test_indices_out_of_range_count_nowhere(dtype, impl):
    limits = mx.iinfo(dtype)
    # The last ones would be 1 if they were cut down to 32 bits.
    outside = [limits.min, -1, 5, limits.max, 2**32 + 1, 1 - 2**32]
    numbers = [1, 4, 1, *(each for each in outside if limits.min <= each <= limits.max and not 0 <= each < 5)]
    indices = mx.array(np.array(numbers, dtype=object).astype(str(dtype)[9:]))
    assert indices.dtype == dtype
    assert expert_counts(indices, 5, impl=impl).tolist() == [0, 2, 0, 0, 1]


@pytest.mark.parametrize(("dtype", "impl"), [each for each in OF_DTYPES if each.values[0].size < 4])
def test_narrow_indices_of_more_experts_than_they_can_name(dtype, impl):
    limits = mx.iinfo(dtype)
    counts = expert_counts(mx.array([limits.min, 1, limits.max], dtype=dtype), 70_000, impl=impl)
    want = np.bincount([each for each in (limits.min, 1, limits.max) if each >= 0], minlength=70_000)
    assert np.array_equal(counts, want)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_which_gates_count(dtype, impl):
    smallest = {mx.float32: 1e-45, mx.float16: 6e-8, mx.bfloat16: 1e-40}[dtype]
    gates = mx.array([0.0, -0.0, float("nan"), smallest, -smallest, float("-inf"), 1, 0, 0], dtype=dtype)
    assert expert_counts(gates, 9, impl=impl).tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize(
    "array",
    [mx.zeros((0, 4)), mx.zeros((2, 0, 4)), mx.zeros((0,), mx.int32), mx.zeros((3, 0), mx.int8)],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_nothing_counts_nothing(array, impl):
    counts = expert_counts(array, 4, impl=impl)
    assert (counts.dtype, counts.tolist()) == (mx.int32, [0] * 4)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize(
    "transform",
    [mx.grad, mx.value_and_grad, lambda f: lambda x: mx.jvp(f, [x], [x])],
    ids=["grad", "value_and_grad", "jvp"],
)
def test_differentiating_counts_of_gates_raises(transform, impl):
    def loss(gates):
        return (expert_counts(gates, 4, impl=impl).astype(mx.float32) * gates).sum()

    with pytest.raises(ValueError, match=r"\[expert_counts\] counts must not be differentiated.*mx.stop_gradient"):
        mx.eval(transform(loss)(mx.ones((3, 4))))


@pytest.mark.parametrize("impl", ENGINES)
def test_counts_beside_a_loss_and_of_gates_without_a_gradient(impl):
    p = mx.softmax(random((9, 4), 0), axis=-1)
    chosen = mx.array([[0, 2]] * 9)

    def loss(p, gates):
        counts = expert_counts(mx.stop_gradient(gates), 4, impl=impl) + expert_counts(chosen, 4, impl=impl)
        return (counts.astype(mx.float32) * p).sum(), expert_counts(gates, 4, impl=impl)

    (_, counts), gradient = mx.value_and_grad(loss)(p, p)
    assert counts.tolist() == [9] * 4
    assert gradient.tolist() == [[18, 9, 18, 9]] * 9


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append((self.source.name, engine))
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    expert_counts(IDS, 4, impl="metal")
    with use_engine("metal"):
        expert_counts(mx.ones((3, 4)), 4)
    assert launched == [("expert_counts", "metal"), ("expert_counts_gates", "metal")]


@pytest.fixture(params=["reference", "metal"])
def engine(request, monkeypatch):
    """The reference, and an engine whose launches are lazy, as those of a GPU: with what the kernels ask of inputs."""

    def count_indices(engine, indices, experts):
        assert engine == request.param
        assert indices.ndim == 1
        return reference.count_indices(indices, experts)

    def count_gates(engine, gates):
        assert engine == request.param
        assert gates.ndim == 2
        return reference.count_gates(gates)

    if request.param == "metal":
        monkeypatch.setattr(counts_op, "_count_indices", count_indices)
        monkeypatch.setattr(counts_op, "_count_gates", count_gates)
        monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return request.param


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["indices", "uint8", "gates"])
def test_vmap(kind, axis, engine):
    numbers = np.random.default_rng(0).integers(-1, 6, (4, 3, 5))
    array = mx.array(numbers % 256 if kind == "uint8" else numbers).astype(
        {"indices": mx.int32, "uint8": mx.uint8, "gates": mx.float32}[kind]
    )
    if kind == "gates" and axis == 2:
        array = array.swapaxes(1, 2)
    each = mx.moveaxis(array, axis if kind != "gates" or axis < 2 else 2, 0)
    experts = each.shape[-1] if kind == "gates" else 5
    got = mx.vmap(partial(expert_counts, num_experts=experts, impl=engine), in_axes=axis)(array)
    want = [reference.expert_counts(one, experts).tolist() for one in each]
    assert (got.dtype, got.tolist()) == (mx.int32, want)


def test_vmap_in_vmap(engine):
    indices = mx.array(np.random.default_rng(0).integers(-1, 6, (2, 4, 3, 5)))
    got = mx.vmap(mx.vmap(partial(expert_counts, num_experts=5, impl=engine)), in_axes=1)(indices)
    want = [[reference.expert_counts(one, 5).tolist() for one in row] for row in indices.swapaxes(0, 1)]
    assert got.tolist() == want


@pytest.mark.parametrize("array", [IDS, mx.array([[0.5, 0, 0.5, 0]])], ids=["indices", "gates"])
def test_compiled_function(array, engine):
    compiled = mx.compile(partial(expert_counts, num_experts=4, impl=engine))
    assert compiled(array).tolist() == reference.expert_counts(array, 4).tolist()


def test_counts_are_as_exact_as_integers_are():
    # In float32 one more than 2^24 is lost.
    indices = mx.concatenate([mx.zeros((2**24 + 1,), mx.int8), mx.ones((1,), mx.int8)])
    assert expert_counts(indices, 2, impl="reference").tolist() == [2**24 + 1, 1]
    case = replace(GATES, dtype=mx.bfloat16)
    assert not case.run("emulator")["counts_off"].any()
