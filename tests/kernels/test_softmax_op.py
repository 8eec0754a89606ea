"""What callers of softmax see: errors, engines, vmap, second derivatives, checkpoints, compiled functions, traffic."""

from functools import cache

from forge_mlx.kernels.softmax import op, reference, softmax
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import pytest
from room_proofs import assert_close, random

FUNCTIONS = {"op": softmax, "reference": reference.softmax}
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_result_and_gradient_have_the_dtype_of_the_input(dtype, impl):
    x = random((3, 9), 0, dtype)
    (p,), (dx,) = mx.vjp(lambda x: softmax(x, impl=impl), [x], [x])
    assert p.dtype == dx.dtype == reference.softmax(x).dtype == dtype


# Mistake: argument, message.
MISTAKES = {
    "x is an integer": (mx.zeros((2, 3), mx.int32), r"\[softmax\] x must be float32, .* but got int32. Convert it: x"),
    "x has no axes": (mx.array(1.0), r"\[softmax\] x must have 1 or more axes but got the shape \(\)."),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    x, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](x)


def test_unknown_engine_raises():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        softmax(mx.zeros((2, 3)), impl="emulater")


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_empty_input_gives_an_empty_result(shape, impl):
    x = mx.zeros(shape, mx.bfloat16)
    (p,), (dx,) = mx.vjp(lambda x: softmax(x, impl=impl), [x], [x])
    for each in (p, dx, reference.softmax(x)):
        assert (each.shape, each.dtype) == (shape, mx.bfloat16)


def test_on_a_cpu_automatic_is_mlxs_own_operation():
    x = random((4, 40), 0, mx.bfloat16)
    assert mx.array_equal(softmax(x), mx.softmax(x, axis=-1, precise=True))


def test_use_engine_reaches_the_kernels(monkeypatch):
    ran = []
    launch = op._launch
    monkeypatch.setattr(op, "_launch", lambda name, engine, arrays: ran.append(engine) or launch(name, engine, arrays))
    with use_engine("emulator"):
        softmax(random((2, 8), 0))
    assert ran == ["emulator"]


@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_every_launch_is_on_the_engine_that_was_asked_for(columns, monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    x = random((3, columns), 0)
    mx.eval(mx.vjp(lambda x: softmax(x, impl="metal"), [x], [x]))
    assert launched == ["metal"] * 2


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_second_derivative(impl):
    x, direction = random((3, 40), 0), random((3, 40), 1)

    def second(function):
        def first(x):
            return (mx.grad(lambda x: (function(x) ** 3).sum())(x) * direction).sum()

        return mx.grad(first)(x)

    assert_close(second(lambda x: softmax(x, impl=impl)), second(lambda x: mx.softmax(x, axis=-1)), 1e-4)


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formulas."""

    def forward(engine, x):
        assert engine == "metal"
        return (reference.forward(x),)

    def backward(engine, _x, p, dp):
        assert engine == "metal"
        assert p.shape == dp.shape
        return (reference.backward(p, dp),)

    op._softmax.cache_clear()
    monkeypatch.setattr(op, "_forward", forward)
    monkeypatch.setattr(op, "_backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    yield lambda x: softmax(x, impl="metal")
    op._softmax.cache_clear()


@pytest.fixture(params=["reference", "lazy"])
def function(request):
    """The reference engine, and the kernels with launches of the formulas in their place."""
    return request.getfixturevalue("lazy_kernels") if request.param == "lazy" else softmax


@pytest.mark.parametrize(("shape", "axis"), [((4, 3, 5), 0), ((3, 4, 5), 1), ((3, 5, 4), 2), ((4, 5), 0)], ids=str)
def test_vmap_its_gradient_and_vmap_of_the_gradient(shape, axis, function):
    x, plain = random(shape, 0), lambda x: mx.softmax(x, axis=-1)

    def transformed(function):
        gradient = mx.grad(lambda x: (function(x) ** 3).sum())
        mapped = mx.vmap(function, in_axes=axis)
        return mapped(x), mx.grad(lambda x: (mapped(x) ** 3).sum())(x), mx.vmap(gradient, in_axes=axis)(x)

    for got, want in zip(transformed(function), transformed(plain), strict=True):
        assert_close(got, want)


def test_vmap_in_vmap(function):
    x = random((2, 3, 4, 5), 0)
    assert_close(mx.vmap(mx.vmap(function), in_axes=1)(x), mx.softmax(mx.moveaxis(x, 1, 0), axis=-1))


def test_compiled_function(function):
    x = random((3, 40), 0)
    got = mx.compile(mx.grad(lambda x: (function(x) ** 3).sum()))(x)
    assert_close(got, mx.grad(lambda x: (mx.softmax(x, axis=-1) ** 3).sum())(x))


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_in_a_checkpoint(impl):
    x = random((3, 40), 0)

    def loss(x):
        return (softmax(x, impl=impl) ** 2).sum()

    assert mx.array_equal(mx.grad(mx.checkpoint(loss))(x), mx.grad(loss)(x))


@cache
def counts(rows, columns, dtype):
    """Kernel -> buffer -> its counts, of a forward and a backward pass."""
    x = random((rows, columns), 0, dtype)
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(mx.vjp(lambda x: softmax(x, impl="emulator"), [x], [x]))
    return {launch.name: {each.name: each for each in launch.counts.buffers} for launch in emulator.report().launches}


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "times"),
    [
        (48, 4096, mx.float32, 1),
        (48, 8192, mx.bfloat16, 1),
        (600, 1000, mx.float16, 1),
        (2048, 8, mx.float32, 1),
        (6, 4100, mx.float32, 2),
        pytest.param(4096, 4096, mx.float32, 1, marks=pytest.mark.slow),
        pytest.param(6, 128256, mx.bfloat16, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_are_read_once_or_twice_and_written_once_in_16_byte_accesses(rows, columns, dtype, times):
    launches = counts(rows, columns, dtype)
    nbytes = rows * columns * dtype.size
    suffix = "_long" if times == 2 else ""
    forward, backward = launches[f"softmax_forward{suffix}"], launches[f"softmax_backward{suffix}"]
    for each in (forward["x"], backward["p"], backward["dp"]):
        assert (each.bytes_read, each.reads) == (times * nbytes, times * nbytes // 16)
    for each in (forward["p"], backward["dx"]):
        assert (each.bytes_written, each.writes) == (nbytes, nbytes // 16)
