"""Metal source to C++ for OpenCL: what is rewritten, what must stay, and that every line stays where it was."""

import re

from forge_mlx.metal.emulator.declarations import TranslationError
from forge_mlx.metal.emulator.errors import Location
from forge_mlx.metal.emulator.tokens import tokenize
from forge_mlx.metal.emulator.translate import location_of, translate, translate_header
from forge_mlx.metal.signature import ATTRIBUTES, GeneratedSource, Input, Output, generate
import mlx.core as mx
import pytest

# Declarations that make names known, put before a snippet and cut off again.
NAMES = """template <typename T, typename U> void names(); using V = vec<T, 4>; typedef half4 H; using S = float;
template <typename A> using Pair = vec<A, 2>; using Loader = BlockLoader<T, 4>;
"""


def in_function(body: str, *, kernel: bool = True) -> str:
    """A snippet translated as the body of a function."""
    head = f"{NAMES}{'[[kernel]] ' if kernel else ''}void f() {{\n"
    text = translate_header(f"{head}{body}\n}}")
    return text[text.index("void f() {\n") + len("void f() {\n") :].removesuffix("\n}")


def generated(body: str, header: str = "", **options: object) -> GeneratedSource:
    """One input `x`, one output `out`."""
    inputs = [Input("x", mx.float32, 64, 1)]
    return generate("k", inputs, [Output("out", mx.float32)], body, header, **options)


# What follows the typedef of an array, by its name, number and element type.
ARRAY = (
    "threadgroup emu_type_{0}& {0} = *(threadgroup emu_type_{0}*)"
    'emu_threadgroup({1}, sizeof(emu_type_{0}), sizeof({2}), "{0}");'
)

REWRITTEN = {
    # Constructors.
    "vec": ("out = vec<T, 2>(a, b);", "out = emu_make<vec<T, 2>>(a, b);"),
    "metal::vec": ("out = metal::vec<float, 4>(x);", "out = emu_make<metal::vec<float, 4>>(x);"),
    "::metal::vec": ("out = ::metal::vec<float, 4>(x);", "out = emu_make<::metal::vec<float, 4>>(x);"),
    "vec of vec arguments": ("f(vec<T, N>(vec<U, N>(x)));", "f(emu_make<vec<T, N>>(emu_make<vec<U, N>>(x)));"),
    "vec with arithmetic": ("vec<T, (N > 2 ? N : 2)>(x);", "emu_make<vec<T, (N > 2 ? N : 2)>>(x);"),
    "parameter": ("out = T(x) + U(1);", "out = emu_make<T>(x) + emu_make<U>(1);"),
    "alias": ("out = V(a, b, c, d);", "out = emu_make<V>(a, b, c, d);"),
    "typedef": ("out = H(a);", "out = emu_make<H>(a);"),
    "alias template": ("out = Pair<float>(a, b);", "out = emu_make<Pair<float>>(a, b);"),
    "typename": ("out = typename A<T>::type(x);", "out = emu_make<typename A<T>::type>(x);"),
    "typename template": ("typename A<T>::template B<U>(x);", "emu_make<typename A<T>::template B<U>>(x);"),
    "half": ("out = half(b) + bfloat16_t(h);", "out = emu_make<half>(b) + emu_make<bfloat16_t>(h);"),
    "over lines": ("out = vec<T,\n 2>(a,\n b);", "out = emu_make<vec<T,\n 2>>(a,\n b);"),
    # Casts.
    "static_cast": ("static_cast<float4>(i)", "emu_cast<float4>(i)"),
    "static_cast of vec": ("static_cast<vec<T, 4>>(i)", "emu_cast<vec<T, 4>>(i)"),
    "static_cast const": ("static_cast<const T>(i)", "emu_cast<const T>(i)"),
    "cast": ("a = (float4)i;", "a = emu_cast<float4>(i);"),
    "cast of member": ("a = (V)x.y[2].f(z)++ + 1;", "a = emu_cast<V>(x.y[2].f(z)++) + 1;"),
    "cast of call": ("a = (T)f<T>(x)(y) * 2;", "a = emu_cast<T>(f<T>(x)(y)) * 2;"),
    "cast of comparison": ("a = (T)x < y;", "a = emu_cast<T>(x) < y;"),
    "cast of negation": ("a = (T)-x * y;", "a = emu_cast<T>(-x) * y;"),
    "cast of dereference": ("a = (T)*p++;", "a = emu_cast<T>(*p++);"),
    "cast of parentheses": ("a = (int4)(b, c);", "a = emu_cast<int4>((b, c));"),
    "cast of cast": ("a = (T)(U)x;", "a = emu_cast<T>(emu_cast<U>(x));"),
    "cast of scalar cast": ("a = (T)(int)x;", "a = emu_cast<T>((int)x);"),
    "scalar cast of cast": ("a = (float)(T)x;", "a = (float)emu_cast<T>(x);"),
    "cast of constructor": ("a = (half4)float4(1);", "a = emu_cast<half4>(float4(1));"),
    "cast after return": ("return (T)x;", "return emu_cast<T>(x);"),
    # Variables made by a constructor's syntax.
    "direct": ("float4 v(a, b);", "float4 v = emu_make<float4>(a, b);"),
    "direct const": ("const vec<T, 2> v(a);", "const vec<T, 2> v = emu_make<vec<T, 2>>(a);"),
    "direct several": ("V a(1), b, c(d);", "V a = emu_make<V>(1), b, c = emu_make<V>(d);"),
    "direct in for": ("for (T i(0); i < n; i++) {}", "for (T i = emu_make<T>(0); i < n; i++) {}"),
    "direct in block": ("if (a) { V v(1); }", "if (a) { V v = emu_make<V>(1); }"),
    "direct after label": ("case 1: V v(1);", "case 1: V v = emu_make<V>(1);"),
    # Literals.
    "bfloat literal": ("x = 1.0bf;", "x = ((bfloat)0x80p-7f);"),
    "bfloat capital": ("x = .5BF;", "x = ((bfloat)0x80p-8f);"),
    "bfloat exponent": ("x = 1e3bf;", "x = ((bfloat)0xfap2f);"),
    "bfloat zero": ("x = 0.bf;", "x = ((bfloat)0x0p0f);"),
    "bfloat tie to even": ("x = 0x1.01p0bf;", "x = ((bfloat)0x80p-7f);"),
    "bfloat tie to even up": ("x = 0x1.03p0bf;", "x = ((bfloat)0x82p-7f);"),
    "bfloat not a tie": ("x = 0x1.010001p0bf;", "x = ((bfloat)0x81p-7f);"),
    "bfloat denormal": ("x = 1e-40bf;", "x = ((bfloat)0x1p-133f);"),
    "float literals": (
        "x = 1.5 + .5 + 1. + 2e3 + 1e-5 + 0x1.8p3 + 1'0.5;",
        "x = 1.5f + .5f + 1.f + 2e3f + 1e-5f + 0x1.8p3f + 1'0.5f;",
    ),
    # Names.
    "opencl type": ("int event_t = sampler_t;", "int emu_name_event_t = emu_name_sampler_t;"),
    "opencl function": ("to_global(read_pipe);", "emu_name_to_global(emu_name_read_pipe);"),
    "constant": ("constant float* p = t;", "const constant float* p = t;"),
    "constant array": ("constant T t[2] = {1, 2};", "static const constant T t[2] = {1, 2};"),
    "constant after const": ("const constant T t = 1;", "static const constant T t = 1;"),
    "cast to constant": ("p = (constant T*)q;", "p = (const constant T*)q;"),
    # References to constants.
    "reference": (
        "const thread float& r = a + b;",
        "const  float/*th*/& emu_ref_r = a + b; const thread float& r = *(const thread float*)&emu_ref_r;",
    ),
    # Threadgroup variables.
    "array": ("threadgroup float a[64];", "typedef float emu_type_a[64]; " + ARRAY.format("a", 0, "float")),
    "scalar": ("threadgroup uint n;", "typedef uint emu_type_n; " + ARRAY.format("n", 0, "uint")),
    "several": (
        "threadgroup T a[N],\n  b[M][K], c;",
        "typedef T emu_type_a[N],\n  emu_type_b[M][K], emu_type_c; "
        + " ".join(ARRAY.format(name, index, "T") for index, name in enumerate("abc")),
    ),
    "deep": (
        "if (x) { for (;;) { threadgroup half4 a[2]; } }",
        "if (x) { for (;;) { typedef half4 emu_type_a[2]; " + ARRAY.format("a", 0, "half4") + " } }",
    ),
    "specifiers": (
        "threadgroup alignas(16) unsigned int a[(N + 1) / 2];",
        "typedef  unsigned int emu_type_a[(N + 1) / 2]; " + ARRAY.format("a", 0, "unsigned int"),
    ),
    "type before space": ("float threadgroup a[2];", "float typedef emu_type_a[2]; " + ARRAY.format("a", 0, "float")),
    "dependent type": (
        "threadgroup typename A<T>::type a[A<T>::n];",
        "typedef typename A<T>::type emu_type_a[A<T>::n]; " + ARRAY.format("a", 0, "typename A<T>::type"),
    ),
    "atomic": (
        "threadgroup metal::atomic<float> a[4];",
        "typedef metal::atomic<float> emu_type_a[4]; " + ARRAY.format("a", 0, "metal::atomic<float>"),
    ),
}


@pytest.mark.parametrize(("metal", "opencl"), REWRITTEN.values(), ids=REWRITTEN.keys())
def test_rewritten(metal, opencl):
    assert squeezed(in_function(metal)) == squeezed(opencl)


def squeezed(text: str) -> str:
    """Without the blanks that a dropped word leaves behind."""
    return re.sub(r" +", " ", text)


UNTOUCHED = [
    "float x = float(i) + int(j) + uint3(1).x + S(2);",
    "float4 v = float4(a, b, c, d);",
    "T x = 0; T y = x; V v = V{1, 2, 3, 4}; T z{x};",
    "vec<T, 4> v; device vec<T, 4>* p; thread vec<T, 2>& r = v[0];",
    "thread T (&row)[4] = rows[i];",
    "device T (*p)[4] = q;",
    "auto n = sizeof(T) * sizeof(V) + alignof(T);",
    "auto p = (device float4*)x + (const device T*)y; auto q = (threadgroup V*)z;",
    "auto p = static_cast<device T*>(x); auto q = reinterpret_cast<device V*>(y);",
    "auto q = static_cast<float>(y) + (float)z + (uint)w;",
    "Loader loader(a, b, c); Loader l = Loader(a);",
    "threadgroup float* p = a; threadgroup V* q = (threadgroup V*)p; threadgroup T& r = *p;",
    "threadgroup float (*p)[8] = a; threadgroup T (&b)[4] = c;",
    "f(a < b, c > (d)); bool e = a < T::n && b > (c);",
    "a.T(x); a->T(x); a::T(x); A<T>::make(x);",
    "foo<T>(x); f<float4>(x); simd_sum(x);",
    "float a = 1.0h + 0xbf + 1.5f + 0x1e5 + 1'000 + 10u + 2.0H + 3e5f;",
    'char c = \'"\'; s = "threadgroup float a[2];"; // threadgroup float a[2]; T(x)',
    "/* vec<T, 2>(a)\n threadgroup float a[2]; */ x = 1;",
    "const thread float* p = &x; thread float& r = y; const device T& d = z; const thread auto& w = y;",
    "static constant float t[2] = {1, 2};",
    "const constant float* p = x; static constexpr const constant int n = 2;",
    "Z a(x); B<T> b(y); int i(3); return T::f(x);",
    "is_same_v<T, U>; metal::function<T(U, int)> f;",
]


@pytest.mark.parametrize("metal", UNTOUCHED)
def test_untouched(metal):
    expected = metal.replace("static constant", "static const constant").replace(
        "constexpr constant", "constexpr const constant"
    )
    assert in_function(metal) == expected


OUTSIDE = {
    # Methods and constructors.
    "method": ("struct A { int f() const thread; };", "int f() const /*th*/;"),
    "member": (
        "struct A { T v[4]; thread T& at(int i) thread { return v[i]; } };",
        "thread T& at(int i) /*th*/ { return ((thread A*)this)->v[i]; }",
    ),
    "const member": (
        "struct A { T v; T get() const thread { return v + this->v; } };",
        "T get() const /*th*/ { return ((const thread A*)this)->v + ((const thread A*)this)->v; }",
    ),
    "member without qualifier": ("struct A { T v; T f() { return v; } };", "T f() { return ((thread A*)this)->v; }"),
    "member declared later": ("struct A { T f() { return v; } T v; };", "T f() { return ((thread A*)this)->v; }"),
    "member in threadgroup memory": (
        "struct A { T v; T f() threadgroup { return v; } };",
        "T f() threadgroup { return v; }",
    ),
    "hidden by a parameter": ("struct A { T v; T f(T v) { return v; } };", "T f(T v) { return v; }"),
    "hidden by a variable": ("struct A { T v; T f() { T a = 1, v = 2; return v; } };", "T a = 1, v = 2; return v; }"),
    "hidden by a pointer": ("struct A { T v; T f() { T* v = g(); return *v; } };", "T* v = g(); return *v; }"),
    "of another object": ("struct A { T v; T f(A b) { return b.v + A::v; } };", "{ return b.v + A::v; }"),
    "static method": ("struct A { T v; static T f(T x) { return v; } };", "static T f(T x) { return v; }"),
    "static member": (
        "struct A { static constant int n = 4; CONST int m = 2; T v; T f() { return n * m * v; } };",
        "return n * m * ((thread A*)this)->v; }",
    ),
    "constant value": ("struct A { T v; constexpr T f() const { return v; } };", "constexpr T f() const { return v; }"),
    "constructor": ("struct A { T v; A(T x) thread : v(x) {} };", "A(T x) /*th*/ : v(emu_make<T>(x)) {}"),
    "vector members": (
        "struct A { float2 v; int n; A(T x) thread : v(x, 1), n(2) {} };",
        "A(T x) /*th*/ : v(emu_make<float2>(x, 1)), n(2) {}",
    ),
    "constructor's body": (
        "struct A { int v; A() thread { init(v, this); } };",
        "{ init(((thread A*)this)->v, ((thread A*)this)); }",
    ),
    "outside the class": (
        "struct A { T v; T f() thread; }; T A::f() thread { return v; }",
        "T A::f() /*th*/ { return ((thread A*)this)->v; }",
    ),
    "outside a template": (
        "template <typename X> struct A { X v; X f(); }; template <typename X> X A<X>::f() thread { return v; }",
        "X A<X>::f() /*th*/ { return ((thread A*)this)->v; }",
    ),
    "operator": ("struct A { T v; T operator()(T x) { return v * x; } };", "{ return ((thread A*)this)->v * x; }"),
    "conversion": ("struct A { T v; operator T() { return v; } };", "operator T() { return ((thread A*)this)->v; }"),
    "vector conversion": ("struct A { operator float4() { return 1; } };", "operator vec<float, 4>() { return 1; }"),
    "constant method": ("struct A { int f() constant; };", "int f() const constant;"),
    "constant constructor": ("struct A { A(int x) constant; };", "A(int x) constant;"),
    "copies": (
        "struct A { T v; };",
        "{ A() = default; A(const A&) = default; A(const constant A&) = default;"
        " A& operator=(const A&) = default; A& operator=(const constant A&) = default; T v;",
    ),
    "copies of a class with constructor": ("struct A { A(int x); };", "struct A { A(const A&) = default;"),
    "own copies": (
        "struct A { A(thread const A& a); void operator=(A a); };",
        "struct A { A( const A/*th*/& a); void operator=(A a); }",
    ),
    "nested class": (
        "struct A { struct alignas(8) B { int v; }; B b; };",
        "struct alignas(8) B { B() = default; B(const B&)",
    ),
    "no name": ("struct { int v; } a;", "struct { int v; } a;"),
    # Parameters.
    "array of vectors": ("void f(thread float4 (&v)[4]);", "void f(thread vec<float, 4> (&v)[4]);"),
    "reference parameter": (
        "T f(const thread float4& x) { return x; }",
        "T f(const float4/*th*/& emu_ref_x) { const thread float4& x = *(const thread float4*)&emu_ref_x; return x; }",
    ),
    "other order": ("T f(thread const A<T>& x);", "T f( const A<T>/*th*/& x);"),
    "deduced reference": (
        "template <typename X> X f(const thread X& x, thread X& y) { return x; }",
        "X f(const X x, thread X& y) { return x; }",
    ),
    "deduced and returned": (
        "template <typename X> const thread X& f(const thread X& x) { return x; }",
        "const thread X& f(const thread X& x) { return x; }",
    ),
    "constexpr": (
        "constexpr int f(const thread int& x) { return x; }",
        "constexpr int f(const int/*th*/& x) { return x; }",
    ),
    # Kernels.
    "kernel attribute": ("[[kernel]] void f(device T* x [[buffer(0)]]) {}", " void f(device T* x [[buffer(0)]]) {}"),
    "kernel attributes": ("[[kernel, max_total_threads_per_threadgroup(4 * 32)]] void f() {}", " void f() {}"),
    "kernel keyword": ("kernel void f() {}", " void f() {}"),
    "exported instance": (
        'int a; template [[host_name("f<")]] [[kernel]] decltype(f<T>) f<T>; int b;',
        "int a; int b;",
    ),
    "array in a template kernel": (
        "template <typename A, typename B = A> [[kernel]] void f() { threadgroup A a[2]; }",
        "typedef A emu_type_a[2];",
    ),
    # Macros.
    "macro": (
        "#define F(T, p) vec<T, 2>(p[0], 1.0bf)\n",
        "#define F(T, p) emu_make<vec<T, 2>>(p[0], ((bfloat)0x80p-7f))",
    ),
    "macro of an array": (
        "#define A(n) threadgroup float n[2]\n",
        "typedef float emu_type_##n[2]; threadgroup emu_type_##n& n = "
        "*(threadgroup emu_type_##n*)emu_threadgroup(255 - __COUNTER__, sizeof(emu_type_##n), sizeof(float), #n)",
    ),
    "macro that joins names": (
        "#define A(n) threadgroup float n##_a[2]; \\\n  n##_a[0] = 1\n",
        'sizeof(float), #n "_a"); \\\n n##_a[0] = 1',
    ),
}


@pytest.mark.parametrize(("metal", "opencl"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_outside_of_functions(metal, opencl):
    assert squeezed(opencl) in squeezed(translate_header(f"{NAMES}{metal}"))


REFUSED = {
    "initialiser": ("\nthreadgroup float a[2] = {1, 2};", True, 1, "'a' cannot have an initialiser"),
    "initialised scalar": ("threadgroup int a,\n b = 2;", True, 1, "'b' cannot have an initialiser"),
    "constructor": ("threadgroup float4 a(1);", True, 0, "'a' cannot have an initialiser"),
    "not in a kernel": ("threadgroup float a[2];", False, 0, "'a' is declared outside a kernel function"),
}


@pytest.mark.parametrize(("body", "kernel", "line", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(body, kernel, line, message):
    with pytest.raises(TranslationError, match=message) as raised:
        in_function(body, kernel=kernel)
    assert raised.value.line == 2 + NAMES.count("\n") + line


HEADER = """// A first line
#define LONG(a) \\
  vec<T, 2>(a)
template <typename T>
struct A {
  T v; /* over
  lines */ T get() const
  thread { return T(v); }
};
template [[host_name("x")]]
[[kernel]] decltype(f<T>)
  f<T>;
"""
BODY = """
  threadgroup float a[4],
    b[2];
  // threadgroup float c;
  float4 v(1,
    2, 3, 4);
  a[0] = (float4)
    v; out[0] = x_shape[0] + thread_position_in_grid.x;
"""


def lines_with_origins(text: str) -> list[tuple[str, int, str]]:
    """Each line of a translated text with the file and line that its `#line` directives give it."""
    found, file, line = [], "", 0
    for each in text.split("\n"):
        if match := re.fullmatch(r'#line (\d+) "(.*)"', each):
            file, line = match[2], int(match[1])
        else:
            found.append((file, line, each))
            line += 1
    return found


@pytest.mark.parametrize("header", [HEADER, HEADER.rstrip("\n"), ""], ids=["header", "no line break", "no header"])
def test_every_line_keeps_its_number(header):
    source = generated(BODY, header, header_line=7, body_file="dir/k.metal", body_line=20, template=[("T", mx.float16)])
    origins = {(file, line): text for file, line, text in lines_with_origins(translate(source))}
    expected = {("k header", 7 + index): line for index, line in enumerate(header.splitlines()[:-3])}
    expected |= {
        ("k signature", 1 + index): line
        for index, line in enumerate(source.signature.splitlines())
        if index or not header or header.endswith("\n")
    }
    expected |= {("dir/k.metal", 20 + index): line for index, line in enumerate(BODY.split("\n"))}
    assert expected
    for place, line in expected.items():
        words = set(re.findall(r"[a-z_]\w*", line)) - {"threadgroup", "thread", "kernel"}
        assert words <= set(re.findall(r"\w+", origins[place].replace("emu_type_", "")))
    assert len(translate_header(HEADER).split("\n")) == len(HEADER.split("\n"))


def test_origins_of_lines_of_the_generated_text():
    source = generated(BODY, HEADER, header_file="k.h", header_line=3, body_file="k.metal", body_line=10)
    lines = source.text.split("\n")
    assert location_of(source, 1 + lines.index("struct A {")) == Location("k.h", 7)
    assert location_of(source, 1 + lines.index("    b[2];")).line == 12
    assert location_of(source, 1 + lines.index("    b[2];")).file == "k.metal"
    place = location_of(source, 1 + next(index for index, line in enumerate(lines) if "[[buffer(0)]]" in line))
    assert (place.file, place.line) == ("k signature", 2)


def test_file_names_are_quoted():
    assert '#line 4 "a \\"b\\" \\\\c"' in translate(generated("", body_file='a "b" \\c', body_line=4))


def test_the_entry_calls_the_kernel_with_the_generated_signature():
    source = generate(
        "k",
        [Input("few", mx.int32, 3, 1), Input("one", mx.complex64, 1, 0), Input("x", mx.bfloat16, 9, 2)],
        [Output("out", mx.float32)],
        "few_shape x_ndim x_strides threads_per_grid grid_size simdgroup_index_in_threadgroup",
        template=[("T", mx.bool_), ("N", -3), ("B", True)],
        atomic_outputs=True,
    )
    entry = translate(source).partition('#line 1 "<generated>"\n')[2]
    assert entry.startswith('extern "C" void emu_entry(void* const* emu_arguments, const emu_ids* emu_thread_ids) {\n')
    assert f"{source.kernel_name}<bool, -3, 1>(" in entry
    arguments = [
        "(const constant int32_t*)(emu_ulong)emu_arguments[0]",
        "(const constant int*)(emu_ulong)emu_arguments[1]",
        "*(const constant complex64_t*)(emu_ulong)emu_arguments[2]",
        "(const device bfloat16_t*)(emu_ulong)emu_arguments[3]",
        "(const constant int64_t*)(emu_ulong)emu_arguments[4]",
        "*(const constant int*)(emu_ulong)emu_arguments[5]",
        "(device atomic<float>*)(emu_ulong)emu_arguments[6]",
        *(f"uint3({', '.join(f'emu_thread_ids->grid_size[{axis}]' for axis in range(3))})",),
        "emu_thread_ids->simdgroup_index_in_threadgroup",
        *(f"uint3({', '.join(f'emu_thread_ids->threads_per_grid[{axis}]' for axis in range(3))})",),
    ]
    assert ", ".join(arguments) in entry


def test_the_instantiation_is_left_to_the_entry():
    text = translate(generated("out[0] = 1;", template=[("T", mx.float32)]))
    assert "host_name" not in text
    assert "[[kernel]]" not in text


def test_parameters_of_the_kernel_are_no_types_in_its_body():
    """An input that is called T, as in mlx-lm, hides the T of a helper."""
    header = "template <typename T> T twice(T x) { return T(2) * (T)x; }\n"
    source = generate("k", [Input("T", mx.int32, 1, 0)], [Output("out", mx.float32)], "a = (T) - 1; b = T (c);", header)
    text = translate(source)
    assert "emu_make<T>(2) * emu_cast<T>(x)" in text
    assert "a = (T) - 1; b = T (c);" in text


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_template_of_half_or_bfloat_needs_help(dtype):
    text = translate(generated("out[0] = T(x[0]);", template=[("T", dtype)]))
    assert ("out[0] = emu_make<T>(x[0]);" in text) == (dtype == mx.bfloat16)


@pytest.mark.parametrize(
    "text",
    [
        "#define A \\\n b /* c\n */ d\nx>>=1; a->b ... ##",
        'R = "a\\"b" + \'\\\'\' + "unfinished\n x',
        "/* no end",
        "1.5e+10f 0x1p-3h .5 1'0 a1 _b $c é",
        "// spliced \\\n comment\n#pragma x // \\\n y\n",
    ],
)
def test_tokens_join_to_their_text(text):
    tokens = tokenize(text)
    assert "".join(token.text for token in tokens) == text
    assert all(
        token.line == 1 + text[: sum(len(each.text) for each in tokens[:index])].count("\n")
        for index, token in enumerate(tokens)
    )


def test_every_attribute_is_passed():
    body = " ".join(ATTRIBUTES)
    entry = translate(generated(body)).partition('"<generated>"')[2]
    assert re.findall(r"emu_thread_ids->(\w+)", entry) == [
        name for name, spelled in ATTRIBUTES.items() for _ in range(3 if spelled == "uint3" else 1)
    ]
