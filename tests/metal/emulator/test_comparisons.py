"""Comparisons of vectors are vectors of bool in every expression, template and macro; a bool makes a vector of 1."""

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import BoundsError, CompileError, LanguageError
from forge_mlx.metal.emulator.comparisons import _edits, compare_as_metal
from forge_mlx.metal.emulator.errors import Location
from forge_mlx.metal.emulator.preamble import preamble_text
from forge_mlx.metal.emulator.toolchain import dump_ast
from forge_mlx.metal.emulator.translate import translate_header
import mlx.core as mx
import numpy as np
import pytest

# In every kernel: v = (-1.5, -0.5, 0.5, 1.5), a = (0, 1, 2, 3), yes is true.
BEGIN = "float4 a = *(const device float4*)x, v = a - 1.5f; bool yes = x[1] > 0;\n"
HEADER = """
template <typename T> float4 spread(T a, T b) { auto m = a < b; return float4(m); }
template <typename T> struct Above { T least; float4 operator()(T x) const thread { return float4(x > least) * 3; } };
template <typename T> T larger(T a, T b) { return a > b ? a : b; }
template <typename A, typename B> bool4 both(A a, B b) { return a > A(0) && b > B(2.5h); }
template <typename T, int N> vec<bool, N> positive(vec<T, N> v) { vec<bool, N> m = v > 0; return m; }
template <typename T> float count(vec<float, 4> v) { vec<T, 4> m = vec<T, 4>(v > 0); return m.x + m.y + m.z + m.w; }
bool4 tell(float4 v, float least = 0) { return v > least; }
#define LESS(a, b) (a < b)
#define POSITIVE(v) ((v) > 0.0f)
#define FINITE(v) ((v) < INFINITY)
#define TWICE(x) (2 * float4(x))
"""


def run(body: str) -> list[float]:
    """Four elements that one thread writes."""
    kernel = emulator.metal_kernel(
        name="k", input_names=["x"], output_names=["out"], source=BEGIN + body, header=HEADER
    )
    x = mx.arange(16).astype(mx.float32)
    options = {"output_shapes": [(4,)], "output_dtypes": [mx.float32], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    return np.array(kernel(inputs=[x], **options)[0]).tolist()


VALUES = {
    "constructor": ("float4(v > 0)", [0, 0, 1, 1]),
    "dot": ("dot(float4(v > 0.0f), v)", [2, 2, 2, 2]),
    "elements": ("(v > 0).x * 3, (v > 0).w * 3, int((v > 0)[3]), float((!(v > 1.0f)).x)", [0, 3, 1, 1]),
    "every operator": (
        "float4(v < 0) + 2 * float4(v <= -0.5f) + 4 * float4(a >= 1) + 8 * float4(a != 2)",
        [11, 15, 4, 12],
    ),
    "equal": ("int4(v + 1.5f) == int4(1, 1, 2, 2)", [0, 1, 1, 0]),
    "not": ("!v", [0, 0, 0, 0]),
    "not equal to nothing": ("!(a - 2)", [0, 0, 1, 0]),
    "and": ("(v > 0) && (a > 2)", [0, 0, 0, 1]),
    "or of widths": ("(half4(v) > 0.0h) || (a == 0)", [1, 0, 1, 1]),
    "bits": ("((v > 0) ^ (a > 2)) | (v < -1)", [1, 0, 1, 0]),
    "comparison of comparisons": ("(v < a) == (a > 1.5f)", [0, 0, 1, 1]),
    "any and all": ("any(v > 0), all(v > 0), any(v > 9), all(v < 9)", [1, 0, 0, 1]),
    "select": ("select(v, a, v > 0)", [-1.5, -0.5, 2, 3]),
    "choice": ("v > 0 ? a : v", [-1.5, -0.5, 2, 3]),
    "choice of other width": ("v > 0 ? half4(a) : half4(7.0h)", [7, 7, 2, 3]),
    "choice with a scalar": ("v > 0 ? a : 0.0f", [0, 0, 2, 3]),
    "choice in a choice": ("v > 0 ? (a > 2 ? a : v) : float4(9)", [9, 9, 0.5, 3]),
    "choice by a scalar": ("yes ? a : v", [0, 1, 2, 3]),
    "packed with a bool": ("float3(packed_int3(2) * yes), 0", [2, 2, 2, 0]),
    "template of vector and scalar": ("spread(v, a) + spread(1.0f, 2.0f)", [2, 2, 2, 2]),
    "method of a template": ("Above<float4>{float4(0)}(v) + Above<float>{2}(3)", [3, 3, 6, 6]),
    "template of widths": ("both(v, half4(a))", [0, 0, 0, 1]),
    "template that chooses": ("larger(1.0f, 2.0f), larger(2, 1), 0, 0", [2, 2, 0, 0]),
    "default argument": ("tell(v)", [0, 0, 1, 1]),
    "deduced": ("positive(v)", [0, 0, 1, 1]),
    "vec of a parameter": ("count<bool>(v), count<float>(v), count<int>(v), 0", [2, 2, 2, 0]),
    "macro without parentheses": ("LESS(v, 0)", [1, 1, 0, 0]),
    "macro": ("POSITIVE(v)", [0, 0, 1, 1]),
    "macro in a macro": ("FINITE(v)", [1, 1, 1, 1]),
    "argument of a macro": ("TWICE(v > 0)", [0, 0, 2, 2]),
    "ends in a macro": ("v < INFINITY", [1, 1, 1, 1]),
    "vector times bool": ("a * yes", [0, 1, 2, 3]),
    "integers times bool": ("int4(a) * yes + (x[2] > x[1])", [1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", VALUES)
def test_comparison_in_an_expression(name: str) -> None:
    text, expected = VALUES[name]
    assert run(f"*(device float4*)out = float4({text});") == expected


STATEMENTS = {
    "auto": ("auto m = v > 0; OUT(m.x, m.w, m.w * 3, any(m))", [0, 1, 3, 1]),
    "variable": ("bool4 m = v > 0; m = m || a == 0; OUT(m)", [1, 0, 1, 1]),
    "vec of bool": ("vec<bool, 4> m = v > 0; metal::vec<bool, 2> n(yes); OUT(m.x, m.w, n.x, n.y)", [0, 1, 1, 1]),
    "list": ("bool4 m = {true, false, yes, x[0] > 0}; OUT(m)", [1, 0, 1, 0]),
    "assignment of bits": ("bool4 m = v > 0; m &= a > 2; m |= a == 0; m ^= yes; OUT(m)", [0, 1, 1, 0]),
    "with a bool": ("bool4 m = v > 0; bool4 n = m && yes; OUT((n || false) == true)", [0, 0, 1, 1]),
    "chosen vector of bool": ("bool4 m = v > 0; OUT(m ? a : v)", [-1.5, -0.5, 2, 3]),
    "vector made of a bool": ("float4 f = yes; int4 i = yes; f += yes; OUT(f.x, i.x, f.w, i.w)", [2, 1, 2, 1]),
    "bytes and a bool": ("uchar4 u = uchar4(1); u += yes; short4 s = yes; OUT(u.x, u.w, s.x, s.w)", [2, 2, 1, 1]),
    "packed": (
        "auto m = packed_float3(v.yzw) > packed_float3(0.0f); auto n = packed_float2(v.xw) == v.xw;"
        " OUT(m.x, m.y, n.x, (packed_float2(v.xw) > 0).y)",
        [0, 1, 1, 1],
    ),
    "scalar by a template": ("OUT(spread(half4(1), half4(a)))", [0, 0, 1, 1]),
    "over lines": ("bool4 m = v\n  >  // positive? : yes\n 0; OUT(m\n ? /* ? : */ a\n :\n v)", [-1.5, -0.5, 2, 3]),
    "macro over lines": ("bool4 m = LESS(v,\n 0); OUT(m)", [1, 1, 0, 0]),
    "loop": ("float4 s = 0; for (int i = 0; i < 3; i++) s += float4(v > i - 1); OUT(s)", [0, 1, 2, 3]),
    "constants in functions": (
        "constant float t[] = {1, 2}; constexpr constant float u = 3; OUT(t[0], t[1], u, 0)",
        [1, 2, 3, 0],
    ),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_comparison_in_a_statement(name: str) -> None:
    text, expected = STATEMENTS[name]
    assert run(f"#define OUT(...) *(device float4*)out = float4(__VA_ARGS__);\n{text}") == expected


REFUSED = {
    "to integers": ("int4 m = v > 0;", "'bool4' to 'thread int4'"),
    "to its decltype": ("decltype(v > 0) m = v > 0;", "no viable conversion from 'bool4'"),
    "to a bool": ("if (v > 0) out[0] = 1;", "value of type 'bool4' is not contextually convertible to 'bool'"),
    "arithmetic": ("float4 f = (v > 0) * 3.0f;", "invalid operands"),
    "negative": ("float4 f = -(v > 0);", "invalid argument type 'bool4'"),
    "choice by integers": ("int4 i = 1; float4 f = i ? a : v;", "?: chooses by a bool, or by a vector of bool"),
    "choice by both": ("float4 f = larger(a, v) + larger(1.0f, 2.0f);", "?: chooses by a bool, or by a vector of bool"),
    "choice of sizes": ("float2 f = v > 0 ? a.xy : v.xy;", "another number of elements than the condition"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_metal_refuses(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(CompileError) as caught:
        run(f"\n{text}")
    assert message in str(caught.value)
    assert "emu_" not in str(caught.value)


def test_findings_stay_on_the_lines_of_the_user() -> None:
    with pytest.raises(BoundsError) as caught:
        run("bool4 m = LESS(v,\n 0);\nfloat4 f = m ? a : v;\nout[4] = f.x;")
    assert caught.value.locations[0] == Location("k body", 5)


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "long4": "device long4* p = (device long4*)out; p[0] = long4(1);",
        "ulong3": "threadgroup ulong3 t[2]; t[1].x = 1;",
        "long3": "const device vec<int64_t, 3>* p = (const device vec<int64_t, 3>*)x; long3 w = p[0];",
    }.items(),
)
def test_vectors_of_32_bytes_are_for_threads_alone(name: str, text: str) -> None:
    with pytest.raises(LanguageError, match=f"cannot watch a {name} in memory that threads share; use u?long2 or"):
        run(text)
    assert run(
        f"{name} w = 1; const device long2* p = (const device long2*)x; *(device float4*)out = float(w.z + p[0].x * 0);"
    )


def test_a_text_without_vectors_compared_stays() -> None:
    text = '#include "prelude.h"\nkernel void f(device float* x) { x[0] = x[1] < x[2] && !(x[3] == 0) ? 1 : 2; }\n'
    assert compare_as_metal(translate_header(text), preamble=False) == translate_header(text)


def test_mlx_header_compares_no_vectors() -> None:
    from forge_mlx.metal.emulator.toolchain import _mlx_include

    tree = dump_ast(preamble_text(_mlx_include()), preamble=False, broken=True)
    assert len(tree["inner"]) > 50
    assert not set(_edits(tree))
