"""simdgroup_matrix: loads, stores, products and the lanes' elements, against NumPy.

Where MSL leaves the rounding of a product open, the emulator adds in float, in order of k, and rounds once (matrix.h);
the expected values do the same, so they are equal bit for bit.
"""

import itertools
from typing import Any

from forge_mlx.metal.emulator import BarrierError, BoundsError
from lane_kernels import launch, refusals
import mlx.core as mx
import numpy as np
import pytest

DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}
LANES = np.arange(32)
ROW = ((LANES // 4) & 4) + (LANES // 2) % 4
COLUMN = ((LANES // 4) & 2) * 2 + (LANES % 2) * 2


def bfloat_bits(x: np.ndarray) -> np.ndarray:
    """The bfloat16 nearest to each finite float32, halves to even, as bits."""
    pattern = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 values as the kernel's output holds them: bits for a bfloat."""
    return bfloat_bits(x) if kind == "bfloat" else x.astype({"float": np.float32, "half": np.float16}[kind])


def widened(x: np.ndarray, kind: str) -> np.ndarray:
    """What `rounded` gave, as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat" else x.astype(np.float32)


def random_matrix(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values of a type, as float32, of magnitudes between which the order of a sum shows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-5, 6, shape)
    return widened(rounded(x.astype(np.float32), kind), kind)


def array(x: np.ndarray, kind: str) -> mx.array:
    return mx.array(x).astype(DTYPES[kind])


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    total = c.astype(np.float32)
    for k in range(8):
        total = total + a[:, k : k + 1] * b[k : k + 1, :]
    return total


# Elements per row, origin (column, row), transposed: the arguments of a load or store.
PLACES = [
    (stride, origin, turned) for stride, origin in ((8, (0, 0)), (13, (0, 0)), (19, (5, 3))) for turned in (False, True)
]


def block(memory: np.ndarray, stride: int, origin: tuple[int, int], transposed: bool) -> np.ndarray:
    """The 8x8 view of a flat array that a load or store with these arguments means."""
    x, y = origin
    rows = memory[: memory.size // stride * stride].reshape(-1, stride)[y : y + 8, x : x + 8]
    return rows.T if transposed else rows


def arguments(stride: int, origin: tuple[int, int], transposed: bool) -> str:
    return f"{stride}, ulong2({origin[0]}, {origin[1]}), {str(transposed).lower()}"


@pytest.mark.parametrize("space", ["device", "threadgroup"])
@pytest.mark.parametrize("kind", DTYPES)
def test_load(kind: str, space: str):
    source = "staged" if space == "threadgroup" else "x"
    body = """
    uint lane = thread_index_in_simdgroup;
    threadgroup T staged[400];
    for (uint i = lane; i < 400; i += 32) staged[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<T, 8, 8> m;
"""
    for row, place in enumerate(PLACES):
        body += f"""
    simdgroup_load(m, {source}, {arguments(*place)});
    y[{64 * row} + 2 * lane] = m.thread_elements()[0];
    y[{64 * row + 1} + 2 * lane] = m.thread_elements()[1];
"""
    memory = random_matrix(kind, (400,), seed=1)
    shape = (len(PLACES), 32, 2)
    got = launch(body, {"x": array(memory, kind)}, shape, DTYPES[kind], template=(("T", DTYPES[kind]),))
    for place, y in zip(PLACES, got, strict=True):
        want = rounded(block(memory, *place), kind)
        np.testing.assert_array_equal(y[:, 0], want[ROW, COLUMN], err_msg=arguments(*place))
        np.testing.assert_array_equal(y[:, 1], want[ROW, COLUMN + 1], err_msg=arguments(*place))


@pytest.mark.parametrize("space", ["device", "threadgroup"])
@pytest.mark.parametrize("kind", DTYPES)
def test_store(kind: str, space: str):
    body = """
    uint lane = thread_index_in_simdgroup;
    threadgroup T staged[400];
    simdgroup_matrix<T, 8, 8> m;
    simdgroup_load(m, x);
"""
    for row, place in enumerate(PLACES):
        if space == "device":
            body += f"simdgroup_store(m, y + {400 * row}, {arguments(*place)});\n"
            continue
        body += f"""
    for (uint i = lane; i < 400; i += 32) staged[i] = T(0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_store(m, staged, {arguments(*place)});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < 400; i += 32) y[{400 * row} + i] = staged[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
"""
    m = random_matrix(kind, (8, 8), seed=1)
    shape = (len(PLACES), 400)
    got = launch(body, {"x": array(m, kind)}, shape, DTYPES[kind], template=(("T", DTYPES[kind]),), init_value=0)
    for place, y in zip(PLACES, got, strict=True):
        want = np.zeros(400, np.float32)
        block(want, *place)[:] = m
        np.testing.assert_array_equal(y, rounded(want, kind), err_msg=arguments(*place))


MULTIPLY = """
    simdgroup_matrix<A, 8, 8> a;
    simdgroup_matrix<B, 8, 8> b;
    simdgroup_matrix<C, 8, 8> c;
    simdgroup_matrix<D, 8, 8> d;
    simdgroup_load(a, x);
    simdgroup_load(b, z);
    simdgroup_load(c, w);
    {call};
    simdgroup_store(d, y);
"""
# The types of a, b, c and d.
TYPES = [
    *((each,) * 4 for each in DTYPES),
    ("half", "half", "float", "float"),
    ("bfloat", "bfloat", "float", "float"),
    ("float", "half", "bfloat", "half"),
    ("half", "bfloat", "half", "bfloat"),
]


@pytest.mark.parametrize("types", TYPES, ids=" ".join)
def test_multiply_accumulate(types: tuple[str, str, str, str]):
    a, b, c = (random_matrix(kind, (8, 8), seed) for seed, kind in enumerate(types[:3]))
    template = tuple((name, DTYPES[kind]) for name, kind in zip("ABCD", types, strict=True))
    inputs = {name: array(m, kind) for name, m, kind in zip("xzw", (a, b, c), types[:3], strict=True)}
    body = MULTIPLY.format(call="simdgroup_multiply_accumulate(d, a, b, c)")
    got = launch(body, inputs, (8, 8), DTYPES[types[3]], template=template)
    np.testing.assert_array_equal(got, rounded(product(a, b, c), types[3]))


@pytest.mark.parametrize("call", ["simdgroup_multiply(d, a, b)", "d = a * b"])
@pytest.mark.parametrize("kind", DTYPES)
def test_multiply(kind: str, call: str):
    a, b = random_matrix(kind, (8, 8), 5), random_matrix(kind, (8, 8), 6)
    template = tuple((name, DTYPES[kind]) for name in "ABCD")
    inputs = {"x": array(a, kind), "z": array(b, kind), "w": array(b, kind)}
    got = launch(MULTIPLY.format(call=call), inputs, (8, 8), DTYPES[kind], template=template)
    np.testing.assert_array_equal(got, rounded(product(a, b, np.zeros((8, 8))), kind))


def test_a_product_is_rounded_once():
    # In half 2048 + 1 is 2048: eight ones add up in float alone.
    body = MULTIPLY.format(call="simdgroup_multiply_accumulate(d, a, b, c)")
    inputs = {
        "x": mx.ones((8, 8), mx.float16),
        "z": mx.ones((8, 8), mx.float16),
        "w": mx.full((8, 8), 2048, mx.float16),
    }
    got = launch(body, inputs, (8, 8), mx.float16, template=tuple((name, mx.float16) for name in "ABCD"))
    np.testing.assert_array_equal(got, np.full((8, 8), 2056, np.float16))


def test_products_are_not_fused():
    # (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: a float drops the last term of the product, an fma of it and -1 does not.
    a = np.zeros((8, 8), np.float32)
    a[:, 0] = 1 + 2.0**-12
    inputs = {"x": mx.array(a), "z": mx.array(a.T.copy()), "w": mx.full((8, 8), -1.0)}
    body = MULTIPLY.format(call="simdgroup_multiply_accumulate(d, a, b, c)")
    got = launch(body, inputs, (8, 8), mx.float32, template=tuple((name, mx.float32) for name in "ABCD"))
    np.testing.assert_array_equal(got, np.full((8, 8), 2.0**-11, np.float32))


def test_the_elements_of_a_lane():
    body = """
    uint lane = thread_index_in_simdgroup;
    simdgroup_float8x8 m;
    m.thread_elements()[0] = 2 * lane;
    m.thread_elements()[1] = 2 * lane + 1;
    simdgroup_store(m, y);
"""
    got = launch(body, {"x": np.zeros(32)}, (8, 8), mx.float32)
    # Written out from MLX's steel/gemm/mma.h, so that neither the formula here nor the one in matrix.h is its own test.
    want = [
        [0, 1, 2, 3, 16, 17, 18, 19],
        [4, 5, 6, 7, 20, 21, 22, 23],
        [8, 9, 10, 11, 24, 25, 26, 27],
        [12, 13, 14, 15, 28, 29, 30, 31],
        [32, 33, 34, 35, 48, 49, 50, 51],
        [36, 37, 38, 39, 52, 53, 54, 55],
        [40, 41, 42, 43, 56, 57, 58, 59],
        [44, 45, 46, 47, 60, 61, 62, 63],
    ]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", DTYPES)
def test_constructors(kind: str):
    body = """
    simdgroup_matrix<T, 8, 8> diagonal(T(3.0f));
    simdgroup_store(diagonal, y);
    auto filled = make_filled_simdgroup_matrix<T, 8, 8>(T(2.0f));
    simdgroup_store(filled, y + 64);
    simdgroup_matrix<T, 8, 8> zero = simdgroup_matrix<T, 8, 8>(T(0.0f));
    simdgroup_store(zero, y + 128);
    auto square = make_filled_simdgroup_matrix<T, 8>(T(5.0f));
    simdgroup_store(square, y + 192);
"""
    got = launch(body, {"x": np.zeros(32)}, (4, 8, 8), DTYPES[kind], template=(("T", DTYPES[kind]),))
    want = np.stack([3 * np.eye(8), np.full((8, 8), 2), np.zeros((8, 8)), np.full((8, 8), 5)]).astype(np.float32)
    np.testing.assert_array_equal(got, rounded(want, kind))


def test_named_types_arrays_copies_and_reinterpreted_elements():
    header = """
template <typename M> void twice(thread M& m) { m.thread_elements() *= 2; }
float first(const thread simdgroup_float8x8& m) { return m.thread_elements()[0]; }
struct Tiles { simdgroup_float8x8 tile[2][2]; };
static_assert(sizeof(simdgroup_float8x8) == 8 && sizeof(simdgroup_half8x8) == 4 && sizeof(simdgroup_bfloat8x8) == 4);
"""
    body = """
    uint lane = thread_index_in_simdgroup;
    Tiles tiles;
    simdgroup_half8x8 h(half(1.0f));
    simdgroup_bfloat8x8 b = make_filled_simdgroup_matrix<bfloat, 8, 8>(bfloat(1.0f));
    simdgroup_load(tiles.tile[1][0], x);
    tiles.tile[0][1] = tiles.tile[1][0];
    const simdgroup_float8x8 kept = tiles.tile[0][1];
    twice(tiles.tile[0][1]);
    reinterpret_cast<thread float2&>(tiles.tile[0][1].thread_elements()) += float2(1.0f);
    simdgroup_multiply_accumulate(tiles.tile[0][0], h, b, tiles.tile[0][1]);
    simdgroup_store(tiles.tile[0][0], y);
    y[64 + lane] = first(kept) == kept.thread_elements().x ? first(kept) : -1.0f;
"""
    x = np.arange(64, dtype=np.float32)
    got = launch(body, {"x": x}, (96,), mx.float32, header=header)
    np.testing.assert_array_equal(got[:64], 2 * x + 2)
    np.testing.assert_array_equal(got[64:], x.reshape(8, 8)[ROW, COLUMN])


def test_a_tile_past_the_end():
    # Rows of 9 floats: of the 64 that there are, row 7 needs the 65th.
    body = """
    simdgroup_float8x8 m;
    simdgroup_load(m, x, 9);
    simdgroup_store(m, y);
"""
    with pytest.raises(BoundsError) as raised:
        launch(body, {"x": np.zeros(64)}, (64,), mx.float32)
    assert (raised.value.buffer, raised.value.index) == ("x", 64)
    assert raised.value.locations[0].line == 3


CALLS = {
    "load": "simdgroup_load(m, x)",
    "store": "simdgroup_store(m, y)",
    "multiply": "simdgroup_multiply_accumulate(m, m, m, m)",
    "fill": "m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f)",
}


@pytest.mark.parametrize(
    ("threads", "condition"), [(32, "lane < 31"), (31, "true")], ids=["branch", "simdgroup not full"]
)
@pytest.mark.parametrize("call", CALLS)
def test_all_lanes_must_take_part(call: str, threads: int, condition: str):
    body = f"""uint lane = thread_index_in_simdgroup;
    simdgroup_float8x8 m;
    m.thread_elements() = 0;
    if ({condition}) {CALLS[call]};
    y[lane] = m.thread_elements()[0];
"""
    with pytest.raises(BarrierError) as raised:
        launch(body, {"x": np.zeros(64, np.float32)}, (64,), mx.float32, threads=threads)
    assert raised.value.locations[0].line == 4


MISSING = {
    "matrix of int": "simdgroup_matrix<int, 8, 8> m;",
    "matrix of four columns": "simdgroup_matrix<float, 4, 4> m;",
    "matrix of double": "simdgroup_matrix<double, 8, 8> m;",
    "load of another type": "simdgroup_half8x8 m; simdgroup_load(m, x);",
    "store to a const array": "simdgroup_float8x8 m(0.0f); simdgroup_store(m, x);",
    "scaled": "simdgroup_float8x8 m(0.0f); m = m * 2.0f;",
    "sum": "simdgroup_float8x8 m(0.0f); m = m + m;",
    "from a scalar": "simdgroup_float8x8 m = 0.0f;",
    "fused with an array": "simdgroup_float8x8 m(0.0f); simdgroup_multiply_accumulate(m, m, m, x);",
}


@pytest.mark.parametrize("preamble", [True, False], ids=["with MLX's header", "without"])
def test_what_metal_does_not_have(preamble: bool):
    refusals(list(MISSING.values()), mlx_preamble=preamble)


def test_lanes_hold_all_elements():
    pairs: Any = itertools.chain(zip(ROW, COLUMN, strict=True), zip(ROW, COLUMN + 1, strict=True))
    assert sorted((int(r), int(c)) for r, c in pairs) == list(itertools.product(range(8), range(8)))
