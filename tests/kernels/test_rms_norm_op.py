"""What callers of rms_norm see: dtypes, errors, engines, vmap, second derivatives, checkpoints, compiled functions."""

from forge_mlx import kernels
from forge_mlx.kernels.norms import reference
from forge_mlx.kernels.norms import rms_norm_op as op
from forge_mlx.metal.engine import use_engine
import mlx.core as mx
from norm_proofs import assert_close, launched_engines, random, second_derivative
import pytest

FUNCTIONS = {"op": kernels.rms_norm, "reference": reference.rms_norm}


DTYPES = [(x, w) for x in (mx.float32, mx.float16, mx.bfloat16) for w in (mx.float32, mx.float16, mx.bfloat16, None)]
FEW_DTYPES = [(mx.float16, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.float32, mx.float16), (mx.bfloat16, None)]


@pytest.mark.parametrize(
    ("impl", "x_dtype", "w_dtype"),
    [("reference", *dtypes) for dtypes in DTYPES] + [("emulator", *dtypes) for dtypes in FEW_DTYPES],
    ids=str,
)
def test_dtypes_are_those_of_mx_fast(impl, x_dtype, w_dtype):
    x, w = random((8, 9), 0, x_dtype), None if w_dtype is None else random((9,), 1, w_dtype)
    want = mx.fast.rms_norm(x, w, 1e-5).dtype
    assert kernels.rms_norm(x, w, impl=impl).dtype == want
    assert reference.rms_norm(x, w).dtype == want
    primals = [x] if w is None else [x, w]
    _, gradients = mx.vjp(lambda *inputs: kernels.rms_norm(*inputs, impl=impl), primals, [mx.ones(x.shape, want)])
    assert [each.dtype for each in gradients] == [each.dtype for each in primals]


X = mx.zeros((2, 3))
# Mistake: arguments, options, message.
MISTAKES = {
    "x is an integer": ((X.astype(mx.int32),), {}, r"\[rms_norm\] x must be float32, .* but got int32. Convert it: x"),
    "x has no axes": ((X[0, 0],), {}, r"\[rms_norm\] x must have 1 or more axes but got the shape \(\)."),
    "w is an integer": ((X, X[0].astype(mx.int8)), {}, "w must be float32, float16 or bfloat16 but got int8"),
    "w is too long": ((X, mx.zeros((4,))), {}, r"w must have the shape \(3,\), the last axis of x, but got \(4,\)"),
    "w is a matrix": ((X, X[:1]), {}, r"w must have the shape \(3,\)"),
    "eps is negative": ((X,), {"eps": -1e-5}, "eps must be a finite number of 0 or more but got -1e-05"),
    "eps is infinite": ((X,), {"eps": float("inf")}, "eps must be a finite number"),
    "eps is nan": ((X,), {"eps": float("nan")}, "eps must be a finite number"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    arguments, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](*arguments, **options)


def test_unknown_engine_raises():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        kernels.rms_norm(mx.zeros((2, 3)), impl="emulater")


def test_cuda_raises_until_it_is_built():
    with pytest.raises(RuntimeError, match=r"\[rms_norm\] engine cuda cannot run"):
        kernels.rms_norm(mx.zeros((2, 3)), impl="cuda")


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0,), (2, 0, 3)])
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_empty_input_gives_an_empty_result_and_zero_gradients(shape, impl):
    x, w = mx.zeros(shape), mx.ones(shape[-1:])
    y, gradients = mx.vjp(lambda x, w: kernels.rms_norm(x, w, impl=impl), [x, w], [mx.zeros(shape)])
    assert y[0].shape == gradients[0].shape == shape
    assert gradients[1].tolist() == [0] * shape[-1]


def test_on_a_cpu_automatic_is_mlxs_own_operation():
    x, w = random((4, 40), 0), random((40,), 1)
    assert mx.array_equal(kernels.rms_norm(x, w, 1e-3), mx.fast.rms_norm(x, w, 1e-3))


def test_use_engine_reaches_the_kernels(monkeypatch):
    ran = []
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    with use_engine("emulator"):
        kernels.rms_norm(random((2, 8), 0))
    assert ran == ["emulator"]


@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_every_launch_is_on_the_engine_that_was_asked_for(columns, monkeypatch):
    x, w = random((3, columns), 0), random((columns,), 1)
    launched = launched_engines(monkeypatch, lambda x, w: kernels.rms_norm(x, w, impl="metal").sum(), x, w)
    assert launched == ["metal"] * (4 if columns > 4096 else 3)


@pytest.mark.parametrize("weighted", [True, False], ids=["w", "no-w"])
def test_second_derivative_on_the_kernels(weighted):
    arguments = [random((3, 40), 0), random((40,), 1)][: 1 + weighted]
    got = second_derivative(lambda *inputs: kernels.rms_norm(*inputs, eps=0.1, impl="emulator"), *arguments)
    want = second_derivative(lambda *inputs: reference.rms_norm(*inputs, eps=0.1), *arguments)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-4)


def test_cotangent_of_the_inverse_rms_is_used():
    x, w, dr = random((1, 5, 40), 0), random((1, 40), 1), random((1, 5), 2)
    for columns in (40, 264, 4104):
        x, w = random((1, 5, columns), 0), random((1, columns), 1)
        _, got = mx.vjp(lambda x, w: op._normalise("emulator", 0.1, True)(x, w)[1], [x, w], [dr])
        _, want = mx.vjp(lambda x, w: reference.rms_norm_forward(x, w, 0.1)[1], [x, w], [dr])
        assert_close(got[0], want[0])
        assert not got[1].any()


def test_kernels_in_a_checkpoint():
    x, w = random((3, 40), 0), random((40,), 1)

    def loss(x, w):
        return (kernels.rms_norm(x, w, impl="emulator") ** 2).sum()

    got = mx.grad(mx.checkpoint(loss), argnums=(0, 1))(x, w)
    for a, b in zip(got, mx.grad(loss, argnums=(0, 1))(x, w), strict=True):
        assert mx.array_equal(a, b)


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formula, with what the kernels ask of their inputs."""

    def forward(engine, x, w, eps, weighted):
        assert engine == "metal"
        assert x.ndim == 3
        assert w.shape == ((x.shape[0], x.shape[2]) if weighted else w.shape)
        return reference.rms_norm_forward(x, w if weighted else None, eps)

    def backward(engine, x, w, r, dy, dr, weighted):
        assert engine == "metal"
        assert w.shape == ((x.shape[0], x.shape[2]) if weighted else w.shape)
        assert (r.shape, dy.shape, dr.shape) == (x.shape[:2], x.shape, x.shape[:2])
        return reference.rms_norm_backward(x, w if weighted else None, r, dy, dr)

    monkeypatch.setattr(op, "_forward", forward)
    monkeypatch.setattr(op, "rms_norm_backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)

    def call(*arguments):
        return kernels.rms_norm(*arguments, eps=0.1, impl="metal")

    return call


def plain(*arguments):
    return reference.rms_norm(*arguments, eps=0.1)


# What is mapped over which axis; None: shared.
MAPPED = {
    "x": ((random((4, 3, 5), 0), random((5,), 1)), (0, None)),
    "x over its second axis": ((random((3, 4, 5), 0), random((5,), 1)), (1, None)),
    "x over its last axis": ((random((3, 5, 4), 0), random((5,), 1)), (2, None)),
    "w": ((random((3, 5), 0), random((4, 5), 1)), (None, 0)),
    "x and w": ((random((4, 3, 5), 0), random((5, 4), 1)), (0, 1)),
    "x without w": ((random((4, 3, 5), 0),), (0,)),
    "rows of one axis": ((random((4, 5), 0), random((5,), 1)), (0, None)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name, lazy_kernels):
    arguments, axes = MAPPED[name]
    assert_close(mx.vmap(lazy_kernels, in_axes=axes)(*arguments), mx.vmap(plain, in_axes=axes)(*arguments))


@pytest.mark.parametrize("name", MAPPED)
def test_gradient_of_vmap_and_vmap_of_gradient(name, lazy_kernels):
    arguments, axes = MAPPED[name]
    numbers = tuple(range(len(arguments)))

    def of_vmap(function):
        return mx.grad(lambda *inputs: (mx.vmap(function, in_axes=axes)(*inputs) ** 3).sum(), argnums=numbers)(
            *arguments
        )

    def vmap_of(function):
        gradient = mx.grad(lambda *inputs: (function(*inputs) ** 3).sum(), argnums=numbers)
        return mx.vmap(gradient, in_axes=axes)(*arguments)

    for transformed in (of_vmap, vmap_of):
        for a, b in zip(transformed(lazy_kernels), transformed(plain), strict=True):
            assert_close(a, b)


def test_vmap_in_vmap(lazy_kernels):
    x, w = random((2, 4, 3, 5), 0), random((4, 5), 1)

    def twice(function):
        inner = mx.vmap(function, in_axes=(0, 0))
        return mx.vmap(lambda x: mx.vmap(inner, in_axes=(3, None))(mx.expand_dims(x, 3), w))(x)

    assert_close(twice(lazy_kernels), twice(plain))


def test_compiled_function(lazy_kernels):
    x, w = random((3, 40), 0), random((40,), 1)

    def gradients(function):
        return mx.grad(lambda x, w: (function(x, w) ** 3).sum(), argnums=(0, 1))

    for a, b in zip(mx.compile(gradients(lazy_kernels))(x, w), gradients(plain)(x, w), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("weighted", [True, False], ids=["w", "no-w"])
@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_kernels_take_batches_with_weights_of_their_own(columns, weighted):
    x, w, dy, dr = random((3, 5, columns), 0), random((3, columns), 1), random((3, 5, columns), 2), random((3, 5), 3)
    weight = w if weighted else None
    y, r = op._forward("emulator", x, w, 0.1, weighted)
    got = (y, r, *op.rms_norm_backward("emulator", x, w, r, dy, dr, weighted))
    want = (*reference.rms_norm_forward(x, weight, 0.1), *reference.rms_norm_backward(x, weight, r, dy, dr))
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b)
