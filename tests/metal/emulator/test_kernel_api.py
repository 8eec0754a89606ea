"""`emulator.metal_kernel` takes what `mx.fast.metal_kernel` takes, raises what it raises, returns what it returns."""

from types import SimpleNamespace

from forge_mlx.metal import emulator
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.emulator import arrays, kernel_api
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest

MLX = mx.fast.metal_kernel
COPY = "uint i = thread_position_in_grid.x;\nout[i] = x[i];"
DTYPES = [
    *(mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
    *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
]


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def build(source=COPY, inputs=("x",), outputs=("out",), **options):
    return emulator.metal_kernel("test", list(inputs), list(outputs), source, **options)


def run(kernel, *inputs, shape=(16,), dtype=mx.float32, size=None, **options):
    """The only output of a launch with one thread per element, unless `size` is another number."""
    threads = int(np.prod(shape)) if size is None else size
    arguments = {"grid": (threads, 1, 1), "threadgroup": (min(threads, 64), 1, 1)} | options
    return kernel(inputs=list(inputs), output_shapes=[shape], output_dtypes=[dtype], **arguments)[0]


MAKE = {"name": "test", "input_names": ["x"], "output_names": ["out"], "source": COPY}
CALL = {
    "inputs": [mx.zeros((16,))],
    "output_shapes": [(16,)],
    "output_dtypes": [mx.float32],
    "grid": (16, 1, 1),
    "threadgroup": (16, 1, 1),
}
WRONG = {
    "no output": ({"output_names": []}, {}),
    "compile options as a list": ({"compile_options": []}, {}),
    "unknown compile option": ({"compile_options": {"fast": True}}, {}),
    "unknown math mode": ({"compile_options": {"math_mode": "precise"}}, {}),
    "math mode of another type": ({"compile_options": {"math_mode": 1}}, {}),
    "name of another type": ({"name": 1}, {}),
    "names in one string": ({"input_names": "x"}, {}),
    "source of another type": ({"source": None}, {}),
    "flag as a number": ({"ensure_row_contiguous": 1}, {}),
    "too few inputs": ({}, {"inputs": []}),
    "too many shapes": ({}, {"output_shapes": [(16,), (16,)]}),
    "too few dtypes": ({}, {"output_dtypes": []}),
    "float template": ({}, {"template": [("T", 1.5)]}),
    "template of 34 bits": ({}, {"template": [("N", 2**33)]}),
    "template as text": ({}, {"template": [("T", "float")]}),
    "template of NumPy": ({}, {"template": [("N", np.int32(3))]}),
    "template as a dict": ({}, {"template": {"T": mx.float32}}),
    "grid of two": ({}, {"grid": (16, 1)}),
    "float grid": ({}, {"grid": (16.0, 1, 1)}),
    "threadgroup as an int": ({}, {"threadgroup": 16}),
    "dtype as text": ({}, {"output_dtypes": ["float32"]}),
    "shape as an int": ({}, {"output_shapes": [16]}),
    "list as an input": ({}, {"inputs": [[1.0, 2.0]]}),
    "text as an input": ({}, {"inputs": ["x"]}),
    "None as an input": ({}, {"inputs": [None]}),
    "inputs as a dict": ({}, {"inputs": {"x": 1.0}}),
    "init_value as text": ({}, {"init_value": "0"}),
    "verbose as a number": ({}, {"verbose": 1}),
    "stream as a number": ({}, {"stream": 3}),
    "stream of the CPU": ({}, {"stream": mx.cpu}),
    "device of the CPU": ({}, {"stream": mx.Device(mx.cpu)}),
    "double as an input": ({}, {"inputs": [mx.array(1.0, dtype=mx.float64)]}),
    "double as an output": ({}, {"output_dtypes": [mx.float64]}),
}


def of_mlx(make, call):
    """MLX's own answer: without Metal it judges a call while it traces an export."""
    mx.export_function(lambda _: None, lambda _: MLX(**make)(**call), mx.zeros((1,)))


@pytest.mark.parametrize(("make", "call"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise_as_in_mlx(make, call):
    make, call = MAKE | make, CALL | call
    with pytest.raises(Exception) as expected:  # noqa: PT011
        of_mlx(make, call)
    with pytest.raises(Exception) as found:  # noqa: PT011
        emulator.metal_kernel(**make)(**call)
    assert type(found.value) is type(expected.value)
    # In which order a TypeError lists what it got is a matter of the call.
    said, wanted = (str(error.value).partition("Invoked with types:")[0].strip() for error in (found, expected))
    assert said == wanted


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [([[mx.zeros((16,))]], {}), ([], {"inputs": [mx.zeros((16,))]}), ([], CALL | {"grids": 1})],
    ids=["positional", "missing", "unknown"],
)
def test_arguments_are_keywords(arguments, keywords):
    with pytest.raises(TypeError):
        of_mlx(MAKE, keywords) if not arguments else MLX(**MAKE)(*arguments)
    with pytest.raises(TypeError):
        emulator.metal_kernel(**MAKE)(*arguments, **keywords)


RIGHT = {
    "tuples": {"inputs": (mx.zeros((16,)),), "output_shapes": ([16],), "output_dtypes": (mx.float32,)},
    "lists for the grid": {"grid": [16, 1, 1], "threadgroup": [np.int64(16), 1, 1]},
    "NumPy array": {"inputs": [np.zeros(16, dtype=np.float32)]},
    "stream of the GPU": {"stream": mx.gpu},
    "device of the GPU": {"stream": mx.Device(mx.gpu)},
    "thread's stream of the GPU": {"stream": mx.new_thread_local_stream(mx.Device(mx.gpu))},
    "template pairs as lists": {"template": [["N", 3]]},
    "no template": {"template": []},
}


@pytest.mark.parametrize("call", RIGHT.values(), ids=RIGHT)
def test_right_arguments_are_taken_as_in_mlx(call):
    of_mlx(MAKE, CALL | call)
    (out,) = emulator.metal_kernel(**MAKE)(**(CALL | call))
    assert out.tolist() == [0.0] * 16


def test_names_may_be_given_by_position():
    kernel = emulator.metal_kernel("test", ("x",), ("out",), COPY, "", True, False, {"math_mode": "fast"})
    with pytest.warns(emulator.MetalWarning, match="math_mode 'fast'"):
        assert run(kernel, mx.ones((16,))).tolist() == [1.0] * 16


PRINTED = {
    "plain": (MAKE, CALL),
    "template": (MAKE, CALL | {"template": [("T", mx.bfloat16), ("N", -4), ("B", True)]}),
    "small": (MAKE | {"source": "out[0] = x[0];"}, CALL | {"inputs": [mx.zeros((3,))]}),
    "number": (MAKE | {"source": "out[0] = x;"}, CALL | {"inputs": [2.0]}),
    "header and shape": (
        MAKE | {"header": "// Héader\n", "source": COPY + " // x_shape x_ndim"},
        CALL | {"inputs": [mx.zeros((4, 4), dtype=mx.float16)]},
    ),
}


@pytest.mark.parametrize(("make", "call"), PRINTED.values(), ids=PRINTED)
def test_verbose_prints_what_mlx_prints(capfd, monkeypatch, make, call):
    of_mlx(make, call | {"verbose": True})
    printed = capfd.readouterr().out
    assert "[[kernel]] void" in printed
    # Only the text matters here: some of these bodies do not fit their inputs.
    monkeypatch.setattr(kernel_api.EmulatedKernel, "_launch", lambda *_: [mx.zeros((1,))])
    emulator.metal_kernel(**make)(**call, verbose=True)
    assert capfd.readouterr().out == printed
    emulator.metal_kernel(**make)(**call)
    assert capfd.readouterr().out == ""


@dtypes
def test_every_dtype_comes_and_goes_unchanged(dtype):
    x = (mx.random.normal((4, 9)) * 50).astype(dtype)
    if dtype in (mx.int64, mx.uint64):
        x = x + mx.array(2**40, dtype=dtype)
    out = run(build(), x, shape=(4, 9), dtype=dtype)
    assert (out.dtype, out.shape) == (dtype, (4, 9))
    assert mx.array_equal(out, x)


@dtypes
def test_few_elements_and_numbers_arrive_too(dtype):
    few, one = mx.array([3, 0, 1]).astype(dtype), mx.array(1).astype(dtype)
    kernel = build("uint i = thread_position_in_grid.x; out[i] = i < 3 ? few[i] : one;", ("few", "one"))
    assert mx.array_equal(run(kernel, few, one, shape=(4,), dtype=dtype), mx.array([3, 0, 1, 1]).astype(dtype))


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(0.1, mx.float32), (-3, mx.int32), (True, mx.bool_), (2**40, mx.int64), (1j, mx.complex64)],
    ids=["float", "int", "bool", "long", "complex"],
)
def test_python_numbers_become_the_arrays_that_mlx_makes(number, dtype):
    out = run(build("out[0] = x;"), number, shape=(1,), dtype=dtype)
    assert out.item() == mx.array(number, dtype=dtype).item()


FILLED = {
    mx.bool_: [True, True],
    **{dtype: [2, -3] for dtype in (mx.int8, mx.int16, mx.int32, mx.int64)},
    # A negative float has no unsigned value in C++.
    **{dtype: [2] for dtype in (mx.uint8, mx.uint16, mx.uint32, mx.uint64)},
    **{mx.float16: [2.69921875, -3.69921875], mx.bfloat16: [2.703125, -3.703125]},
    mx.float32: [2.700000047683716, -3.700000047683716],
    mx.complex64: [2.700000047683716 + 0j, -3.700000047683716 + 0j],
}


@dtypes
def test_init_value_fills_what_is_not_written(dtype):
    kernel = build("out[0] = x[0];")
    x = mx.ones((16,)).astype(dtype)
    for value, expected in zip((2.7, -3.7), FILLED[dtype], strict=False):
        out = run(kernel, x, shape=(2, 3), dtype=dtype, size=1, init_value=value)
        assert out.flatten().tolist() == [1, *[expected] * 5]


def test_init_value_of_nan_and_of_a_number_that_float32_does_not_hold():
    kernel = build("out[0] = x[0];")
    assert np.isnan(run(kernel, mx.ones((8,)), shape=(2,), size=1, init_value=float("nan"))[1].item())
    assert run(kernel, mx.ones((8,)), shape=(2,), dtype=mx.int32, size=1, init_value=2**24 + 1)[1].item() == 2**24


def test_output_that_is_not_written_raises():
    with pytest.raises(emulator.UninitialisedError, match="'out'"):
        run(build("out[0] = x[0];"), mx.ones((8,)), shape=(2,), size=1)


def test_init_value_can_be_read():
    out = run(build("out[thread_position_in_grid.x] += x[0];"), mx.ones((8,)), shape=(4,), init_value=3)
    assert out.tolist() == [4.0] * 4


def test_outputs_keep_their_order_and_types():
    source = "uint i = thread_position_in_grid.x; a[i] = x[i]; b[i] = x[i] * 2; c[i] = x[i] > 1;"
    a, b, c = build(source, outputs=("a", "b", "c"))(
        inputs=[mx.arange(8)],
        output_shapes=[(8,), (2, 4), (8, 1)],
        output_dtypes=[mx.int8, mx.bfloat16, mx.bool_],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
    )
    assert (a.dtype, b.dtype, c.dtype) == (mx.int8, mx.bfloat16, mx.bool_)
    assert (a.tolist(), b.tolist()) == (list(range(8)), [[0, 2, 4, 6], [8, 10, 12, 14]])
    assert c.tolist() == [[i > 1] for i in range(8)]


def test_no_inputs():
    assert run(build("out[thread_position_in_grid.x] = 1;", ()), shape=(4,)).tolist() == [1.0] * 4


def test_template_of_every_kind():
    source = "uint i = thread_position_in_grid.x; out[i] = T(x[i] / 3) * N + (B ? 1 : 0);"
    x = mx.arange(8, dtype=mx.float32)
    out = run(build(source), x, shape=(8,), template=[("T", mx.int32), ("N", -2), ("B", True)])
    assert out.tolist() == [int(i / 3) * -2 + 1 for i in range(8)]


def test_atomic_outputs():
    source = "atomic_fetch_add_explicit(&out[thread_position_in_grid.x % 2], x[0], memory_order_relaxed);"
    kernel = build(source, atomic_outputs=True)
    assert run(kernel, mx.ones((8,)), shape=(2,), size=9, init_value=0).tolist() == [5.0, 4.0]


def test_math_mode_reaches_the_compiler(monkeypatch):
    modes = []
    compile_kernel = kernel_api.compile_kernel
    monkeypatch.setattr(
        kernel_api,
        "compile_kernel",
        lambda generated, settings: modes.append(generated.math_mode) or compile_kernel(generated, settings),
    )
    for options in ({}, {"compile_options": {}}):
        run(build(**options), mx.ones((16,)))
    with pytest.warns(emulator.MetalWarning):
        run(build(compile_options={"math_mode": "fast"}), mx.ones((16,)))
    assert modes == ["safe", "safe", "fast"]


@pytest.mark.parametrize("mode", ["relaxed", "fast"])
def test_math_modes_other_than_safe_warn_once_for_each_kernel(mode):
    emulator.reset()
    for kernel in (build(compile_options={"math_mode": mode}) for _ in range(2)):
        with pytest.warns(
            emulator.MetalWarning, match=rf"^\[test\] math_mode '{mode}' is computed as 'safe'"
        ) as caught:
            run(kernel, mx.ones((16,)))
        assert [each.filename for each in caught] == [__file__]
        # Warnings are errors in tests.
        run(kernel, mx.ones((16,)))
    assert emulator.report().warnings == 2


X = np.arange(24, dtype=np.float32).reshape(4, 6)
VIEWS = {
    "row contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "every other row": lambda x: x[::2],
    "every other column": lambda x: x[:, 1::2],
    "rows reversed": lambda x: x[::-1],
    "both reversed": lambda x: x[::-2, ::-1],
    "broadcast": lambda x: (
        mx.broadcast_to(x[1:2], (3, 6)) if isinstance(x, mx.array) else np.broadcast_to(x[1:2], (3, 6))
    ),
    "three axes": lambda x: x.reshape(2, 2, 6).transpose(2, 0, 1),
}
BY_STRIDES = "int64_t i = thread_position_in_grid.x; out[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int64], ids=dtype_name)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_inputs(view, dtype):
    x, expected = view(mx.array(X).astype(dtype)), view(X).tolist()
    shape = tuple(x.shape)
    assert run(build(), x, shape=shape, dtype=dtype).tolist() == expected
    assert run(build(BY_STRIDES), x, shape=shape, dtype=dtype).tolist() == expected
    assert run(build(BY_STRIDES, ensure_row_contiguous=False), x, shape=shape, dtype=dtype).tolist() == expected


def test_strides_are_those_that_mlx_would_pass():
    kernel = "out[0] = x_strides[0]; out[1] = x_strides[1]; out[2] = x_shape[0]; out[3] = x_shape[1]; out[4] = x_ndim;"
    found = {}
    for name, contiguous in (("copied", True), ("as it is", False)):
        source = build(kernel, ensure_row_contiguous=contiguous)
        found[name] = run(source, mx.array(X).T[::-1], shape=(5,), dtype=mx.int64, size=1).tolist()
    assert found == {"copied": [4, 1, 6, 4, 2], "as it is": [-1, 6, 6, 4, 2]}


def test_elements_outside_a_strided_view_are_out_of_bounds():
    kernel = build("out[0] = x[-7];", ensure_row_contiguous=False)
    reversed_rows = mx.array(X)[2::-1]
    assert run(build("out[0] = x[-12];", ensure_row_contiguous=False), reversed_rows, shape=(1,)).item() == 0.0
    assert run(kernel, reversed_rows, shape=(1,)).item() == 5.0
    with pytest.raises(emulator.BoundsError):
        run(build("out[0] = x[-13];", ensure_row_contiguous=False), reversed_rows, shape=(1,))


VECTOR = "uint i = thread_position_in_grid.x; auto v = ((const device T*)x)[i]; out[i] = v.x + v.y + v.z + v.w;"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8], ids=dtype_name)
@pytest.mark.parametrize("start", [0, 1, 2, 4, 6, 8], ids=lambda start: f"x[{start}:]")
def test_a_view_starts_where_it_does_on_a_gpu(dtype, start):
    """A contiguous view shares its array's memory: four elements at once need an address that is a multiple."""
    name = {mx.float32: "float4", mx.float16: "half4", mx.bfloat16: "bfloat4", mx.uint8: "uchar4"}[dtype]
    x = mx.arange(64).astype(dtype)
    mx.eval(x)
    kernel = build(VECTOR.replace("T*", name + "*"))
    if start % 4:
        with pytest.raises(emulator.AlignmentError, match="'x'"):
            run(kernel, x[start:], shape=(8,), dtype=dtype)
    else:
        expected = [4 * (start + 4 * i) + 6 for i in range(8)]
        assert run(kernel, x[start:], shape=(8,), dtype=dtype).tolist() == expected


def test_a_copy_is_aligned():
    kernel = build(VECTOR.replace("T*", "float4*"))
    x = mx.arange(64, dtype=mx.float32).reshape(8, 8)[:, 1:5]
    assert run(kernel, x, shape=(8,)).tolist() == [32 * i + 10 for i in range(8)]


def test_alignment_is_told_from_fresh_arrays(monkeypatch):
    """Where new arrays begin anywhere, nothing can be told, and no view is accused."""
    addresses = iter([0, 8, 0, 8])
    monkeypatch.setattr(arrays, "_address", lambda _: next(addresses, 4))
    arrays._fresh_residue.cache_clear()
    assert arrays.read(mx.arange(4), ensure_row_contiguous=True).misalignment == 0
    arrays._fresh_residue.cache_clear()


def test_empty_arrays():
    kernel = build("out[0] = x_shape[0] + x_shape[1];")
    assert run(kernel, mx.zeros((0, 5)), shape=(1,)).item() == 5.0
    assert run(build("if (x[0] > 1) { out[0] = 1; }"), mx.zeros((8,)), shape=(3, 0), size=1).shape == (3, 0)
    with pytest.raises(emulator.BoundsError, match="'x'"):
        run(build("out[0] = x[0];"), mx.zeros((0,)), shape=(1,))
    with pytest.raises(emulator.BoundsError, match="'out'"):
        run(build("out[0] = x[0];"), mx.zeros((8,)), shape=(0,), size=1)


@pytest.mark.parametrize("name", ["grid", "threadgroup"])
@pytest.mark.parametrize("size", [(0, 1, 1), (4, 1, 0), (4, -1, 1)], ids=str)
def test_nothing_to_launch_raises(name, size):
    with pytest.raises(ValueError, match=rf"^\[metal_kernel\] {name} must be at least 1 on each axis but got \("):
        run(build(), mx.ones((16,)), **{name: size})


def test_negative_shape_raises():
    with pytest.raises(ValueError, match=r"output_shapes must not be negative but got \(2, -1\)"):
        run(build(), mx.ones((16,)), shape=(2, -1), size=1)


def test_threadgroup_of_more_than_1024_threads():
    with pytest.raises(emulator.LimitError, match="1024"):
        run(build(), mx.ones((2048,)), shape=(2048,), threadgroup=(1025, 1, 1))


def test_threadgroup_is_cut_to_the_grid():
    kernel = build("out[thread_position_in_grid.x] = threads_per_threadgroup.x;", ())
    assert run(kernel, shape=(10,), threadgroup=(512, 1, 1)).tolist() == [10.0] * 10
    assert run(kernel, shape=(10,), threadgroup=(4, 1, 1)).tolist() == [4.0] * 8 + [2.0] * 2


def test_warnings_are_issued():
    kernel = build("uint i = thread_position_in_grid.x; out[i] = 0; if (i < 5) { out[i] = simd_sum(x[i]); }")
    with pytest.warns(emulator.MetalWarning, match=r"^\[test\] ") as caught:
        run(kernel, mx.ones((32,)), shape=(32,), threadgroup=(32, 1, 1))
    # The caller's line.
    assert caught[0].filename == __file__


def test_warnings_about_the_language_come_with_every_launch():
    emulator.reset()
    kernel = build("out[0] = A{x[0]}.value();", header="struct A { float a; float value() const { return a; } };\n")
    for _ in range(2):
        with pytest.warns(emulator.MetalWarning, match=r"^\[test\] test header:1: methods of A") as caught:
            run(kernel, mx.ones((8,)), shape=(1,))
        assert [each.filename for each in caught] == [__file__]
    assert emulator.report().warnings == 2


def test_warnings_of_an_engine_are_at_the_line_that_called_it(tmp_path):
    (tmp_path / "one.metal").write_text("kernel void one(device float* out) {\n  out[0] = simd_sum(1.0f);\n}")
    kernel = MetalKernel(tmp_path / "one.metal", math_mode="fast")
    with pytest.warns(emulator.MetalWarning, match="math_mode") as caught:
        kernel(
            [],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            engine="emulator",
        )
    assert {each.filename for each in caught} == {__file__}


def twice(x):
    return run(build("uint i = thread_position_in_grid.x; out[i] = 2 * x[i];"), x, shape=x.shape)


def test_no_gradient_is_made_up():
    x = mx.ones((8,))
    with pytest.raises(ValueError, match=r"^\[Primitive::vjp\] Not implemented for CustomKernel\.$"):
        mx.grad(lambda x: twice(x).sum())(x)
    with pytest.raises(ValueError, match=r"^\[Primitive::vjp\] Not implemented for CustomKernel\.$"):
        mx.vjp(twice, [x], [x])
    with pytest.raises(ValueError, match=r"^\[Primitive::jvp\] Not implemented for CustomKernel\.$"):
        mx.jvp(twice, [x], [x])


def test_every_output_raises_on_a_gradient():
    kernel = build("a[0] = x[0]; b[0] = y[0];", ("x", "y"), ("a", "b"))

    def second(x, y):
        options = {"output_shapes": [(1,)] * 2, "output_dtypes": [mx.float32] * 2}
        return kernel(inputs=[x, y], grid=(1, 1, 1), threadgroup=(1, 1, 1), **options)[1].sum()

    for argument in (0, 1):
        with pytest.raises(ValueError, match="Not implemented for CustomKernel"):
            mx.grad(second, argnums=argument)(mx.ones((8,)), mx.ones((8,)))


def test_vmap_raises():
    with pytest.raises(ValueError, match=r"\[Primitive::vmap\] Not implemented for CustomKernel\."):
        mx.vmap(twice)(mx.ones((3, 8)))


def test_gradients_of_others_pass_by():
    x = mx.arange(8, dtype=mx.float32)
    gradient = mx.grad(lambda x: (x * mx.stop_gradient(twice(x))).sum())(x)
    assert gradient.tolist() == (2 * x).tolist()
    assert mx.vmap(lambda y: y * twice(x))(mx.ones((3, 8))).tolist() == [(2 * x).tolist()] * 3


def test_custom_function_gives_a_gradient():
    @mx.custom_function
    def function(x):
        return twice(x)

    @function.vjp
    def vjp(_primals, cotangent, output):
        return twice(cotangent) + 0 * output

    assert mx.grad(lambda x: (function(x) * x).sum())(mx.ones((8,))).tolist() == [4.0] * 8


def test_inside_compile_it_says_that_it_cannot():
    function = mx.compile(lambda x: twice(x) + 1)
    with pytest.raises(ValueError, match=r"cannot run inside mx.compile .* Call mx.disable_compile\(\) first"):
        function(mx.ones((8,)))
    mx.disable_compile()
    try:
        assert function(mx.ones((8,))).tolist() == [3.0] * 8
    finally:
        mx.enable_compile()


def test_inside_an_export_it_says_that_it_cannot():
    with pytest.raises(ValueError, match="or an export"):
        mx.export_function(lambda _: None, twice, mx.ones((8,)))


def test_inputs_need_not_be_evaluated():
    assert twice(mx.arange(8) * 3.0 + 1).tolist() == [2 * (3 * i + 1) for i in range(8)]


def test_output_is_an_array_of_its_own():
    x = mx.ones((8,))
    out = twice(x)
    x += 5
    assert out.tolist() == [2.0] * 8
    out += 1
    assert twice(mx.ones((8,))).tolist() == [2.0] * 8


def test_error_of_another_kind_passes():
    def other(**_):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        kernel_api._check(other)
    stream = SimpleNamespace(device=mx.Device(mx.cpu))
    with pytest.raises(ValueError, match="Only supports the GPU"):
        kernel_api._check_stream(stream)
