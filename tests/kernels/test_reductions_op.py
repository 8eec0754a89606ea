"""What callers of sum and sum_squares see: results, errors, engines, vmap, derivatives, compiled functions."""

from forge_mlx.kernels.reductions import op, reference, sum, sum_squares
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

OPS = {"sum": sum, "sum_squares": sum_squares}
PAIRS = {"sum": (sum, reference.sum), "sum_squares": (sum_squares, reference.sum_squares)}
IMPLS = ["emulator", "reference"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", OPS)
def test_result_is_one_float32_number_whatever_the_dtype(name, impl):
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        ones = mx.full((300, 300), 2.0, dtype)
        for x in (ones, [ones[:100], ones[100:]], (ones[:0], ones)):
            total = OPS[name](x, impl=impl)
            assert (total.shape, total.dtype) == ((), mx.float32)
            # In float16 this would be infinite, in bfloat16 a multiple of 1024.
            assert total.item() == 90_000 * (4 if name == "sum_squares" else 2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("x", [[], mx.zeros((0,)), [mx.zeros((3, 0)), mx.zeros((0, 2))]], ids=["none", "array", "list"])
def test_empty_gives_0_and_empty_gradients(x, name, impl):
    total = OPS[name](x, impl=impl)
    assert (total.item(), total.dtype) == (0, mx.float32)
    if isinstance(x, mx.array):
        assert mx.grad(lambda x: OPS[name](x, impl=impl))(x).shape == x.shape


def test_gradients_of_a_list_with_an_empty_array():
    arrays = [random((3,), 0), mx.zeros((0, 2)), random((2, 2), 1)]
    found = mx.grad(lambda *x: sum_squares(x, impl="emulator"), argnums=(0, 1, 2))(*arrays)
    assert [each.shape for each in found] == [(3,), (0, 2), (2, 2)]
    assert_close(found[2], 2 * arrays[2])


@pytest.mark.parametrize("impl", IMPLS)
def test_mul_is_a_factor_with_a_gradient(impl):
    x = random((7, 40), 0)
    assert_close(sum(x, 2.5, impl=impl), 2.5 * sum(x, impl=impl))
    assert_close(sum(x, 0, impl=impl), mx.array(0.0))
    for dtype in (mx.float32, mx.bfloat16):
        mul = mx.array(2.5, dtype)
        dx, dmul = mx.grad(lambda x, mul: 3 * sum([x, x], mul, impl=impl), argnums=(0, 1))(x, mul)
        assert dmul.dtype == dtype
        assert_close(dx, mx.full(x.shape, 15.0))
        assert_close(dmul.astype(mx.float32), 6 * x.sum(), 1e-5 if dtype == mx.float32 else 1e-2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mul", [np.float32(2), np.float64(2), np.int64(2)], ids=lambda mul: type(mul).__name__)
def test_mul_may_be_a_number_of_numpy(mul, impl):
    x = random((7, 40), 0)
    assert mx.array_equal(sum(x, mul, impl=impl), sum(x, 2, impl=impl))
    assert mx.array_equal(reference.sum(x, mul), reference.sum(x, 2))


# Rows that are summed as they lie, the first too short and too long ones; several axes.
@pytest.mark.parametrize("shape", [(300, 255), (300, 256), (257, 300), (5, 4096), (5, 4097), (3, 300, 270)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_transposed_arrays_on_the_reference_engine(name, shape):
    for dtype in (mx.float32, mx.bfloat16):
        x = random(shape, 0, dtype)
        values = np.array(x.T.astype(mx.float32), np.float64)
        terms = values if name == "sum" else values**2
        (total,), (dx,) = mx.vjp(lambda x: OPS[name](x, impl="reference"), [x.T], [mx.array(1.5)])
        assert total.item() == pytest.approx(terms.sum(), abs=1e-6 * np.abs(terms).sum())
        assert mx.array_equal(dx, mx.full(dx.shape, 1.5, dtype) if name == "sum" else (3 * x.T).astype(dtype))


def test_a_transposed_array_is_not_copied_on_the_reference_engine():
    x = random((1024, 1024), 0).T
    mx.eval(x, sum(x, impl="reference"))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(sum(x, impl="reference"))
    assert mx.get_peak_memory() - before < x.nbytes / 8


X = mx.zeros((2, 3))
# Mistake: op, arguments, message.
MISTAKES = {
    "integers": ("sum", (X.astype(mx.int32),), r"^\[sum\] x must be float32, .* but got int32\. Convert it: x\.astype"),
    "integers to square": ("sum_squares", (X.astype(mx.int8),), r"^\[sum_squares\] x must be float32.* but got int8"),
    "integers in a list": ("sum_squares", ([X, X.astype(mx.int8)],), r"^\[sum_squares\] x\[1\] must be float32"),
    "a tree": ("sum_squares", ([{"a": X}],), r"x\[0\] must be an mx\.array but got dict\. Flatten a tree first\.$"),
    "mul is a vector": ("sum", (X, mx.zeros((1,))), r"^\[sum\] mul must be a real number .*but got float32 \(1,\)\.$"),
    "mul is text": ("sum", (X, "2"), r"^\[sum\] mul must be a real number or a 0-d array of one but got '2'\.$"),
    "mul is an integer array": ("sum", (X, mx.array(2)), r"^\[sum\] mul must be a floating array but got int32\.$"),
}


@pytest.mark.parametrize("which", [0, 1], ids=["op", "reference"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, which):
    name, arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        PAIRS[name][which](*arguments)


@pytest.mark.parametrize("name", OPS)
def test_an_array_that_no_axis_can_hold_is_an_error(name, monkeypatch):
    monkeypatch.setattr(reference, "SIZE_LIMIT", 6)
    for function in PAIRS[name]:
        with pytest.raises(ValueError, match=rf"^\[{name}\] x\[1\] must have fewer than 2\^31 elements but got 6"):
            function([X[0], X])


def test_unknown_engine_is_an_error():
    with pytest.raises(ValueError, match="impl must be among"):
        sum_squares(X, impl="gpu")


def test_use_engine_reaches_the_kernels(monkeypatch):
    ran = []
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    with use_engine("emulator"):
        sum_squares([random((2, 8), 0)])
    assert ran == ["emulator"]


@pytest.mark.parametrize(("name", "backward"), [("sum", 0), ("sum_squares", 2)])
def test_one_launch_an_array_and_one_for_all_on_the_engine_that_was_asked_for(name, backward, monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    arrays = [random((3, 5), 0), random((9000,), 1)]
    mx.eval(mx.vjp(lambda *x: OPS[name](x, impl="metal"), arrays, [mx.array(1.0)]))
    assert launched == ["metal"] * (3 + backward)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", OPS)
def test_second_derivative(name, impl):
    x, mul = random((3, 40), 0), mx.array(1.7)

    def first(function):
        def loss(x, mul):
            return function(x) ** 3 * mul

        def of_gradients(x, mul):
            dx, dmul = mx.grad(loss, argnums=(0, 1))(x, mul)
            return (dx * random(dx.shape, 9)).sum() + dmul

        return mx.grad(of_gradients, argnums=(0, 1))(x, mul)

    plain = {"sum": mx.sum, "sum_squares": lambda x: (x * x).sum()}[name]
    for a, b in zip(first(lambda x: OPS[name](x, impl=impl)), first(plain), strict=True):
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", OPS)
def test_in_a_checkpoint(name, impl):
    def loss(x):
        return OPS[name](mx.tanh(x), impl=impl) ** 2

    x = random((3, 40), 0)
    assert mx.array_equal(mx.grad(mx.checkpoint(loss))(x), mx.grad(loss)(x))


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formula, with what the kernels ask of their inputs."""

    def forward(engine, arrays, squares):
        assert engine == "metal"
        assert all(each.ndim == 2 and each.shape[0] == arrays[0].shape[0] for each in arrays)
        return reference.total(arrays, squares)

    def backward(engine, x, dtotal):
        assert engine == "metal"
        assert dtotal.shape == x.shape[:1]
        return reference.gradients((x,), dtotal, True)[0]

    monkeypatch.setattr(op, "_forward", forward)
    monkeypatch.setattr(op, "_backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)


def functions(name, impl):
    """The op of two arrays, and the same in plain MLX."""

    def plain(x, y):
        return x.sum() + y.sum() if name == "sum" else (x * x).sum() + (y * y).sum()

    return lambda x, y: OPS[name]([x, y], impl=impl), plain


@pytest.mark.usefixtures("lazy_kernels")
@pytest.mark.parametrize("impl", ["metal", "reference"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1), (1, 0)], ids=str)
def test_vmap_gradient_of_vmap_and_vmap_of_gradient(axes, name, impl):
    shapes = [(3, 5) if axis is None else (4, 3, 5) if axis == 0 else (3, 4, 5) for axis in axes]
    arrays = [random(shape, seed) for seed, shape in enumerate(shapes)]

    def mapped(function):
        return mx.vmap(function, in_axes=axes)(*arrays)

    def of_vmap(function):
        return mx.grad(lambda *x: (mx.vmap(function, in_axes=axes)(*x) ** 3).sum(), argnums=(0, 1))(*arrays)

    def vmap_of(function):
        return mx.vmap(mx.grad(lambda *x: function(*x) ** 3, argnums=(0, 1)), in_axes=axes)(*arrays)

    found, plain = functions(name, impl)
    assert_close(mapped(found), mapped(plain))
    for transformed in (of_vmap, vmap_of):
        for a, b in zip(transformed(found), transformed(plain), strict=True):
            assert_close(a, b)


@pytest.mark.usefixtures("lazy_kernels")
@pytest.mark.parametrize("impl", ["metal", "reference"])
@pytest.mark.parametrize("name", OPS)
def test_compiled_function(name, impl):
    found, plain = functions(name, impl)
    arrays = random((3, 40), 0), random((5000,), 1)
    compiled = mx.compile(mx.value_and_grad(lambda *x: found(*x) ** 3, argnums=(0, 1)))
    want = mx.value_and_grad(lambda *x: plain(*x) ** 3, argnums=(0, 1))(*arrays)
    value, gradients = compiled(*arrays)
    assert_close(value, want[0], 1e-4)
    for a, b in zip(gradients, want[1], strict=True):
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("squares", [False, True], ids=["sum", "sum_squares"])
def test_kernels_take_batches(squares):
    arrays = (random((3, 41), 0), random((3, 5000), 1))
    assert_close(op._forward("emulator", arrays, squares), reference.total(arrays, squares))
    dtotal = random((3,), 2)
    assert_close(op._backward("emulator", arrays[0], dtotal), reference.gradients(arrays[:1], dtotal, True)[0])
