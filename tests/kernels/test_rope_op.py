"""What callers of rope see: errors, engines, dtypes, positions, gradients, vmap, checkpoints, compiled functions."""

from forge_mlx.kernels.rope import op, reference
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

FUNCTIONS = {"op": op.rope, "reference": reference.rope}
ENGINES = ["emulator", "reference"]


X = mx.zeros((2, 3, 5, 8))
FREQS = mx.ones((4,))
POSITIONS = mx.zeros((2, 5), mx.int32)
# Mistake: arguments, options, message.
MISTAKES = {
    "x is an integer": ((X.astype(mx.int32),), {}, r"\[rope\] x must be float32, .* but got int32"),
    "x has 3 axes": ((X[0],), {}, r"\[rope\] x must have the 4 axes \[B, H, T, D\] but got the shape \(3, 5, 8\)"),
    "an odd head": ((X[..., :7],), {}, "dims must be even, above 0 and at most the last axis of x, 7, but got 7"),
    "dims are odd": ((X,), {"dims": 3}, "dims must be even, .* but got 3"),
    "dims are too many": ((X,), {"dims": 10}, "dims must be even, .* 8, but got 10"),
    "dims are 0": ((X,), {"dims": 0}, "dims must be even, .* but got 0"),
    "freqs are integers": ((X, FREQS.astype(mx.int32)), {}, "freqs must be float32"),
    "freqs are too many": ((X, FREQS), {"dims": 6}, r"freqs must have the shape \(3,\), half of dims, but got \(4,\)"),
    "freqs and a base": ((X, FREQS), {"base": 500.0}, "base must be left out with freqs.* but got 500"),
    "base is 0": ((X,), {"base": 0.0}, "base must be a finite number above 0 but got 0"),
    "base is nan": ((X,), {"base": float("nan")}, "base must be a finite number above 0"),
    "scale is infinite": ((X,), {"scale": float("inf")}, "scale must be a finite number but got inf"),
    "base is an array": ((X,), {"base": mx.array(1e4)}, r"\[rope\] base must be a Python number but got an mx.array"),
    "scale is an array": ((X,), {"scale": mx.array(1.0)}, "scale must be a Python number but got an mx.array"),
    "scale is too large": ((X,), {"scale": 1e300}, r"\[rope\] scale must be within float32's range, .* got 1e\+300."),
    "base is too small": ((X,), {"base": 1e-300}, "base must be within float32's range, .* but got 1e-300."),
    "offset is a Python float": ((X,), {"offset": 1.5}, "offset must be an int or an mx.array of integers but got 1.5"),
    "offset is a truth value": ((X,), {"offset": True}, "offset must be an int or an mx.array .* but got True"),
    "offset is a list": ((X,), {"offset": [1, 2]}, r"offset must be an int or an mx.array .* but got \[1, 2\]"),
    "offset is of NumPy": ((X,), {"offset": np.array([1, 2])}, "offset must be an int or an mx.array .* got array"),
    "offset is a float": ((X,), {"offset": mx.array([1.0, 2.0])}, "offset must be integers but got float32"),
    "offset is too long": ((X,), {"offset": mx.array([1, 2, 3])}, r"offset must .* the shape \(2,\) but got \(3,\)"),
    "offset is too large": ((X,), {"offset": 2**31 - 4}, "offset must keep every position within 32 bits"),
    "positions are floats": ((X,), {"positions": POSITIONS.astype(mx.float32)}, "positions must be integers"),
    "positions are too few": ((X,), {"positions": POSITIONS[0]}, r"positions must have the shape \(2, 5\)"),
    "both": ((X,), {"positions": POSITIONS, "offset": 1}, "offset must be left out with positions but got both"),
    "both as arrays": ((X,), {"positions": POSITIONS, "offset": mx.array([0, 0])}, "but got both"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    arguments, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](*arguments, **options)


def test_unknown_and_missing_engines_raise():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        op.rope(X, impl="emulater")
    with pytest.raises(RuntimeError, match=r"\[rope\] engine cuda cannot run"):
        op.rope(X, impl="cuda")


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("offset", [mx.array(7), mx.array([7, 7]), mx.array([7, 7], mx.uint8), mx.array(7, mx.int64)])
def test_offsets_of_any_integer_dtype(offset, impl):
    x = random((2, 3, 5, 8), 0)
    assert_close(op.rope(x, offset=offset, impl=impl), reference.rope(x, offset=7))


@pytest.mark.parametrize("impl", ENGINES)
def test_numbers_of_numpy_are_numbers(impl):
    x = random((2, 3, 5, 8), 0)
    got = op.rope(x, offset=np.int64(7), scale=np.float32(0.5), base=np.float64(100), impl=impl)
    assert_close(got, reference.rope(x, offset=7, scale=0.5, base=100.0))


@pytest.mark.parametrize("impl", ENGINES)
def test_positions_that_count_are_an_offset(impl):
    x = random((2, 3, 5, 8), 0)
    positions = mx.arange(5) + mx.array([[3], [900]])
    want = op.rope(x, offset=mx.array([3, 900]), impl=impl)
    assert mx.array_equal(op.rope(x, positions=positions, impl=impl), want)
    assert mx.array_equal(op.rope(x, positions=positions.astype(mx.int64), impl=impl), want)


@pytest.mark.parametrize("impl", ENGINES)
def test_frequencies_are_periods_as_in_mlx(impl):
    x, freqs = random((2, 3, 5, 8), 0), mx.array([1.0, 3.0, 10.0, 44.0])
    want = mx.fast.rope(x, 8, traditional=False, base=None, scale=0.5, offset=2, freqs=freqs)
    assert_close(op.rope(x, freqs, scale=0.5, offset=2, impl=impl), want)
    assert_close(op.rope(x, freqs.astype(mx.float16), scale=0.5, offset=2, impl=impl), want)


@pytest.mark.parametrize("impl", ENGINES)
def test_any_strides_give_the_result_without_a_copy(impl):
    x = random((3, 7, 5, 16), 0)
    for strided in (
        x[::-1],
        x[:, ::-2, ::-1],
        mx.contiguous(x.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0),
        mx.broadcast_to(x[:, :1], x.shape),
        mx.broadcast_to(x[..., :1], x.shape),
        x[1:, 2:, 3:, 4:],
    ):
        positions = (mx.arange(3 * 5).reshape(5, 3).T % 4)[: strided.shape[0], : strided.shape[2]]
        got = op.rope(strided, positions=positions, impl=impl)
        assert_close(got, reference.rope(mx.contiguous(strided), positions=mx.contiguous(positions)))


def test_kernel_gets_x_as_it_lies(monkeypatch):
    seen = []
    call = MetalKernel.__call__

    def see(self, inputs, **options):
        seen.append((self.ensure_row_contiguous, inputs["x"]))
        return call(self, inputs, **options)

    monkeypatch.setattr(MetalKernel, "__call__", see)
    x = random((2, 5, 3, 8), 0).transpose(0, 2, 1, 3)
    mx.eval(op.rope(x, impl="emulator"))
    ((copied, given),) = seen
    assert not copied
    # NumPy's view of the same memory tells how the elements lie.
    assert np.array(given, copy=False).strides == (480, 32, 96, 4)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
@pytest.mark.parametrize("impl", ENGINES)
def test_empty_input_gives_an_empty_result_and_zero_gradients(shape, impl):
    x, freqs = mx.zeros(shape), mx.ones((4,))
    (y,), gradients = mx.vjp(lambda *inputs: op.rope(*inputs, impl=impl), [x, freqs], [mx.zeros(shape)])
    assert y.shape == gradients[0].shape == shape
    assert gradients[1].tolist() == [0] * 4


@pytest.mark.parametrize("impl", ENGINES)
def test_freqs_get_their_gradient_in_their_dtype(impl):
    x, freqs = random((2, 3, 5, 8), 0), mx.array([1.0, 3.0, 10.0, 44.0], mx.float16)
    got = mx.grad(lambda freqs: (op.rope(x, freqs, impl=impl) * random(x.shape, 1)).sum())(freqs)
    want = mx.grad(lambda freqs: (reference.rope(x, freqs) * random(x.shape, 1)).sum())(freqs.astype(mx.float32))
    assert got.dtype == mx.float16
    assert_close(got.astype(mx.float32), want, 1e-3)


def second_derivative(function, *arguments):
    """Gradients of a weighted sum of the first gradients."""
    numbers = tuple(range(len(arguments)))

    def first(*arguments):
        gradients = mx.grad(lambda *inner: (function(*inner) ** 3).sum(), argnums=numbers)(*arguments)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*arguments)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("with_freqs", [False, True], ids=["base", "freqs"])
def test_second_derivative(with_freqs, impl):
    arguments = [random((2, 3, 5, 8), 0), mx.array([1.0, 3.0, 10.0, 44.0])][: 1 + with_freqs]
    got = second_derivative(lambda *inputs: op.rope(*inputs, dims=8, offset=2, impl=impl), *arguments)
    want = second_derivative(lambda *inputs: reference.rope(*inputs, dims=8, offset=2), *arguments)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("impl", ENGINES)
def test_in_a_checkpoint(impl):
    x = random((2, 3, 5, 8), 0)

    def loss(x):
        return (op.rope(x, offset=2, impl=impl) ** 3).sum()

    assert mx.array_equal(mx.grad(mx.checkpoint(loss))(x), mx.grad(loss)(x))


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    x = random((2, 3, 5, 8), 0)
    mx.eval(mx.vjp(lambda x: op.rope(x, impl="metal"), [x], [x]))
    assert launched == ["metal"] * 2
    with use_engine("metal"):
        mx.eval(op.rope(x))
    assert launched == ["metal"] * 3


@pytest.fixture(params=["reference", "metal"])
def engine(request, monkeypatch):
    """The reference, and an engine whose launches are lazy, as those of a GPU: with what the kernel asks of inputs."""
    rotate = op._rotate

    def lazy(engine, x, positions, inverse, *rest):
        assert engine == request.param
        assert x.ndim == 4
        assert positions.shape[0] in (1, x.shape[0])
        assert positions.shape[1] in (1, x.shape[2])
        assert inverse.shape[0] in (1, x.shape[0])
        return rotate("reference", x, positions, inverse, *rest)

    monkeypatch.setattr(op, "_rotate", lazy)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return request.param


# What is mapped over which axis: name of the second argument, arguments, axes.
MAPPED = {
    "x": (None, (random((4, 2, 3, 5, 8), 0),), (0,)),
    "heads": (None, (random((2, 3, 4, 5, 8), 0),), (2,)),
    "the last axis": (None, (random((2, 3, 5, 8, 4), 0),), (4,)),
    "freqs": ("freqs", (random((2, 3, 5, 8), 0), 1 + mx.abs(random((4, 4), 1))), (None, 1)),
    "x, one freqs": ("freqs", (random((4, 2, 3, 5, 8), 0), 1 + mx.abs(random((4,), 1))), (0, None)),
    "x and freqs": ("freqs", (random((2, 4, 3, 5, 8), 0), 1 + mx.abs(random((4, 4), 1))), (1, 0)),
    "positions": ("positions", (random((2, 3, 5, 8), 0), mx.arange(40).reshape(4, 2, 5) % 11), (None, 0)),
    "x and positions": ("positions", (random((4, 2, 3, 5, 8), 0), mx.arange(40).reshape(2, 4, 5) % 11), (0, 1)),
    "x, one offset": ("offset", (random((4, 2, 3, 5, 8), 0), mx.array([3, 8])), (0, None)),
    "offsets": ("offset", (random((4, 2, 3, 5, 8), 0), mx.array([[3, 8], [1, 2], [4, 5], [0, 9]])), (0, 0)),
    "an offset each": ("offset", (random((4, 2, 3, 5, 8), 0), mx.array([3, 8, 1, 2])), (0, 0)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_gradients(name, engine):
    other, arguments, axes = MAPPED[name]
    numbers = (0, 1) if other == "freqs" else (0,)

    def ours(x, *rest):
        return op.rope(x, traditional=True, impl=engine, **({other: rest[0]} if rest else {}))

    def plain(x, *rest):
        return reference.rope(x, traditional=True, **({other: rest[0]} if rest else {}))

    def of_vmap(function):
        mapped = mx.vmap(function, in_axes=axes)
        return mx.grad(lambda *inputs: (mapped(*inputs) ** 3).sum(), argnums=numbers)(*arguments)

    def vmap_of(function):
        gradient = mx.grad(lambda *inputs: (function(*inputs) ** 3).sum(), argnums=numbers)
        return mx.vmap(gradient, in_axes=axes)(*arguments)

    assert_close(mx.vmap(ours, in_axes=axes)(*arguments), mx.vmap(plain, in_axes=axes)(*arguments))
    for transformed in (of_vmap, vmap_of):
        got, want = transformed(ours), transformed(plain)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)


def test_compiled_function(engine):
    x, freqs = random((2, 3, 5, 8), 0), mx.array([1.0, 3.0, 10.0, 44.0])

    def gradients(function, **options):
        return mx.grad(lambda x, freqs: (function(x, freqs, offset=2, **options) ** 3).sum(), argnums=(0, 1))

    got = mx.compile(gradients(op.rope, impl=engine))(x, freqs)
    for a, b in zip(got, gradients(reference.rope)(x, freqs), strict=True):
        assert_close(a, b)
