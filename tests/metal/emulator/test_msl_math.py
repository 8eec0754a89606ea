"""Metal's functions in the emulator, against the same functions of NumPy in float64, rounded once."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from msl_functions import NUMPY, accepted, call, compile_functions, error_of, samples
import numpy as np
import pytest

Function = Callable[..., Any]
COUNT = 300
SIZES = (1, 2, 3, 4)
# A row of four arguments is used as a scalar, and as vectors of two, three and four elements.
COLUMNS = [c for n in SIZES for c in range(n)]
LEAST_NORMAL = 2.0**-126


def half_turns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sine and cosine of what is left of pi x after whole quarter turns, and the number of these modulo 4."""
    x = np.fmod(x, 2.0)
    quarters = np.rint(2 * x)
    rest = np.pi * (x - quarters / 2)
    return np.sin(rest), np.cos(rest), np.nan_to_num(quarters).astype(np.int64) % 4


def sinpi(x: np.ndarray) -> np.ndarray:
    s, c, quarter = half_turns(x)
    return np.choose(quarter, [s, c, -s, -c])


def cospi(x: np.ndarray) -> np.ndarray:
    s, c, quarter = half_turns(x)
    return np.choose(quarter, [c, -s, -c, s])


def powr(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    wrong = (x < 0) | np.isnan(x) | np.isnan(y) | ((x == 0) & (y == 0)) | (np.isinf(x) & (y == 0))
    return np.where(wrong | ((x == 1) & np.isinf(y)), np.nan, np.power(np.abs(x), y))


# Within 1 ulp.
ROUNDED: dict[str, tuple[int, Function]] = {
    "acos": (1, np.arccos),
    "acosh": (1, np.arccosh),
    "asin": (1, np.arcsin),
    "asinh": (1, np.arcsinh),
    "atan": (1, np.arctan),
    "atanh": (1, np.arctanh),
    "cos": (1, np.cos),
    "cosh": (1, np.cosh),
    "cospi": (1, cospi),
    "exp": (1, np.exp),
    "exp10": (1, lambda x: np.power(10.0, x)),
    "exp2": (1, np.exp2),
    "log": (1, np.log),
    "log10": (1, np.log10),
    "log2": (1, np.log2),
    "rsqrt": (1, lambda x: 1 / np.sqrt(x)),
    "sin": (1, np.sin),
    "sinh": (1, np.sinh),
    "sinpi": (1, sinpi),
    "tan": (1, np.tan),
    "tanh": (1, np.tanh),
    "tanpi": (1, lambda x: sinpi(x) / (cospi(x) + 0.0)),
    "atan2": (2, np.arctan2),
    "pow": (2, np.power),
    "powr": (2, powr),
}
# Correctly rounded.
EXACT: dict[str, tuple[int, Function]] = {
    "abs": (1, np.abs),
    "ceil": (1, np.ceil),
    "fabs": (1, np.abs),
    "floor": (1, np.floor),
    "rint": (1, np.rint),
    "round": (1, lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x)),
    "saturate": (1, lambda x: np.fmin(np.fmax(x, 0.0), 1.0)),
    "sign": (1, lambda x: np.where(np.isnan(x), 0.0, np.where(x == 0, x, np.sign(x)))),
    "sqrt": (1, np.sqrt),
    "trunc": (1, np.trunc),
    "copysign": (2, np.copysign),
    "divide": (2, np.divide),
    "fdim": (2, lambda x, y: np.where(x <= y, 0.0, x - y)),
    "fmod": (2, np.fmod),
    "step": (2, lambda edge, x: np.where(x < edge, 0.0, 1.0)),
}


def fast_min(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(x < y, x, y)


def fast_max(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(x > y, x, y)


def order_functions(least: Function, greatest: Function) -> dict[str, tuple[int, Function]]:
    """min, max and what is made of them."""
    functions: dict[str, tuple[int, Function]] = {
        "min": (2, least),
        "max": (2, greatest),
        "min3": (3, lambda x, y, z: least(x, least(y, z))),
        "max3": (3, lambda x, y, z: greatest(x, greatest(y, z))),
        "median3": (3, lambda x, y, z: greatest(least(x, y), least(greatest(x, y), z))),
    }
    functions |= {f"f{name}": function for name, function in functions.items()}
    return {**functions, "clamp": (3, lambda x, low, high: least(greatest(x, low), high))}


PRECISE_ORDER = order_functions(np.fmin, np.fmax)
FAST_ORDER = order_functions(fast_min, fast_max)


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(0.0, x), x)


def symbol(name: str) -> str:
    """Of the C function that calls `name`: another than the C library's."""
    return "call_" + name.replace("::", "_")


def kernel(name: str, scalar: str, arity: int, result: str = "") -> str:
    """A C function that calls `name` on rows of four arguments, as a scalar and as vectors."""
    result, letters = result or scalar, "abc"[:arity]
    parameters = ", ".join(f"device const {scalar}* {letter}" for letter in letters)
    step = ", ".join(f"{letter} += 4" for letter in letters)
    text = f'extern "C" void {symbol(name)}({parameters}, device {result}* y, long n) {{\n'
    text += f"for (; n > 0; --n, {step}) {{ *y++ = {name}({', '.join(f'{letter}[0]' for letter in letters)});\n"
    for n in SIZES[1:]:
        vectors = ", ".join(f"{scalar}{n}({', '.join(f'{letter}[{i}]' for i in range(n))})" for letter in letters)
        text += f"{{ {result}{n} r = {name}({vectors}); {' '.join(f'*y++ = r.{axis};' for axis in 'xyzw'[:n])} }}\n"
    return text + "} }\n"


def arguments_of(scalar: str, arity: int) -> list[np.ndarray]:
    """Rows of four arguments: the same special values meet each other in every combination."""
    arguments = [samples(scalar, 4 * COUNT, seed) for seed in range(arity)]
    if arity > 1:
        random = np.random.default_rng(9)
        # The special values stand first in every array: they are moved so that they meet.
        arguments = [arguments[0], *(random.permutation(x) for x in arguments[1:])]
    return [np.ascontiguousarray(x.reshape(COUNT, 4)) for x in arguments]


def results(library: Any, name: str, arguments: list[np.ndarray], result: str) -> np.ndarray:
    y = np.zeros((COUNT, len(COLUMNS)), dtype=NUMPY[result])
    call(library, symbol(name), *arguments, y, COUNT)
    return y


def expected_of(function: Function, arguments: list[np.ndarray], *, flushed: bool) -> np.ndarray:
    """In float64, not yet rounded."""
    with np.errstate(all="ignore"):
        wide = [x[:, COLUMNS].astype(np.float64) for x in arguments]
        return np.asarray(function(*(map(flush, wide) if flushed else wide)))


def check(got: np.ndarray, expected: np.ndarray, label: str, *, ulps: int = 0, flushed: bool = False) -> None:
    """`got` is `expected` rounded, up to `ulps`; a zero whose sign is the function's to choose is given as such."""
    with np.errstate(all="ignore"):
        nearest = expected.astype(got.dtype)
        if flushed:
            nearest = flush(nearest).astype(got.dtype)
        finite = np.isfinite(nearest)
        ulp = np.spacing(np.abs(np.where(finite, nearest, 0))).astype(np.float64)
        off = np.abs(got.astype(np.float64) - nearest.astype(np.float64)) > ulps * ulp
    special = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
    places = np.argwhere(np.where(finite, off | ~np.isfinite(got), ~special))
    assert not len(places), (
        f"{label}: {len(places)} wrong, first {got[tuple(places[0])]} for {nearest[tuple(places[0])]}"
    )


def check_signs(got: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Signs of zeros and infinities too."""
    different = (np.signbit(got) != np.signbit(expected)) & ~np.isnan(expected)
    assert not different.any(), f"{label}: {different.sum()} signs"


@pytest.fixture(scope="module", autouse=True)
def _headers_and_runtime_are_compiled() -> None:
    compile_functions("")


# Namespace, type, and whether denormals are zeros.
FORMS = {"float": ("", "float"), "half": ("", "half"), "precise": ("precise::", "float"), "fast": ("fast::", "float")}


@pytest.mark.parametrize("form", FORMS)
def test_functions_that_round(form: str) -> None:
    space, scalar = FORMS[form]
    library = compile_functions("".join(kernel(space + name, scalar, arity) for name, (arity, _) in ROUNDED.items()))
    for name, (arity, function) in ROUNDED.items():
        arguments = arguments_of(scalar, arity)
        got = results(library, space + name, arguments, scalar)
        flushed = form == "fast"
        check(got, expected_of(function, arguments, flushed=flushed), space + name, ulps=1, flushed=flushed)


@pytest.mark.parametrize("form", FORMS)
def test_functions_that_are_exact(form: str) -> None:
    space, scalar = FORMS[form]
    order = FAST_ORDER if form == "fast" else PRECISE_ORDER
    exact = {**EXACT, **order}
    if form == "fast":
        exact["saturate"] = (1, lambda x: fast_min(fast_max(x, np.zeros_like(x)), np.ones_like(x)))
    library = compile_functions("".join(kernel(space + name, scalar, arity) for name, (arity, _) in exact.items()))
    for name, (arity, function) in exact.items():
        arguments = arguments_of(scalar, arity)
        got = results(library, space + name, arguments, scalar)
        expected = expected_of(function, arguments, flushed=form == "fast")
        check(got, expected, space + name, flushed=form == "fast")
        # Of zeros with different signs, min and max may return either.
        if name not in order and name != "saturate":
            check_signs(got, expected, space + name)


def formula(name: str, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """In float32, in the order of MSL's formulas."""
    if name == "mix":
        return x + (y - x) * z
    t = np.fmin(np.fmax((z - x) / (y - x), np.float32(0)), np.float32(1))
    return t * t * (np.float32(3) - np.float32(2) * t)


@pytest.mark.parametrize("form", FORMS)
def test_mix_and_smoothstep_follow_their_formulas(form: str) -> None:
    space, scalar = FORMS[form]
    library = compile_functions("".join(kernel(space + name, scalar, 3) for name in ("mix", "smoothstep")))
    random = np.random.default_rng(3)
    arguments = [random.uniform(-3, 3, (COUNT, 4)).astype(NUMPY[scalar]) for _ in range(3)]
    for name in ("mix", "smoothstep"):
        got = results(library, space + name, arguments, scalar)
        expected = formula(name, *(x[:, COLUMNS].astype(np.float32) for x in arguments))
        np.testing.assert_array_equal(got, expected.astype(NUMPY[scalar]))


@pytest.mark.parametrize("form", FORMS)
def test_fract_stays_below_one(form: str) -> None:
    space, scalar = FORMS[form]
    arguments = arguments_of(scalar, 1)
    got = results(compile_functions(kernel(f"{space}fract", scalar, 1)), f"{space}fract", arguments, scalar)
    below_one = np.nextafter(NUMPY[scalar](1), NUMPY[scalar](0))
    if form == "fast":
        expected = expected_of(lambda x: x - np.floor(x), arguments, flushed=True)
    else:
        expected = expected_of(
            lambda x: np.where(np.isinf(x), 0.0, np.minimum(x - np.floor(x), below_one)), arguments, flushed=False
        )
    check(got, expected, f"{space}fract", flushed=form == "fast")
    assert form == "fast" or np.nanmax(got) == below_one


def nearest(exact: Fraction, dtype: Any) -> Any:
    """The number of a type that is nearest to a fraction, ties to even."""
    guess = dtype(float(exact))
    if not np.isfinite(guess):
        return guess
    around = [np.nextafter(guess, dtype(-np.inf)), guess, np.nextafter(guess, dtype(np.inf))]
    unsigned = np.uint16 if dtype is np.float16 else np.uint32
    finite = [x for x in around if np.isfinite(x)]
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(unsigned)) & 1))


@pytest.mark.parametrize("form", FORMS)
def test_fma_rounds_once(form: str) -> None:
    space, scalar = FORMS[form]
    dtype = NUMPY[scalar]
    random = np.random.default_rng(4)
    x, y = (random.uniform(-4, 4, (COUNT, 4)).astype(dtype) for _ in range(2))
    # Products cancelled to their last bits, sums just off a tie, and results below the least normal number.
    with np.errstate(all="ignore"):
        z = np.where(random.integers(0, 2, (COUNT, 4)), -(x * y), (x * y) * dtype(2.0**12) + dtype(1)).astype(dtype)
    x[:20], z[:20] = x[:20] * dtype(2.0**-14), z[:20] * dtype(2.0**-14)
    # 3 * 683 lies half-way between two halfs, and float has no room for what z adds to it.
    x[20], y[20], z[20] = 3, 683, [2.0**-14, -(2.0**-14), 0, 2.0**-13]
    got = results(compile_functions(kernel(f"{space}fma", scalar, 3)), f"{space}fma", [x, y, z], scalar)
    exact = [
        nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), dtype)
        for a, b, c in zip(*(v[:, COLUMNS].ravel() for v in (x, y, z)), strict=True)
    ]
    np.testing.assert_array_equal(got.ravel(), np.array(exact, dtype=dtype))
    assert np.any(got != (x * y + z)[:, COLUMNS])


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_numbers(form: str) -> None:
    """nextafter, ldexp, frexp, ilogb, modf and sincos."""
    space, scalar = FORMS[form]
    dtype = NUMPY[scalar]
    outputs = f"device {scalar}* y, device int* e, device {scalar}* w, device {scalar}* s, device {scalar}* c"
    text = kernel(f"{space}nextafter", scalar, 2) + kernel(f"{space}ilogb", scalar, 1, "int")
    text += f'extern "C" void parts(device const {scalar}* x, device const int* k, {outputs}, long n) {{'
    text += "for (; n > 0; --n, x += 4, k += 4) {\n"
    text += f"{{ int i; {scalar} f, g; *y++ = {space}ldexp(x[0], k[0]); *y++ = {space}frexp(x[0], i); *e++ = i;"
    text += f"*y++ = {space}modf(x[0], f); *w++ = f; *s++ = {space}sincos(x[0], g); *c++ = g; }}\n"
    for n in SIZES[1:]:
        numbers, powers = (", ".join(f"{letter}[{i}]" for i in range(n)) for letter in "xk")
        text += f"{{ int{n} i; {scalar}{n} f, g, v = {scalar}{n}({numbers});"
        text += f"{scalar}{n} l = {space}ldexp(v, int{n}({powers}));"
        text += f"{scalar}{n} r = {space}frexp(v, i), m = {space}modf(v, f), p = {space}sincos(v, g);"
        for axis in "xyzw"[:n]:
            text += f"*y++ = l.{axis}; *y++ = r.{axis}; *y++ = m.{axis}; *e++ = i.{axis}; *w++ = f.{axis};"
            text += f"*s++ = p.{axis}; *c++ = g.{axis};"
        text += "}\n"
    library = compile_functions(text + "} }\n")
    (x, other), k = arguments_of(scalar, 2), np.random.default_rng(5).integers(-200, 200, (COUNT, 4)).astype(np.int32)
    k[0, :2] = 2**31 - 1, -(2**31)
    np.testing.assert_array_equal(
        results(library, f"{space}nextafter", [x, other], scalar), np.nextafter(x, other)[:, COLUMNS]
    )
    a, times = x[:, COLUMNS], k[:, COLUMNS]
    y, e = np.zeros((*a.shape, 3), dtype=dtype), np.zeros(a.shape, dtype=np.int32)
    whole, sine, cosine = (np.zeros(a.shape, dtype=dtype) for _ in range(3))
    call(library, "parts", x, k, y, e, whole, sine, cosine, COUNT)
    with np.errstate(all="ignore"):
        fast = flush(a).astype(dtype) if form == "fast" else a
        check(y[..., 0], np.ldexp(fast.astype(np.float64), np.clip(times, -999, 999)), "ldexp", flushed=form == "fast")
        mantissa, exponent = np.frexp(a)
        check(y[..., 1], mantissa, "frexp")
        np.testing.assert_array_equal(e, np.where(np.isfinite(a), exponent, 0))
        rest, integral = np.modf(fast)
        check(y[..., 2], rest, "modf")
        check_signs(y[..., 2], rest, "modf")
        np.testing.assert_array_equal(whole, integral)
        check(sine, np.sin(fast.astype(np.float64)), "sincos", ulps=1, flushed=form == "fast")
        check(cosine, np.cos(fast.astype(np.float64)), "cosine of sincos", ulps=1, flushed=form == "fast")
        unknown = np.where(np.isinf(a), 2**31 - 1, -(2**31))
        expected = np.where(np.isfinite(a) & (a != 0), exponent - 1, unknown)
    np.testing.assert_array_equal(results(library, f"{space}ilogb", [x], "int"), expected)


@pytest.mark.parametrize("scalar", ["half", "float"])
def test_classes_of_numbers(scalar: str) -> None:
    least = np.finfo(NUMPY[scalar]).smallest_normal
    functions: dict[str, tuple[int, Function]] = {
        "isfinite": (1, np.isfinite),
        "isinf": (1, np.isinf),
        "isnan": (1, np.isnan),
        "isnormal": (1, lambda x: np.isfinite(x) & (np.abs(x) >= float(least))),
        "signbit": (1, np.signbit),
        "isordered": (2, lambda x, y: ~(np.isnan(x) | np.isnan(y))),
        "isunordered": (2, lambda x, y: np.isnan(x) | np.isnan(y)),
    }
    library = compile_functions("".join(kernel(name, scalar, arity, "bool") for name, (arity, _) in functions.items()))
    for name, (arity, function) in functions.items():
        arguments = arguments_of(scalar, arity)
        got = results(library, name, arguments, "bool")
        np.testing.assert_array_equal(got, expected_of(function, arguments, flushed=False), err_msg=name)


SELECTED = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float")


@pytest.mark.parametrize("scalar", SELECTED)
def test_select_takes_the_second_where_the_condition_holds(scalar: str) -> None:
    text = f'extern "C" void f(device const {scalar}* a, device {scalar}* y, long n) {{ for (; n > 0; --n, a += 4) {{\n'
    text += "*y++ = select(a[0], a[1], a[0] < a[1]);\n"
    for n in SIZES[1:]:
        v, w = (f"{scalar}{n}({', '.join(f'a[{i}]' for i in order[:n])})" for order in ((0, 1, 2, 3), (3, 2, 1, 0)))
        text += f"{{ {scalar}{n} v = {v}, w = {w}; bool{n} m = v < w;"
        text += f"{scalar}{n} r = select(v, w, m), s = select(v, w, v < w), t = select(v, {scalar}(1), m);"
        text += " ".join(f"*y++ = r.{x}; *y++ = s.{x}; *y++ = t.{x};" for x in "xyzw"[:n]) + "}\n"
    (a,) = arguments_of(scalar, 1)
    y = np.zeros((COUNT, 1 + 3 * 9), dtype=a.dtype)
    call(compile_functions(text + "} }"), "f", a, y, COUNT)
    columns = [np.where(a[:, 0] < a[:, 1], a[:, 1], a[:, 0])]
    for n in SIZES[1:]:
        for v, w in zip(a.T[:n], a.T[[3, 2, 1, 0]][:n], strict=True):
            columns += [np.where(v < w, w, v), np.where(v < w, w, v), np.where(v < w, a.dtype.type(1), v)]
    np.testing.assert_array_equal(y, np.stack(columns, axis=1))


@pytest.mark.parametrize("form", FORMS)
def test_geometry(form: str) -> None:
    space, scalar = FORMS[form]
    dtype = NUMPY[scalar]
    text = f'extern "C" void f(device const {scalar}* a, device {scalar}* y, long n) {{ for (; n > 0; --n, a += 8) {{\n'
    for n in SIZES[1:]:
        v, w = (f"{scalar}{n}({', '.join(f'a[{start + i}]' for i in range(n))})" for start in (0, 4))
        text += f"{{ {scalar}{n} v = {v}, w = {w}; *y++ = {space}dot(v, w); *y++ = {space}length(v);"
        text += f"*y++ = {space}length_squared(v); *y++ = {space}distance(v, w); *y++ = {space}distance_squared(v, w);"
        text += f"{scalar}{n} u = {space}normalize(v), f = {space}faceforward(v, w, u), r = {space}reflect(v, w);"
        text += f"{scalar}{n} s = {space}refract(u, {space}normalize(w), {scalar}(0.75f));"
        text += " ".join(f"*y++ = u.{x}; *y++ = f.{x}; *y++ = r.{x}; *y++ = s.{x};" for x in "xyzw"[:n]) + "}\n"
    cross = f"{space}cross({scalar}3(a[0], a[1], a[2]), {scalar}3(a[4], a[5], a[6]))"
    text += f"{{ {scalar}3 c = {cross}; *y++ = c.x; *y++ = c.y; *y++ = c.z; }} }} }}"
    a = np.random.default_rng(6).uniform(-2, 2, (COUNT, 8)).astype(dtype)
    y = np.zeros((COUNT, 3 * 5 + 4 * 9 + 3), dtype=dtype)
    call(compile_functions(text), "f", a, y, COUNT)
    columns = []
    for n in SIZES[1:]:
        v, w = a[:, :n].astype(np.float64), a[:, 4 : 4 + n].astype(np.float64)
        lengths = [np.linalg.norm(v, axis=1), (v * v).sum(1), np.linalg.norm(v - w, axis=1), ((v - w) ** 2).sum(1)]
        columns += [(v * w).sum(1), *lengths]
        unit, normal = v / lengths[0][:, None], w / np.linalg.norm(w, axis=1)[:, None]
        facing = np.where((unit * w).sum(1)[:, None] < 0, v, -v)
        cosine = (unit * normal).sum(1)[:, None]
        k = 1 - 0.75**2 * (1 - cosine**2)
        refracted = np.where(k < 0, 0, 0.75 * unit - (0.75 * cosine + np.sqrt(np.maximum(k, 0))) * normal)
        reflected = v - 2 * (v * w).sum(1)[:, None] * w
        columns += [vector[:, i] for i in range(n) for vector in (unit, facing, reflected, refracted)]
    columns += list(np.cross(a[:, :3].astype(np.float64), a[:, 4:7].astype(np.float64)).T)
    expected = np.stack(columns, axis=1)
    # A few roundings of terms as large as 4 * 4 * 2 * 4.
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=0, atol=128 * float(np.finfo(dtype).eps))
    np.testing.assert_allclose(y[:, 0], expected[:, 0].astype(dtype), rtol=0, atol=8 * float(np.finfo(dtype).eps))


def wrap(value: int, name: str) -> int:
    info = np.iinfo(NUMPY[name])
    return (value - info.min) % 2**info.bits + info.min


def limited(value: int, name: str) -> int:
    info = np.iinfo(NUMPY[name])
    return min(max(value, int(info.min)), int(info.max))


def extract(x: int, offset: int, bits: int, *, signed: bool) -> int:
    taken = x >> offset & (1 << bits) - 1
    return taken - (1 << bits) if signed and bits and taken >> bits - 1 else taken


def integer_functions(name: str) -> dict[str, tuple[int, Callable[..., int]]]:
    """On Python's integers, before wrapping to the type."""
    info = np.iinfo(NUMPY[name])
    width, mask = info.bits, 2**info.bits - 1
    functions: dict[str, tuple[int, Callable[..., int]]] = {
        "abs": (1, abs),
        "clz": (1, lambda x: width - (x & mask).bit_length()),
        "ctz": (1, lambda x: ((x & mask) & -(x & mask)).bit_length() - 1 if x else width),
        "popcount": (1, lambda x: (x & mask).bit_count()),
        "reverse_bits": (1, lambda x: int(f"{x & mask:0{width}b}"[::-1], 2)),
        "absdiff": (2, lambda x, y: abs(x - y)),
        "addsat": (2, lambda x, y: limited(x + y, name)),
        "subsat": (2, lambda x, y: limited(x - y, name)),
        "hadd": (2, lambda x, y: x + y >> 1),
        "rhadd": (2, lambda x, y: x + y + 1 >> 1),
        "max": (2, max),
        "min": (2, min),
        "mulhi": (2, lambda x, y: x * y >> width),
        "rotate": (2, lambda x, y: ((x & mask) << y % width | (x & mask) >> width - y % width) & mask),
        "clamp": (3, lambda x, low, high: min(max(x, low), high)),
        "madhi": (3, lambda x, y, z: (x * y >> width) + z),
        "madsat": (3, lambda x, y, z: limited(x * y + z, name)),
        "max3": (3, max),
        "min3": (3, min),
        "median3": (3, lambda x, y, z: sorted((x, y, z))[1]),
    }
    if name in ("int", "uint"):
        low = (lambda x: extract(x, 0, 24, signed=True)) if name == "int" else (lambda x: x & 0xFFFFFF)
        functions["mul24"] = (2, lambda x, y: low(x) * low(y))
        functions["mad24"] = (3, lambda x, y, z: low(x) * low(y) + z)
    return functions


INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")


@pytest.mark.parametrize("scalar", INTEGERS)
def test_integer_functions(scalar: str) -> None:
    functions = integer_functions(scalar)
    unsigned = scalar if scalar[0] == "u" else f"u{scalar}"
    kinds = {name: unsigned if name == "absdiff" else scalar for name in functions}
    text = "".join(kernel(name, scalar, arity, kinds[name]) for name, (arity, _) in functions.items())
    library = compile_functions(text)
    for name, (arity, function) in functions.items():
        arguments = arguments_of(scalar, arity)
        rows = zip(*(x[:, COLUMNS].ravel().tolist() for x in arguments), strict=True)
        expected = [wrap(function(*row), kinds[name]) for row in rows]
        got = results(library, name, arguments, kinds[name])
        np.testing.assert_array_equal(got.ravel(), np.array(expected, dtype=NUMPY[kinds[name]]), err_msg=name)


@pytest.mark.parametrize("scalar", INTEGERS)
def test_bit_fields(scalar: str) -> None:
    info = np.iinfo(NUMPY[scalar])
    parameters = f"device const {scalar}* a, device const {scalar}* b, device const uint* f, device {scalar}* y, long n"
    text = f'extern "C" void f({parameters}) {{ for (; n > 0; --n, a += 4, b += 4, f += 2) {{\n'
    text += "*y++ = extract_bits(a[0], f[0], f[1]); *y++ = insert_bits(a[0], b[0], f[0], f[1]);\n"
    for n in SIZES[1:]:
        v, w = (f"{scalar}{n}({', '.join(f'{letter}[{i}]' for i in range(n))})" for letter in "ab")
        text += f"{{ {scalar}{n} e = extract_bits({v}, f[0], f[1]), i = insert_bits({v}, {w}, f[0], f[1]);"
        text += " ".join(f"*y++ = e.{axis}; *y++ = i.{axis};" for axis in "xyzw"[:n]) + "}\n"
    a, b = arguments_of(scalar, 2)
    random = np.random.default_rng(7)
    offset = random.integers(0, info.bits, COUNT)
    fields = np.stack([offset, random.integers(0, info.bits - offset, endpoint=True)], axis=1).astype(np.uint32)
    fields[:3] = [0, info.bits], [0, 0], [info.bits, 0]
    y = np.zeros((COUNT, len(COLUMNS), 2), dtype=a.dtype)
    call(compile_functions(text + "} }"), "f", a, b, fields, y, COUNT)
    for row in range(COUNT):
        start, bits = fields[row].tolist()
        mask = (1 << bits) - 1 << start
        for place, column in enumerate(COLUMNS):
            base, inserted = int(a[row, column]), int(b[row, column])
            taken = extract(base, start, bits, signed=info.min < 0)
            together = wrap(base & ~mask | inserted << start & mask, scalar)
            assert y[row, place].tolist() == [taken, together]


@pytest.mark.parametrize("scalar", INTEGERS)
def test_shifts_and_division(scalar: str) -> None:
    """A shift looks at the count modulo the width, division rounds towards zero."""
    info = np.iinfo(NUMPY[scalar])
    text = f'extern "C" void f(device const {scalar}* a, device const {scalar}* b, device {scalar}* y, long n) {{'
    text += f"for (; n > 0; --n, ++a, ++b) {{ {scalar} x = *a, c = *b; {scalar}2 v(x), w(c);"
    text += "*y++ = x << c; *y++ = x >> c; *y++ = (v << w).x; *y++ = (v >> w).y; x <<= 3; *y++ = x; c |= 1;"
    text += "*y++ = *a == numeric_limits<decltype(x)>::min() ? 0 : *a / c; *y++ = c == -1 ? 0 : *a % c; } }"
    (a, b), y = arguments_of(scalar, 2), np.zeros((COUNT, 7), dtype=NUMPY[scalar])
    call(compile_functions(text), "f", np.ascontiguousarray(a[:, 0]), np.ascontiguousarray(b[:, 1]), y, COUNT)
    # Scalars shorter than int are shifted as int, vectors as what they are.
    promoted = max(info.bits, 32)
    for x, c, row in zip(a[:, 0].tolist(), b[:, 1].tolist(), y.tolist(), strict=True):
        odd = c | 1
        quotient = abs(x) // abs(odd) * (1 if (x < 0) == (odd < 0) else -1)
        expected = [x << c % promoted, x >> c % promoted, x << c % info.bits, x >> c % info.bits, x << 3]
        expected += [
            0 if x == info.min else quotient,
            0 if odd in (-1, info.max + info.max + 1) else x - quotient * odd,
        ]
        assert row == [wrap(value, scalar) for value in expected], (x, c)


UNARY = [name for name, (arity, _) in {**ROUNDED, **EXACT}.items() if arity == 1 and name not in ("saturate", "sign")]
BINARY = ("atan2", "divide", "fdim", "fmax", "fmin", "fmod", "max", "min", "nextafter", "pow", "powr")
TERNARY = ("fma", "fmax3", "fmedian3", "fmin3", "max3", "median3", "min3")
LETTERS = {1: ("b",), 2: ("b, b", "b, f", "f, b"), 3: ("b, b, b", "b, f, f", "f, b, f", "f, f, b")}


@pytest.mark.parametrize("space", ["", "precise::", "fast::"])
def test_bfloat_becomes_float_and_the_result_stays_one(space: str) -> None:
    calls = [f"{name}({LETTERS[1][0]})" for name in UNARY]
    calls += [f"{name}({letters})" for name in (*BINARY, "copysign", "step") for letters in LETTERS[2]]
    calls += [f"{name}({letters})" for name in (*TERNARY, "clamp", "mix", "smoothstep") for letters in LETTERS[3]]
    checks = "".join(f"static_assert(is_same_v<decltype({space}{call}), float>);\n" for call in calls)
    assert error_of(f"void f(bfloat b, float f) {{ {checks} }}") == ""


@pytest.mark.parametrize("space", ["", "precise::", "fast::"])
def test_functions_of_mlx_for_bfloat_win_over_the_conversion(space: str) -> None:
    calls = [f"{name}(b)" for name in UNARY] + [f"{name}(b, b)" for name in BINARY]
    calls += [f"{name}(b, b, b)" for name in TERNARY]
    checks = "".join(f'static_assert(is_same_v<decltype({space}{call}), bfloat>, "{call}");\n' for call in calls)
    # With a float beside it, as in plain Metal: neither float nor half becomes bfloat.
    mixed = [f"{name}({letters})" for name in BINARY for letters in LETTERS[2][1:]]
    mixed += [f"{name}({letters})" for name in TERNARY for letters in LETTERS[3][1:]]
    checks += "".join(f"static_assert(is_same_v<decltype({space}{call}), float>);\n" for call in mixed)
    assert error_of(f"void f(bfloat b, float f) {{ {checks} }}", preamble=True) == ""


def test_half_has_functions_of_its_own_and_no_fast_or_precise_ones() -> None:
    types = {"exp(h)": "half", "max(h, h)": "half", "fma(h, h, h)": "half", "abs(v)": "half3", "ilogb(h)": "int"}
    types |= {"precise::exp(h)": "float", "fast::exp2(h)": "float", "fast::max(h, h)": "float", "isnan(h)": "bool"}
    checks = "".join(f'static_assert(is_same_v<decltype({call}), {kind}>, "{call}");\n' for call, kind in types.items())
    assert error_of(f"void f(half h, half3 v) {{ {checks} }}") == ""


REFUSED = {
    "not in Metal": ("erf(f)", "erfc(f)", "expm1(f)", "log1p(f)", "lgamma(f)", "tgamma(f)", "cbrt(f)", "hypot(f, f)"),
    "C's names": ("expf(f)", "sqrtf(f)", "fabsf(f)", "fmaxf(f, f)", "rsqrtf(f)", "lrint(f)", "remainder(f, f)"),
    "ambiguous": ("exp(i)", "max(f, i)", "max(h, f)", "max(u, 1)", "min(s, i)", "clamp(f, 0, 1)", "pow(i, 2)"),
    "other vectors": ("exp(v2 + v3)", "dot(v2, v3)", "max(v2, v3)", "cross(v2, v2)", "dot(f, f)", "max(v2, b2)"),
    "wrong types": (
        "addsat(f, f)",
        "popcount(f)",
        "mul24(f, f)",
        "fmin(i, i)",
        "isnan(i)",
        "any(f)",
        "select(v2, v2, f)",
    ),
    "bfloat vectors": ("exp(b2)", "max(b2, b2)", "fma(b2, b2, b2)"),
    "namespaces": ("fast::addsat(i, i)", "precise::popcount(i)", "fast::exp(h2)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_metal_does_not_have_does_not_compile(kind: str) -> None:
    parameters = "float f, half h, int i, uint u, short s, float2 v2, float3 v3, bfloat2 b2, half2 h2"
    lines = [f"void f{n}({parameters}) {{ auto x = {call}; }}" for n, call in enumerate(REFUSED[kind])]
    assert accepted(lines) == []
