"""What callers of the element-wise ops see: errors, engines, vmap, second derivatives, compiled functions, traffic."""

from functools import partial

from forge_mlx.kernels import elementwise
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels.elementwise import launch, reference
from forge_mlx.kernels.elementwise.cases import KINDS, AddBiasCase, AxpyCase, MulCase, ScaleCase
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
from norm_proofs import assert_close, counted, random
import numpy as np
import pytest

# Op: what MLX has, shapes of the arrays behind the first.
PLAIN = {
    "add": (lambda x, y: x + y, [(5, 8)]),
    "mul": (lambda x, y: x * y, [(5, 8)]),
    "scale": (lambda x, s: x * s, [()]),
    "add_bias": (lambda x, b: x + b, [(8,)]),
    "accumulate": (lambda dst, src: dst + src, [(5, 8)]),
    "axpy": (lambda dst, src, s: dst + s * src, [(5, 8), ()]),
}
F32, F16, BF16 = FLOATS


def arrays(name, dtype=F32, first=(5, 8)):
    return [random(shape, seed, dtype) for seed, shape in enumerate([first, *PLAIN[name][1]])]


def op(name, impl):
    return partial(getattr(elementwise, name), impl=impl)


def wide(array):
    return array.astype(F32)


# Op: dtypes of the arrays, dtype of the result.
DTYPES = [
    ("add", (BF16, F32), F32),
    ("add", (F16, BF16), F32),
    ("add", (BF16, BF16), BF16),
    ("mul", (F32, F16), F32),
    ("mul", (F16, F16), F16),
    ("scale", (BF16, F32), BF16),
    ("scale", (F32, BF16), F32),
    ("add_bias", (BF16, F32), F32),
    ("add_bias", (BF16, BF16), BF16),
    ("accumulate", (BF16, F32), BF16),
    ("accumulate", (F32, BF16), F32),
    ("axpy", (F16, F32, F32), F16),
    ("axpy", (F32, BF16, BF16), F32),
]


@pytest.mark.parametrize("impl", ["emulator", "reference", "formula"])
@pytest.mark.parametrize(("name", "dtypes", "want"), DTYPES, ids=str)
def test_dtypes_of_results_and_gradients(name, dtypes, want, impl):
    inputs = [array.astype(dtype) for array, dtype in zip(arrays(name), dtypes, strict=True)]
    function = getattr(reference, name) if impl == "formula" else op(name, impl)
    (out,), gradients = mx.vjp(function, inputs, [mx.ones((5, 8), want)])
    assert out.dtype == want
    assert [each.dtype for each in gradients] == list(dtypes)
    assert [each.shape for each in gradients] == [each.shape for each in inputs]


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_a_number_is_not_rounded_to_the_dtype(impl):
    # In bfloat16 1.0038 is 1, and the next number above 300 is 302.
    x = mx.array([300.0, -300.0], BF16)
    assert elementwise.scale(x, 1.0038, impl=impl).tolist() == [302.0, -302.0]
    assert elementwise.axpy(mx.zeros_like(x), x, 1.0038, impl=impl).tolist() == [302.0, -302.0]


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_a_number_has_the_gradient_of_the_array_it_stands_for(impl):
    x, y = arrays("add")
    for name, inputs in (("scale", (x,)), ("axpy", (x, y))):
        cotangents = [x - 0.3]
        number, array = (
            mx.vjp(lambda *arrays, name=name, s=s: op(name, impl)(*arrays, s), list(inputs), cotangents)[1]
            for s in (0.5, mx.array(0.5))
        )
        for got, want in zip(number, array, strict=True):
            assert_close(got, want)


X, INTEGERS = mx.zeros((2, 3)), mx.zeros((2, 3), mx.int32)
SHAPES = r"must have one shape but got \(2, 3\) and \(3,\). Nothing is broadcast: use mx.broadcast_to\(..., shape\)."
# Mistake: op, arguments, message.
MISTAKES = {
    **{f"{name}: integers": (name, (INTEGERS, X), rf"\[{name}\] x must be float32, .* but got int32. Convert it: x")
       for name in ("add", "mul", "scale", "add_bias")},
    **{f"{name}: integers behind": (name, (X, INTEGERS), rf"\[{name}\] y must be float32, .* but got int32")
       for name in ("add", "mul")},
    "accumulate: integers": ("accumulate", (X, INTEGERS), r"\[accumulate\] src must be float32, .* but got int32"),
    "axpy: integers": ("axpy", (INTEGERS, X, 1.0), r"\[axpy\] dst must be float32, .* but got int32"),
    "add: two shapes": ("add", (X, X[0]), rf"\[add\] x and y {SHAPES}"),
    "mul: two shapes": ("mul", (X, X[0]), rf"\[mul\] x and y {SHAPES}"),
    "accumulate: two shapes": ("accumulate", (X, X[0]), rf"\[accumulate\] dst and src {SHAPES}"),
    "axpy: two shapes": ("axpy", (X, X[0], 1.0), rf"\[axpy\] dst and src {SHAPES}"),
    "scale: s with axes": ("scale", (X, X[0]), r"\[scale\] s must be a real number or a 0-d array .* float32 \(3,\)"),
    "axpy: s with axes": ("axpy", (X, X, X[0, :1]), r"\[axpy\] s must be a real number or a 0-d array"),
    "scale: s of integers": ("scale", (X, mx.array(2)), r"\[scale\] s must be float32, .* but got int32"),
    "scale: s of a word": ("scale", (X, "2"), r"\[scale\] s must be a real number or a 0-d array of one but got '2'"),
    "scale: s of a truth": ("scale", (X, True), r"\[scale\] s must be a real number .* but got True"),
    "add_bias: b of another length": ("add_bias", (X, mx.zeros((2,))), r"\[add_bias\] b must have the shape \(3,\)"),
    "add_bias: x without axes": ("add_bias", (mx.array(1.0), mx.zeros((1,))), r"\[add_bias\] x must have 1 or more"),
    "add_bias: b of integers": ("add_bias", (X, INTEGERS[0]), r"\[add_bias\] b must be float32, .* but got int32"),
}  # fmt: skip


@pytest.mark.parametrize("module", [elementwise, reference], ids=["op", "reference"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, module):
    name, arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        getattr(module, name)(*arguments)


@pytest.mark.parametrize("name", PLAIN)
def test_unknown_engine_raises(name):
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        op(name, "emulater")(*arrays(name))


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("name", PLAIN)
def test_empty_arrays_give_empty_results_and_gradients_of_0(name, impl):
    for shape in ((0, 8), (2, 0, 8)):
        inputs = [mx.zeros(shape, BF16) if array.ndim > 1 else array for array in arrays(name, BF16)]
        (out,), gradients = mx.vjp(op(name, impl), inputs, [mx.zeros(shape, BF16)])
        assert (out.shape, out.dtype) == (shape, BF16)
        for given, gradient in zip(inputs, gradients, strict=True):
            assert (gradient.shape, gradient.dtype) == (given.shape, BF16)
            assert not gradient.any()


@pytest.mark.parametrize("name", PLAIN)
def test_on_a_cpu_automatic_is_plain_mlx(name):
    inputs = arrays(name)
    assert_close(getattr(elementwise, name)(*inputs), PLAIN[name][0](*inputs), 1e-7)


@pytest.mark.parametrize("name", PLAIN)
def test_every_launch_is_on_the_engine_that_was_asked_for(name, monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append((self.source.name, engine))
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    inputs = arrays(name)
    with use_engine("metal"):
        mx.eval(mx.vjp(getattr(elementwise, name), inputs, [inputs[0]]))
    kernels = {
        "add": ["elementwise"],
        "mul": ["elementwise", "mul_backward"],
        "scale": ["scaled", "scaled_backward", "sum_parts"],
        "add_bias": ["add_bias", "column_sums", "sum_parts"],
        "accumulate": ["elementwise"],
        "axpy": ["scaled", "scaled_backward", "sum_parts"],
    }
    assert launched == [(each, "metal") for each in kernels[name]]


def second_derivative(function, inputs):
    """Gradients of a weighted sum of the first gradients."""
    numbers = tuple(range(len(inputs)))

    def first(*inputs):
        gradients = mx.grad(lambda *inner: (function(*inner) ** 3).sum(), argnums=numbers)(*inputs)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*inputs)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("name", PLAIN)
def test_second_derivative(name, impl):
    inputs = arrays(name)
    want = second_derivative(PLAIN[name][0], inputs)
    for got, each in zip(second_derivative(op(name, impl), inputs), want, strict=True):
        assert_close(got, each, 1e-4)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_second_derivative_by_a_number(impl):
    inputs = arrays("axpy")[:2]
    want = second_derivative(lambda dst, src: dst + 0.5 * src, inputs)
    for got, each in zip(second_derivative(lambda *a: op("axpy", impl)(*a, 0.5), inputs), want, strict=True):
        assert_close(got, each, 1e-4)


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formulas."""

    def batched(x, s):
        assert x.ndim >= 1
        assert s.shape == x.shape[:1]
        assert s.dtype == F32

    def elementwise(engine, x, y, dtype, product):
        assert (engine, x.shape) == ("metal", y.shape)
        return reference.mul_forward(x, y) if product else reference.add_forward(x, y, dtype)

    def mul_backward(engine, x, y, dout):
        assert (engine, x.shape, y.shape) == ("metal", y.shape, dout.shape)
        return reference.mul_backward(x, y, dout)

    def scaled(engine, dst, src, s, dtype):
        assert engine == "metal"
        batched(src, s)
        if dst is None:
            return reference.scaled(src, s, dtype)
        assert dst.shape == src.shape
        return reference.added_scaled(dst, src, s)

    def scaled_backward(engine, x, s, dout):
        assert (engine, x.shape) == ("metal", dout.shape)
        batched(x, s)
        return reference.scaled_backward(x, s, dout)

    def add_bias(engine, x, b, dtype):
        assert (engine, b.shape) == ("metal", (x.shape[0], x.shape[2]))
        return (reference.wide(x) + reference.wide(b)[:, None]).astype(dtype)

    def column_sums(engine, x, dtype):
        assert (engine, x.ndim) == ("metal", 3)
        return reference.column_sums(x, dtype)

    for each in (elementwise, mul_backward, scaled, scaled_backward, add_bias, column_sums):
        monkeypatch.setattr(launch, each.__name__, each)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return "metal"


@pytest.fixture(params=["reference", "lazy"])
def impl(request):
    """The reference engine, and the kernels with launches of the formulas in their place."""
    return request.getfixturevalue("lazy_kernels") if request.param == "lazy" else "reference"


def transformed(function, inputs, axes):
    """vmap, its gradient, and vmap of the gradient."""
    numbers = tuple(range(len(inputs)))
    mapped = mx.vmap(function, in_axes=axes)
    gradient = mx.grad(lambda *inputs: (function(*inputs) ** 3).sum(), argnums=numbers)
    of_mapped = mx.grad(lambda *inputs: (mapped(*inputs) ** 3).sum(), argnums=numbers)
    return [mapped(*inputs), *of_mapped(*inputs), *mx.vmap(gradient, in_axes=axes)(*inputs)]


# Op, and which axis of each array is mapped; None: shared.
AXES = [
    *((name, axes) for name in ("add", "mul", "accumulate") for axes in ((0, 0), (0, 1), (2, None), (None, 1))),
    *(("scale", axes) for axes in ((0, 0), (1, 0), (2, None), (None, 0))),
    *(("add_bias", axes) for axes in ((0, 0), (1, 1), (2, None), (None, 0))),
    *(("axpy", axes) for axes in ((0, 0, 0), (1, 2, None), (None, 0, None), (None, None, 0), (0, None, 0))),
]


@pytest.mark.parametrize(("name", "axes"), AXES, ids=str)
def test_vmap_and_gradients(name, axes, impl):
    inputs = [
        array if axis is None else random((*array.shape[:axis], 4, *array.shape[axis:]), 5 + seed)
        for seed, (array, axis) in enumerate(zip(arrays(name), axes, strict=True))
    ]
    got = transformed(op(name, impl), inputs, axes)
    for a, b in zip(got, transformed(PLAIN[name][0], inputs, axes), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("name", "axes"), [("scale", (1,)), ("axpy", (0, 1)), ("axpy", (None, 2))], ids=str)
def test_vmap_and_gradients_by_a_number(name, axes, dtype, impl):
    shapes = [(5, 8) if axis is None else (*(5, 8)[:axis], 4, *(5, 8)[axis:]) for axis in axes]
    inputs = [random(shape, seed, dtype) for seed, shape in enumerate(shapes)]
    got = transformed(lambda *arrays: wide(op(name, impl)(*arrays, 0.5)), inputs, axes)
    want = transformed(lambda *arrays: PLAIN[name][0](*arrays, 0.5), [wide(array) for array in inputs], axes)
    for a, b in zip(got, want, strict=True):
        assert_close(wide(a), b, 1e-5 if dtype == F32 else 3e-2)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["scale", "axpy"])
def test_compiled_gradient_by_a_number_in_16_bits_makes_nothing_in_float32(name, dtype):
    inputs = [random((256, 256), seed, dtype) for seed in range(2 if name == "axpy" else 1)]
    dout = random((256, 256), 7, dtype)
    function = op(name, "reference")

    def gradients(dout, *arrays):
        return mx.vjp(lambda *each: function(*each, 0.5), list(arrays), [dout])[1]

    step = partial(mx.compile(gradients), dout)
    mx.eval(dout, step(*inputs))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(step(*inputs))
    assert mx.get_peak_memory() - before < 3 * dout.nbytes


@pytest.mark.parametrize("name", ["scale", "axpy", "add_bias"])
def test_vmap_over_two_axes(name, impl):
    inputs = [random((3, 2, *array.shape), seed) for seed, array in enumerate(arrays(name))]
    got, want = (mx.vmap(mx.vmap(function))(*inputs) for function in (op(name, impl), PLAIN[name][0]))
    assert_close(got, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_compiled_function(name, dtype, impl):
    inputs = arrays(name, dtype)

    def gradients(function):
        numbers = tuple(range(len(inputs)))
        return mx.grad(lambda *inputs: (wide(function(*inputs)) ** 3).sum(), argnums=numbers)

    want = gradients(PLAIN[name][0])(*[wide(array) for array in inputs])
    for a, b in zip(mx.compile(gradients(op(name, impl)))(*inputs), want, strict=True):
        assert a.dtype == dtype
        assert_close(wide(a), b, {F32: 1e-5, F16: 5e-3, BF16: 3e-2}[dtype])


def test_a_compiled_function_takes_another_s_without_compiling_again(impl):
    x, traced = arrays("scale")[0], []

    def function(x, s):
        traced.append(1)
        return op("scale", impl)(x, s)

    compiled = mx.compile(function)
    for value in (0.5, -2.0):
        assert_close(compiled(x, mx.array(value)), x * value)
    assert len(traced) == 1


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("name", PLAIN)
def test_in_a_checkpoint(name, impl):
    inputs, numbers = arrays(name), tuple(range(len(PLAIN[name][1]) + 1))

    def loss(*inputs):
        return (op(name, impl)(*inputs) ** 2).sum()

    got, want = (mx.grad(each, argnums=numbers)(*inputs) for each in (mx.checkpoint(loss), loss))
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradient_of_s_on_the_reference_engine_is_accurate_where_mx_sum_is_not():
    x = mx.full((20_000_003,), 0.1)
    ds = mx.grad(lambda s: elementwise.scale(x, s, impl="reference").sum())(mx.array(2.0))
    assert ds.item() == pytest.approx(x.size * float(np.float32(0.1)), rel=1e-5)


def once(array):
    return array.nbytes, array.nbytes // 16


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not AddBiasCase], ids=lambda kind: kind.op)
def test_each_array_is_moved_once_in_16_byte_accesses(kind):
    case = kind((64, 400), BF16)
    x = case.inputs()[case.first]
    launches = counted(case)
    expected = {
        "add": {"elementwise": 3},
        "accumulate": {"elementwise": 3},
        "mul": {"elementwise": 3, "mul_backward": 5},
        "scale": {"scaled": 2, "scaled_backward": 3},
        "axpy": {"scaled": 3, "scaled_backward": 3},
    }[case.op]
    for name, number in expected.items():
        large = [each for each in launches[name].buffers.values() if each.size == x.nbytes and each.space == "device"]
        moved = [(each.bytes_read + each.bytes_written, each.reads + each.writes) for each in large]
        # What is not read has a buffer all the same.
        assert [each for each in moved if each != (0, 0)] == [once(x)] * number


@pytest.mark.parametrize(
    "case", [AddBiasCase((512, 400), BF16), AddBiasCase((70, 2048)), AddBiasCase((2000, 8), F16)], ids=lambda c: c.name
)
def test_a_bias_and_its_gradient_are_moved_once_a_threadgroup(case):
    launches, (x, b) = counted(case), case.inputs().values()
    forward, sums, second = (launches[name] for name in ("add_bias", "column_sums", "sum_parts"))
    assert forward.read("x") == forward.written("out") == sums.read("x") == once(x)
    blocks = -(-x.shape[1] * x.dtype.size // (256 * 16))
    assert forward.read("b")[0] * blocks == forward.groups * b.nbytes
    assert sums.written("parts")[0] * blocks == sums.groups * x.shape[1] * 4
    assert second.read("parts")[0] == sums.written("parts")[0]
    assert sums.groups <= max(1, x.shape[0] // 32 + 1) * blocks


def test_array_that_begins_elsewhere_and_has_a_tail():
    launches = counted(MulCase((3, 1001), F16, layout="shifted"))
    # The inputs begin elsewhere; what is written is 375 vectors and a tail of 3.
    assert launches["elementwise"].read("x")[1] == launches["elementwise"].read("y")[1] == 3003
    assert launches["elementwise"].written("out")[1] == 375 + 3


def test_a_number_costs_no_sum():
    for case in (ScaleCase((7, 33), factor=None), AxpyCase((7, 33), factor=None)):
        emulator.reset()
        mx.eval(case.run("emulator"))
        assert [each.name for each in emulator.report().launches] == ["scaled", "scaled"]
