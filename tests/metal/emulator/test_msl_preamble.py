"""MLX's own Metal header on the emulator: what it adds for bfloat is computed in float and rounded once.

The header is the installed package's. Its functions are compared with the emulator's own on float, which the tests of
the mathematical functions check, and with NumPy.
"""

from pathlib import Path
import re

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import BoundsError, CompileError
from forge_mlx.metal.emulator.preamble import HEADERS, preamble_text
from lane_kernels import launch, random_lanes, scan, tree
import mlx.core as mx
import numpy as np
import pytest

INCLUDE = Path(mx.__file__).parent / "include"
SPACES = ("", "metal::", "metal::fast::", "metal::precise::")
UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "cospi", "exp", "exp10", "exp2"),
    *("fabs", "floor", "fract", "log", "log10", "log2", "rint", "round", "rsqrt", "sin", "sinh", "sinpi", "sqrt"),
    *("tan", "tanh", "tanpi", "trunc"),
)
BINARY = ("atan2", "divide", "fmax", "fmin", "fmod", "max", "min", "pow", "powr")
TERNARY = ("fma", "fmax3", "fmin3", "fmedian3", "max3", "min3", "median3")
# In every namespace, but for those that MSL has in none but metal for float.
CALLS = (
    *(f"{{space}}{name}({{a}})" for name in UNARY),
    *(f"{{space}}{name}({{a}}, {{b}})" for name in BINARY),
    *(f"{{space}}{name}({{a}}, {{b}}, {{c}})" for name in TERNARY),
    "{space}ldexp({a}, 3)",
    "{space}ldexp({a}, -140)",
)


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest bfloat16, halves to even, as float32."""
    pattern = x.view(np.uint32).astype(np.uint64)
    rounded = ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.nan, rounded).astype(np.float32)


def bfloats(bits: np.ndarray) -> mx.array:
    return mx.array(bits.astype(np.uint16)).view(mx.bfloat16)


def some_bfloats(step: int, offset: int = 0) -> np.ndarray:
    """The bits of every `step`-th bfloat, both zeros, infinities, a NaN, the least and the greatest among them."""
    special = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x3F80, 0xBF80, 0x0080]
    return np.concatenate([np.array(special, np.uint16), np.arange(offset, 1 << 16, step, dtype=np.uint16)])


@pytest.mark.parametrize("space", SPACES, ids=["unqualified", "metal", "fast", "precise"])
def test_mathematical_functions_of_bfloat(space: str):
    lines = []
    for row, call in enumerate(CALLS):
        narrow = call.format(space=space, a="a", b="b", c="c")
        # What the call names where nothing qualifies it is in metal.
        wide = call.format(space=space or "metal::", a="float(a)", b="float(b)", c="float(c)")
        lines.append(f"y[{2 * row} * n + i] = bfloat({narrow}); y[{2 * row + 1} * n + i] = {wide};")
    bits = some_bfloats(61)
    rng = np.random.default_rng(0)
    body = """
    static_assert(is_same_v<decltype({space}exp(x[0])), bfloat>, "the overload gives a bfloat");
    const uint n = x_shape[0];
    for (uint i = thread_position_in_grid.x; i < n; i += 32) {{
        bfloat a = x[i], b = z[i], c = w[i];
        {lines}
    }}
""".format(space=space, lines="\n        ".join(lines))
    inputs = {"x": bfloats(bits), "z": bfloats(rng.permutation(bits)), "w": bfloats(rng.permutation(bits))}
    y = launch(body, inputs, (len(CALLS), 2, len(bits)), mx.float32)
    for call, (narrow, wide) in zip(CALLS, y, strict=True):
        np.testing.assert_array_equal(narrow, to_bfloat(wide), err_msg=call)


def test_some_functions_against_numpy():
    bits = np.arange(0x3E00, 0x4200, dtype=np.uint16)
    x = (bits.astype(np.uint32) << 16).view(np.float32)
    body = """
    for (uint i = thread_position_in_grid.x; i < 1024; i += 32) {
        y[i] = precise::exp(x[i]); y[1024 + i] = precise::sqrt(x[i]); y[2048 + i] = precise::sin(x[i]);
    }
"""
    y = launch(body, {"x": bfloats(bits)}, (3, 1024), mx.bfloat16)
    wide = x.astype(np.float64)
    for got, want in zip(y, (np.exp(wide), np.sqrt(wide), np.sin(wide)), strict=True):
        np.testing.assert_array_equal(
            (got.astype(np.uint32) << 16).view(np.float32), to_bfloat(want.astype(np.float32))
        )


def test_the_rest_of_the_functions():
    body = """
    uint i = thread_position_in_grid.x;
    bfloat a = x[i], b = z[i];
    int exponent = 0;
    y[i] = frexp(a, exponent);
    y[32 + i] = bfloat(float(exponent));
    y[64 + i] = fdim(a, b);
    y[96 + i] = nextafter(a, b);
"""
    rng = np.random.default_rng(1)
    a, b = (to_bfloat((rng.standard_normal(32) * 8).astype(np.float32)) for _ in range(2))
    y = launch(body, {"x": mx.array(a).astype(mx.bfloat16), "z": mx.array(b).astype(mx.bfloat16)}, (4, 32), mx.bfloat16)
    got = (y.astype(np.uint32) << 16).view(np.float32)
    mantissa, exponent = np.frexp(a)
    np.testing.assert_array_equal(got[:2], [mantissa, exponent])
    np.testing.assert_array_equal(got[2], np.where(a > b, to_bfloat(a - b), 0))
    # The next float is the same bfloat: MLX's header takes the step in float.
    np.testing.assert_array_equal(got[3], a)


REDUCTIONS = ("sum", "product", "max", "min")
PREFIXES = ("prefix_inclusive_sum", "prefix_exclusive_sum", "prefix_inclusive_product", "prefix_exclusive_product")


def test_reductions_of_bfloat_are_rounded_once():
    names = (*REDUCTIONS, *PREFIXES)
    body = "uint i = thread_index_in_simdgroup;\n"
    body += "\n".join(f"y[{32 * row} + i] = simd_{name}(x[i]);" for row, name in enumerate(names))
    x = to_bfloat(random_lanes("float"))
    y = launch(body, {"x": mx.array(x.ravel()).astype(mx.bfloat16)}, (len(names), 32), mx.bfloat16)
    got = dict(zip(names, (y.astype(np.uint32) << 16).view(np.float32), strict=True))
    every = np.ones(32, bool)
    want = {
        "sum": tree(x, every, np.add, -0.0, "float"),
        "product": tree(x, every, np.multiply, 1, "float"),
        "max": x.max(axis=0),
        "min": x.min(axis=0),
    }
    for name in PREFIXES:
        combine, first = (np.add, 0) if name.endswith("sum") else (np.multiply, 1)
        want[name] = scan(x, every, combine, first, "float", inclusive="inclusive" in name)[:, 0]
    for name in names:
        np.testing.assert_array_equal(got[name], np.broadcast_to(to_bfloat(want[name]), 32), err_msg=name)
    # Rounded after each addition it would be another number.
    assert got["sum"][0] != x[:, 0].cumsum(dtype=np.float32)[0]


def test_shuffles_move_all_bits_of_a_bfloat():
    moves = ("shuffle_down(v, 3)", "shuffle_up(v, 3)", "shuffle_xor(v, 5)", "shuffle(v, 31 - i)", "broadcast(v, 7)")
    turns = ("shuffle_rotate_down(v, 3)", "shuffle_rotate_up(v, 3)")
    fills = ("and_fill_down(v, f, 3)", "and_fill_up(v, f, 3)", "and_fill_down(v, f, 3, 8)", "and_fill_up(v, f, 3, 8)")
    calls = [*moves, *turns, *(f"shuffle_{each}" for each in fills)]
    body = "ushort i = thread_index_in_simdgroup; bfloat v = x[i], f = z[i];\n"
    body += "\n".join(f"y[{32 * row} + i] = simd_{call};" for row, call in enumerate(calls))
    rng = np.random.default_rng(5)
    v, f = rng.integers(0, 1 << 16, (2, 32), dtype=np.uint16)
    v[:4] = [0x7FA5, 0xFFC1, 0x8000, 0x0001]
    y = launch(body, {"x": bfloats(v), "z": bfloats(f)}, (len(calls), 32), mx.bfloat16)
    i = np.arange(32)
    want = [
        np.where(i + 3 < 32, v[np.minimum(i + 3, 31)], v),
        np.where(i >= 3, v[np.maximum(i - 3, 0)], v),
        v[i ^ 5],
        v[31 - i],
        np.full(32, v[7]),
        np.roll(v, -3),
        np.roll(v, 3),
        np.concatenate([v[3:], f[:3]]),
        np.concatenate([f[29:], v[:29]]),
        np.concatenate([np.concatenate([v[s + 3 : s + 8], f[s : s + 3]]) for s in range(0, 32, 8)]),
        np.concatenate([np.concatenate([f[s + 5 : s + 8], v[s : s + 5]]) for s in range(0, 32, 8)]),
    ]
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("dtype", [mx.int64, mx.uint64, mx.bool_, mx.complex64], ids=str)
def test_shuffles_that_mlx_adds(dtype: mx.Dtype):
    calls = [
        "simd_shuffle_down(v, 4)",
        "simd_shuffle_up(v, 4)",
        "simd_shuffle_and_fill_up(v, f, 4)",
        "simd_shuffle(v, 9)",
    ]
    body = "uint i = thread_index_in_simdgroup; T v = x[i], f = z[i];\n"
    body += "\n".join(f"y[{32 * row} + i] = {call};" for row, call in enumerate(calls))
    rng = np.random.default_rng(6)
    bits = mx.array(rng.integers(0, 1 << 63, (2, 32), dtype=np.uint64))
    v, f = bits.astype(dtype) if dtype != mx.bool_ else bits % 3 > 0
    y = launch(body, {"x": v, "z": f}, (4, 32), dtype, template=(("T", dtype),))
    v, f = np.array(v), np.array(f)
    up, down = np.concatenate([v[:4], v[:28]]), np.concatenate([v[4:], v[28:]])
    np.testing.assert_array_equal(y, [down, up, np.concatenate([f[28:], v[:28]]), np.full(32, v[9])])


def test_complex_numbers():
    header = "template <typename T> complex_t<T> both(complex_t<T> a, complex_t<T> b) { return a * b - b; }\n"
    body = """
    uint i = thread_position_in_grid.x;
    complex64_t a = x[i], b = z[i];
    threadgroup complex64_t shared[32];
    shared[i] = a;
    shared[i] += b;
    y[i] = shared[i];
    y[32 + i] = a * b;
    y[64 + i] = a / b;
    y[96 + i] = both(a, b);
    y[128 + i] = complex64_t(vec<float, 2>(a.imag, a.real));
    y[160 + i] = {float(a), 2.0f};
    y[192 + i] = a > b ? 1.0f : 0.0f;
    y[224 + i] = -a + 1.0f;
    y[256 + i] = log1p(a);
    complex64_t top = Limits<complex64_t>::max;
    y[288 + i] = top;
"""
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((2, 32)) + 1j * rng.standard_normal((2, 32))).astype(np.complex64)
    y = launch(body, {"x": a, "z": b}, (10, 32), mx.complex64, header=header)
    greater = (a.real > b.real) | ((a.real == b.real) & (a.imag > b.imag))
    want = [a + b, a * b, a / b, a * b - b, a.imag + 1j * a.real, a.real + 2j, greater, 1 - a, np.log1p(a)]
    np.testing.assert_allclose(y[:9], want, rtol=2e-6, atol=1e-6)
    assert (y[9].real == np.inf).all()
    assert (y[9].imag == np.inf).all()


def test_helpers():
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = log1p(x[i]);
    y[32 + i] = hypot(x[i], 2.0f);
    y[64 + i] = float(log1p(bfloat(x[i])));
    y[96 + i] = ceildiv(i, 5u) + cast_to<bool>(x[i]) + cast_to<float>(bfloat(0.5f)) + WorkPerThread<float>::n;
    y[128 + i] = Limits<float>::max == INFINITY && Limits<half>::finite_max == half(65504.0f) &&
        Limits<uchar>::min == 0 && Limits<bfloat16_t>::finite_min < bfloat16_t(-3.0e38f) && !Limits<bool>::min;
    y[160 + i] = uint16_to_bfloat16(0x4049) == bfloat(3.140625f) && bfloat16_to_uint16(bfloat(1.0f)) == 0x3f80;
"""
    x = np.linspace(-0.9, 100, 32).astype(np.float32)
    y = launch(body, {"x": x}, (6, 32), mx.float32)
    np.testing.assert_allclose(y[0], np.log1p(x), rtol=1e-6)
    np.testing.assert_allclose(y[1], np.hypot(x, 2), rtol=1e-6)
    np.testing.assert_allclose(y[2], np.log1p(to_bfloat(x)), rtol=2.0**-8)
    np.testing.assert_array_equal(y[3], -(-np.arange(32) // 5) + 1 + 0.5 + 2)
    assert y[4:].all()


def test_locations_in_strided_arrays():
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = elem_to_loc(i, x_shape, x_strides, x_ndim);
    LoopedElemToLoc<3, int> loop(x_ndim);
    for (uint k = 0; k < i; k++) loop.next(x_shape, x_strides);
    y[24 + i] = loop.location();
    y[48 + i] = elem_to_loc<int>(uint3(i % 4, i / 4 % 3, i / 12), x_shape, x_strides, x_ndim);
    y[72 + i] = x[y[i]];
"""
    x = mx.arange(24, dtype=mx.int32).reshape(4, 2, 3)
    # [2, 3, 4] with strides [3, 1, 6].
    turned = x.transpose(1, 2, 0)
    kernel = emulator.metal_kernel(
        name="strided", input_names=["x"], output_names=["y"], source=body, ensure_row_contiguous=False
    )
    y = kernel(
        inputs=[turned],
        grid=(24, 1, 1),
        threadgroup=(24, 1, 1),
        output_shapes=[(4, 24)],
        output_dtypes=[mx.int32],
    )[0]
    np.testing.assert_array_equal(np.array(y), np.tile(np.array(turned).ravel(), (4, 1)))


def test_what_the_header_reads_belongs_to_the_users_line():
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = elem_to_loc(7u, x_shape + 1, x_strides, 2);
"""
    with pytest.raises(BoundsError) as raised:
        launch(body, {"x": np.zeros((4, 8))}, (32,), mx.int32)
    assert (raised.value.buffer, raised.value.index) == ("x_shape", 2)
    assert raised.value.locations[0].line == 3


ONLY_WITH_IT = {
    "log1p": "log1p(x[0])",
    "hypot": "hypot(x[0], 1.0f)",
    "sum of bfloat": "float(simd_sum(bfloat(x[0])))",
    "prefix sum of bfloat": "float(simd_prefix_inclusive_sum(bfloat(x[0])))",
    "shuffle of bfloat": "float(simd_shuffle_down(bfloat(x[0]), ushort(0)))",
    "shuffle of bool": "simd_shuffle_down(x[0] > 0, ushort(0))",
    "complex numbers": "complex64_t(x[0], 1.0f).real",
    "limits": "Limits<float>::finite_max",
    "places": "elem_to_loc_1(3, x_strides[0])",
    "names of MLX": "float(bfloat16_t(1.0f)) + float(float16_t(1.0f))",
}


@pytest.mark.parametrize("name", ONLY_WITH_IT)
def test_what_only_the_header_has(name: str):
    body = f"\ny[thread_position_in_grid.x] = {ONLY_WITH_IT[name]};"
    header = "#include <metal_stdlib>\nusing namespace metal;\n"
    launch(body, {"x": np.zeros(32)}, (32,), mx.float32, header=header)
    with pytest.raises(CompileError) as raised:
        launch(body, {"x": np.zeros(32)}, (32,), mx.float32, header=header, mlx_preamble=False)
    assert {each.line for each in raised.value.locations} == {2}


@pytest.mark.parametrize("header", HEADERS)
def test_every_line_of_a_header_keeps_its_number(header: str):
    text = preamble_text(INCLUDE)
    name = f"mlx/backend/metal/kernels/{header}"
    assert text.count(f'"{name}"') == 1
    part = re.split(r"\n#(?:line|pragma clang)", text.split(f'#line 1 "{name}"\n')[1])[0].split("\n")
    original = (INCLUDE / name).read_text().split("\n")
    assert len(part) >= len(original)
    # A line may be spelled otherwise, but some word of it stays: not of directives, `thread`, or what exports a kernel.
    for number, line in enumerate(original):
        words = set(re.findall(r"\w+", line))
        if words and not line.startswith("#") and not words & {"host_name", "kernel", "thread"}:
            assert words & set(re.findall(r"\w+", part[number])), number + 1


def test_a_package_without_headers(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"bf16\.h"):
        preamble_text(tmp_path)
