"""What `load` makes of a .metal file, and what it refuses because MLX could not write it."""

from pathlib import Path

from forge_mlx.metal.include import blank
from forge_mlx.metal.source import SourceError, TemplateParameter, load
import pytest

HELPER = "#pragma once\ntemplate <typename T>\ninline float twice(T x) { return 2 * float(x); }\n"
GUARDED = '#ifndef B_H\n#define B_H\n#include "a.h"\nconstant constexpr float table[2] = {1, 2};\n#endif\n'
KERNEL = """\
// Not [[kernel]] void this(
#include <metal_stdlib>
#include "../_common/a.h"
#include "b.h"
using namespace metal;

template <typename T, int N, bool B>
[[kernel]] void scale_rows(
    const device T* x [[buffer(0)]],  // rows, in order
    const constant int* x_shape [[buffer(1)]],
    constant float& factor [[buffer(2)]],
    device T* out [[buffer(3)]],
    device bfloat* total [[buffer(4)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  uint i = thread_position_in_grid.x;
  if (thread_index_in_simdgroup == 0) { total[0] = x_shape[0]; }
  out[i] = twice(x[i]) * factor * N * (B ? 1 : 2);
}

// For xcrun metal.
template [[host_name("scale_rows_half")]] [[kernel]]
decltype(scale_rows<half, 1, true>) scale_rows<half, 1, true>;
"""


@pytest.fixture
def write(tmp_path):
    """Writes a kernel into the room of a small tree: the file's path."""
    for folder in ("room", "_common"):
        (tmp_path / folder).mkdir()
    (tmp_path / "_common" / "a.h").write_text(HELPER)
    (tmp_path / "_common" / "b.h").write_text(GUARDED)

    def write_kernel(text: str) -> Path:
        (tmp_path / "room" / "forward.metal").write_text(text)
        return tmp_path / "room" / "forward.metal"

    return write_kernel


def test_arrays_are_those_of_the_signature(write):
    source = load(write(KERNEL))
    assert (source.name, source.file) == ("scale_rows", "room/forward.metal")
    found = [(array.name, array.type, array.space, array.is_reference) for array in source.inputs + source.outputs]
    assert found == [
        ("x", "T", "device", False),
        ("factor", "float", "constant", True),
        ("out", "T", "device", False),
        ("total", "bfloat16_t", "device", False),
    ]
    assert [array.name for array in source.outputs] == ["out", "total"]
    assert [array.descriptions for array in source.inputs] == [("shape",), ()]
    assert [array.line for array in source.inputs] == [9, 11]
    assert not source.atomic_outputs


def test_template_and_attributes_are_those_of_the_signature(write):
    source = load(write(KERNEL))
    kinds = [("T", "typename"), ("N", "int"), ("B", "bool")]
    assert source.template == tuple(TemplateParameter(name, kind) for name, kind in kinds)
    # In the order in which MLX passes them.
    assert source.attributes == ("thread_index_in_simdgroup", "thread_position_in_grid")


def test_header_and_body_keep_their_lines(write):
    path = write(KERNEL)
    source = load(path)
    positions = {}
    for text in (source.header, source.body):
        file, number = "", 0
        for line in text.splitlines():
            if line.startswith("#line "):
                number, file = int(line.split()[1]), line.split()[2].strip('"')
            else:
                positions.setdefault((file, number), line)
                number += 1
    files = {name: (path.parents[1] / name).read_text().splitlines() for name in {file for file, _ in positions}}
    assert files.keys() == {"room/forward.metal", "_common/a.h", "_common/b.h"}
    for (file, number), line in positions.items():
        if line:
            assert line == files[file][number - 1]
    assert positions["room/forward.metal", 17] == KERNEL.splitlines()[16]
    assert positions["_common/a.h", 3] == HELPER.splitlines()[2]


def test_body_is_what_stands_between_the_braces(write):
    source = load(write(KERNEL))
    first, rest = source.body.split("\n", 1)
    assert first == '#line 15 "room/forward.metal"'
    assert rest == KERNEL.split("]]) {")[1].split("}\n\n")[0]
    assert source.body_line == 15


def test_includes_are_inlined_once_and_angle_brackets_stay(write):
    header = load(write(KERNEL)).header
    assert "#include <metal_stdlib>" in header
    assert '#include "' not in header
    assert header.count("inline float twice") == 1
    assert header.count("constexpr float table") == 1
    assert "pragma once" not in header
    assert "host_name" not in header + load(write(KERNEL)).body


def test_older_spelling_of_a_kernel(write):
    source = load(write("kernel void f(device const uchar* a, device metal::atomic_float* out) {\n  out[0] = a[0];\n}"))
    assert (source.name, source.header, source.atomic_outputs) == ("f", '#line 1 "room/forward.metal"\n', True)
    assert [(array.type, array.space, array.atomic) for array in source.inputs + source.outputs] == [
        ("uint8_t", "device", False),
        ("float", "device", True),
    ]


def test_atomic_outputs_of_a_template_type(write):
    source = load(write("template <class T>\n[[kernel]] void f(constant int& n, device atomic<T>* out) {}"))
    assert source.template == (TemplateParameter("T", "typename"),)
    assert (source.outputs[0].type, source.outputs[0].atomic) == ("T", True)


def test_all_three_descriptions(write):
    names = "const device int* a, constant int* a_shape, constant int64_t* a_strides, constant int& a_ndim"
    source = load(write(f"kernel void f({names}, device int* o) {{ o[0] = a_shape[0] + a_strides[0] + a_ndim; }}"))
    (array,) = source.inputs
    assert array.descriptions == ("shape", "strides", "ndim")


def test_an_array_may_be_called_like_a_shape_of_something_else(write):
    source = load(write("kernel void f(constant int* out_shape, device int* o) { o[0] = out_shape[0]; }"))
    assert [array.name for array in source.inputs] == ["out_shape"]


def test_headers_may_lie_anywhere_else(write):
    path = write('#include "a.h"\n#include "d.h"\n' + PLAIN)
    with pytest.raises(SourceError, match=r'room/forward\.metal:2: #include "d\.h" must name a file'):
        load(path)
    (path.parents[1] / "elsewhere").mkdir()
    (path.parents[1] / "elsewhere" / "d.h").write_text("int d();\n")
    folders = [path.parents[1] / name for name in ("_common", "elsewhere")]
    assert "int d();" in load(path, folders).header
    with pytest.raises(SourceError, match=r'#include "a\.h" must name a file'):
        load(path, folders[1:])


PLAIN = "kernel void f(const device float* a, device float* o) {\n  o[0] = a[0];\n}\n"
REFUSED = {
    "no kernel": ("int f();\n", 1, "one [[kernel]] function but got none"),
    "two kernels": (PLAIN + PLAIN.replace(" f(", " g("), 4, "one [[kernel]] function but got f, g"),
    "kernel in a condition": ("#if 1\n" + PLAIN + "#endif\n", 2, "inside #if"),
    "code after the kernel": (PLAIN + "int g() { return 1; }\n", 4, "nothing may follow the kernel but got int g()"),
    "no body": ("kernel void f(device float* o);\n", 1, "body must follow"),
    "unclosed body": ("kernel void f(device float* o) {\n", 1, "never closed"),
    "host name": ('[[host_name("f")]]\n' + PLAIN, 1, "may stand before [[kernel]]"),
    "thread limit": (
        "[[kernel, max_total_threads_per_threadgroup(64)]] void f(device float* o) {}",
        1,
        "writes [[kernel]] and nothing else but got max_total_threads_per_threadgroup(64)",
    ),
    "thread limit after": (
        "\n[[kernel]] [[max_total_threads_per_threadgroup(64)]] void f(device float* o) {}",
        2,
        "nothing else but got [[max_total_threads_per_threadgroup(64)]]",
    ),
    "float template": ("template <float E>\n" + PLAIN, 1, "a dtype, an int or a bool to a template"),
    "template default": ("\ntemplate <int N = 4>\n" + PLAIN, 2, "without default, but got int N = 4"),
    "nested template": ("template <template <int> class C>\n" + PLAIN, 1, "may stand before [[kernel]]"),
    "texture": (
        "kernel void f(device float* o,\n  texture2d<float> t [[texture(0)]]) {}",
        2,
        "no texture and no sampler, but got texture2d<float> t",
    ),
    "sampler": ("kernel void f(sampler s [[sampler(0)]], device float* o) {}", 1, "no texture and no sampler"),
    "threadgroup memory": (
        "kernel void f(device float* o,\n\n  threadgroup float* s [[threadgroup(0)]]) {}",
        3,
        "declare s inside the kernel",
    ),
    "no name": ("kernel void f(const device float*,\n device float* o) {}", 1, "must have a name"),
    "value": ("kernel void f(float x, device float* o) {}", 1, "[[attribute]] of float x is missing"),
    "unknown attribute": (
        "kernel void f(uint v [[vertex_id]], device float* o) {}",
        1,
        "[[attribute]] of uint v is none of those that MLX passes",
    ),
    "attribute of another name": (
        "kernel void f(device float* o, uint3 gid [[thread_position_in_grid]]) { o[gid.x] = 1; }",
        1,
        "MLX calls a parameter as its attribute, thread_position_in_grid, but got gid",
    ),
    "attribute of another type": (
        "kernel void f(device float* o, uint thread_position_in_grid [[thread_position_in_grid]]) {}",
        1,
        "MLX passes uint3 thread_position_in_grid but got uint",
    ),
    "two attributes": ("kernel void f(device float* o [[buffer(0)]] [[id(1)]]) {}", 1, "may have one [[attribute]]"),
    "wrong buffer": (
        "kernel void f(\n  const device float* a [[buffer(1)]],\n  device float* o [[buffer(0)]]) {}",
        2,
        "gives a [[buffer(0)]] but got [[buffer(1)]]",
    ),
    "struct": ("kernel void f(constant Params& p, device float* o) {}", 1, "got Params"),
    "double": ("kernel void f(const device double* a, device float* o) {}", 1, "got double"),
    "vector": ("kernel void f(const device float4* a, device float* o) {}", 1, "arrays of scalar types"),
    "pointer to pointer": ("kernel void f(const device float** a, device float* o) {}", 1, "a buffer must be"),
    "no address space": ("kernel void f(const float* a, device float* o) {}", 1, "a buffer must be"),
    "volatile": ("kernel void f(device volatile float* o) {}", 1, "a buffer must be"),
    "device reference": ("kernel void f(device float& o) {}", 1, "0-d array as `const constant T&`"),
    "array by brackets": ("kernel void f(device float o[4]) {}", 1, "an array or a thread's position"),
    "atomic input": ("kernel void f(const device atomic_int* a, device float* o) {}", 1, "inputs as plain values"),
    "mixed atomics": ("kernel void f(device atomic_int* a,\n device float* o) {}", 2, "atomic or none but o is not"),
    "output first": ("kernel void f(device float* o,\n const device float* a) {}", 2, "a after o"),
    "no output": ("kernel void f(const device float* a) {}", 1, "must have an output"),
    "same name": ("kernel void f(const device float* a, device float* a) {}", 1, "got a twice"),
    "shape of another type": (
        "kernel void f(const device int* a, constant uint* a_shape, device int* o) { o[0] = a_shape[0]; }",
        1,
        "`const constant int32_t* a_shape`",
    ),
    "shape in device memory": (
        "kernel void f(const device int* a, const device int* a_shape, device int* o) { o[0] = a_shape[0]; }",
        1,
        "`const constant int32_t* a_shape`",
    ),
    "ndim as a pointer": (
        "kernel void f(const device int* a, constant int* a_ndim, device int* o) { o[0] = a_ndim[0]; }",
        1,
        "`const constant int32_t& a_ndim`",
    ),
    "strides before shape": (
        "kernel void f(const device int* a, constant long* a_strides,\n constant int* a_shape, device int* o) {}",
        2,
        "a_shape, a_strides, a_ndim in this order",
    ),
    "shape of a 0-d array": (
        "kernel void f(constant int& a, constant int* a_shape, device int* o) { o[0] = a_shape[0]; }",
        1,
        "a is a 0-d array",
    ),
    "unused shape": (
        "kernel void f(const device int* a, constant int* a_shape, device int* o) {}",
        1,
        "a_shape is declared and never used",
    ),
    "undeclared shape": (
        "kernel void f(const device int* a, device int* o) {\n\n  o[0] = a_shape[0];\n}",
        3,
        "the body holds a_shape",
    ),
    "shape in a comment": (
        "kernel void f(const device int* a, device int* o) {\n  o[0] = 1; // not a_ndim\n}",
        2,
        "a comment holds a_ndim",
    ),
    "shape within a longer name": (
        "kernel void f(const device int* a, device int* o) {\n  int data_shape = 1;\n}",
        2,
        "the body holds a_shape",
    ),
    "unused attribute": (
        "kernel void f(device int* o,\n  uint3 threads_per_grid [[threads_per_grid]]) {}",
        2,
        "threads_per_grid is declared and never used",
    ),
    "undeclared attribute": ("kernel void f(device int* o) {\n  o[grid_size.x] = 1;\n}", 2, "the body holds grid_size"),
    "attribute in a comment": (
        "kernel void f(device int* o) {\n  // by grid_origin\n}",
        2,
        "a comment holds grid_origin",
    ),
    "attribute within another": (
        "kernel void f(device int* o, uint3 dispatch_threads_per_threadgroup [[dispatch_threads_per_threadgroup]]) {\n"
        "  o[0] = dispatch_threads_per_threadgroup.x;\n}",
        2,
        "the body holds threads_per_threadgroup",
    ),
    "list that MLX closes too early": (
        "kernel void f(const device int* a, constant int* a_shape, device int* o, device int* p) {\n"
        "  o[0] = a_shape[0]; p[0] = 1;\n}",
        1,
        "use one, such as thread_position_in_grid",
    ),
    "too many buffers": (
        "kernel void f(" + "".join(f"const device int* a{i}, " for i in range(31)) + "device int* o) {}",
        1,
        "at most 31 buffers but got 32",
    ),
    "missing include": ('\n#include "none.h"\n' + PLAIN, 2, '#include "none.h" must name a file'),
    "include in a condition": ('#ifdef X\n#include "a.h"\n#endif\n' + PLAIN, 2, "may not stand inside #if"),
}


@pytest.mark.parametrize(("text", "line", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(write, text, line, message):
    with pytest.raises(SourceError) as caught:
        load(write(text))
    assert str(caught.value).startswith(f"room/forward.metal:{line}: ")
    assert message in str(caught.value)
    assert (caught.value.file, caught.value.line) == ("room/forward.metal", line)


def test_error_in_an_included_file_names_it(write):
    path = write('#include "c.h"\n' + PLAIN)
    (path.parent / "c.h").write_text('\n\n#include "gone.h"\n')
    with pytest.raises(SourceError, match=r'^room/c.h:3: #include "gone.h"'):
        load(path)


def test_a_file_beside_comes_before_one_in_a_folder(write):
    path = write('#include "a.h"\n' + PLAIN)
    (path.parent / "a.h").write_text("int beside();\n")
    assert "int beside();" in load(path).header
    assert "twice" not in load(path).header


def test_a_file_that_includes_itself_is_inlined_once(write):
    path = write('#include "c.h"\n' + PLAIN)
    (path.parent / "c.h").write_text('#include "c.h"\nint c();\n')
    assert load(path).header.count("int c();") == 1


def test_file_whose_path_holds_a_name_that_mlx_would_pass(tmp_path):
    path = tmp_path / "grid_size" / "f.metal"
    path.parent.mkdir()
    path.write_text(PLAIN)
    with pytest.raises(SourceError, match="the file's path holds grid_size"):
        load(path)


def test_blank_keeps_lines_and_offsets():
    text = 'a // "x\nb /* y\n */ c "d // e" f\n'
    assert blank(text) == "a      \nb     \n    c          f\n"
    assert blank(text, strings=False) == 'a      \nb     \n    c "d // e" f\n'
