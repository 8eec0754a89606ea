"""What callers of layer_norm see: dtypes, errors, engines, vmap, second derivatives, checkpoints, compiling."""

from forge_mlx.kernels.norms import layer_norm, reference
from forge_mlx.kernels.norms import layer_norm_op as op
from forge_mlx.metal.engine import use_engine
import mlx.core as mx
from norm_proofs import assert_all_close, assert_close, launched_engines, random, second_derivative
import pytest

FUNCTIONS = {"op": layer_norm, "reference": reference.layer_norm}
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
FEW_DTYPES = [(F16, BF16, F32), (BF16, F32, F32), (F32, F16, F16), (BF16, None, F32), (BF16, BF16, None)]
DTYPES = [*FEW_DTYPES, (F16, F16, F16), (BF16, BF16, BF16), (BF16, BF16, F32), (F16, None, None), (F32, None, BF16)]


@pytest.mark.parametrize(
    ("impl", "dtypes"),
    [("reference", dtypes) for dtypes in DTYPES] + [("emulator", dtypes) for dtypes in FEW_DTYPES],
    ids=str,
)
def test_dtypes_are_those_of_mx_fast(impl, dtypes):
    x, *weights = (
        None if dtype is None else random(shape, seed, dtype)
        for seed, (shape, dtype) in enumerate(zip([(8, 9), (9,), (9,)], dtypes, strict=True))
    )
    want = mx.fast.layer_norm(x, *weights, 1e-5).dtype
    assert layer_norm(x, *weights, impl=impl).dtype == want
    assert reference.layer_norm(x, *weights).dtype == want

    def function(x, *given):
        rest = iter(given)
        return layer_norm(x, *(None if each is None else next(rest) for each in weights), impl=impl)

    primals = [x, *(each for each in weights if each is not None)]
    _, gradients = mx.vjp(function, primals, [mx.ones(x.shape, want)])
    assert [each.dtype for each in gradients] == [each.dtype for each in primals]


X = mx.zeros((2, 3))
# Mistake: arguments, options, message.
MISTAKES = {
    "x is an integer": (
        (X.astype(mx.int32),),
        {},
        r"\[layer_norm\] x must be float32, .* but got int32. Convert it: x",
    ),
    "x has no axes": ((X[0, 0],), {}, r"\[layer_norm\] x must have 1 or more axes but got the shape \(\)."),
    "w is an integer": ((X, X[0].astype(mx.int8)), {}, "w must be float32, float16 or bfloat16 but got int8"),
    "b is an integer": ((X, X[0], X[0].astype(mx.int8)), {}, "b must be float32, float16 or bfloat16 but got int8"),
    "w is too long": ((X, mx.zeros((4,))), {}, r"w must have the shape \(3,\), the last axis of x, but got \(4,\)"),
    "b is too long": ((X, None, mx.zeros((4,))), {}, r"b must have the shape \(3,\), the last axis of x, but got"),
    "b is a matrix": ((X, X[0], X[:1]), {}, r"b must have the shape \(3,\)"),
    "eps is negative": ((X,), {"eps": -1e-5}, "eps must be a finite number of 0 or more but got -1e-05"),
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
        layer_norm(X, impl="emulater")


def test_cuda_raises_until_it_is_built():
    with pytest.raises(RuntimeError, match=r"\[layer_norm\] engine cuda cannot run"):
        layer_norm(X, impl="cuda")


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0,), (2, 0, 3)])
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_empty_input_gives_an_empty_result_and_zero_gradients(shape, impl):
    x, w, b = mx.zeros(shape), mx.ones(shape[-1:]), mx.ones(shape[-1:])
    (y,), gradients = mx.vjp(lambda *inputs: layer_norm(*inputs, impl=impl), [x, w, b], [mx.zeros(shape)])
    assert y.shape == gradients[0].shape == shape
    assert gradients[1].tolist() == gradients[2].tolist() == [0] * shape[-1]


def test_on_a_cpu_automatic_is_the_formula():
    x, w, b = random((4, 40), 0), random((40,), 1), random((40,), 2)
    assert mx.array_equal(layer_norm(x, w, b, 1e-3), reference.layer_norm(x, w, b, 1e-3))
    assert mx.allclose(layer_norm(x, w, b, 1e-3), mx.fast.layer_norm(x, w, b, 1e-3), rtol=1e-5, atol=1e-6)


def test_use_engine_reaches_the_kernels(monkeypatch):
    ran = []
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    with use_engine("emulator"):
        layer_norm(random((2, 8), 0))
    assert ran == ["emulator"]


@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_every_launch_is_on_the_engine_that_was_asked_for(columns, monkeypatch):
    x, w, b = random((3, columns), 0), random((columns,), 1), random((columns,), 2)
    launched = launched_engines(monkeypatch, lambda *inputs: layer_norm(*inputs, impl="metal").sum(), x, w, b)
    # Forward, backward (two for long rows), and one sum for dw and db together.
    assert launched == ["metal"] * (4 if columns > 4096 else 3)


@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16)], ids=str)
def test_dw_and_db_of_two_dtypes_are_each_rounded_once(dtypes):
    x, dy = random((6, 40), 0), random((6, 40), 3)
    w, b = (random((40,), seed, dtype) for seed, dtype in enumerate(dtypes, 1))
    _, got = mx.vjp(lambda *inputs: layer_norm(*inputs, impl="emulator"), [x, w, b], [dy])
    _, want = mx.vjp(lambda *inputs: layer_norm(*inputs, impl="emulator"), [x, w, b.astype(F32)], [dy])
    assert mx.array_equal(got[1], want[1])
    assert mx.array_equal(got[2], want[2].astype(dtypes[1]))


GIVEN = {"w-b": 3, "w": 2, "neither": 1}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_second_derivative_is_that_of_the_formula(impl, given):
    arguments = [random((3, 40), 0), random((40,), 1), random((40,), 2)][: GIVEN[given]]
    got = second_derivative(lambda *inputs: layer_norm(*inputs, eps=0.1, impl=impl), *arguments)
    want = second_derivative(lambda *inputs: reference.layer_norm(*inputs, eps=0.1), *arguments)
    # b does not act on the gradients of x and w but through y: it has a second derivative too.
    assert all(each.any() for each in want)
    assert_all_close(got, want, 1e-4)


@pytest.mark.parametrize("output", [1, 2], ids=["mean", "s"])
@pytest.mark.parametrize("columns", [40, 264, 4104])
def test_cotangents_of_mean_and_s_are_used(columns, output):
    x, w, b, cotangent = random((1, 5, columns), 0), random((1, columns), 1), random((1, columns), 2), random((1, 5), 3)
    normalise = op._normalise("emulator", 0.1, True, True)
    _, got = mx.vjp(lambda *inputs: normalise(*inputs)[output], [x, w, b], [cotangent])
    _, want = mx.vjp(lambda *inputs: reference.layer_norm_forward(*inputs, 0.1)[output], [x, w, b], [cotangent])
    assert_close(got[0], want[0])
    assert not got[1].any()
    assert not got[2].any()


def test_kernels_in_a_checkpoint():
    arguments = random((3, 40), 0), random((40,), 1), random((40,), 2)

    def loss(*inputs):
        return (layer_norm(*inputs, impl="emulator") ** 2).sum()

    got = mx.grad(mx.checkpoint(loss), argnums=(0, 1, 2))(*arguments)
    for a, b in zip(got, mx.grad(loss, argnums=(0, 1, 2))(*arguments), strict=True):
        assert mx.array_equal(a, b)


@pytest.fixture(params=["metal", "reference"])
def lazy(request, monkeypatch):
    """layer_norm on engines that are lazy: the reference, and a GPU's, where the formula stands in for the kernels.

    It asks of its inputs what the kernels do.
    """

    def check(x, w, b, weighted, biased):
        assert x.ndim == 3
        weights = (x.shape[0], x.shape[2])
        assert w.shape == (weights if weighted else w.shape)
        assert b.shape == (weights if biased else b.shape)
        return w if weighted else None, b if biased else None

    def forward(engine, x, w, b, eps, weighted, biased):
        assert engine == "metal"
        return reference.layer_norm_forward(x, *check(x, w, b, weighted, biased), eps)

    def backward(engine, x, w, b, mean, s, dy, dmean, ds, *, weighted, biased):
        assert engine == "metal"
        assert {each.shape for each in (mean, s, dmean, ds)} == {x.shape[:2]}
        assert dy.shape == x.shape
        return reference.layer_norm_backward(x, *check(x, w, b, weighted, biased), mean, s, dy, dmean, ds)

    monkeypatch.setattr(op, "_forward", forward)
    monkeypatch.setattr(op, "_backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return lambda *arguments: layer_norm(*arguments, eps=0.1, impl=request.param)


def plain(*arguments):
    return reference.layer_norm(*arguments, eps=0.1)


W, B = random((5,), 1), random((5,), 2)
# What is mapped over which axis; None: shared.
MAPPED = {
    "x": ((random((4, 3, 5), 0), W, B), (0, None, None)),
    "x over its last axis": ((random((3, 5, 4), 0), W, B), (2, None, None)),
    "w": ((random((3, 5), 0), random((4, 5), 1), B), (None, 0, None)),
    "b": ((random((3, 5), 0), W, random((4, 5), 2)), (None, None, 0)),
    "all": ((random((3, 4, 5), 0), random((5, 4), 1), random((4, 5), 2)), (1, 1, 0)),
    "x without w and b": ((random((4, 3, 5), 0),), (0,)),
    "rows of one axis": ((random((4, 5), 0), W, B), (0, None, None)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name, lazy):
    arguments, axes = MAPPED[name]
    assert_close(mx.vmap(lazy, in_axes=axes)(*arguments), mx.vmap(plain, in_axes=axes)(*arguments))


@pytest.mark.parametrize("name", MAPPED)
def test_gradient_of_vmap_and_vmap_of_gradient(name, lazy):
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
        got, want = transformed(lazy), transformed(plain)
        assert_all_close(*((each,) if isinstance(each, mx.array) else each for each in (got, want)))


def test_compiled_function(lazy):
    arguments = random((3, 40), 0), random((40,), 1), random((40,), 2)

    def gradients(function):
        return mx.grad(lambda *inputs: (function(*inputs) ** 3).sum(), argnums=(0, 1, 2))

    assert_all_close(mx.compile(gradients(lazy))(*arguments), gradients(plain)(*arguments))


@pytest.mark.parametrize(
    ("columns", "weighted", "biased"),
    [
        *((columns, True, True) for columns in (40, 264, 4104)),
        (40, True, False),
        (264, False, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((264, True, False), (4104, True, False), (40, False, True), (4104, False, True))
        ),
    ],
)
def test_kernels_take_batches_with_weights_of_their_own(columns, weighted, biased):
    x, dy = random((3, 5, columns), 0), random((3, 5, columns), 1)
    w, b = random((3, columns), 2), random((3, columns), 3)
    cotangents = dy, random((3, 5), 4), random((3, 5), 5)
    given = w if weighted else None, b if biased else None
    y, mean, s = op._forward("emulator", x, w, b, 0.1, weighted, biased)
    got = op._backward("emulator", x, w, b, mean, s, *cotangents, weighted=weighted, biased=biased)
    assert_all_close((y, mean, s), reference.layer_norm_forward(x, *given, 0.1))
    want = reference.layer_norm_backward(x, *given, mean, s, *cotangents)
    assert [each is None for each in got] == [each is None for each in want]
    assert_all_close(*([each for each in arrays if each is not None] for arrays in (got, want)))
