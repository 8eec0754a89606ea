"""Metal's types in the emulator: vectors, their constructors and conversions, packed vectors, bits, limits, traits."""

from forge_mlx.metal.emulator.translate import translate_header
from msl_functions import (
    FLOATS,
    INTEGERS,
    NUMPY,
    SCALARS,
    accepted,
    aligned,
    bfloat_bits,
    call,
    compile_functions,
    error_of,
    samples,
    stored_as,
    values_of,
)
import numpy as np
import pytest

COUNT = 96
SIZES = (2, 3, 4)
NUMBERS = (*INTEGERS, *FLOATS)


def converted(source: str, target: str, stored: np.ndarray) -> np.ndarray:
    """What Metal's conversion gives: integers wrap, floats are rounded to nearest and saturate to integers."""
    x = values_of(source, stored)
    if target == "bool":
        return x != 0
    if target in FLOATS:
        if target == "bfloat":
            return bfloat_bits(x)
        with np.errstate(over="ignore"):
            return x.astype(NUMPY[target])
    if source not in FLOATS:
        return x.astype(NUMPY[target])
    info = np.iinfo(NUMPY[target])
    wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=2.0**70, neginf=-(2.0**70))
    return np.array([min(max(int(value), info.min), info.max) for value in wide.tolist()], dtype=NUMPY[target])


def same(got: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Equal bit for bit, but for the bits of NaN."""
    nan = np.isnan(values_of(name, expected)) if name in FLOATS else np.zeros(expected.shape, dtype=bool)
    assert np.array_equal(np.isnan(values_of(name, got)) if name in FLOATS else nan, nan)
    view = expected.dtype if expected.dtype == np.bool_ else f"u{expected.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(view)[~nan], expected.view(view)[~nan])


def conversion_function(source: str, target: str) -> str:
    """Row by row: the scalar, its splats and the converted vectors of every size, by constructor and by cast."""
    lines = [f'extern "C" void from_{source}(device const {source}* x, device {target}* y, long n) {{']
    # Clang has no cast between half and bfloat; the translation calls emu_make.
    scalar = f"emu_make<{target}>" if {source, target} == {"half", "bfloat"} else target
    lines += ["for (long i = 0; i < n; ++i, x += 4) {", f"*y++ = {scalar}(x[0]);", f"*y++ = emu_cast<{target}>(x[1]);"]
    for n in SIZES:
        fill = " ".join(f"v.{axis} = x[{c}];" for c, axis in enumerate("xyzw"[:n]))
        for value in (f"{target}{n}(x[0])", f"{target}{n}(v)", f"emu_cast<vec<{target}, {n}>>(v)"):
            if target == "bool":
                value = value.replace(f"vec<bool, {n}>", f"bool{n}")
            lines.append(f"{{ {source}{n} v; {fill} {target}{n} r = {value};")
            lines += [f"*y++ = r.{axis};" for axis in "xyzw"[:n]]
            lines.append("}")
    return "\n".join([*lines, "}", "}"])


@pytest.fixture(scope="module", autouse=True)
def _headers_and_runtime_are_compiled() -> None:
    compile_functions("")


@pytest.mark.parametrize("target", SCALARS)
def test_every_conversion_to(target: str) -> None:
    library = compile_functions("\n".join(conversion_function(source, target) for source in SCALARS))
    columns = [0, 1] + [c for n in SIZES for c in [0] * n + [*range(n)] * 2]
    for source in SCALARS:
        x = samples(source, 4 * COUNT)
        y = np.zeros((COUNT, len(columns)), dtype=NUMPY[target])
        call(library, f"from_{source}", x, y, COUNT)
        same(y, np.ascontiguousarray(converted(source, target, x).reshape(COUNT, 4)[:, columns]), target)


PARTS = {
    2: ("2", "11"),
    3: ("3", "111", "12", "21"),
    4: ("4", "1111", "112", "121", "211", "22", "13", "31"),
}


@pytest.mark.parametrize("scalar", SCALARS)
def test_constructors_take_scalars_and_vectors_that_fill_the_vector(scalar: str) -> None:
    lines = [f'extern "C" void make(device const {scalar}* x, device {scalar}* y) {{']
    lines += [f"{scalar}{n} v{n}_{c}; " for n in (2, 3) for c in range(4)]
    lines += [
        f"v{n}_{c}.{axis} = x[{c + i}];" for n in (2, 3) for c in range(5 - n) for i, axis in enumerate("xyz"[:n])
    ]
    expected = []
    for size, splits in PARTS.items():
        for split in splits:
            starts = [sum(map(int, split[:i])) for i in range(len(split))]
            parts = [
                f"x[{c}]" if n == "1" else f"v{n}_{c}" if n in "23" else f"{scalar}4(x[0], x[1], x[2], x[3])"
                for n, c in zip(split, starts, strict=True)
            ]
            for name in (f"{scalar}{size}", f"metal::{scalar}{size}"):
                lines += [f"{{ {scalar}{size} r = {name}({', '.join(parts)});"]
                lines += [f"*y++ = r.{axis};" for axis in "xyzw"[:size]]
                lines += ["}"]
                expected += list(range(size))
    library = compile_functions("\n".join([*lines, "}"]))
    x = np.array([1, 0, 1, 1], dtype=bool) if scalar == "bool" else stored_as(scalar, np.array([3, 5, 7, 11]))
    y = np.zeros(len(expected), dtype=NUMPY[scalar])
    call(library, "make", x, y)
    np.testing.assert_array_equal(y, x[expected])


def test_what_does_not_fill_a_vector_does_not_compile() -> None:
    expressions = ["float4(a, a, a)", "float4(b, b, b)", "float3(c)", "float2(c)", "float4(a, c, a)", "float2(b, b)"]
    expressions += ["float4(b, c)", "float3(a, c)"]
    expressions += ["float4(d)", "float(c)", "bool4(m, true)", "bool4(true, false)", "packed_float3(b, b)"]
    expressions += ["float4(pointer)", "half(c)", "emu_cast<float2>(d)", "emu_make<vec<half, 3>>(a, a)"]
    parameters = "float a, float2 b, float4 c, float3 d, bool2 m, device float* pointer"
    expressions += ["float4(a, b, a)"]
    lines = [f"void f{n}({parameters}) {{ auto x = {text}; }}" for n, text in enumerate(expressions)]
    assert accepted(lines) == lines[-1:]


def test_constructors_are_constant_expressions() -> None:
    text = """
    constant constexpr float4 table[2] = {float4(1, 2.0f, float2(3)), float4(half3(1.5h), 4)};
    static_assert(table[0].w == 3 && table[1].x == 1.5f && table[1].w == 4);
    static_assert(int4(float4(1.9f)).y == 1 && uint2(int2(-1)).x == 0xffffffffu && as_type<uint>(1.0f) == 0x3f800000u);
    constant constexpr bool4 mask = bool4(bool2(true, false), true, false);
    static_assert(mask.x && !mask.y && mask[2] && !mask[3]);
    template <typename T> constexpr vec<T, 3> middle(vec<T, 2> v) { return emu_make<vec<T, 3>>(v, T(7)); }
    static_assert(middle(half2(1, 2)).z == 7.0h && middle(long2(1, 2)).y == 2);
    """
    assert error_of(translate_header(text)) == ""
    assert "static assertion failed" in error_of(text.replace("== 3 &&", "== 4 &&"))


def test_scalars_become_vectors_by_themselves_and_vectors_do_not_convert() -> None:
    uses = "float4 v = 1; v = 2.0f; v = v * 2 + 3.0h - 1u; half2 h = 1.0f; int3 i = i << 2; i = 5; v.xz = 1;"
    assert error_of(f"void f() {{ {uses} }}") == ""
    statements = ("v = i", "i = v", "v = v + i", "v = h", "v = u", "i = u", "v = float2(1)", "float s = v", "v = v + 1")
    lines = [f"void f{n}(float4 v, int4 i, uint4 u, half4 h) {{ {text}; }}" for n, text in enumerate(statements)]
    assert accepted(lines) == lines[-1:]


SHAPES = [name + size for name in NUMBERS for size in ("", "2", "4")]
BYTES = {
    shape: np.dtype(NUMPY[shape.rstrip("24")]).itemsize * int(shape[-1] if shape[-1] in "24" else 1) for shape in SHAPES
}


@pytest.mark.parametrize("size", sorted(set(BYTES.values())))
def test_as_type_keeps_the_bits_of_every_pair_of_types_of_one_size(size: int) -> None:
    names = [name for name, bytes_ in BYTES.items() if bytes_ == size]
    # Three elements take the space of four, the last of them unknown: only such types are looked at as one another.
    names += [f"{name}3" for name in NUMBERS if 4 * np.dtype(NUMPY[name]).itemsize == size]
    pairs = [(a, b) for a in names for b in names if (a[-1] == "3") == (b[-1] == "3")]
    text = ""
    for number, (a, b) in enumerate(pairs):
        text += f'extern "C" void f{number}(device const {a}* x, device {b}* y) {{ *y = as_type<{b}>(*x); }}\n'
    library = compile_functions(text)
    # No bits of a NaN, which a move may change.
    x = aligned(np.random.default_rng(size).integers(0, 0x40, 32).astype(np.uint8))
    for number, (a, _) in enumerate(pairs):
        y = aligned(np.zeros(32, dtype=np.uint8))
        call(library, f"f{number}", x, y)
        used = size * 3 // 4 if a[-1] == "3" else size
        np.testing.assert_array_equal(y[:used], x[:used])


def test_as_type_refuses_other_sizes_and_bool() -> None:
    expressions = ("as_type<float>(h)", "as_type<uint2>(f)", "as_type<bool>(c)", "as_type<half>(f)", "as_type<int>(f)")
    lines = [f"void g{n}(float f, half h, char c) {{ auto x = {text}; }}" for n, text in enumerate(expressions)]
    assert accepted(lines) == lines[-1:]


@pytest.mark.parametrize("scalar", NUMBERS)
def test_packed_vectors_lie_without_gaps(scalar: str) -> None:
    lines = ['extern "C" void copy(']
    for n in SIZES:
        packed = f"packed_{scalar}{n}"
        lines += [
            f"static_assert(sizeof({packed}) == {n} * sizeof({scalar}) && alignof({packed}) == sizeof({scalar}));",
            f'extern "C" void copy{n}(device const {packed}* x, device {packed}* y, threadgroup {packed}* z) {{',
            f"{scalar}{n} v = x[1]; {packed} p = x[2]; z[0] = v; y[0] = z[0]; y[1] = p; y[2] = {packed}(v);",
            f"y[3] = {packed}({', '.join(['p.' + axis for axis in 'xyzw'[:n]])}); y[4] = {scalar}{n}(p);",
            f"y[5][0] = p[{n - 1}]; y[5].y = x[0].x; y[6] = {packed}({scalar}(3)); }}",
        ]
    library = compile_functions("\n".join(lines[1:]))
    for n in SIZES:
        x = stored_as(scalar, np.arange(1, 1 + 3 * n)).reshape(3, n)
        y = np.zeros((7, n), dtype=x.dtype)
        call(library, f"copy{n}", x, y, np.zeros_like(y))
        expected = np.stack(
            [x[1], x[2], x[1], x[2], x[2], np.zeros_like(x[0]), np.full(n, stored_as(scalar, np.array(3)))]
        )
        expected[5, :2] = x[2, n - 1], x[0, 0]
        np.testing.assert_array_equal(y, expected)


def test_packed_vectors_take_part_in_arithmetic() -> None:
    text = """
    extern "C" void f(device packed_float3* p, device packed_int2* q, constant packed_float3& c, device float* y) {
      float3 r = p[0] + p[1] * 2.0f - c / float3(2) + 1 * p[0] + -p[1];
      y[0] = r.x; y[1] = r.y; y[2] = r.z;
      p[0] += c; p[0] *= 2.0f; p[0] -= float3(1); p[0] /= p[1];
      q[0] = (q[0] << 2) | (q[1] & 3) ^ (q[1] % 2);
      y[3] = any(p[1] < p[0]); y[4] = dot(p[1], c); y[5] = float4(p[1], 9).w;
      y[6] = float4(packed_half4(half4(3.0h))).z;
    }
    """
    p = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
    q, c, y = np.array([[1, 2], [5, 7]], dtype=np.int32), np.array([7, 8, 9], dtype=np.float32), np.zeros(7, np.float32)
    results = [
        p[0] + p[1] * 2 - c / 2 + p[0] - p[1],
        ((p[0] + c) * 2 - 1) / p[1],
        (q[0] << 2) | (q[1] & 3) ^ (q[1] % 2),
    ]
    call(compile_functions(text), "f", p, q, c, y)
    np.testing.assert_array_equal(y, [*results[0], 0, 4 * 7 + 5 * 8 + 6 * 9, 9, 3])
    np.testing.assert_array_equal(p[0], results[1])
    np.testing.assert_array_equal(q[0], results[2])


@pytest.mark.parametrize("scalar", NUMBERS)
def test_comparisons_are_vectors_of_bool(scalar: str) -> None:
    operators = ("<", "<=", ">", ">=", "==", "!=")
    text = ""
    for n in SIZES:
        text += f'extern "C" void compare{n}(device const {scalar}* x, device bool* y) {{ {scalar}{n} a, b;\n'
        text += " ".join(f"a.{axis} = x[{i}]; b.{axis} = x[{i + 4}];" for i, axis in enumerate("xyzw"[:n]))
        for operator in operators:
            text += f"{{ bool{n} m = a {operator} b; const bool{n} not_m = !m;"
            text += f"*y++ = any(m); *y++ = all(m); *y++ = any(a {operator} b); *y++ = all(not_m);"
            text += " ".join(f"*y++ = m[{i}]; *y++ = not_m.{axis};" for i, axis in enumerate("xyzw"[:n])) + "}\n"
        text += f"bool{n} u = (a < b) || (a == b), v = u && a != b, w = (v | u) ^ v; *y++ = all(w == (u && !v)); }}\n"
    library = compile_functions(text)
    compare = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
    # Every n has rows where all, some and no element compares true.
    rows = [[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 2, 3, 4, 5], [5, 2, 3, 4, 1, 2, 3, 9], [9, 9, 9, 9, 1, 2, 3, 4]]
    for row in rows:
        x = stored_as(scalar, np.array(row))
        for n in SIZES:
            y = np.full(6 * (4 + 2 * n) + 1, 255, dtype=np.uint8)
            call(library, f"compare{n}", x, y)
            expected = []
            for function in compare:
                mask = function(row[:n], row[4 : 4 + n])
                expected += [mask.any(), mask.all(), mask.any(), not mask.any()]
                expected += np.stack([mask, ~mask], axis=1).ravel().tolist()
            np.testing.assert_array_equal(y, np.array([*expected, True], dtype=np.uint8))


def test_bool_vectors_have_metals_sizes() -> None:
    assert error_of("static_assert(sizeof(bool2) == 2 && sizeof(bool3) == 4 && sizeof(bool4) == 4);") == ""
    uses = "m.x = false; m[1] = m.r; t[1] = d[0]; a[1] = m; d[2] = a[1]; a[0] = c[1]; d[1] = c[0]; m = x < x;"
    for n in SIZES:
        spaces = f"device bool{n}* d, threadgroup bool{n}* t, constant bool{n}* c, half{n} x"
        assert error_of(f"void f({spaces}) {{ bool{n} m = bool{n}(true), a[2]; {uses} }}") == ""
    statements = ("float4 f = m", "int4 i = m", "bool b = m", "bool4 n = true", "if (m) {}", "bool4 n = bool4(true)")
    lines = [f"void f{n}(bool4 m) {{ {text}; }}" for n, text in enumerate(statements)]
    assert accepted(lines) == lines[-1:]


LAYOUT = {"char": (1, 2, 4, 4), "short": (2, 4, 8, 8), "int": (4, 8, 16, 16), "long": (8, 16, 32, 32)}


def test_scalars_and_vectors_have_metals_sizes_and_alignments() -> None:
    same_width = {"uchar": "char", "ushort": "short", "half": "short", "bfloat": "short", "uint": "int", "float": "int"}
    lines = [
        f"static_assert(sizeof({name}{suffix}) == {size} && alignof({name}{suffix}) == {size});"
        for name in NUMBERS
        for suffix, size in zip(("", "2", "3", "4"), LAYOUT[same_width.get(name, name.lstrip("u"))], strict=True)
    ]
    assert accepted(lines) == lines
    fixed = (
        "int8_t char uint8_t uchar int16_t short uint16_t ushort int32_t int uint32_t uint int64_t long uint64_t ulong"
    )
    names = fixed.split()
    pairs = [*zip(names[::2], names[1::2], strict=True), ("size_t", "ulong"), ("ptrdiff_t", "long")]
    assert error_of("\n".join(f"static_assert(is_same_v<{a}, {b}>);" for a, b in pairs)) == ""


@pytest.mark.parametrize("name", NUMBERS)
def test_numeric_limits(name: str) -> None:
    calls = ("min", "max", "lowest", "epsilon", "infinity", "quiet_NaN", "denorm_min")
    text = f"typedef numeric_limits<{name}> L;\n" + " ".join(
        f"constant constexpr {name} {c}_ = L::{c}();" for c in calls
    )
    body = " ".join(f"y[{i}] = {c}_;" for i, c in enumerate(calls))
    text += f'extern "C" void f(device {name}* y, device int* d) {{ {body} d[0] = L::digits; d[1] = L::is_signed; '
    text += "d[2] = L::is_integer; d[3] = L::has_infinity; d[4] = L::digits10; }"
    y, d = np.zeros(7, dtype=NUMPY[name]), np.zeros(5, dtype=np.int32)
    call(compile_functions(text), "f", y, d)
    if name in INTEGERS:
        info = np.iinfo(NUMPY[name])
        np.testing.assert_array_equal(y, [info.min, info.max, info.min, 0, 0, 0, 0])
        digits = info.bits - (info.min < 0)
        np.testing.assert_array_equal(d, [digits, info.min < 0, 1, 0, int(digits * 0.30103)])
        return
    mantissa, least, greatest = {"half": (10, -14, 15), "bfloat": (7, -126, 127), "float": (23, -126, 127)}[name]
    top = 2.0**greatest * (2 - 2.0**-mantissa)
    expected = [2.0**least, top, -top, 2.0**-mantissa, np.inf, np.nan, 2.0 ** (least - mantissa)]
    np.testing.assert_array_equal(values_of(name, y), np.array(expected, dtype=np.float32))
    np.testing.assert_array_equal(d, [mantissa + 1, 1, 0, 1, int(mantissa * 0.30103)])


def test_constants() -> None:
    names = {
        "M_E": np.e,
        "M_LOG2E": 1 / np.log(2),
        "M_LOG10E": 1 / np.log(10),
        "M_LN2": np.log(2),
        "M_LN10": np.log(10),
        "M_PI": np.pi,
        "M_PI_2": np.pi / 2,
        "M_PI_4": np.pi / 4,
        "M_1_PI": 1 / np.pi,
        "M_2_PI": 2 / np.pi,
        "M_2_SQRTPI": 2 / np.sqrt(np.pi),
        "M_SQRT2": np.sqrt(2),
        "M_SQRT1_2": np.sqrt(0.5),
    }
    fill = " ".join(f"y[{i}] = {name}_F; h[{i}] = {name}_H;" for i, name in enumerate(names))
    fill += f" y[{len(names)}] = INFINITY; y[{len(names) + 1}] = -HUGE_VALF; y[{len(names) + 2}] = NAN;"
    text = f'extern "C" void f(device float* y, device half* h) {{ {fill} }}\n'
    text += "static_assert(is_same_v<decltype(M_PI_F), float> && is_same_v<decltype(M_PI_H), half>);"
    y, h = np.zeros(len(names) + 3, dtype=np.float32), np.zeros(len(names), dtype=np.float16)
    call(compile_functions(text), "f", y, h)
    np.testing.assert_array_equal(y, np.array([*names.values(), np.inf, -np.inf, np.nan], dtype=np.float32))
    np.testing.assert_array_equal(h, np.array([*names.values()]).astype(np.float16))
    limits = "FLT_MAX == numeric_limits<float>::max() && FLT_MIN == 0x1p-126f && FLT_EPSILON == 0x1p-23f"
    limits += " && HALF_MAX == 65504.0h && HALF_MIN == 0x1p-14h && INT_MIN == -INT_MAX - 1 && INT_MAX == 0x7fffffff"
    limits += (
        " && UINT_MAX == ~0u && LONG_MIN == -LONG_MAX - 1 && SHRT_MAX == 32767 && UCHAR_MAX == 255 && CHAR_BIT == 8"
    )
    assert error_of(f"static_assert({limits} && __METAL_VERSION__ == 310);") == ""


def test_traits() -> None:
    true = [
        *("is_same_v<int, int32_t>", "!is_same_v<int, uint>", "is_same<half, half>::value", "is_same<half, half>{}"),
        *("is_floating_point_v<half>", "is_floating_point_v<bfloat>", "is_floating_point<float>::value"),
        *("!is_floating_point_v<int>", "is_integral_v<uchar>", "is_integral_v<bool>", "!is_integral_v<float>"),
        *("is_signed_v<short>", "is_unsigned_v<ulong>", "is_arithmetic_v<half>", "!is_arithmetic_v<float4>"),
        *("is_convertible_v<int, float>", "!is_convertible_v<float, bfloat>", "!is_convertible_v<half, bfloat>"),
        *("is_convertible_v<bfloat, float>", "is_convertible_v<half, float>", "!is_convertible<float4, int4>::value"),
        *("is_pointer_v<device int*>", "is_class_v<packed_float3>", "is_enum_v<E>", "is_array_v<int[3]>"),
        *("is_same_v<conditional_t<true, int, half>, int>", "is_same_v<conditional_t<false, int, half>, half>"),
        *("is_same_v<enable_if_t<true, int>, int>", "is_same_v<remove_cv_t<const int>, int>"),
        *("is_same_v<remove_reference_t<const device int&>, const device int>", "is_base_of_v<A, B>"),
        *("is_same_v<remove_pointer_t<threadgroup half*>, threadgroup half>", "is_same_v<make_unsigned_t<int>, uint>"),
        *(
            "is_same_v<make_signed_t<ulong>, long>",
            "true_type::value && !false_type::value",
            "bool_constant<true>::value",
        ),
        *("integral_constant<int, 7>::value == 7", "integral_constant<int, 7>{} + 1 == 8", "is_void_v<void>"),
        *(
            "is_same_v<remove_addrspace_t<device int>, int>",
            "is_same_v<remove_addrspace_t<const constant int>, const int>",
        ),
    ]
    begin = "enum E { one }; struct A {}; struct B : A {};\n"
    assert error_of(begin + "\n".join(f"static_assert({condition});" for condition in true)) == ""
    wrong = error_of(begin + "\n".join(f"static_assert(!({condition}));" for condition in true))
    assert wrong.count("static assertion failed") == len(true)


def test_the_type_of_a_local_variable_is_the_type_it_was_declared_with() -> None:
    text = """void f() {
      int i = 0; const half2 h = 1.0h;
      static_assert(is_same_v<decltype(i), int> && is_same<decltype(h), const half2>::value);
      static_assert(numeric_limits<decltype(i)>::max() == INT_MAX && is_same_v<make_unsigned_t<decltype(i)>, uint>);
      static_assert(is_same_v<remove_cv_t<decltype(h)>, half2> && is_integral_v<decltype(i)>);
      auto v = emu_make<decltype(h)>(i); v = emu_cast<decltype(h)>(float2(2)); i = as_type<decltype(i)>(h);
    }"""
    assert error_of(text) == ""


def test_deduction_from_vectors() -> None:
    text = """
    template <typename T> constexpr T last(vec<T, 4> v) { return v.w; }
    template <typename T, int N> constexpr int size(vec<T, N>) { return N; }
    template <typename T> struct Name { static constexpr constant int value = 0; };
    template <typename T, int N> struct Name<vec<T, N>> { static constexpr constant int value = N; };
    static_assert(is_same_v<decltype(last(half4(1))), half> && size(uchar3(1)) == 3);
    static_assert(Name<float4>::value == 4 && Name<float>::value == 0 && is_same_v<vec<uint, 3>, uint3>);
    """
    assert error_of(translate_header(text)) == ""


def test_arrays_are_copied_and_indexed_in_every_address_space() -> None:
    text = """
    template <typename T> array<T, 2> swap(array<T, 2> a) { array<T, 2> b = {a[1], a[0]}; return b; }
    extern "C" void f(device array<int, 2>* x, constant array<int, 2>& c, threadgroup array<int, 2>* t) {
      t[0] = swap(x[0]); t[0][1] += c[1]; x[1] = t[0]; x[2][0] = c.size();
    }
    """
    x, c = np.array([[1, 2], [0, 0], [0, 0]], dtype=np.int32), np.array([10, 20], dtype=np.int32)
    call(compile_functions(text), "f", x, c, np.zeros(2, dtype=np.int32))
    np.testing.assert_array_equal(x, [[1, 2], [2, 21], [2, 0]])


def test_names_that_only_opencl_reserves_are_free() -> None:
    names = ("global", "local", "generic", "pipe", "read_only", "write_only", "read_write", "vec_step")
    assert error_of("".join(f"int {name}_() {{ int {name} = 1; return {name}; }}\n" for name in names)) == ""


def test_what_is_opencl_or_cpp_alone_does_not_compile() -> None:
    lines = ["double x() { return 0; }", "long double y();", "float z() { return get_global_id(0); }", "int variable;"]
    lines += ["void a() { barrier(0); }", "float b(float x) { return native_exp(x); }", "device int counter = 0;"]
    lines += ["int c(float x) { return convert_int(x); }", "float d(float4 x) { return as_float(1); }"]
    assert accepted([*lines, "constant int e = 0;"]) == ["constant int e = 0;"]


def test_vectors_of_bool_by_parameters() -> None:
    text = """
    template <typename T, int N> struct Of { vec<T, N> value; };
    template <typename T, int N> constexpr int size(vec<T, N>) { return N; }
    static_assert(is_same_v<vec<bool, 3>, bool3> && is_same_v<decltype(Of<bool, 2>::value), bool2>);
    static_assert(is_same_v<decltype(Of<half, 2>::value), half2> && size(half3(1)) == 3);
    static_assert(bool3(true)[2] && packed_float2(1, 2)[1] == 2);
    """
    assert error_of(translate_header(text)) == ""


def test_names_that_metal_leaves_to_others() -> None:
    lines = ["template <typename T> struct is_empty {};", "template <typename... T> using void_t = void;"]
    assert error_of("\n".join([*lines, "static_assert(is_same_v<void_t<int>, void> && sizeof(is_empty<int>));"])) == ""


def test_disjunction_is_true_where_any_is() -> None:
    cases = {"": False, "is_same<int, int>": True, "is_same<int, uint>": False}
    cases |= {"is_same<int, uint>, is_same<int, int>, false_type": True}
    lines = [f"static_assert(_disjunction<{types}>::value == {str(truth).lower()});" for types, truth in cases.items()]
    assert accepted(lines) == lines
