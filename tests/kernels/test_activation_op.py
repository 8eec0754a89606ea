"""What callers of the activations see: errors, engines, vmap, second derivatives, compiled functions, traffic."""

from functools import partial

from forge_mlx.kernels import activations
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels.activations import gated_op, plain, reference, unary_op
from forge_mlx.kernels.activations.cases import OPS, SiluCase, SwigluCase
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

# Name: the op, its reference function, what MLX has, options, number of arrays.
CAP = 2.0
FUNCTIONS = {
    "sigmoid": (activations.sigmoid, reference.sigmoid, mx.sigmoid, {}, 1),
    "silu": (activations.silu, reference.silu, nn.silu, {}, 1),
    "gelu": (activations.gelu, reference.gelu, nn.gelu, {}, 1),
    "gelu-tanh": (activations.gelu, reference.gelu, nn.gelu_approx, {"approximate": "tanh"}, 1),
    "relu2": (activations.relu2, reference.relu2, nn.relu2, {}, 1),
    "softcap": (activations.softcap, reference.softcap, lambda x: CAP * mx.tanh(x / CAP), {"cap": CAP}, 1),
    "swiglu": (activations.swiglu, reference.swiglu, lambda g, u: nn.silu(g) * u, {}, 2),
    "geglu": (activations.geglu, reference.geglu, lambda g, u: nn.gelu(g) * u, {}, 2),
    "geglu-tanh": (
        activations.geglu,
        reference.geglu,
        lambda g, u: nn.gelu_approx(g) * u,
        {"approximate": "tanh"},
        2,
    ),
}


def random(shape, seed, dtype=mx.float32):
    return (2 * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def assert_close(got, want, rtol=1e-5):
    got, want = (np.array(each.astype(mx.float32), np.float64) for each in (got, want))
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def arrays(name, shape=(3, 40), dtype=mx.float32):
    return [random(shape, seed, dtype) for seed in range(FUNCTIONS[name][4])]


def op(name, impl):
    function, _, _, options, _ = FUNCTIONS[name]
    return partial(function, **options, impl=impl)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["silu", "softcap", "swiglu"])
def test_results_and_gradients_have_the_dtype_of_the_inputs(name, dtype, impl):
    inputs = arrays(name, (3, 9), dtype)
    (y,), gradients = mx.vjp(op(name, impl), inputs, [inputs[0]])
    assert {each.dtype for each in (y, *gradients)} == {dtype}
    assert {each.shape for each in (y, *gradients)} == {(3, 9)}


X, INTEGERS = mx.zeros((2, 3)), mx.zeros((2, 3), mx.int32)
# Mistake: op, arguments, options, message.
MISTAKES = {
    **{f"{name} of integers": (name, (INTEGERS,), {}, rf"\[{name}\] x must be float32, .* but got int32. Convert it: x")
       for name in ("sigmoid", "silu", "gelu", "relu2")},
    "softcap of integers": ("softcap", (INTEGERS, 1.0), {}, r"\[softcap\] x must be float32, .* but got int32"),
    "cap of 0": ("softcap", (X, 0.0), {}, r"\[softcap\] cap must be a finite number above 0 but got 0.0."),
    "cap below 0": ("softcap", (X, -1), {}, "cap must be a finite number above 0 but got -1."),
    "infinite cap": ("softcap", (X, float("inf")), {}, "cap must be a finite number above 0 but got inf."),
    "cap of nan": ("softcap", (X, float("nan")), {}, "cap must be a finite number above 0 but got nan."),
    "cap is an array": ("softcap", (X, mx.array(2.0)), {}, "cap must be a Python number but got an mx.array"),
    "cap is text": ("softcap", (X, "2"), {}, "cap must be a Python number but got '2'"),
    "cap above float32": ("softcap", (X, 1e39), {}, r"\[softcap\] cap must be within float32's range, .* got 1e\+39."),
    "cap below float32": ("softcap", (X, 1e-40), {}, "cap must be within float32's range, .* but got 1e-40."),
    "gelu's form is a truth value": ("gelu", (X, True), {}, r"\[gelu\] approximate must be the string .* but got True"),
    "geglu's form is an array": ("geglu", (X, X, X), {}, r"\[geglu\] approximate must be the string 'none' or 'tanh'"),
    "gelu's form": ("gelu", (X, "erf"), {}, r"\[gelu\] approximate must be 'none' or 'tanh' but got 'erf'."),
    "geglu's form": ("geglu", (X, X), {"approximate": "fast"}, r"\[geglu\] approximate must be 'none' or 'tanh'"),
    "up is an integer": ("swiglu", (X, INTEGERS), {}, r"\[swiglu\] up must be float32, .* but got int32"),
    "gate is an integer": ("geglu", (INTEGERS, X), {}, r"\[geglu\] gate must be float32, .* but got int32"),
    "two dtypes": (
        "swiglu",
        (X, X.astype(mx.bfloat16)),
        {},
        r"gate and up must have one dtype but got float32 and bfloat16. Convert one of them.",
    ),
    "two shapes": ("geglu", (X, X[:1]), {}, r"gate and up must have one shape but got \(2, 3\) and \(1, 3\)."),
}  # fmt: skip


@pytest.mark.parametrize("module", [activations, reference], ids=["op", "reference"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, module):
    name, arguments, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        getattr(module, name)(*arguments, **options)


@pytest.mark.parametrize("name", ["gelu", "geglu"])
def test_unknown_engine_raises(name):
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        op(name, "emulater")(*arrays(name))


@pytest.mark.parametrize("shape", [(5, 0), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_empty_input_gives_an_empty_result(name, impl, shape):
    inputs = arrays(name, shape, mx.bfloat16)
    (y,), gradients = mx.vjp(op(name, impl), inputs, [inputs[0]])
    for each in (y, *gradients, FUNCTIONS[name][1](*inputs, **FUNCTIONS[name][3])):
        assert (each.shape, each.dtype) == (shape, mx.bfloat16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_cpu_automatic_is_plain_mlx(name):
    inputs = arrays(name)
    function, _, of_mlx, options, _ = FUNCTIONS[name]
    assert_close(function(*inputs, **options), of_mlx(*inputs), 1e-6)


@pytest.mark.parametrize(("module", "name"), [(unary_op, "silu"), (gated_op, "swiglu")], ids=["unary", "gated"])
def test_use_engine_reaches_the_kernels(module, name, monkeypatch):
    ran = []
    forward = module._forward
    monkeypatch.setattr(module, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    with use_engine("emulator"):
        FUNCTIONS[name][0](*arrays(name))
    assert ran == ["emulator"]


@pytest.mark.parametrize("name", ["silu", "swiglu"])
def test_every_launch_is_on_the_engine_that_was_asked_for(name, monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    inputs = arrays(name)
    mx.eval(mx.vjp(op(name, "metal"), inputs, [inputs[0]]))
    assert launched == ["metal"] * 2


def second_derivative(function, inputs):
    """Gradients of a weighted sum of the first gradients."""
    numbers = tuple(range(len(inputs)))

    def first(*inputs):
        gradients = mx.grad(lambda *inner: (function(*inner) ** 3).sum(), argnums=numbers)(*inputs)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*inputs)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivative(name, impl):
    inputs, of_mlx = arrays(name), FUNCTIONS[name][2]
    for got, want in zip(second_derivative(op(name, impl), inputs), second_derivative(of_mlx, inputs), strict=True):
        assert_close(got, want, 1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivative_of_the_reference_in_float16(name):
    inputs, of_mlx = arrays(name, dtype=mx.float16), FUNCTIONS[name][2]
    wide = [array.astype(mx.float32) for array in inputs]
    got = second_derivative(lambda *inputs: op(name, "reference")(*inputs).astype(mx.float32), inputs)
    for a, b in zip(got, second_derivative(of_mlx, wide), strict=True):
        assert_close(a, b, 1e-2)


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formulas."""

    def forward(engine, function, cap, x):
        assert engine == "metal"
        return (reference.forward(function, x, cap),)

    def backward(engine, function, cap, x, dy):
        assert engine == "metal"
        assert x.shape == dy.shape
        return (reference.backward(function, x, dy, cap),)

    def gated_forward(engine, function, gate, up):
        assert engine == "metal"
        assert gate.shape == up.shape
        return (reference.gated_forward(function, gate, up),)

    def gated_backward(engine, function, gate, up, dy):
        assert engine == "metal"
        assert gate.shape == up.shape == dy.shape
        return reference.gated_backward(function, gate, up, dy)

    monkeypatch.setattr(unary_op, "_forward", forward)
    monkeypatch.setattr(unary_op, "_backward", backward)
    monkeypatch.setattr(gated_op, "_forward", gated_forward)
    monkeypatch.setattr(gated_op, "_backward", gated_backward)
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


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if FUNCTIONS[name][4] == 1])
def test_vmap_and_gradients(name, axis, impl):
    inputs = arrays(name, (4, 3, 5))
    got = transformed(op(name, impl), inputs, (axis,))
    for a, b in zip(got, transformed(FUNCTIONS[name][2], inputs, (axis,)), strict=True):
        assert_close(a, b)


# Which axis of gate and of up is mapped; None: shared.
@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (2, 0), (0, None), (None, 1)], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu-tanh"])
def test_gated_vmap_and_gradients(name, axes, impl):
    shape = (3, 5)
    inputs = [
        random(shape if axis is None else (*shape[:axis], 4, *shape[axis:]), seed) for seed, axis in enumerate(axes)
    ]
    got = transformed(op(name, impl), inputs, axes)
    for a, b in zip(got, transformed(FUNCTIONS[name][2], inputs, axes), strict=True):
        assert_close(a, b)


def test_vmap_over_every_axis(impl):
    inputs = arrays("swiglu", (2, 3))
    assert_close(mx.vmap(mx.vmap(op("swiglu", impl)))(*inputs), FUNCTIONS["swiglu"][2](*inputs))


# Each new loop for the CPU takes a C++ compiler a second.
@pytest.mark.parametrize(
    ("name", "dtype", "lazy"),
    [
        *((name, mx.float32, False) for name in FUNCTIONS),
        *((name, dtype, False) for name in ("swiglu", "gelu-tanh") for dtype in (mx.float16, mx.bfloat16)),
        *((name, mx.float32, True) for name in ("silu", "swiglu")),
    ],
    ids=str,
)
def test_compiled_function(name, dtype, lazy, request):
    impl = request.getfixturevalue("lazy_kernels") if lazy else "reference"
    inputs, of_mlx = arrays(name, dtype=dtype), FUNCTIONS[name][2]

    def gradients(function):
        return mx.grad(
            lambda *inputs: (function(*inputs).astype(mx.float32) ** 3).sum(), argnums=tuple(range(len(inputs)))
        )

    want = gradients(of_mlx)(*[array.astype(mx.float32) for array in inputs])
    for a, b in zip(mx.compile(gradients(op(name, impl)))(*inputs), want, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 3e-2}[dtype])


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("name", ["relu2", "gelu-tanh", "swiglu"])
def test_in_a_checkpoint(name, impl):
    inputs = arrays(name)

    def loss(*inputs):
        return (op(name, impl)(*inputs) ** 2).sum()

    assert mx.array_equal(mx.grad(mx.checkpoint(loss))(*inputs), mx.grad(loss)(*inputs))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_softcap_of_the_reference_engine_does_not_differentiate_its_rounded_result(dtype):
    x = mx.linspace(-6, 6, 401).astype(dtype)
    got = mx.grad(lambda x: activations.softcap(x, CAP, impl="reference").sum())(x)
    want = 1 / np.cosh(np.array(x.astype(mx.float32), np.float64) / CAP) ** 2
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, rtol=1e-2)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu-tanh", "swiglu", "geglu"])
def test_gradient_in_float16_is_finite_where_x_times_the_cotangent_is_not(name):
    inputs = [mx.array([-3e4, -300, 300, 3e4], mx.float16), *arrays(name, (4,), mx.float16)[1:]]
    _, gradients = mx.vjp(op(name, "reference"), inputs, [mx.full((4,), 300, mx.float16)])
    assert mx.isfinite(gradients[0]).all()


# Function, inputs and cotangent for which a product in MLX's derivative overflows, and the gradients.
LARGE = {
    "silu above": ("silu", (3e38,), 2.0, (2.0,)),
    "silu below": ("silu", (-3e38,), 2.0, (0.0,)),
    "gelu above": ("gelu", (3e38,), 2.0, (2.0,)),
    "gelu below": ("gelu", (-3e38,), 2.0, (0.0,)),
    "swiglu above": ("swiglu", (1e30, 1e10), 1.0, (1e10, 1e30)),
    "swiglu below": ("swiglu", (-1e30, 1e30), 1e30, (0.0, 0.0)),
    "geglu above": ("geglu", (1e30, 1e10), 1.0, (1e10, 1e30)),
    "geglu below": ("geglu", (-1e30, 1e30), 1.0, (0.0, 0.0)),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("of", LARGE)
def test_gradient_of_large_numbers_is_that_of_the_kernels(of, dtype):
    name, inputs, dy, want = LARGE[of]
    inputs = [mx.array([each], dtype) for each in inputs]
    for impl in ("reference", "emulator"):
        got = mx.vjp(op(name, impl), inputs, [mx.array([dy], dtype)])[1]
        np.testing.assert_allclose([each.item() for each in got], want, rtol=4e-3)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softcap_far_beyond_its_cap_has_a_second_derivative_of_0(dtype, impl):
    x = mx.array([-3e4, -100 * CAP, 100 * CAP, 3e4], dtype)
    got = mx.grad(lambda x: mx.grad(lambda x: op("softcap", impl)(x).sum())(x).sum())(x)
    assert got.tolist() == [0] * 4


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_relu2_at_0_has_a_second_derivative_of_0(dtype, impl):
    x = mx.array([-1.0, 0.0, 1.0], dtype)
    got = mx.grad(lambda x: mx.grad(lambda x: activations.relu2(x, impl=impl).sum())(x).sum())(x)
    assert got.tolist() == [0, 0, 2]


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_relu2_in_float16_doubles_last(impl):
    x, dy = mx.array([40000.0], mx.float16), mx.array([1e-3], mx.float16)
    assert mx.vjp(op("relu2", impl), [x], [dy])[1][0].item() == pytest.approx(80.06, rel=1e-3)


def peak_of_compiled_layers(name):
    """Peak memory of a compiled gradient through eight products and activations in bfloat16."""
    x, w = random((256, 256), 0, mx.bfloat16), random((256, 256), 1, mx.bfloat16) * 0.05

    def loss(x):
        for _ in range(8):
            x = op(name, "reference")(x @ w)
        return x.sum()

    step = mx.compile(mx.grad(loss))
    mx.eval(step(x))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(step(x))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("name", ["gelu-tanh", "softcap"])
def test_compiled_16_bit_step_keeps_nothing_in_float32_for_the_gradient(name, monkeypatch):
    plain._recomputed.cache_clear()
    peak = peak_of_compiled_layers(name)
    plain._recomputed.cache_clear()
    monkeypatch.setattr(plain, "_again", lambda x: x)
    merged = peak_of_compiled_layers(name)
    plain._recomputed.cache_clear()
    assert peak < 0.75 * merged


# How arrays are read and written does not depend on the function.
@pytest.mark.parametrize(
    ("kind", "option"),
    [each if each[0] in (SiluCase, SwigluCase) else pytest.param(*each, marks=pytest.mark.slow) for each in OPS],
    ids=lambda each: getattr(each, "op", each),
)
def test_each_array_is_moved_once_in_16_byte_accesses(kind, option):
    case = kind((64, 400), mx.bfloat16, option=option)
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(case.run("emulator"))
    launches = emulator.report().launches
    assert len(launches) == 2
    nbytes = 64 * 400 * 2
    for launch, which in zip(launches, ("forward", "backward"), strict=True):
        buffers = [each for each in launch.counts.buffers if each.space == "device"]
        for each in buffers:
            assert (each.bytes_read + each.bytes_written, each.reads + each.writes) == (nbytes, nbytes // 16)
        assert len(buffers) * nbytes == case.ideal_bytes()[which]


def test_array_that_begins_elsewhere_and_has_a_tail():
    case = SwigluCase((3, 1001), mx.float16, layout="shifted")
    emulator.reset()
    mx.eval(case.run("emulator"))
    counts = {each.name: each for each in emulator.report().launches[0].counts.buffers}
    assert counts["gate"].reads == 3003
    # 375 vectors and a tail of 3.
    assert counts["up"].reads == counts["y"].writes == 375 + 3
