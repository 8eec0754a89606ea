"""Numbers follow Metal's rules: rounding, denormals, fast:: against precise::, integers, NaN, lanes that left.

Where the Metal Shading Language leaves a choice, the test says which one the emulator makes.
"""

from typing import Any

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import MetalWarning
from forge_mlx.metal.emulator.settings import CHECKS
import mlx.core as mx
import numpy as np
import pytest

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
TYPES = {np.dtype(name): getattr(mx, name) for name in ("float16", "float32", "int32", "uint32", "int64", "uint16")}
TINY = np.float32(2.0**-149)


def elementwise(expression: str, *inputs: np.ndarray, out: Any, width: int = 1, threads: int = 256) -> np.ndarray:
    """`out[i] = expression` for each i, with inputs `a`, `b`, `c` and `i` the thread's position."""
    names = ["a", "b", "c"][: len(inputs)]
    kernel = emulator.metal_kernel(
        name="numbers",
        input_names=names,
        output_names=["out"],
        source=f"""
    uint i = thread_position_in_grid.x;
    out[i] = {expression};
""",
    )
    dtype = TYPES[np.dtype(out)]
    size = inputs[0].size // width
    with emulator.settings(checks=CHECKS):
        result = kernel(
            inputs=[mx.array(x) for x in inputs],
            grid=(size, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(size,)],
            output_dtypes=[dtype],
        )[0]
    return np.array(result)


def bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns of float32 values."""
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def bfloat_bits(values: np.ndarray) -> np.ndarray:
    """The bfloat16 nearest to each finite float32, halves to even: what 16 more bits of rounding give."""
    pattern = bits(values).astype(np.uint64)
    return ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).astype(np.uint16)


def float_of_bfloat(pattern: np.ndarray) -> np.ndarray:
    return (pattern.astype(np.uint32) << 16).view(np.float32)


def around_ties(representable: np.ndarray) -> np.ndarray:
    """The middle between each two neighbours, and the float32 values just below and above it."""
    ordered = np.unique(representable[np.isfinite(representable)].astype(np.float64))
    middle = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    return np.concatenate([middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)]).astype(np.float32)


def test_every_half_survives_the_way_through_float():
    halves = ALL_16_BITS.view(np.float16)
    wide = elementwise("float(as_type<half>(a[i]))", ALL_16_BITS, out="float32")
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
    back = elementwise("as_type<ushort>(half(float(as_type<half>(a[i]))))", ALL_16_BITS, out="uint16")
    numbers = ~np.isnan(halves)
    np.testing.assert_array_equal(back[numbers], ALL_16_BITS[numbers])
    assert np.isnan(back[~numbers].view(np.float16)).all()


def test_every_bfloat_survives_the_way_through_float():
    wide = elementwise("float(as_type<bfloat>(a[i]))", ALL_16_BITS, out="float32")
    values = float_of_bfloat(ALL_16_BITS)
    np.testing.assert_array_equal(wide, values)
    back = elementwise("as_type<ushort>(bfloat(float(as_type<bfloat>(a[i]))))", ALL_16_BITS, out="uint16")
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(back[numbers], ALL_16_BITS[numbers])
    assert np.isnan(float_of_bfloat(back[~numbers])).all()


def test_float_to_half_rounds_to_nearest_even():
    ties = around_ties(ALL_16_BITS.view(np.float16))
    edges = np.array([65504, 65519.996, 65520, -65520, 1e9, 2.0**-25, 2.0**-25 * 1.0001, 2.0**-24, np.inf], np.float32)
    values = np.concatenate([ties, edges])
    got = elementwise("as_type<ushort>(half(a[i]))", values, out="uint16")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, values.astype(np.float16).view(np.uint16))


def test_float_to_bfloat_rounds_to_nearest_even():
    ties = around_ties(float_of_bfloat(ALL_16_BITS))
    edges = np.array([np.finfo(np.float32).max, np.inf, -np.inf, TINY, 2.0**-134, 0.0, -0.0], np.float32)
    values = np.concatenate([ties, edges])
    got = elementwise("as_type<ushort>(bfloat(a[i]))", values, out="uint16")
    np.testing.assert_array_equal(got, bfloat_bits(values))


@pytest.mark.parametrize("sign", ["+", "-", "*", "/"])
def test_half_arithmetic_rounds_each_result_once(sign):
    a, b = np.random.default_rng(0).integers(0, 1 << 16, (2, 20_000), dtype=np.uint16)
    got = elementwise(f"as_type<ushort>(as_type<half>(a[i]) {sign} as_type<half>(b[i]))", a, b, out="uint16")
    x, y = (bit.view(np.float16).astype(np.float32) for bit in (a, b))
    with np.errstate(all="ignore"):
        want = {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign].astype(np.float16)
    np.testing.assert_array_equal(got.view(np.float16), want)


@pytest.mark.parametrize("sign", ["+", "-", "*", "/"])
def test_bfloat_arithmetic_rounds_each_result_once(sign):
    a, b = np.random.default_rng(0).integers(0, 1 << 16, (2, 20_000), dtype=np.uint16)
    got = elementwise(f"as_type<ushort>(as_type<bfloat>(a[i]) {sign} as_type<bfloat>(b[i]))", a, b, out="uint16")
    x, y = float_of_bfloat(a), float_of_bfloat(b)
    with np.errstate(all="ignore"):
        want = {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign]
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(got[numbers], bfloat_bits(want[numbers]))
    assert np.isnan(float_of_bfloat(got[~numbers])).all()


@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        ("half", lambda x: x.astype(np.float16).astype(np.float32)),
        ("bfloat", lambda x: float_of_bfloat(bfloat_bits(x))),
    ],
    ids=["half", "bfloat"],
)
def test_each_step_of_a_16_bit_expression_is_rounded(name, narrow):
    values = narrow(np.random.default_rng(1).uniform(-2, 2, (3, 4000)).astype(np.float32))
    got = elementwise(f"float({name}(a[i]) * {name}(b[i]) + {name}(c[i]))", *values, out="float32")
    stepwise = narrow(narrow(values[0] * values[1]) + values[2])
    np.testing.assert_array_equal(got, stepwise)
    # Rounding only at the end, as in float32, gives other values: the test can tell the two apart.
    assert (stepwise != narrow(values[0] * values[1] + values[2])).any()


def test_a_float_literal_is_not_a_double():
    values = np.random.default_rng(2).uniform(-2, 2, 4000).astype(np.float32)
    np.testing.assert_array_equal(elementwise("a[i] * 1.1", values, out="float32"), values * np.float32(1.1))


def test_products_and_sums_are_not_contracted():
    a, b, c = np.random.default_rng(3).uniform(-2, 2, (3, 4000)).astype(np.float32)
    np.testing.assert_array_equal(elementwise("a[i] * b[i] + c[i]", a, b, c, out="float32"), a * b + c)


def test_fma_rounds_once():
    a, b = np.random.default_rng(3).uniform(1, 2, (2, 4000)).astype(np.float32)
    exact = a.astype(np.float64) * b
    c = -(a * b)
    got = elementwise("fma(a[i], b[i], c[i])", a, b, c, out="float32")
    np.testing.assert_array_equal(got, (exact + c).astype(np.float32))


def test_denormals_are_kept():
    values = np.array([2.0**-126, 2.0**-130, TINY, -(2.0**-127), 3.0, 2.0**-149, 2.0**-148, 1.0], np.float32)
    np.testing.assert_array_equal(
        bits(elementwise("a[i] * 0.5f", values, out="float32")), bits(values * np.float32(0.5))
    )
    halves = np.arange(1, 9, dtype=np.uint16)
    got = elementwise("as_type<ushort>(as_type<half>(a[i]) + as_type<half>(a[i]))", halves, out="uint16")
    np.testing.assert_array_equal(got, 2 * halves)


def test_fast_functions_flush_denormals_and_precise_ones_keep_them():
    # Metal leaves the choice; a kernel that depends on either must show.
    values = np.array([-100.0, -88.0, -87.0, -103.0, 0.0, 1.0, -1.0, -95.0], np.float32)
    want = np.exp(values.astype(np.float64)).astype(np.float32)
    assert (np.abs(want) < 2.0**-126).any()
    precise = elementwise("precise::exp(a[i])", values, out="float32")
    np.testing.assert_allclose(precise, want, rtol=1e-6, atol=2 * TINY)
    fast = elementwise("fast::exp(a[i])", values, out="float32")
    np.testing.assert_allclose(fast, np.where(want < 2.0**-126, 0, want), rtol=1e-5)
    assert ((fast == 0) == (want < 2.0**-126)).all()


def test_masked_exp_is_zero():
    # Math mode "safe", MLX's default: infinities are honoured.
    values = np.array([-np.inf, np.inf, 0.0, -np.inf, np.nan, 1.0, -1e38, 1e38], np.float32)
    got = elementwise("metal::exp(a[i])", values, out="float32")
    np.testing.assert_allclose(got, [0, np.inf, 1, 0, np.nan, np.e, 0, np.inf], rtol=1e-6)


def test_min_and_max_return_the_number_beside_a_nan():
    a = np.array([np.nan, 1, np.nan, -np.inf, np.nan, 2, -0.0, 5], np.float32)
    b = np.array([1, np.nan, np.nan, np.nan, np.inf, 3, 1, 4], np.float32)
    for name in ("min", "max", "fmin", "fmax", "precise::min", "precise::max"):
        want = (np.fmin if "min" in name else np.fmax)(a, b)
        got = elementwise(f"{name}(a[i], b[i])", a, b, out="float32")
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_min_and_max_of_16_bits_return_the_number_beside_a_nan(name):
    a = np.array([np.nan, 1, np.nan, -np.inf, np.nan, 2, -0.0, 5], np.float32)
    b = np.array([1, np.nan, np.nan, np.nan, np.inf, 3, 1, 4], np.float32)
    got = elementwise(f"float(min({name}(a[i]), {name}(b[i])))", a, b, out="float32")
    np.testing.assert_array_equal(got, np.fmin(a, b))


def test_comparisons_with_nan_are_false():
    a = np.array([np.nan, 1, np.nan, 2, 0, -1, np.nan, 7], np.float32)
    b = np.array([1, np.nan, np.nan, 2, -0.0, 1, 0, 3], np.float32)
    got = elementwise(
        "(a[i] < b[i]) | (a[i] <= b[i]) << 1 | (a[i] == b[i]) << 2 | (a[i] != b[i]) << 3 | isnan(a[i]) << 4",
        a, b, out="int32",
    )  # fmt: skip
    want = (a < b) | (a <= b) * 2 | (a == b) * 4 | (a != b) * 8 | np.isnan(a) * 16
    np.testing.assert_array_equal(got, want)


def test_integer_division_rounds_towards_zero():
    # The sign of a remainder with a negative operand is left open by Metal: here the dividend's, as in C++.
    a = np.array([7, -7, 7, -7, 0, -(2**31), 2**31 - 1, 100], np.int32)
    b = np.array([2, 2, -2, -2, 5, 2, -1, -7], np.int32)
    quotient = np.trunc(a / b.astype(np.float64)).astype(np.int64)
    np.testing.assert_array_equal(elementwise("a[i] / b[i]", a, b, out="int32"), quotient)
    np.testing.assert_array_equal(elementwise("a[i] % b[i]", a, b, out="int32"), a - quotient * b)
    unsigned = a.astype(np.uint32)
    np.testing.assert_array_equal(elementwise("uint(a[i]) / 3u", unsigned, out="uint32"), unsigned // 3)


def test_int_arithmetic_wraps():
    a = np.array([2**31 - 1, -(2**31), 2**30, 65536, 123456789, -5, 46341, 0], np.int32)
    wide = a.astype(np.int64)
    got = elementwise("a[i] * a[i] + a[i]", a, out="int32")
    np.testing.assert_array_equal(got, (wide * wide + wide).astype(np.int32))
    np.testing.assert_array_equal(elementwise("long(a[i]) * a[i]", a, out="int64"), wide * wide)


def test_shifts_use_the_low_bits_of_their_amount():
    # By 32 and more: left open by C++; the amount modulo the width, as OpenCL has it and GPUs do.
    a = np.array([-8, 5, -1, 2**31 - 1, -(2**31), 1, 1, -3], np.int32)
    b = np.array([1, 2, 31, 30, 4, 32, 33, 63], np.int32)
    np.testing.assert_array_equal(elementwise("a[i] >> b[i]", a, b, out="int32"), a >> (b % 32))
    left = (a.view(np.uint32).astype(np.uint64) << (b % 32).astype(np.uint64)).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(elementwise("a[i] << b[i]", a, b, out="int32"), left)
    unsigned = a.view(np.uint32)
    np.testing.assert_array_equal(
        elementwise("uint(a[i]) >> b[i]", unsigned, b, out="uint32"), unsigned >> (b % 32).astype(np.uint32)
    )


def test_float_to_int_rounds_towards_zero():
    values = np.array([1.9, -1.9, 0.5, -0.5, 2147483520.0, -2147483648.0, 16777217.0, -0.0], np.float32)
    np.testing.assert_array_equal(elementwise("int(a[i])", values, out="int32"), np.trunc(values).astype(np.int64))
    unsigned = np.array([0.99, 1.5, 4294967040.0, 3e9, 2.0**31, 7.0, 0.0, 255.9], np.float32)
    np.testing.assert_array_equal(
        elementwise("uint(a[i])", unsigned, out="uint32"), np.trunc(unsigned).astype(np.uint32)
    )


def test_int_to_float_rounds_to_nearest_even():
    values = np.array([16777217, 16777219, -16777217, 2**31 - 1, 33554431, 1, 0, -(2**31)], np.int32)
    np.testing.assert_array_equal(elementwise("float(a[i])", values, out="float32"), values.astype(np.float32))
    got = elementwise(
        "float(half(a[i]))", np.array([2049, 2051, 65519, 65520, -4099, 1, 0, 7], np.int32), out="float32"
    )
    np.testing.assert_array_equal(got, np.float32([2048, 2052, 65504, np.inf, -4100, 1, 0, 7]))


def test_rounding_functions():
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.4999998, 8388609.0], np.float32)
    np.testing.assert_array_equal(elementwise("rint(a[i])", values, out="float32"), np.rint(values))
    away = np.copysign(np.floor(np.abs(values.astype(np.float64)) + 0.5), values)
    np.testing.assert_array_equal(elementwise("round(a[i])", values, out="float32"), away)


LANES = np.arange(32)


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("simd_sum(a[i])", lambda x, on: x[on].sum()),
        ("simd_product(a[i])", lambda x, on: x[on].prod()),
        ("simd_max(a[i])", lambda x, on: x[on].max()),
        ("simd_min(a[i])", lambda x, on: x[on].min()),
        ("simd_or(a[i])", lambda x, on: np.bitwise_or.reduce(x[on])),
        ("simd_and(a[i])", lambda x, on: np.bitwise_and.reduce(x[on])),
        ("simd_xor(a[i])", lambda x, on: np.bitwise_xor.reduce(x[on])),
        ("simd_prefix_inclusive_sum(a[i])", lambda x, on: np.cumsum(x * on)),
        ("simd_prefix_exclusive_sum(a[i])", lambda x, on: np.cumsum(x * on) - x),
        ("int(simd_any(i == 21))", lambda _x, on: int(on[21])),
        ("int(simd_all(i != 21))", lambda _x, on: int(not on[21])),
        ("simd_broadcast_first(a[i])", lambda x, on: x[on][0]),
        ("int(simd_is_first())", lambda _x, on: np.arange(32) == np.flatnonzero(on)[0]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize(
    "active",
    [np.ones(32, bool), LANES >= 5, LANES % 3 == 1, (LANES > 7) & (LANES < 29)],
    ids=["all lanes", "from the fifth", "every third", "the middle"],
)
@pytest.mark.filterwarnings("ignore::forge_mlx.metal.emulator.MetalWarning")
def test_simd_functions_see_the_active_lanes_alone(expression, want, active):
    # Numbers in which every lane shows: a bit each where bits are combined, few enough twos for a product.
    bit_each = (np.uint32(1) << LANES.astype(np.uint32)).view(np.int32)
    by_name = {"product": LANES % 2 + 1, "_or": bit_each, "_xor": bit_each, "_and": ~bit_each}
    numbers = [by_name[name] for name in by_name if name in expression]
    values = (numbers[0] if numbers else (LANES * 37) % 61 + 1).astype(np.int32)
    kernel = emulator.metal_kernel(
        name="lanes",
        input_names=["a", "active"],
        output_names=["out"],
        source=f"""
    uint i = thread_position_in_grid.x;
    out[i] = -1;
    if (active[i]) {{
        out[i] = {expression};
    }}
""",
    )
    (out,) = kernel(
        inputs=[mx.array(values), mx.array(active)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.int32],
    )
    result = np.broadcast_to(want(values, active), 32)
    np.testing.assert_array_equal(np.array(out), np.where(active, result, -1))


def test_reduction_over_part_of_a_simdgroup_warns():
    kernel = emulator.metal_kernel(
        name="part",
        input_names=["a"],
        output_names=["out"],
        source="""
    uint i = thread_position_in_grid.x;
    out[i] = 0;
    if (i != 3) {
        out[i] = simd_sum(a[i]);
    }
""",
    )
    with pytest.warns(MetalWarning, match="simd"):
        kernel(
            inputs=[mx.arange(32, dtype=mx.int32)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[mx.int32],
        )


@pytest.mark.parametrize(
    ("name", "dtype"), [("float", mx.float32), ("half", mx.float16), ("bfloat16_t", mx.bfloat16)], ids=str
)
def test_matrix_product_accumulates_in_float(name, dtype):
    rng = np.random.default_rng(4)
    a, b = (mx.array(rng.standard_normal((8, 8)).astype(np.float32)).astype(dtype) for _ in range(2))
    kernel = emulator.metal_kernel(
        name="product",
        input_names=["a", "b"],
        output_names=["out"],
        source=f"""
    simdgroup_matrix<{name}, 8, 8> left, right;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_load(left, a, 8);
    simdgroup_load(right, b, 8);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    simdgroup_store(sum, out, 8);
""",
    )
    (out,) = kernel(
        inputs=[a, b],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
    )
    x, y = (np.array(m.astype(mx.float32)) for m in (a, b))
    np.testing.assert_allclose(np.array(out), 1 + x @ y, rtol=1e-5, atol=1e-6)


def test_elements_of_a_matrix_lie_in_apples_lane_order():
    kernel = emulator.metal_kernel(
        name="lane_order",
        input_names=["x"],
        output_names=["out"],
        source="""
    uint lane = thread_index_in_simdgroup;
    simdgroup_float8x8 m;
    simdgroup_load(m, x, 8);
    out[2 * lane] = m.thread_elements()[0];
    out[2 * lane + 1] = m.thread_elements()[1];
""",
    )
    (out,) = kernel(
        inputs=[mx.arange(64, dtype=mx.float32)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    # As flash attention kernels written for Macs compute it from the bits of the lane.
    row = 4 * ((LANES >> 4) & 1) + 2 * ((LANES >> 2) & 1) + ((LANES >> 1) & 1)
    column = 4 * ((LANES >> 3) & 1) + 2 * (LANES & 1)
    np.testing.assert_array_equal(np.array(out), np.stack([8 * row + column, 8 * row + column + 1], 1).ravel())
