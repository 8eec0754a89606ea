"""What callers of add_rms_norm see: dtypes, errors, engines, vmap, second derivatives, checkpoints, compiling."""

from forge_mlx.kernels.norms import add_rms_norm, reference
from forge_mlx.kernels.norms import add_rms_norm_op as op
from forge_mlx.metal.engine import use_engine
import mlx.core as mx
from norm_proofs import assert_all_close, assert_close, launched_engines, random, second_derivative
import pytest

FUNCTIONS = {"op": add_rms_norm, "reference": reference.add_rms_norm}
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
FEW_DTYPES = [(F16, F16, BF16), (BF16, F32, BF16), (F16, BF16, F16)]
DTYPES = [*FEW_DTYPES, (F32, F32, F32), (F16, F16, F16), (BF16, BF16, F32), (F32, BF16, None), (BF16, BF16, None)]


@pytest.mark.parametrize(
    ("impl", "dtypes"),
    [("reference", dtypes) for dtypes in DTYPES] + [("emulator", dtypes) for dtypes in FEW_DTYPES],
    ids=str,
)
def test_dtypes_are_those_of_a_sum_and_mx_fast(impl, dtypes):
    arrays = [
        random(shape, seed, dtype)
        for seed, (shape, dtype) in enumerate(zip([(8, 9), (8, 9), (9,)], dtypes, strict=True))
        if dtype is not None
    ]
    r = arrays[0] + arrays[1]
    want = [mx.fast.rms_norm(r, arrays[2] if len(arrays) > 2 else None, 1e-5).dtype, r.dtype]
    assert [each.dtype for each in add_rms_norm(*arrays, impl=impl)] == want
    assert [each.dtype for each in reference.add_rms_norm(*arrays)] == want
    cotangents = [mx.ones(r.shape, dtype) for dtype in want]
    _, gradients = mx.vjp(lambda *inputs: add_rms_norm(*inputs, impl=impl), arrays, cotangents)
    assert [each.dtype for each in gradients] == [each.dtype for each in arrays]


X = mx.zeros((2, 3))
NAME = r"\[add_rms_norm\] "
# Mistake: arguments, options, message.
MISTAKES = {
    "x is an integer": ((X.astype(mx.int32), X), {}, f"{NAME}x must be float32, .* but got int32. Convert it: x"),
    "residual is an integer": ((X, X.astype(mx.int32)), {}, f"{NAME}residual must be float32, .* but got int32"),
    "x has no axes": ((X[0, 0], X[0, 0]), {}, rf"{NAME}x must have 1 or more axes but got the shape \(\)."),
    "residual is one row": ((X, X[0]), {}, rf"{NAME}residual must have the shape \(2, 3\), that of x, but got \(3,\)"),
    "residual is longer": ((X, mx.zeros((3, 3))), {}, rf"{NAME}residual must have the shape \(2, 3\), that of x"),
    "w is an integer": ((X, X, X[0].astype(mx.int8)), {}, f"{NAME}w must be float32, float16 or bfloat16 but got int8"),
    "w is too long": ((X, X, mx.zeros((4,))), {}, rf"{NAME}w must have the shape \(3,\), the last axis of x, but got"),
    "eps is negative": ((X, X), {"eps": -1e-5}, f"{NAME}eps must be a finite number of 0 or more but got -1e-05"),
    "eps is nan": ((X, X), {"eps": float("nan")}, f"{NAME}eps must be a finite number"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    arguments, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](*arguments, **options)


def test_unknown_engine_raises():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        add_rms_norm(X, X, impl="emulater")


def test_cuda_raises_until_it_is_built():
    with pytest.raises(RuntimeError, match=rf"{NAME}engine cuda cannot run"):
        add_rms_norm(X, X, impl="cuda")


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0,), (2, 0, 3)])
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_empty_input_gives_an_empty_result_and_zero_gradients(shape, impl):
    x, residual, w = mx.zeros(shape), mx.zeros(shape, BF16), mx.ones(shape[-1:], F16)
    cotangents = [mx.zeros(shape), mx.zeros(shape)]
    results, gradients = mx.vjp(lambda *inputs: add_rms_norm(*inputs, impl=impl), [x, residual, w], cotangents)
    assert {each.shape for each in (*results, *gradients[:2])} == {shape}
    assert [each.dtype for each in results] == [F32, F32]
    assert gradients[2].tolist() == [0] * shape[-1]


def test_on_a_cpu_automatic_is_a_sum_and_mlxs_own_operation():
    x, residual, w = random((4, 40), 0), random((4, 40), 1), random((40,), 2)
    y, r = add_rms_norm(x, residual, w, 1e-3)
    assert mx.array_equal(r, x + residual)
    assert mx.array_equal(y, mx.fast.rms_norm(x + residual, w, 1e-3))


def test_use_engine_reaches_the_kernels(monkeypatch):
    ran = []
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    with use_engine("emulator"):
        add_rms_norm(random((2, 8), 0), random((2, 8), 1))
    assert ran == ["emulator"]


@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_every_launch_is_on_the_engine_that_was_asked_for(columns, monkeypatch):
    arguments = random((3, columns), 0), random((3, columns), 1), random((columns,), 2)

    def loss(*inputs):
        y, r = add_rms_norm(*inputs, impl="metal")
        return (y * r).sum()

    # Forward, backward (two for long rows), and the sum of dw.
    assert launched_engines(monkeypatch, loss, *arguments) == ["metal"] * (4 if columns > 4096 else 3)


@pytest.mark.parametrize("unused", ["y", "r"])
def test_a_result_that_nobody_uses_has_a_gradient_of_0(unused):
    arguments = random((3, 40), 0), random((3, 40), 1), random((40,), 2)

    def gradients(function):
        return mx.grad(lambda *inputs: (function(*inputs)[unused == "y"] ** 3).sum(), argnums=(0, 1, 2))(*arguments)

    got = gradients(lambda *inputs: add_rms_norm(*inputs, impl="emulator"))
    assert_all_close(got, gradients(reference.add_rms_norm))
    assert mx.array_equal(got[0], got[1])
    assert got[2].any() == (unused == "r")


@pytest.mark.parametrize("weighted", [True, False], ids=["w", "no-w"])
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_second_derivative_is_that_of_the_formula(impl, weighted):
    arguments = [random((3, 40), 0), random((3, 40), 1), random((40,), 2)][: 2 + weighted]
    got = second_derivative(lambda *inputs: add_rms_norm(*inputs, eps=0.1, impl=impl), *arguments)
    want = second_derivative(lambda *inputs: reference.add_rms_norm(*inputs, eps=0.1), *arguments)
    assert_all_close(got, want, 1e-4)


def test_cotangent_of_the_inverse_rms_is_used():
    for columns in (40, 264, 4104):
        rows = [random((1, 5, columns), seed) for seed in (0, 1)]
        arguments, ds = [*rows, random((1, columns), 2)], random((1, 5), 3)
        _, got = mx.vjp(lambda *inputs: op._normalise("emulator", 0.1, True)(*inputs)[2], arguments, [ds])
        _, want = mx.vjp(lambda *inputs: reference.add_rms_norm_forward(*inputs, 0.1)[2], arguments, [ds])
        assert_all_close(got[:2], want[:2])
        assert not got[2].any()


def test_kernels_in_a_checkpoint():
    arguments = random((3, 40), 0), random((3, 40), 1), random((40,), 2)

    def loss(*inputs):
        y, r = add_rms_norm(*inputs, impl="emulator")
        return (y * y * r).sum()

    got = mx.grad(mx.checkpoint(loss), argnums=(0, 1, 2))(*arguments)
    for a, b in zip(got, mx.grad(loss, argnums=(0, 1, 2))(*arguments), strict=True):
        assert mx.array_equal(a, b)


@pytest.fixture(params=["metal", "reference"])
def lazy(request, monkeypatch):
    """add_rms_norm on engines that are lazy: the reference, and a GPU's, where the formula stands in for the kernels.

    It asks of its inputs what the kernels do.
    """

    def forward(engine, x, residual, w, eps, weighted):
        assert engine == "metal"
        assert x.ndim == 3
        assert residual.shape == x.shape
        assert w.shape == ((x.shape[0], x.shape[2]) if weighted else w.shape)
        return reference.add_rms_norm_forward(x, residual, w if weighted else None, eps)

    def backward(engine, r, w, s, dy, ds, weighted, dr):
        assert engine == "metal"
        assert w.shape == ((r.shape[0], r.shape[2]) if weighted else w.shape)
        assert (s.shape, dy.shape, ds.shape, dr.shape) == (r.shape[:2], r.shape, r.shape[:2], r.shape)
        return reference.add_rms_norm_backward(r, r, w if weighted else None, r, s, dy, dr, ds)[1:]

    monkeypatch.setattr(op, "_forward", forward)
    monkeypatch.setattr(op, "rms_norm_backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return lambda *arguments: add_rms_norm(*arguments, eps=0.1, impl=request.param)


def plain(*arguments):
    return reference.add_rms_norm(*arguments, eps=0.1)


ROWS, W = [random((3, 5), seed) for seed in (0, 1)], random((5,), 2)
# What is mapped over which axis; None: shared.
MAPPED = {
    "x and residual": ((random((4, 3, 5), 0), random((3, 4, 5), 1), W), (0, 1, None)),
    "x": ((random((3, 5, 4), 0), ROWS[1], W), (2, None, None)),
    "residual": ((ROWS[0], random((4, 3, 5), 1), W), (None, 0, None)),
    "w": ((*ROWS, random((4, 5), 2)), (None, None, 0)),
    "all": ((random((4, 3, 5), 0), random((3, 4, 5), 1), random((5, 4), 2)), (0, 1, 1)),
    "x and residual without w": ((random((4, 3, 5), 0), random((4, 3, 5), 1)), (0, 0)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name, lazy):
    arguments, axes = MAPPED[name]
    assert_all_close(*(mx.vmap(each, in_axes=axes)(*arguments) for each in (lazy, plain)))


@pytest.mark.parametrize("name", MAPPED)
def test_gradient_of_vmap_and_vmap_of_gradient(name, lazy):
    arguments, axes = MAPPED[name]
    numbers = tuple(range(len(arguments)))

    def loss(results):
        y, r = results
        return (y**3 + y * r).sum()

    def of_vmap(function):
        return mx.grad(lambda *inputs: loss(mx.vmap(function, in_axes=axes)(*inputs)), argnums=numbers)(*arguments)

    def vmap_of(function):
        gradient = mx.grad(lambda *inputs: loss(function(*inputs)), argnums=numbers)
        return mx.vmap(gradient, in_axes=axes)(*arguments)

    for transformed in (of_vmap, vmap_of):
        assert_all_close(transformed(lazy), transformed(plain))


def test_compiled_function(lazy):
    arguments = random((3, 40), 0), random((3, 40), 1), random((40,), 2)

    def gradients(function):
        def loss(*inputs):
            y, r = function(*inputs)
            return (y**3 + y * r).sum()

        return mx.grad(loss, argnums=(0, 1, 2))

    assert_all_close(mx.compile(gradients(lazy))(*arguments), gradients(plain)(*arguments))


@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_kernels_take_batches_with_weights_of_their_own(columns):
    x, residual = (random((3, 5, columns), seed) for seed in (0, 1))
    w = random((3, columns), 2)
    cotangents = [random((3, 5, columns), 3), random((3, 5, columns), 4), random((3, 5), 5)]
    outputs, got = mx.vjp(op._normalise("emulator", 0.1, True), [x, residual, w], cotangents)
    want = reference.add_rms_norm_forward(x, residual, w, 0.1)
    assert_all_close(outputs, want)
    assert_all_close(got, reference.add_rms_norm_backward(x, residual, w, *want[1:], *cotangents))
    assert_close(outputs[1], x + residual)
