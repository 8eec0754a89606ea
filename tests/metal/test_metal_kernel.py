"""A launch is checked against the signature in the kernel's file, then runs on the engine that was asked for."""

from forge_mlx.metal import apple
from forge_mlx.metal.emulator import BoundsError, CompileError
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.source import load
import mlx.core as mx
import pytest

SCALE = """\
#include <metal_stdlib>
using namespace metal;

template <typename T, int N, bool NEGATE>
[[kernel]] void scale(
    const device T* x [[buffer(0)]],
    const constant float& factor [[buffer(1)]],
    const constant int& shift [[buffer(2)]],
    const constant bool& skip [[buffer(3)]],
    const constant uchar* few [[buffer(4)]],
    device T* out [[buffer(5)]],
    device float* total [[buffer(6)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  uint i = thread_position_in_grid.x;
  float value = skip ? 0.0f : float(x[i]) * factor * N + shift + few[0];
  out[i] = T(NEGATE ? -value : value);
  if (i == 0) {
    total[0] = value;
  }
}
"""


@pytest.fixture
def kernel(tmp_path):
    file = tmp_path / "scale.metal"
    file.write_text(SCALE)
    return MetalKernel(file)


def call(kernel, **changes):
    """A call that is right, with changes."""
    x = mx.arange(24, dtype=mx.float16).reshape(2, 12)
    few = mx.array([3, 4], dtype=mx.uint8)
    arguments = {
        "inputs": {"x": x, "factor": 0.5, "shift": 1, "skip": False, "few": few},
        "output_shapes": [(2, 12), (1,)],
        "output_dtypes": [mx.float16, mx.float32],
        "grid": (24, 1, 1),
        "threadgroup": (8, 1, 1),
        "template": {"T": mx.float16, "N": 3, "NEGATE": True},
        "engine": "emulator",
    } | changes
    return kernel(arguments.pop("inputs"), **arguments)


def given(**changes):
    """Inputs that are right, with changes; None takes one away."""
    x, few = mx.zeros((2, 12), dtype=mx.float16), mx.array([3, 4], dtype=mx.uint8)
    inputs = {"x": x, "factor": 0.5, "shift": 1, "skip": False, "few": few} | changes
    return {"inputs": {name: value for name, value in inputs.items() if value is not None}}


ONE = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
EXPECTED = [-(1.5 * i + 4) for i in range(24)]


def test_runs_on_the_emulator(kernel):
    out, total = call(kernel)
    assert (out.dtype, out.shape, total.dtype, total.shape) == (mx.float16, (2, 12), mx.float32, (1,))
    assert out.flatten().tolist() == EXPECTED
    assert total.item() == 4.0


def test_inputs_may_be_listed(kernel):
    x, few = mx.arange(24, dtype=mx.float16), mx.array([3], dtype=mx.uint8)
    out, _ = call(kernel, inputs=[x, mx.array(0.5), mx.array(1), mx.array(False), few])
    assert out.flatten().tolist() == EXPECTED


def test_numbers_become_the_declared_types(kernel):
    assert (
        call(kernel, **given(x=mx.ones((2, 12), mx.float16), factor=2, shift=-7, skip=False))[1].item() == 2 * 3 - 7 + 3
    )
    assert call(kernel, **given(skip=True))[1].item() == 0


def test_engine_of_a_block(kernel):
    with use_engine("emulator"):
        assert call(kernel, engine=None)[1].item() == 4.0


def test_a_source_may_be_loaded_before(kernel):
    assert MetalKernel(kernel.source).source is kernel.source


@pytest.mark.parametrize("engine", ["reference", None], ids=["reference", "automatic"])
def test_the_reference_runs_no_metal_kernel(kernel, monkeypatch, engine):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    with pytest.raises(RuntimeError, match=r"^\[scale\] engine reference .* runs no Metal kernel"):
        call(kernel, engine=engine)


def test_the_engine_metal_is_apples(kernel, monkeypatch):
    launches = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(apple, "run", lambda launch: launches.append(launch) or ["out"])
    assert call(kernel, engine="metal", init_value=2, verbose=True) == ["out"]
    (launch,) = launches
    assert launch.source is kernel.source
    assert [array.tolist() for array in launch.inputs[1:]] == [0.5, 1, False, [3, 4]]
    assert [array.dtype for array in launch.inputs[1:]] == [mx.float32, mx.int32, mx.bool_, mx.uint8]
    assert launch.template == (("T", mx.float16), ("N", 3), ("NEGATE", True))
    assert (launch.grid, launch.threadgroup, launch.init_value, launch.verbose) == ((24, 1, 1), (8, 1, 1), 2.0, True)
    assert (launch.output_shapes, launch.output_dtypes) == (((2, 12), (1,)), (mx.float16, mx.float32))
    assert (launch.ensure_row_contiguous, launch.math_mode) == (True, "safe")


def test_options_of_the_kernel_reach_the_launch(kernel, monkeypatch):
    launches = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(apple, "run", lambda launch: launches.append(launch) or ["out"])
    call(MetalKernel(kernel.source, ensure_row_contiguous=False, math_mode="fast"), engine="metal")
    assert (launches[0].ensure_row_contiguous, launches[0].math_mode) == (False, "fast")


def test_an_int_for_a_float_becomes_a_float(kernel, monkeypatch):
    launches = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(apple, "run", lambda launch: launches.append(launch) or ["out"])
    call(kernel, **given(factor=2), engine="metal")
    factor = launches[0].inputs[1]
    assert (factor.dtype, factor.item()) == (mx.float32, 2.0)


def test_template_is_passed_in_the_order_of_the_file(kernel, monkeypatch):
    launches = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(apple, "run", lambda launch: launches.append(launch) or ["out"])
    call(kernel, engine="metal", template={"NEGATE": False, "N": 1, "T": mx.float16})
    assert [name for name, _ in launches[0].template] == ["T", "N", "NEGATE"]


def test_findings_name_the_line_of_the_file(kernel):
    with pytest.raises(BoundsError, match=r"^\[scale\] ") as caught:
        call(kernel, grid=(25, 1, 1))
    # The order of the two accesses of a line is the compiler's choice.
    line = SCALE.splitlines().index("  float value = skip ? 0.0f : float(x[i]) * factor * N + shift + few[0];") + 1
    (location,) = caught.value.locations
    assert location.file.endswith("/scale.metal")
    assert (location.line, caught.value.buffer, caught.value.index) == (line, "x", 24)


@pytest.mark.parametrize("line", [1, 3], ids=["first line", "later line"])
def test_errors_in_an_included_file_name_it_and_show_the_line(tmp_path, line):
    (tmp_path / "helper.h").write_text("\n" * (line - 1) + "inline float helper() { return nothing; }\n")
    file = tmp_path / "f.metal"
    file.write_text('\n#include "helper.h"\nkernel void f(device float* out) {\n  out[0] = helper();\n}\n')
    with pytest.raises(CompileError) as caught:
        MetalKernel(file)([], output_shapes=[(1,)], output_dtypes=[mx.float32], **ONE, engine="emulator")
    (location,) = caught.value.locations
    assert (location.file.rpartition("/")[2], location.line) == ("helper.h", line)
    assert f"helper.h:{line}: use of undeclared identifier 'nothing'" in str(caught.value)
    assert "\n    inline float helper() { return nothing; }" in str(caught.value)


def test_errors_after_an_include_name_the_line_of_the_file(tmp_path):
    (tmp_path / "helper.h").write_text("\n\n\n\n")
    file = tmp_path / "f.metal"
    file.write_text(
        '#include "helper.h"\ninline float wrong() { return nothing; }\nkernel void f(device float* out) {}\n'
    )
    with pytest.raises(CompileError, match=r"/f.metal:2: use of undeclared identifier"):
        MetalKernel(file)([], output_shapes=[(1,)], output_dtypes=[mx.float32], **ONE, engine="emulator")


def test_empty_grid_returns_empty_outputs_without_a_launch(tmp_path):
    file = tmp_path / "copy.metal"
    file.write_text(
        "kernel void copy(const device float* x, device float* y, device half* z,\n"
        "    uint3 thread_position_in_grid [[thread_position_in_grid]]) {\n"
        "  y[thread_position_in_grid.x] = x[thread_position_in_grid.x];\n  z[0] = 1;\n}"
    )

    def copy(*shapes, grid=(0, 1, 1)):
        return MetalKernel(file)(
            [mx.zeros((0,))],
            output_shapes=shapes,
            output_dtypes=[mx.float32, mx.float16],
            grid=grid,
            threadgroup=(32, 1, 1),
            engine="emulator",
        )

    y, z = copy((0, 3), (2, 0))
    assert (y.shape, y.dtype, z.shape, z.dtype) == ((0, 3), mx.float32, (2, 0), mx.float16)
    with pytest.raises(
        ValueError, match=r"^\[copy\] grid must have threads where an output has elements but got \(5, 0"
    ):
        copy((0, 3), (2,), grid=(5, 0, 1))


def test_engine_is_asked_for_an_empty_grid_too(kernel):
    with pytest.raises(RuntimeError, match="runs no Metal kernel"):
        call(kernel, grid=(0, 1, 1), output_shapes=[(0,), (0,)], engine="reference")


WRONG = {
    "missing input": (given(x=None), "inputs must have the keys x, factor, shift, skip, few but got factor, shift"),
    "unknown input": (given(y=1.0), "inputs must have the keys x, factor, shift, skip, few but got x, factor"),
    "too few inputs": (
        {"inputs": [mx.zeros((3,))]},
        "inputs must be the 5 arrays x, factor, shift, skip, few but got 1",
    ),
    "dtype of a template": (given(x=mx.zeros((2, 12))), "input x must be float16 but got float32"),
    "declared dtype": (given(few=mx.zeros((2,))), "input few must be uint8 but got float32"),
    "dtype of a 0-d array": (given(factor=mx.array(1)), "input factor must be float32 but got int32"),
    "number for an array": (given(x=1.0), "input x must be an array of one axis or more but got 1.0 (float)"),
    "list for an array": (given(x=[1.0]), "input x must be an array of one axis or more but got [1.0] (list)"),
    "0-d for an array": (given(x=mx.array(1.0)), "input x must be an array of one axis or more but got shape ()"),
    "array for a 0-d one": (
        given(factor=mx.zeros((1,))),
        "input factor must be a 0-d array or a number but got shape (1,)",
    ),
    "text for a number": (given(factor="1"), "input factor must be a 0-d array or a number but got '1' (str)"),
    "float for an int": (given(shift=1.0), "input shift must be int32 but got 1.0 (float)"),
    "bool for an int": (given(shift=True), "input shift must be int32 but got True (bool)"),
    "int for a bool": (given(skip=1), "input skip must be bool but got 1 (int)"),
    "bool for a float": (given(factor=True), "input factor must be float32 but got True (bool)"),
    "int that is too large": (given(shift=2**31), "input shift must fit into int32 but got 2147483648"),
    "too many for constant": (
        given(few=mx.zeros((8,), dtype=mx.uint8)),
        "input few is declared constant, where MLX passes fewer than 8 elements, but got 8",
    ),
    "missing template": (
        {"template": {"T": mx.float16, "N": 3}},
        "template must have the keys T, N, NEGATE but got T, N",
    ),
    "no template": ({"template": None}, "template must have the keys T, N, NEGATE but got none"),
    "template int for a dtype": (
        {"template": {"T": 1, "N": 3, "NEGATE": True}},
        "template T must be a dtype among bool, int8",
    ),
    "double": (
        {"template": {"T": mx.float64, "N": 3, "NEGATE": True}},
        "bfloat16, float32 but got float64",
    ),
    "template bool for an int": (
        {"template": {"T": mx.float16, "N": True, "NEGATE": True}},
        "template N must be an int of 32 bits but got True (bool)",
    ),
    "template float for an int": (
        {"template": {"T": mx.float16, "N": 3.0, "NEGATE": True}},
        "template N must be an int of 32 bits but got 3.0 (float)",
    ),
    "template int of 33 bits": (
        {"template": {"T": mx.float16, "N": 2**31, "NEGATE": True}},
        "template N must be an int of 32 bits but got 2147483648 (int)",
    ),
    "template int for a bool": (
        {"template": {"T": mx.float16, "N": 3, "NEGATE": 1}},
        "template NEGATE must be a bool but got 1 (int)",
    ),
    "number of shapes": (
        {"output_shapes": [(2, 12)]},
        "output_shapes must have one entry for each of out, total but got 1",
    ),
    "number of dtypes": (
        {"output_dtypes": [mx.float16] * 3},
        "output_dtypes must have one entry for each of out, total but got 3",
    ),
    "output dtype of a template": (
        {"output_dtypes": [mx.float32, mx.float32]},
        "output out must be float16 but got float32",
    ),
    "declared output dtype": (
        {"output_dtypes": [mx.float16, mx.float16]},
        "output total must be float32 but got float16",
    ),
    "negative shape": (
        {"output_shapes": [(2, -1), (1,)]},
        "the shape of output out must be ints of 0 or more but got (2, -1)",
    ),
    "float shape": (
        {"output_shapes": [(2, 12), (1.0,)]},
        "the shape of output total must be ints of 0 or more but got (1.0,) (tuple)",
    ),
    "shape that is no list": (
        {"output_shapes": [24, (1,)]},
        "the shape of output out must be ints of 0 or more but got 24 (int)",
    ),
    "two axes": ({"grid": (24, 1)}, "grid must be three ints but got (24, 1) (tuple)"),
    "float grid": ({"grid": (24.0, 1, 1)}, "grid must be three ints but got (24.0, 1, 1) (tuple)"),
    "negative grid": ({"grid": (24, -1, 1)}, "grid must be three ints of 0 or more but got (24, -1, 1)"),
    "huge grid": ({"grid": (2**31, 1, 1)}, "grid must be three ints of 0 or more but got (2147483648, 1, 1)"),
    "empty threadgroup": (
        {"threadgroup": (8, 0, 1)},
        "threadgroup must be three ints of 1 or more but got (8, 0, 1)",
    ),
    "large threadgroup": (
        {"threadgroup": (32, 33, 1)},
        "threadgroup must have at most 1024 threads but got (32, 33, 1): 1056",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_call_raises_before_anything_runs(kernel, monkeypatch, changes, message):
    monkeypatch.setattr("forge_mlx.metal.kernel.resolve", lambda *_: pytest.fail("an engine was asked for"))
    with pytest.raises(ValueError, match=r"^\[scale\] ") as caught:
        call(kernel, **changes)
    assert message in str(caught.value)


def test_threadgroup_of_1024_is_allowed(kernel):
    assert call(kernel, threadgroup=(1024, 1, 1))[1].item() == 4.0


def test_unknown_math_mode(kernel):
    with pytest.raises(ValueError, match=r"^\[scale\] math_mode must be among safe, relaxed, fast but got precise"):
        MetalKernel(kernel.source, math_mode="precise")


def test_unknown_engine(kernel):
    with pytest.raises(ValueError, match=r"^\[engine\] impl must be among .* but got 'gpu'"):
        call(kernel, engine="gpu")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.metal")
