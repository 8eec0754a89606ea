"""Kernels with one mistake that not every Metal takes, and kernels without one that look as if they had it."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

MARK = "// here"


@dataclass(frozen=True)
class Case:
    """A kernel with one mistake.

    Attributes:
        name: the test's id.
        kind: of the finding.
        body: the kernel's body. `// here` stands at the end of the line of the finding.
        fix: text -> its replacement, in body and header, that corrects it.
        header: what precedes the kernel.
        template: its template arguments.
    """

    name: str
    kind: str
    body: str
    fix: dict[str, str]
    header: str = ""
    template: tuple[tuple[str, Any], ...] = ()

    def place(self) -> tuple[str, int]:
        """File and line of the mark."""
        for file, text in (("k header", self.header), ("k body", self.body)):
            for number, line in enumerate(text.split("\n"), start=1):
                if line.endswith(MARK):
                    return file, number
        raise AssertionError(f"{self.name} has no mark")

    def twin(self) -> tuple[str, str]:
        """Body and header without the mistake."""
        header, body = self.header, self.body
        for old, new in self.fix.items():
            assert (header + body).count(old) == 1, f"{self.name}: {old!r} must occur once"
            header, body = header.replace(old, new), body.replace(old, new)
        return body, header


ADDRESS_SPACES = [
    Case(
        name="pointer variable",
        kind="address space",
        body="""\
float values[2] = {x[0], x[1]};
float* p = values;  // here
out[0] = p[1];
""",
        fix={"float* p": "thread float* p"},
    ),
    Case(
        name="reference variable",
        kind="address space",
        body="""\
float value = x[0];
float& p = value;  // here
out[0] = p;
""",
        fix={"float& p": "thread float& p"},
    ),
    Case(
        name="pointer to device memory",
        kind="address space",
        body="""\
const float* p = x + 1;  // here
out[0] = p[1];
""",
        fix={"const float*": "const device float*"},
    ),
    Case(
        name="second of two declarators",
        kind="address space",
        body="""\
float value = x[0];
float other = 1, *p = &value;  // here
out[0] = *p + other;
""",
        fix={"float other = 1, *p": "thread float other = 1, *p"},
    ),
    Case(
        name="array of pointers",
        kind="address space",
        body="""\
float value = x[0];
float* p[2] = {&value, &value};  // here
out[0] = *p[1];
""",
        fix={"float* p": "thread float* p"},
    ),
    Case(
        name="reference to an array",
        kind="address space",
        body="""\
float values[2] = {x[0], x[1]};
float (&p)[2] = values;  // here
out[0] = p[1];
""",
        fix={"float (&p)": "thread float (&p)"},
    ),
    Case(
        name="parameter of a helper",
        kind="address space",
        header="""\
float first(
    float* p) {  // here
  return *p;
}
""",
        body="""\
float value = x[0];
out[0] = first(&value);
""",
        fix={"float* p": "thread float* p"},
    ),
    Case(
        name="parameter without a name",
        kind="address space",
        header="float first(float*) { return 1; }  // here\n",
        body="""\
float value = x[0];
out[0] = first(&value);
""",
        fix={"float first(float*)": "float first(thread float*)"},
    ),
    Case(
        name="result of a helper",
        kind="address space",
        header="float* same(thread float* p) { return p; }  // here\n",
        body="""\
thread float value = x[0];
out[0] = *same(&value);
""",
        fix={"float* same": "thread float* same"},
    ),
    Case(
        name="member of a class",
        kind="address space",
        header="""\
struct Span {
  const float* data;  // here
};
""",
        body="""\
Span span = {x};
out[0] = span.data[0];
""",
        fix={"const float* data": "const device float* data"},
    ),
    Case(
        name="member of a class template",
        kind="address space",
        header="""\
template <typename T>
struct Span {
  const T* data;  // here
};
""",
        body="""\
Span<float> span = {x};
out[0] = span.data[0];
""",
        fix={"const T* data": "const device T* data"},
    ),
    Case(
        name="alias",
        kind="address space",
        header="using Pointer = float*;  // here\n",
        body="""\
float value = x[0];
Pointer p = &value;
out[0] = *p;
""",
        fix={"using Pointer = float*": "using Pointer = thread float*"},
    ),
    Case(
        name="typedef",
        kind="address space",
        header="typedef float* Pointer;  // here\n",
        body="""\
float value = x[0];
Pointer p = &value;
out[0] = *p;
""",
        fix={"typedef float*": "typedef thread float*"},
    ),
    Case(
        name="template parameter that is given",
        kind="address space",
        header="""\
template <typename T>
T first(T* p) {  // here
  return *p;
}
""",
        body="""\
float value = x[0];
out[0] = first<float>(&value);
""",
        fix={"T* p": "thread T* p"},
    ),
    Case(
        name="C-style cast",
        kind="address space",
        body="""\
float value = x[0];
uint bits = *(uint*)&value;  // here
out[0] = bits;
""",
        fix={"(uint*)": "(thread uint*)"},
    ),
    Case(
        name="reinterpret_cast",
        kind="address space",
        body="""\
float value = x[0];
uint bits = *reinterpret_cast<uint*>(&value);  // here
out[0] = bits;
""",
        fix={"<uint*>": "<thread uint*>"},
    ),
    Case(
        name="static_cast",
        kind="address space",
        body="""\
float value = x[0];
auto p = static_cast<float*>(&value);  // here
out[0] = *p;
""",
        fix={"<float*>": "<thread float*>"},
    ),
    Case(
        name="macro that is used here",
        kind="address space",
        header="#define POINTER(target) float* p = &target\n",
        body="""\
float value = x[0];

POINTER(value);  // here
out[0] = *p;
""",
        fix={"float* p": "thread float* p"},
    ),
    Case(
        name="pointer in a method",
        kind="address space",
        header="""\
struct Point {
  float a;
  float get() thread {
    float* p = &a;  // here
    return *p;
  }
};
""",
        body="""\
Point point = {x[0]};
out[0] = point.get();
""",
        fix={"float* p": "thread float* p"},
    ),
    Case(
        name="method of an object in device memory",
        kind="method",
        header="""\
struct Point {
  float a;
  float b;
  float sum() const thread { return a + b; }
};
""",
        body="""\
device Point* points = (device Point*)out;
out[4] = points[1].sum();  // here
""",
        fix={"points[1].sum()": "Point(points[1]).sum()"},
    ),
    Case(
        name="method through a pointer to device memory",
        kind="method",
        header="""\
struct Point {
  float a;
  float b;
  float sum() const thread { return a + b; }
};
""",
        body="""\
device Point* points = (device Point*)out;
out[4] = points->sum();  // here
""",
        fix={"sum() const thread": "sum() const device"},
    ),
    Case(
        name="operator of an object in threadgroup memory",
        kind="method",
        header="""\
struct Point {
  float a;
  float operator()(float y) const thread { return a * y; }
};
""",
        body="""\
threadgroup Point points[2];
out[4] = points[1](2.0f);  // here
""",
        fix={"operator()(float y) const thread": "operator()(float y) const threadgroup"},
    ),
]

CONSTRUCTS = [
    Case(
        name="lambda",
        kind="lambda",
        body="""\
auto f = [](float y) { return 2 * y; };  // here
out[0] = f(x[0]);
""",
        fix={"auto f = [](float y) { return 2 * y; };  // here\n": "", "f(x[0])": "2 * x[0]"},
    ),
    Case(
        name="lambda in a template",
        kind="lambda",
        header="""\
template <typename T>
T f(T y) {
  auto g = [&]() { return y; };  // here
  return g();
}
""",
        body="out[0] = f(x[0]);\n",
        fix={"auto g = [&]() { return y; };": "T g = y;", "g()": "g"},
    ),
    Case(
        name="structured binding",
        kind="structured binding",
        header="struct Point { float a; float b; };\n",
        body="""\
Point point = {x[0], x[1]};
auto [first, second] = point;  // here
out[0] = first + second;
""",
        fix={"auto [first, second] = point;": "float first = point.a, second = point.b;"},
    ),
    Case(
        name="goto",
        kind="goto",
        body="""\
if (x[0] > 0) {
  goto end;  // here
}
out[0] = 1;
end:
out[1] = 2;
""",
        fix={"  goto end;  // here\n": "  return;\n", "end:\n": ""},
    ),
    Case(
        name="asm",
        kind="asm",
        body="""\
asm("nop");  // here
out[0] = 1;
""",
        fix={'asm("nop");  // here\n': ""},
    ),
    Case(
        name="recursion",
        kind="recursion",
        header="""\
float f(float y) {  // here
  return y < 1 ? y : f(y - 1);
}
""",
        body="out[0] = f(x[0]);\n",
        fix={"f(y - 1)": "y"},
    ),
    Case(
        name="recursion over three functions",
        kind="recursion",
        header="""\
float g(float y);  // here
float f(float y) { return g(y); }
float h(float y) { return f(y - 1); }
float g(float y) {
  return y < 1 ? y : h(y);
}
""",
        body="out[0] = f(x[0]);\n",
        fix={"return f(y - 1)": "return y"},
    ),
    Case(
        name="recursion of a template",
        kind="recursion",
        header="""\
template <typename T>
T f(T y) {  // here
  return y < 1 ? y : f(y - 1);
}
""",
        body="out[0] = f(x[0]);\n",
        fix={"f(y - 1)": "y"},
    ),
    Case(
        name="recursion of a method",
        kind="recursion",
        header="""\
struct Point {
  float a;
  float f(float y) const thread {  // here
    return y < a ? y : f(y - 1);
  }
};
""",
        body="""\
Point point = {x[0]};
out[0] = point.f(x[0]);
""",
        fix={"f(y - 1)": "y"},
    ),
    Case(
        name="constexpr recursion that runs",
        kind="recursion",
        header="""\
constexpr int f(int y) {  // here
  return y < 1 ? y : f(y - 1);
}
""",
        body="out[0] = f(n);\n",
        fix={"out[0] = f(n)": "constexpr int value = f(4);\nout[0] = value"},
    ),
    Case(
        name="threadgroup variable with a constructor",
        kind="threadgroup",
        header="""\
struct Point {
  float a;
  Point() thread : a(0) {}
};
""",
        body="""\
threadgroup Point points[4];  // here
points[n].a = x[0];
out[0] = points[0].a;
""",
        fix={"Point() thread : a(0) {}": ""},
    ),
    Case(
        name="threadgroup variable with a member's initialiser",
        kind="threadgroup",
        header="""\
struct Point {
  float a = 0;
};
""",
        body="""\
threadgroup Point point;  // here
point.a = x[0];
out[0] = point.a;
""",
        fix={"float a = 0;": "float a;"},
    ),
    Case(
        name="threadgroup variable of a class template",
        kind="threadgroup",
        header="""\
namespace geometry {
template <typename T>
struct Point {
  T a = 0;
};
}
""",
        body="""\
threadgroup geometry::Point<float> points[4];  // here
points[n].a = x[0];
out[0] = points[0].a;
""",
        fix={"T a = 0;": "T a;"},
    ),
    Case(
        name="threadgroup matrix of a simdgroup",
        kind="threadgroup",
        body="""\
threadgroup simdgroup_float8x8 tile;  // here
out[0] = 1;
""",
        fix={"threadgroup simdgroup_float8x8 tile": "simdgroup_float8x8 tile"},
    ),
]

CONVERSIONS = [
    Case(
        name="float in the place of a bfloat",
        kind="bfloat",
        body="""\
bfloat16_t y = x[0];  // here
narrow[0] = y;
""",
        fix={"= x[0]": "= bfloat16_t(x[0])"},
    ),
    Case(
        name="float stored as bfloat",
        kind="bfloat",
        body="narrow[0] = x[0];  // here\n",
        fix={"= x[0]": "= static_cast<bfloat16_t>(x[0])"},
    ),
    Case(
        name="product of bfloat and float stored as bfloat",
        kind="bfloat",
        body="narrow[0] = b[0] * 2.0f;  // here\n",
        fix={"b[0] * 2.0f": "(bfloat)(b[0] * 2.0f)"},
    ),
    Case(
        name="float as a bfloat argument",
        kind="bfloat",
        header="bfloat f(bfloat y) { return -y; }\n",
        body="narrow[0] = f(x[0]);  // here\n",
        fix={"f(x[0])": "f(bfloat(x[0]))"},
    ),
    Case(
        name="float as a bfloat result",
        kind="bfloat",
        header="""\
bfloat f(float y) {
  return y;  // here
}
""",
        body="narrow[0] = f(x[0]);\n",
        fix={"return y": "return bfloat(y)"},
    ),
    Case(
        name="float stored where a template makes it a bfloat",
        kind="bfloat",
        header="""\
template <typename T>
T f(float y) {
  T z = y;  // here
  return z;
}
""",
        body="""\
narrow[0] = f<bfloat16_t>(x[0]);
out[0] = f<float>(x[0]);
""",
        fix={"T z = y": "T z = T(y)"},
    ),
    Case(
        name="float stored where the kernel's template makes it a bfloat",
        kind="bfloat",
        template=(("T", mx.bfloat16),),
        body="""\
T y = x[0];  // here
narrow[0] = y;
""",
        fix={"= x[0]": "= T(x[0])"},
    ),
]

# What the compiler rejects by itself: kind, header, body.
REJECTED = {
    "virtual function": (
        "virtual",
        """\
struct A {
  virtual float f() { return 1; }  // here
};
""",
        "out[0] = 1;\n",
    ),
    "try": (
        "exception",
        "",
        """\
try {  // here
  out[0] = 1;
} catch (...) {}
""",
    ),
    "throw": ("exception", "", "if (x[0] > 0) throw 1;  // here\n"),
    "new": (
        "allocation",
        "",
        """\
auto p = new float;  // here
out[0] = *p;
""",
    ),
    "delete": (
        "allocation",
        "",
        """\
thread float* p = nullptr;
delete p;  // here
""",
    ),
    "dynamic_cast": (
        "dynamic_cast",
        """\
struct A {};
struct B : A {};
""",
        """\
A a;
auto p = dynamic_cast<thread B*>(&a);  // here
""",
    ),
    "double": (
        "double",
        "",
        """\
double y = x[0];  // here
out[0] = y;
""",
    ),
    "double in a cast": ("double", "", "out[0] = (double)x[0];  // here\n"),
    "array whose size is read": (
        "variable-length array",
        "",
        """\
float values[n];  // here
out[0] = values[0];
""",
    ),
    "array whose size is a parameter": (
        "variable-length array",
        """\
float f(int size) {
  float values[size];  // here
  return values[0];
}
""",
        "out[0] = f(3);\n",
    ),
    "pointer to a function": (
        "function pointer",
        "float g(float y) { return y; }\n",
        """\
float (*f)(float) = g;  // here
out[0] = f(x[0]);
""",
    ),
    "thread_local": (
        "storage class",
        "",
        """\
thread_local float y = 1;  // here
out[0] = y;
""",
    ),
}

# What compiles on every Metal, in the forms that lie nearest to a mistake: header, body.
CLEAN = {
    "deduced references": (
        "",
        """\
float values[2] = {x[0], 1};
auto& a = values[0];
const auto& c = values[1];
auto p = values;
out[0] = a + c + p[1];
""",
    ),
    "deduced references in methods": (
        """\
struct Row {
  float v[4];
  float sum() const thread {
    float s = 0;
    auto& first = v[0];
    for (auto each : v) s += each;
    return s + first;
  }
};
""",
        """\
Row row = {{x[0], x[1], x[2], x[3]}};
out[0] = row.sum();
""",
    ),
    "deduced references in constexpr methods": (
        """\
template <typename T>
constexpr float first(T p) {
  return *p;
}
struct Row {
  float v[4];
  constexpr float sum() const thread {
    float s = 0;
    auto& last = v[3];
    const auto* pointer = v;
    for (auto each : v) s += each;
    return s + last + *pointer + first(&v[0]);
  }
};
""",
        """\
Row row = {{x[0], x[1], x[2], x[3]}};
out[0] = row.sum();
""",
    ),
    "address spaces that a template deduces": (
        """\
template <typename T>
float first(T p) { return p[0]; }
template <typename T>
float second(T* p) { return p[1]; }
""",
        """\
float values[2] = {x[0], 1};
threadgroup float shared[2];
shared[0] = shared[1] = 1;
out[0] = first(x) + first(&values[0]) + second(x) + second(&values[0]) + second(&shared[0]);
""",
    ),
    "every address space": (
        """\
constant float table[2] = {1, 2};
float f(const device float* a, const threadgroup float* c, constant float* d, thread float& e) {
  return a[0] + c[0] + d[0] + e;
}
""",
        """\
threadgroup float shared[2];
shared[0] = 1;
float value = 2;
out[0] = f(x, shared, table, value);
""",
    ),
    "references to pointers": (
        """\
template <typename T>
inline void step(const device T*& p, threadgroup T*& q, thread int& n) {
  p += n;
  q += n;
}
""",
        """\
threadgroup float shared[4];
shared[0] = shared[1] = 1;
const device float* p = x;
threadgroup float* q = shared;
int by = 1;
step(p, q, by);
out[0] = *p + *q;
""",
    ),
    "references to constants bind temporaries": (
        """\
struct Point { float a; float b; };
float f(const thread Point& p, const thread float& y) { return p.a * y; }
""",
        "out[0] = f(Point{x[0], 1}, x[1] + 1);\n",
    ),
    "copies of objects in device and threadgroup memory": (
        "struct Point { float a; float b; };\n",
        """\
device Point* points = (device Point*)out;
threadgroup Point shared[2];
Point point = points[1];
shared[0] = point;
points[0] = shared[0];
""",
    ),
    "methods for every address space": (
        """\
struct Point {
  float a;
  float get() const thread { return a; }
  float get() const device { return a; }
  float get() const threadgroup { return a; }
};
""",
        """\
device Point* points = (device Point*)out;
threadgroup Point shared[2];
Point point = points[1];
shared[0] = point;
out[4] = points[1].get() + shared[0].get() + point.get();
""",
    ),
    "qualified constructors and operators": (
        """\
struct Point {
  float a;
  Point() thread = default;
  Point(float y) thread : a(y) {}
  Point operator+(const thread Point& other) const thread { return {a + other.a}; }
  float operator()() const thread { return a; }
  float operator()(metal::float2 y) const thread { return a * y.x; }
  operator float() const thread { return a; }
  thread float& at() thread { return a; }
  static float one() { return 1; }
};
""",
        """\
Point point(x[0]), other;
other.at() = 2;
out[0] = (point + other)() + float(point) + Point::one();
""",
    ),
    "casts": (
        "",
        """\
float value = x[0];
out[0] = (int)value + *(thread int*)&value + *reinterpret_cast<const device int*>(x)
    + static_cast<int>(value) * (value) + as_type<int>(value);
""",
    ),
    "conversions to bfloat that are asked for": (
        """\
template <typename T>
T f(float y) {
  T z = static_cast<T>(y);
  z += T(1);
  return T(y) * z;
}
""",
        """\
bfloat y = (bfloat)x[0];
y = y * b[1] + bfloat(2.0f);
float wide = y;
half narrower = half(wide);
narrow[0] = f<bfloat16_t>(x[0]) + bfloat16_t(narrower) + y;
out[0] = f<float>(wide) + f<half>(b[0]);
narrow[1] = metal::exp(b[0]) + 1.5bf;
bfloat4 four = bfloat4(float4(x[0]));
narrow[2] = four.x;
""",
    ),
    "templates that call each other with other arguments": (
        """\
template <int N>
float sum(const device float* p) {
  if constexpr (N == 0) {
    return 0;
  } else {
    return p[N - 1] + sum<N - 1>(p);
  }
}
""",
        "out[0] = sum<4>(x);\n",
    ),
    "recursion for constants alone": (
        """\
constexpr int log2_of(int y) { return y < 2 ? 0 : 1 + log2_of(y / 2); }
constant constexpr int LOG = log2_of(8);
""",
        """\
constexpr int size = log2_of(64);
float values[size + LOG + log2_of(2)];
values[1] = x[0];
out[0] = values[1];
""",
    ),
    "overloads of one name": (
        """\
float f(float y) { return 2 * y; }
float f(int y) { return f(float(y)); }
float f(int2 y) { return f(y.x); }
""",
        "out[0] = f(int2(n, n));\n",
    ),
    "threadgroup variables": (
        """\
struct Point { float a; float b; };
template <typename T>
struct Pair {
  T a;
  T b;
};
""",
        """\
threadgroup float a[4], c;
threadgroup float4 d[2][2];
threadgroup Point e[2];
threadgroup Pair<half> f;
threadgroup atomic_int g;
c = a[0] = 1;
d[0][1] = float4(1);
e[0].a = f.a = 1;
out[0] = 1;
""",
    ),
    "scalars and shapes of the signature": (
        "",
        """\
out[0] = n + x_shape[0] + x_strides[0] + x_ndim + thread_position_in_grid.x + simdgroup_index_in_threadgroup;
""",
    ),
    "macros": (
        """\
#define LOAD(p, i) (*((const device float*)(p) + (i)))
#define EACH(i, n) for (int i = 0; i < (n); ++i)
""",
        """\
EACH(i, 4) {
  out[i] = LOAD(x, i) + LOAD(&x[1], i);
}
""",
    ),
    "control flow": (
        "enum class Mode { a, b };\n",
        """\
Mode mode = n > 0 ? Mode::a : Mode::b;
switch (mode) {
  case Mode::a: break;
  default: return;
}
do {
  out[0] = 1;
} while (false);
""",
    ),
}
