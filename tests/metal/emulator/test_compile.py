"""Kernels compiled: what Metal takes compiles and means the same, what it refuses is told in the user's lines."""

from pathlib import Path
import re

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import BoundsError, CompileError, LanguageError, LimitError
from forge_mlx.metal.emulator.compile import CompiledKernel, compile_kernel
from forge_mlx.metal.emulator.errors import Location
from forge_mlx.metal.emulator.messages import explain, metal_words
from forge_mlx.metal.emulator.settings import CHECKS, Settings
from forge_mlx.metal.signature import GeneratedSource, Input, Output, generate
import mlx.core as mx
import numpy as np
import pytest

F32 = mx.float32
KERNELS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"


def source(body: str, header: str = "", dtype: mx.Dtype = F32, **options: object) -> GeneratedSource:
    """One input `x` of 64 elements, one output `out`."""
    return generate("k", [Input("x", dtype, 64, 1)], [Output("out", dtype)], body, header, **options)


def compiled(body: str, header: str = "", dtype: mx.Dtype = F32, **options: object) -> CompiledKernel:
    return compile_kernel(source(body, header, dtype, **options), Settings())


def run(body, header="", *, count=4, x=None, dtype=F32, **options):
    """The first `count` elements that a single thread writes."""
    kernel = emulator.metal_kernel(name="k", input_names=["x"], output_names=["out"], source=body, header=header)
    (out,) = kernel(
        inputs=[mx.arange(64).astype(dtype) if x is None else x],
        output_shapes=[(count,)],
        output_dtypes=[dtype],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        **options,
    )
    return np.array(out.astype(mx.float32) if dtype == mx.bfloat16 else out).tolist()


MEANING = {
    "casts convert values": (
        "int4 i = (int4)float4(1.9f, -2.5f, 3, 4); OUT(i.x, i.y, ((half2)i.zw).x, 0)",
        "",
        [1, -2, 3, 0],
    ),
    "static_cast converts values": (
        "float2 f = static_cast<float2>(int2(7, -7)); OUT(f.x, f.y, 0, 0)",
        "",
        [7, -7, 0, 0],
    ),
    "a cast ends where its operand does": (
        "OUT(((int2)float2(1.9f).x).y, ((int2)float2(1.9f) * 2).x, (-(int2)float2(1.9f)).x, ((half2)int2(3) + 0.5h).x)",
        "",
        [1, 2, -1, 3.5],
    ),
    "templates of vectors": (
        "float2 a = twice<float2>(half2(1, 2)); int2 b = twice<int2>(float2(1.9f, 2.9f)); OUT(a.x, a.y, b.x, b.y)",
        "template <typename V, typename W> V twice(W w) { V a(w), b = V(w); return a + b; }\n",
        [2, 4, 2, 4],
    ),
    "half and bfloat": (
        "bfloat b = bfloat(half(1.5h)); half h = half(2.5bf); OUT(b, h, static_cast<half>(b), (bfloat)h)",
        "",
        [1.5, 2.5, 1.5, 2.5],
    ),
    "bfloat literals": (
        "OUT(1.00390625bf, 1.01171875bf, 3.3895e38bf, -0.1bf)",
        "",
        [1, 1.015625, 3.3895313892515355e38, -0.10009765625],
    ),
    "references to members": (
        "A a; a.at(1) = 5; thread float& r = a.at(2); r = 6; a.scale(2); OUT(a.v[1], a.get(2), a.sum(), A().sum())",
        """struct A {
          float v[4];
          A() thread { clear(v); }
          static void clear(thread float* p) { for (int i = 0; i < 4; i++) p[i] = 1; }
          thread float& at(int i) thread { return v[i]; }
          const thread float& get(int i) const thread { return v[i]; }
          void scale(float v) thread { for (int i = 0; i < 4; i++) { thread float* p = this->v + i; *p *= v; } }
          float sum() const thread { return all(v); }
          static float all(const thread float* p) { return p[0] + p[1] + p[2] + p[3]; }
        };
        """,
        [10, 12, 26, 4],
    ),
    "temporaries": (
        "OUT(Sum()(1, 2), make(3).x, square(1.5f + 0.5f), largest(1.0f, x[3]))",
        """struct Sum { template <typename T> T operator()(T a, T b) thread const { return a + b; } };
        struct Pair { float x, y; Pair(float a, float b) thread : x(a), y(b) {} };
        Pair make(float a) { return {a, a}; }
        float pointed(const thread float* p) { return *p; }
        float square(const thread float& a) { return pointed(&a) * a; }
        template <typename T> T largest(const thread T& a, const thread T& b) { return a < b ? b : a; }
        """,
        [3, 3, 4, 3],
    ),
    "vector members": (
        "B b(1, 2); C<half> c(3); OUT(b.v.x, b.v.y, c.v.x, c.v.y)",
        """struct B { float2 v; B(float a, float b) thread : v(a, b) {} };
        template <typename T> struct C { vec<T, 2> v; C(float a) thread : v(a, a + 1) {} };
        """,
        [1, 2, 3, 4],
    ),
    "copies of constants": (
        "P p = table[1]; P q; q = table[0]; P r = first(table); thread P s(table[1]); OUT(p.x, q.y, r.x, s.y)",
        "struct P { float x, y; }; constant P table[2] = {{1, 2}, {3, 4}}; P first(constant P* p) { return p[0]; }\n",
        [3, 2, 1, 4],
    ),
    "copies of constants that values convert to": (
        "S s = table; s = 3.0f; out[0] = s.x; s = table; out[1] = s.x; device S* d = (device S*)out; d[2] = 5.0f;"
        " thread S t(2.0f); out[3] = t.x;",
        "struct S { float x; S(float a) thread : x(a) {} S(float a) device : x(a) {} S(float a) constant : x(a) {} };\n"
        "constant S table(4.0f);\n",
        [3, 4, 5, 2],
    ),
    "constants are const": (
        "constant float* p = table; OUT(f(p), f(&table[1]), g(x_shape), table[2])",
        "constant float table[3] = {1, 2, 3}; float f(const constant float* p) { return *p; }\n"
        "int g(constant int* p) { return *p; }\n",
        [1, 2, 64, 3],
    ),
    "names of opencl": (
        "int local = 1, global = 2; float generic = to_global(event_t); OUT(local, global, generic, pipe.read_only)",
        "constant int event_t = 3; float to_global(int x) { return x; }\n"
        "struct S { int read_only; }; constant S pipe = {4};\n",
        [1, 2, 3, 4],
    ),
    "arrays at any depth": (
        "threadgroup float a[2], b; a[1] = 1; b = 2; if (x[1] > 0) { threadgroup float a[2]; a[1] = 3; out[2] = a[1]; }"
        " for (int i = 0; i < 1; i++) { threadgroup half4 c[2]; c[1] = half4(4); out[3] = c[1].w; }"
        " out[0] = a[1]; out[1] = b;",
        "",
        [1, 2, 3, 4],
    ),
    "arrays by macros": (
        "ARRAY(a, 2); ARRAY(b, 3); a[1] = 1; b[1] = 2; threadgroup float c; c = 3; OUT(a[1], b[1], c, sizeof(b))",
        "#define ARRAY(name, n) threadgroup float name[n]\n",
        [1, 2, 3, 12],
    ),
    "arrays as parameters": (
        "threadgroup float a[4]; fill<4>(a, 7); threadgroup float (*p)[4] = &a;"
        " OUT(a[0], (*p)[3], count(a), last(a + 1))",
        """template <int N> void fill(threadgroup float (&a)[N], float v) { for (int i = 0; i < N; i++) a[i] = v; }
        template <int N> int count(threadgroup float (&a)[N]) { return N; }
        float last(threadgroup float* a) { return a[2]; }
        """,
        [7, 7, 4, 7],
    ),
    "branches that open one block": (
        "threadgroup float a[1]; a[0] = f(2); OUT(a[0], f(1), 0, 0)",
        """#ifdef TWO_ARGUMENTS
        float f(float a, float b) {
        #else
        float f(float a) {
        #endif
          return a;
        }
        """,
        [2, 1, 0, 0],
    ),
    "kernels in the header": (
        "OUT(1, 2, 3, 4)",
        """template <typename T> [[kernel]] void other(device T* y [[buffer(0)]]) { threadgroup T a[2]; a[0] = y[0]; }
        kernel void plain(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = 0; }
        template [[host_name("other")]] [[kernel]] decltype(other<float>) other<float>;
        """,
        [1, 2, 3, 4],
    ),
    "includes and pragmas": (
        '_Pragma("clang loop unroll(full)") for (int i = 0; i < 4; i++) out[i] = i;',
        "#include <metal_stdlib>\n#include <metal_simdgroup>\nusing namespace metal;\n"
        "#pragma METAL internals : enable\n",
        [0, 1, 2, 3],
    ),
}
OUT = "#define OUT(a, b, c, d) out[0] = a; out[1] = b; out[2] = c; out[3] = d;\n"


@pytest.mark.parametrize(("body", "header", "expected"), MEANING.values(), ids=MEANING.keys())
def test_meaning(body, header, expected):
    assert run(body, OUT + header) == expected


def test_a_bfloat_template_takes_halves():
    header = "template <typename U> U converted(half h) { return static_cast<U>(h); }\n"
    body = "half h = 1.5h; out[0] = T(h); out[1] = static_cast<T>(h); out[2] = (T)h; out[3] = converted<T>(h);"
    assert run(body, header, dtype=mx.bfloat16, template=[("T", mx.bfloat16)]) == [1.5] * 4


def test_literals_are_float_in_a_template():
    """A sum in double would give the third 1e-8."""
    body = "out[0] = T(0.1 * x[3]); out[1] = is_same_v<decltype(0.1 * x[0]), T>; out[2] = T(1.0 + 1e-8 * x[1] - 1);"
    assert run(body, count=3, template=[("T", F32)]) == [float(np.float32(0.1) * np.float32(3)), 1, 0]


def test_constant_inputs_of_class_type_can_be_copied():
    x = mx.array([1 + 2j, 3 - 1j], dtype=mx.complex64)
    body = "complex64_t a = x[0]; a = a * x[1]; out[0] = a; out[1] = x[1]; out[2] = complex64_t(3, 4) - 1.0f;"
    assert run(body, x=x, count=3, dtype=mx.complex64) == [5 + 5j, 3 - 1j, 2 + 4j]


def test_mlxs_header_is_there():
    body = """
      uint i = elem_to_loc(5u, x_shape, x_strides, x_ndim);
      out[0] = x[i]; out[1] = Limits<float>::max > 1e38f; out[2] = float(metal::exp(bfloat16_t(1.0f)));
      out[3] = is_complex_v<complex64_t> + bfloat16_to_uint16(bfloat16_t(1.0f));
    """
    assert run(body, x=mx.arange(64).reshape(8, 8).T.astype(F32)) == [40, 1, 2.71875, 1 + 0x3F80]


def test_without_mlxs_header():
    body = "out[0] = x[0] + float(bfloat16_to_uint16(bfloat(1.0f)));"
    assert compile_kernel(source(body), Settings())
    with pytest.raises(CompileError, match="undeclared identifier 'bfloat16_to_uint16'"):
        compile_kernel(source(body), Settings(mlx_preamble=False))


MLX_KERNELS = {
    "softmax": (["softmax.h"], ["softmax_single_row<half, float>", "softmax_looped<bfloat16_t, float>"]),
    "logsumexp": (["logsumexp.h"], ["logsumexp<half, float>", "logsumexp_looped<float>"]),
    "sort": (["sort.h"], ["block_sort<float, uint32_t, true, 128, 8>", "mb_block_merge<half, uint32_t, true, 128, 8>"]),
    "scan": (
        ["binary_ops.h", "scan.h"],
        ["strided_scan<complex64_t, complex64_t, CumProd<complex64_t>, 4, true, false>"],
    ),
    "binary": (
        ["binary_ops.h", "binary.h"],
        ["binary_vv<complex64_t, complex64_t, Power>", "binary_ss<half, half, Add>"],
    ),
    "ternary": (["ternary_ops.h", "ternary.h"], ["ternary_v<float, Select, false, false>"]),
    "cross_entropy": (["cross_entropy.h"], []),
    "hadamard": (["steel/defines.h", "hadamard.h"], []),
}


@pytest.mark.parametrize(("files", "instances"), MLX_KERNELS.values(), ids=MLX_KERNELS.keys())
def test_kernels_of_mlx_compile(files, instances):
    """Templates, functors, threadgroup arrays and classes as MLX's authors write them."""
    texts = [re.sub(r"(?m)^\s*#\s*(include .*|pragma once)", "", (KERNELS / file).read_text()) for file in files]
    header = "\n".join([*texts, *(f"template decltype({each}) {each};" for each in instances), ""])
    assert compile_kernel(source("out[0] = 1;", header), Settings(checks=frozenset(CHECKS) - {"language"}))


@pytest.mark.parametrize("dtype", [mx.bool_, mx.int8, mx.uint16, mx.int64, mx.uint64, mx.float16, mx.complex64])
@pytest.mark.parametrize("size", [3, 64])
def test_every_type_arrives(dtype, size):
    inputs = [Input("x", dtype, size, 1), Input("s", dtype, 1, 0)]
    body = "T a = x[1]; out[0] = a; out[1] = s; out[2] = T(1); out[3] = x[x_shape[0] - 1];"
    made = generate("k", inputs, [Output("out", dtype)], body, template=[("T", dtype)])
    assert compile_kernel(made, Settings()).library.is_file()


# Body, header, file and line of the error, what the message says.
REFUSED = {
    "unknown name": ("\nout[0] = y;", "", "k body", 2, "use of undeclared identifier 'y'"),
    "syntax": ("int i = 3\nout[0] = i;", "", "k body", 1, "expected ';'"),
    "threadgroup for device": (
        "threadgroup float a[4];\nf(a);",
        "void f(device float* p) {}\n",
        "k body",
        2,
        "no known conversion from 'threadgroup float[4]' to 'device float *'",
    ),
    "device for threadgroup": (
        "f(out);",
        "void f(threadgroup float* p) {}\n",
        "k body",
        1,
        "cannot pass pointer to address space 'device' as a pointer to address space 'threadgroup'",
    ),
    "pointers of two spaces": (
        "threadgroup float a[4];\n\ndevice float* p = a;",
        "",
        "k body",
        3,
        "cannot initialize a variable of type 'device float *' with an lvalue of type 'threadgroup float[4]'",
    ),
    "constructor": ("float4 v =\n  float4(1, 2, 3);", "", "k body", 2, "the arguments do not fill the vector exactly"),
    "implicit conversion": (
        "int4 i(1);\nfloat4 f = i;",
        "",
        "k body",
        2,
        "type 'thread float4' with an lvalue of type 'thread int4'",
    ),
    "in the header": ("out[0] = 1;", "// a\nint f() { return z; }\n", "k header", 2, "undeclared identifier 'z'"),
    "in a template": (
        "out[0] = f(x[0]);",
        "template <typename T> T f(T a) {\n  return a.y;\n}\n",
        "k header",
        2,
        "member reference base type",
    ),
    "opencl name": ("\nint local = global;", "", "k body", 2, "undeclared identifier 'global'"),
    "threadgroup initialiser": ("\n\nthreadgroup int a = 3;", "", "k body", 3, "'a' cannot have an initialiser"),
    "threadgroup in a helper": (
        "out[0] = 1;",
        "\nvoid f() { threadgroup int a; }\n",
        "k header",
        2,
        "'a' is declared outside a kernel function",
    ),
    "input is const": ("x[0] = 1;", "", "k body", 1, "not assignable"),
}


@pytest.mark.parametrize(("body", "header", "file", "line", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_errors_name_the_users_line(body, header, file, line, says):
    with pytest.raises(CompileError, match=re.escape(says)) as raised:
        compiled(body, header)
    assert raised.value.kernel == "k"
    assert raised.value.locations[0] == Location(file, line)
    text = (body if file == "k body" else header).split("\n")[line - 1].strip()
    assert f"{file}:{line}: " in str(raised.value)
    assert f"\n    {text}" in str(raised.value)
    assert not re.search(r"__(global|local|private|constant|generic)|emu_", str(raised.value))


def test_errors_are_told_in_the_users_file():
    with pytest.raises(CompileError, match=r"kernels/k\.metal:42: use of undeclared") as raised:
        compiled("\nout[0] = y;", body_file="kernels/k.metal", body_line=41)
    assert raised.value.locations == (Location("kernels/k.metal", 42),)


def test_many_errors_are_counted():
    with pytest.raises(CompileError, match="and 3 more errors") as raised:
        compiled("\n".join(f"out[{i}] = y{i};" for i in range(6)))
    assert len(raised.value.locations) == 3


def test_a_function_without_a_body():
    with pytest.raises(CompileError, match=r"declared and not defined: missing\(float\)$"):
        compiled("out[0] = missing(x[0]);", "float missing(float a);\n")


def test_double_is_no_type():
    with pytest.raises(LanguageError, match=r"k signature:2: Metal has no double") as raised:
        compiled("out[0] = 1;", dtype=mx.float64)
    assert {each.file for each in raised.value.locations} == {"k signature"}


UNWRITABLE = {
    "name": ({"name": "my-kernel"}, "does not make a function's name"),
    "outputs": ({"outputs": 2, "body": "out0[0] = x_shape[0];"}, "ends the parameters after the first output"),
    "comment at the end": ({"header": "int f(); // no line break"}, "needs a line break at its end"),
    "directive at the end": ({"header": "#define N 2"}, "needs a line break at its end"),
}


@pytest.mark.parametrize(("options", "says"), UNWRITABLE.values(), ids=UNWRITABLE.keys())
def test_what_mlx_itself_writes_wrongly(options, says):
    names = [Output(f"out{i}", F32) for i in range(options.get("outputs", 1))]
    body, header = options.get("body", "out0[0] = 1;"), options.get("header", "")
    made = generate(options.get("name", "k"), [Input("x", F32, 9, 1)], names, body, header)
    with pytest.raises(CompileError, match=says):
        compile_kernel(made, Settings())


def test_a_header_needs_no_line_break_after_code():
    assert run("out[0] = N;", "constant int N = 4; /* a // b */", count=1) == [4]


def test_buffers_are_counted():
    def many(count: int) -> GeneratedSource:
        inputs = [Input(f"x{i}", F32, 9, 1) for i in range(count)]
        return generate("k", inputs, [Output("out", F32)], "out[0] = x0[0] + x1_shape[0];")

    assert compile_kernel(many(29), Settings())
    with pytest.raises(LimitError, match="uses 32 buffers"):
        compile_kernel(many(30), Settings())
    assert compile_kernel(many(30), Settings(checks=frozenset(CHECKS) - {"limits"}))


def test_the_same_source_and_settings_give_the_same_kernel():
    body = "out[0] = 5;"
    kernel = compiled(body)
    assert compiled(body) is kernel
    assert compile_kernel(source(body), Settings(schedules=3, seed=1)) is kernel
    assert compiled("out[0] = 6;") is not kernel
    assert compile_kernel(source(body), Settings(defines=(("A", "1"),))) is not kernel
    assert compile_kernel(source(body), Settings(checks=frozenset({"language", "limits"}))) is not kernel


def test_definitions_reach_the_source():
    assert compile_kernel(source("out[0] = WIDTH;"), Settings(defines=(("WIDTH", "4"),)))
    with pytest.raises(CompileError, match="undeclared identifier 'WIDTH'"):
        compiled("out[0] = WIDTH;")


@pytest.mark.parametrize("line_break", ["\n", ""], ids=["line break", "no line break"])
def test_accesses_are_found_at_their_lines(line_break):
    """Declarations that became several, and a header that ends in the signature's line, move nothing."""
    header = f"struct A {{\n  float v[2];\n  float at(int i) thread {{\n    return v[i];\n  }}\n}};{line_break}"
    body = """
      threadgroup float a[2],
        b;
      A c; c.v[0] = 1; b = c.at(0); a[0] = b;
      const thread float& d =
        a[0];
      out[0] = d;
      out[64] = 1;
    """
    with pytest.raises(BoundsError) as raised:
        run(body, header)
    assert raised.value.locations == (Location("k body", 8),)


def test_messages_in_metals_words():
    told = metal_words("cannot convert '__local emu_type_a' (aka '__local float[4]') to '__global float *__private'")
    assert told == "cannot convert 'threadgroup float[4]' to 'device float *'"
    assert metal_words("'const __bf16 __attribute__((ext_vector_type(4)))'") == "'const bfloat4'"
    assert metal_words("'unsigned int __attribute__((ext_vector_type(3)))'") == "'uint3'"
    assert metal_words("'emu_name_local' from 'emu_ref_x'") == "'local' from 'x'"


def test_findings_have_the_names_of_the_source():
    with pytest.raises(LanguageError, match=r"Metal has no recursion: pipe -> pipe\n"):
        compiled("out[0] = pipe(1.0f);", "float pipe(float a) { return pipe(a); }\n")
    body = "struct global { float a; };\nglobal s[4] = {};\nout[0] = s[int(x[0]) + 7].a;"
    with pytest.raises(BoundsError, match=r"outside an array of type 'global\[4\]'"):
        run(body)


def test_an_unknown_message_is_kept():
    assert explain("the compiler crashed", source("")) == ("the compiler crashed", ())
