"""simd_ and quad_ functions: every function and type against NumPy, with all lanes, part of them, and in branches.

Where MSL leaves the order of a reduction open, the emulator takes a tree in lane order (lanes.h); the expected values
follow that tree, so they are equal bit for bit.
"""

import functools
from typing import Any

from forge_mlx.metal.emulator import InactiveLaneError, MetalWarning
from lane_kernels import DTYPES, INTEGERS, NUMPY, launch, random_lanes, refusals, scan, tree
import mlx.core as mx
import numpy as np
import pytest

ALL = np.ones(32, dtype=bool)
# Which lanes stand at the call, and the condition that leads them there.
LANES = {
    "all": (ALL, "true"),
    "every third": (np.arange(32) % 3 == 1, "lane % 3 == 1"),
    "one": (np.arange(32) == 19, "lane == 19"),
}
REDUCTIONS = ("sum", "product", "max", "min")
BITWISE = ("and", "or", "xor")
PREFIXES = ("prefix_inclusive_sum", "prefix_exclusive_sum", "prefix_inclusive_product", "prefix_exclusive_product")
SIZE = {"simd": 32, "quad": 4}
# Scalars and vectors of three, whose size is that of four, each time; the others as a slow test.
COMPONENTS = [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


def load(components: int, source: str = "x") -> str:
    """The lane's value of `source`: a scalar, or a vector of its `components` elements."""
    if components == 1:
        return f"{source}[lane]"
    return f"vec<T, {components}>({', '.join(f'{source}[lane * {components} + {c}]' for c in range(components))})"


def rows_kernel(calls: list[str], components: int, condition: str = "true", extra: str = "") -> str:
    """Row i of the output, `[calls, 32, components]`, is what the lanes get of call i on their value `v`."""
    lines = [f"uint lane = thread_index_in_simdgroup; {extra}", f"auto v = {load(components)};", f"if ({condition}) {{"]
    for row, call in enumerate(calls):
        lines.append(f"  {{ auto r = {call};")
        for c in range(components):
            element = "r" if components == 1 else f"r[{c}]"
            lines.append(f"  y[({row} * 32 + lane) * {components} + {c}] = {element};")
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


@functools.cache
def rows(
    kind: str, components: int, calls: tuple[str, ...], condition: str = "true", threads: int = 32
) -> tuple[np.ndarray, np.ndarray]:
    """The lanes' values and what each call gave, `[32, components]` and `[calls, 32, components]`."""
    x = random_lanes(kind, components)
    y = launch(
        rows_kernel(list(calls), components, condition),
        {"x": x.ravel()},
        (len(calls), 32, components),
        DTYPES[kind],
        threads=threads,
        template=(("T", DTYPES[kind]),),
        init_value=0,
    )
    return x, y


def reduced(name: str, x: np.ndarray, active: np.ndarray, kind: str) -> np.ndarray:
    """What a reduction of the active lanes gives, `[components]`."""
    match name:
        case "sum":
            return tree(x, active, np.add, -0.0 if kind in ("half", "float") else 0, kind)
        case "product":
            return tree(x, active, np.multiply, 1, kind)
        case "max":
            return x[active].max(axis=0)
        case "min":
            return x[active].min(axis=0)
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name].reduce(x[active], axis=0)


def expected(group: str, name: str, x: np.ndarray, active: np.ndarray, kind: str) -> np.ndarray:
    """What every lane gets of a reduction or prefix operation, `[32, components]`; zeros where it takes no part."""
    result = np.zeros_like(x)
    for start in range(0, 32, SIZE[group]):
        here = slice(start, start + SIZE[group])
        if not active[here].any():
            continue
        if name.startswith("prefix"):
            combine, first = (np.add, 0) if name.endswith("sum") else (np.multiply, 1)
            result[here] = scan(x[here], active[here], combine, first, kind, inclusive="inclusive" in name)
        else:
            result[here] = np.where(active[here, None], reduced(name, x[here], active[here], kind), 0)
    return result


def reductions(kind: str) -> list[str]:
    return [*REDUCTIONS, *PREFIXES, *(BITWISE if kind in INTEGERS else ())]


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_reductions_and_prefixes(kind: str, components: int):
    names = [(group, name) for group in SIZE for name in reductions(kind)]
    x, y = rows(kind, components, tuple(f"{group}_{name}(v)" for group, name in names))
    for row, (group, name) in enumerate(names):
        np.testing.assert_array_equal(y[row], expected(group, name, x, ALL, kind), err_msg=f"{group}_{name}")


@pytest.mark.filterwarnings("ignore::forge_mlx.metal.emulator.MetalWarning")
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", ["ushort", "int", "half", "float"])
def test_reductions_of_part_of_the_lanes(kind: str, lanes: str):
    active, condition = LANES[lanes]
    names = [(group, name) for group in SIZE for name in reductions(kind)]
    x, y = rows(kind, 1, tuple(f"{group}_{name}(v)" for group, name in names), condition)
    for row, (group, name) in enumerate(names):
        np.testing.assert_array_equal(y[row], expected(group, name, x, active, kind), err_msg=f"{group}_{name}")


@pytest.mark.filterwarnings("ignore::forge_mlx.metal.emulator.MetalWarning")
@pytest.mark.parametrize("threads", [1, 13, 31])
def test_reductions_of_a_simdgroup_that_is_not_full(threads: int):
    active = np.arange(32) < threads
    names = [(group, name) for group in SIZE for name in reductions("float")]
    x, y = rows("float", 1, tuple(f"{group}_{name}(v)" for group, name in names), threads=threads)
    for row, (group, name) in enumerate(names):
        np.testing.assert_array_equal(y[row], expected(group, name, x, active, "float"), err_msg=f"{group}_{name}")


@pytest.mark.parametrize("how", [{"schedules": 3}, {"checks": {"barriers"}}], ids=["three orders", "without hooks"])
def test_the_same_in_any_order_of_threads_and_without_hooks(how: dict[str, Any]):
    x = random_lanes("float")
    body = """
    uint lane = thread_index_in_simdgroup;
    y[lane] = simd_sum(x[lane]);
    y[32 + lane] = quad_max(simd_shuffle_down(x[lane], 1));
    y[64 + lane] = simd_prefix_exclusive_product(simd_is_first() ? 2.0f : x[lane]);
"""
    y = launch(body, {"x": x.ravel()}, (3, 32), mx.float32, **how)
    down, first = np.append(x[1:], x[31:], axis=0), np.append([[np.float32(2)]], x[1:], axis=0)
    want = [
        expected("simd", "sum", x, ALL, "float"),
        expected("quad", "max", down, ALL, "float"),
        expected("simd", "prefix_exclusive_product", first, ALL, "float"),
    ]
    np.testing.assert_array_equal(y, np.array(want)[:, :, 0])


def test_a_sum_of_half_is_rounded_once():
    # In half 2048 + 1 is 2048 again; in float the ones add up before the sum is rounded.
    x = np.array([2048.0, *[1.0] * 31], np.float16)
    y = launch("y[thread_index_in_simdgroup] = simd_sum(x[thread_index_in_simdgroup]);", {"x": x}, (32,), mx.float16)
    np.testing.assert_array_equal(y, np.full(32, np.float16(2079)))


def test_sums_of_negative_zeros():
    # Lanes that take no part, and what a prefix sum starts from, must not turn -0 into 0; MSL gives lane 0 a T(0).
    body = """
    uint lane = thread_index_in_simdgroup;
    y[lane] = simd_sum(x[lane]);
    y[20 + lane] = simd_prefix_inclusive_sum(x[lane]);
    y[40 + lane] = simd_prefix_exclusive_sum(x[lane]);
"""
    y = launch(body, {"x": -np.zeros(32)}, (3, 20), mx.float32, threads=20)
    np.testing.assert_array_equal(np.signbit(y), [[True] * 20, [True] * 20, [False, *[True] * 19]])


def test_maxima_and_minima_pass_over_nan():
    x = np.arange(32, dtype=np.float32)
    x[[0, 5, 31]] = np.nan
    body = """
    uint lane = thread_index_in_simdgroup;
    y[lane] = simd_max(x[lane]);
    y[32 + lane] = simd_min(x[lane]);
    y[64 + lane] = simd_max(x[lane] - x[lane] + NAN);
"""
    y = launch(body, {"x": x}, (3, 32), mx.float32)
    np.testing.assert_array_equal(y, np.repeat([[30.0], [1.0], [np.nan]], 32, axis=1))


def source_of(group: str, call: str, lane: int) -> int:
    """The lane whose value `lane` gets, for the moves below; 32 + i is lane i's filling."""
    size = SIZE[group]
    base, index = lane - lane % size, lane % size
    name, _, argument = call.partition(" ")
    n = int(argument) if argument else 0
    match name:
        case "broadcast" | "shuffle":
            return base + n
        case "broadcast_first":
            return base
        case "shuffle_xor":
            return base + (index ^ n)
        case "shuffle_up":
            return lane - n if index >= n else lane
        case "shuffle_down":
            return lane + n if index + n < size else lane
        case "shuffle_rotate_up":
            return base + (index - n) % size
    assert name == "shuffle_rotate_down"
    return base + (index + n) % size


def moves(group: str) -> list[str]:
    counts = (1, 2, 3) if group == "quad" else (1, 7, 16, 31)
    names = (
        "broadcast",
        "shuffle",
        "shuffle_xor",
        "shuffle_up",
        "shuffle_down",
        "shuffle_rotate_up",
        "shuffle_rotate_down",
    )
    return ["broadcast_first", *(f"{name} {n}" for name in names for n in counts), "shuffle_up 0", "shuffle_down 40"]


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_shuffles_and_broadcasts(kind: str, components: int):
    calls = [(group, call) for group in SIZE for call in moves(group)]
    spelled = []
    for group, call in calls:
        name, _, n = call.partition(" ")
        spelled.append(f"{group}_{name}(v{', ' + n if n else ''})")
    x, y = rows(kind, components, tuple(spelled))
    for row, (group, call) in enumerate(calls):
        sources = [source_of(group, call, lane) for lane in range(32)]
        np.testing.assert_array_equal(y[row], x[sources], err_msg=f"{group}_{call}")


def test_a_shuffle_may_read_a_lane_of_its_own_choice():
    order = np.random.default_rng(1).permutation(32)
    body = "uint lane = thread_index_in_simdgroup; y[lane] = simd_shuffle(x[lane], from[lane]);"
    x = random_lanes("float").ravel()
    np.testing.assert_array_equal(launch(body, {"x": x, "from": order.astype(np.int32)}, (32,), mx.float32), x[order])


def filled_source(direction: str, lane: int, delta: int, modulo: int) -> tuple[bool, int]:
    """Whether a lane gets a filling, and of which lane, by MSL's pictures: vectors of `modulo` lanes side by side."""
    start = lane - lane % modulo
    if direction == "up":
        row = [(True, lane) for lane in range(start, start + modulo)] + [(False, start + i) for i in range(modulo)]
        return row[modulo + lane % modulo - delta]
    row = [(False, start + i) for i in range(modulo)] + [(True, start + i) for i in range(modulo)]
    return row[lane % modulo + delta]


@pytest.mark.parametrize("kind", ["uchar", "int", "half", "float"])
@pytest.mark.parametrize("group", SIZE)
def test_shuffles_that_fill(group: str, kind: str):
    cases = [
        (direction, delta, modulo)
        for direction in ("up", "down")
        for modulo in (2, 4, 8, 16, 32)
        if modulo <= SIZE[group]
        for delta in sorted({0, 1, modulo // 2, modulo - 1, modulo})
    ]
    calls = []
    for direction, delta, modulo in cases:
        calls.append(f"{group}_shuffle_and_fill_{direction}(v, f, {delta}, {modulo})")
    whole = [(direction, delta) for direction, delta, modulo in cases if modulo == SIZE[group]]
    calls += [f"{group}_shuffle_and_fill_{direction}(v, f, {delta})" for direction, delta in whole]
    cases += [(direction, delta, SIZE[group]) for direction, delta in whole]
    x, f = random_lanes(kind), random_lanes(kind, seed=1)
    body = rows_kernel(calls, 1, extra="T f = filling[lane];")
    y = launch(
        body, {"x": x.ravel(), "filling": f.ravel()}, (len(calls), 32, 1), DTYPES[kind], template=(("T", DTYPES[kind]),)
    )
    for row, (direction, delta, modulo) in enumerate(cases):
        sources = [filled_source(direction, lane, delta, modulo) for lane in range(32)]
        want = [f[lane] if fills else x[lane] for fills, lane in sources]
        np.testing.assert_array_equal(y[row], want, err_msg=calls[row])


VOTES = """
    uint lane = thread_index_in_simdgroup;
    bool own = x[lane] != 0;
    if (active[lane] != 0) {
        y[lane] = uint(ulong(simd_ballot(own)));
        y[32 + lane] = uint(simd_vote::vote_t(simd_active_threads_mask()));
        y[64 + lane] = simd_all(own);
        y[96 + lane] = simd_any(own);
        y[128 + lane] = simd_is_first();
        y[160 + lane] = simd_ballot(own).all();
        y[192 + lane] = simd_ballot(own).any();
        y[224 + lane] = simd_is_helper_thread();
        y[256 + lane] = quad_vote::vote_t(quad_ballot(own));
        y[288 + lane] = unsigned(quad_active_threads_mask());
        y[320 + lane] = quad_all(own);
        y[352 + lane] = quad_any(own);
        y[384 + lane] = quad_is_first();
        y[416 + lane] = quad_ballot(own).all();
        y[448 + lane] = quad_ballot(own).any();
        y[480 + lane] = quad_is_helper_thread();
    }
"""


def votes(own: np.ndarray, active: np.ndarray, size: int) -> np.ndarray:
    """The eight rows of votes of groups of `size` lanes, `[8, 32]`."""
    result = np.zeros((8, 32), np.uint32)
    for lane in np.flatnonzero(active):
        group = slice(lane - lane % size, lane - lane % size + size)
        here, true = active[group], own[group] & active[group]
        powers = 2 ** np.arange(size, dtype=np.uint64)
        result[:, lane] = [
            powers[true].sum(),
            powers[here].sum(),
            own[group][here].all(),
            true.any(),
            np.flatnonzero(here)[0] == lane % size,
            true.all(),
            true.any(),
            0,
        ]
    return result


@pytest.mark.filterwarnings("ignore::forge_mlx.metal.emulator.MetalWarning")
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("chosen", ["random", "none", "every"])
def test_votes(chosen: str, lanes: str):
    rng = np.random.default_rng(3)
    own = {"random": rng.random(32) < 0.5, "none": ~ALL, "every": ALL}[chosen]
    active = LANES[lanes][0]
    inputs = {"x": own.astype(np.int32), "active": active.astype(np.int32)}
    y = launch(VOTES, inputs, (16, 32), mx.uint32, init_value=0)
    np.testing.assert_array_equal(y, np.concatenate([votes(own, active, 32), votes(own, active, 4)]))


def test_a_vote_is_made_of_bits_and_cast_back():
    body = """
    y[thread_index_in_simdgroup] = ulong(simd_vote(0x80000001ul)) == 0x80000001ul && !simd_vote().any() &&
        simd_vote(0xfffffffful).all() && quad_vote::vote_t(quad_vote(0xfeu)) == 14u;
"""
    assert launch(body, {"x": np.zeros(32)}, (32,), mx.uint32).all()


@pytest.mark.filterwarnings("ignore::forge_mlx.metal.emulator.MetalWarning")
def test_the_branches_of_an_if_stay_apart():
    # Were both calls one, as an optimiser may make them, each lane would get the sum of all.
    body = """
    uint lane = thread_index_in_simdgroup;
    float s;
    if (lane < 20) s = simd_sum(x[lane]);
    else s = simd_sum(x[lane]);
    y[lane] = s;
"""
    x = np.arange(32, dtype=np.float32)
    y = launch(body, {"x": x}, (32,), mx.float32)
    np.testing.assert_array_equal(y, np.where(x < 20, x[:20].sum(), x[20:].sum()))


@pytest.mark.filterwarnings("ignore::forge_mlx.metal.emulator.MetalWarning")
def test_lanes_that_have_left_a_loop_take_no_part():
    body = """
    uint lane = thread_index_in_simdgroup;
    int total = 0;
    for (uint i = 0; i <= lane; i++) total += simd_sum(1) + simd_min(100);
    y[lane] = total;
"""
    y = launch(body, {"x": np.zeros(32)}, (32,), mx.int32)
    np.testing.assert_array_equal(y, np.cumsum(np.arange(32, 0, -1) + 100))


def test_a_reduction_of_part_of_the_lanes_warns():
    body = "uint lane = thread_index_in_simdgroup; y[lane] = lane < 7 ? simd_sum(x[lane]) : 0.0f;"
    with pytest.warns(MetalWarning, match="simdgroup"):
        launch(body, {"x": np.zeros(32)}, (32,), mx.float32)


# The suite turns warnings into errors: none of these may give one.
@pytest.mark.parametrize("call", ["simd_is_first()", "simd_broadcast_first(lane)", "simd_active_threads_mask().any()"])
def test_asking_which_lanes_are_here_does_not_warn(call: str):
    launch(
        f"uint lane = thread_index_in_simdgroup; y[lane] = lane < 7 ? {call} : 0;", {"x": np.zeros(32)}, (32,), mx.int32
    )


INACTIVE = {
    "shuffle": "simd_shuffle(v, ushort(20))",
    "broadcast": "simd_broadcast(v, ushort(31))",
    "past the last lane": "simd_shuffle(v, ushort(lane + 32))",
    "xor past the last lane": "simd_shuffle_xor(v, ushort(32))",
    "up": "simd_shuffle_down(v, ushort(1))",
    "rotate": "simd_shuffle_rotate_up(v, ushort(1))",
    "fill": "simd_shuffle_and_fill_up(v, 0.0f, ushort(1))",
    "quad": "quad_shuffle(v, ushort(3))",
    "past the quad": "quad_shuffle(v, ushort(4))",
}


@pytest.mark.parametrize("call", INACTIVE)
def test_reading_a_lane_that_takes_no_part(call: str):
    body = f"""uint lane = thread_index_in_simdgroup;
    float v = x[lane];
    if (lane < 10) v = {INACTIVE[call]};
    y[lane] = v;
"""
    with pytest.raises(InactiveLaneError) as raised:
        launch(body, {"x": np.zeros(32, np.float32)}, (32,), mx.float32)
    assert [each.line for each in raised.value.locations[:1]] == [3]


# What is wrong with each, in the message.
MISSING = {
    "sum of bool": ("simd_sum(lane > 3u)", "not bool"),
    "sum of long": ("simd_sum(long(lane))", "up to 32 bits"),
    "sum of ulong": ("simd_prefix_inclusive_sum(ulong(lane))", "up to 32 bits"),
    "shuffle of ulong": ("metal::simd_shuffle(ulong(lane), ushort(0))", "up to 32 bits"),
    "broadcast of bool": ("simd_broadcast(lane > 3u, ushort(0))", "not bool"),
    "and of float": ("simd_and(float(lane))", "take integers"),
    "and of bfloat": ("simd_and(bfloat(lane))", "take integers"),
    "quad sum of bfloat": ("quad_sum(bfloat(lane))", "bfloat"),
    "quad shuffle of bfloat": ("quad_shuffle_down(bfloat(lane), ushort(1))", "bfloat"),
    "sum of a vector of bool": ("simd_sum(bool2(true)).x", "not bool"),
    "sum of a pointer": ("*simd_sum(x)", "vectors of them"),
    "filling of another type": ("simd_shuffle_and_fill_up(float(lane), 0, ushort(1))", "one type"),
    "a number of a vote": ("uint(simd_ballot(true))", "simd_vote"),
    "a vote as a condition": ("simd_ballot(true) ? 1 : 0", "simd_vote"),
}


@pytest.mark.parametrize("preamble", [True, False], ids=["with MLX's header", "without"])
def test_what_metal_does_not_have(preamble: bool):
    refused = refusals(
        [f"uint lane = thread_index_in_simdgroup; y[lane] = {call};" for call, _ in MISSING.values()],
        mlx_preamble=preamble,
    )
    for name, (_, says) in MISSING.items():
        assert says in refused.pop(0), name


def test_numpy_types_are_those_of_the_kernels():
    assert {kind: np.array(mx.zeros(1, dtype)).dtype for kind, dtype in DTYPES.items()} == NUMPY
