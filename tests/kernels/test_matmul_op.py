"""What callers of matmul see: dtypes, errors, engines, vmap, second derivatives, checkpoints, compiled functions."""

from functools import partial

from forge_mlx.kernels.matmul import matmul, op, reference
from forge_mlx.kernels.matmul.tiles import VARIANTS
from forge_mlx.metal.engine import resolve, use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import random

FUNCTIONS = {"op": matmul, "reference": reference.matmul}
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def assert_close(got, want, rtol=1e-5):
    got, want = (np.array(each.astype(mx.float32), np.float64) for each in (got, want))
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def with_sum(function, **options):
    """The function of a, b and perhaps c."""
    return lambda a, b, c=None: function(a, b, accumulate=c, **options)


def second_derivative(function, *arguments):
    """Gradients of a weighted sum of the first gradients."""
    numbers = tuple(range(len(arguments)))

    def first(*arguments):
        gradients = mx.grad(lambda *inner: (function(*inner) ** 3).sum(), argnums=numbers)(*arguments)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*arguments)


@pytest.mark.parametrize("impl", ["reference", "emulator"])
@pytest.mark.parametrize(
    "dtypes",
    [
        *((dtype, dtype, None) for dtype in DTYPES),
        (mx.bfloat16, mx.float16, None),
        (mx.float16, mx.float16, mx.float32),
    ],
    ids=str,
)
def test_dtypes_are_those_of_mlx(dtypes, impl):
    shapes = [(2, 3), (3, 4), (4,)]
    primals = [mx.ones(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True) if dtype is not None]
    want = (mx.matmul(*primals) if len(primals) == 2 else mx.addmm(primals[2], *primals[:2])).dtype
    assert with_sum(reference.matmul)(*primals).dtype == want
    outputs, gradients = mx.vjp(with_sum(matmul, impl=impl), primals, [mx.ones((2, 4), want)])
    assert outputs[0].dtype == want
    assert [each.dtype for each in gradients] == [each.dtype for each in primals]


A, B = mx.zeros((2, 3)), mx.zeros((3, 4))
# Mistake: arguments, options, message.
MISTAKES = {
    "a is an integer": ((A.astype(mx.int32), B), {}, r"\[matmul\] a must be float32, .* but got int32. Convert it: a"),
    "b is an integer": ((A, B.astype(mx.int8)), {}, "b must be float32, float16 or bfloat16 but got int8"),
    "accumulate is an integer": ((A, B), {"accumulate": mx.array(1)}, "accumulate must be .* but got int32"),
    "a has one axis": ((A[0], B), {}, r"\[matmul\] a must have 2 or more axes but got the shape \(3,\)."),
    "b has one axis": ((A, B[:, 0]), {}, r"b must have 2 or more axes but got the shape \(3,\)."),
    "depths differ": ((A, A), {}, r"as many rows as op\(a\) has columns, 3, but got 2: a is \(2, 3\), b is \(2, 3\)"),
    "transposed depths differ": (
        (A, B),
        {"transpose_a": True, "transpose_b": True},
        r"columns, 2, but got 4: a is \(2, 3\) transposed, b is \(3, 4\) transposed",
    ),
    "batches differ": (
        (mx.zeros((2, 2, 3)), mx.zeros((3, 3, 4))),
        {},
        r"the batch axes of a and b must broadcast but got \(2,\) and \(3,\)",
    ),
    "accumulate does not fit": ((A, B), {"accumulate": mx.zeros((3,))}, r"the result's shape \(2, 4\) but got \(3,\)"),
    "accumulate is larger": ((A, B), {"accumulate": mx.zeros((5, 2, 4))}, r"\(2, 4\) but got \(5, 2, 4\)"),
    "accumulate has more rows": ((A[:1], B), {"accumulate": mx.zeros((2, 4))}, r"\(1, 4\) but got \(2, 4\)"),
    "variant is unknown": (
        (A, B),
        {"variant": "tile"},
        "variant must be among auto, naive, tiled, simdgroup but got 'tile'",
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    arguments, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](*arguments, **options)


@pytest.mark.parametrize("function", [reference.matmul, matmul, partial(matmul, impl="reference")])
def test_a_variant_is_not_ignored_where_no_kernel_runs(function):
    with pytest.raises(
        ValueError, match=r"variant must be \"auto\" on engine reference.* but got 'tiled', which names"
    ):
        function(A, B, variant="tiled")


def test_unknown_engine_raises():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        matmul(A, B, impl="emulater")


def test_engine_that_cannot_run_raises():
    with pytest.raises(RuntimeError, match=r"\[matmul\] engine cuda cannot run"):
        matmul(A, B, impl="cuda")


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize(
    ("a", "b", "c", "shape"),
    [
        ((0, 3), (3, 4), (4,), (0, 4)),
        ((2, 3), (3, 0), None, (2, 0)),
        ((0, 2, 3), (3, 4), (1, 1), (0, 2, 4)),
        ((2, 0), (0, 4), None, (2, 4)),
        ((2, 0), (0, 4), (2, 1), (2, 4)),
        ((5, 2, 0), (0, 4), (4,), (5, 2, 4)),
    ],
)
def test_empty_inputs_give_empty_results_or_what_is_added(a, b, c, shape, impl):
    primals = [mx.ones(each) for each in (a, b, c) if each is not None]
    (y,), gradients = mx.vjp(with_sum(matmul, impl=impl), primals, [mx.ones(shape)])
    assert y.shape == shape
    assert mx.array_equal(y, mx.full(shape, 0 if c is None else 1))
    assert [each.shape for each in gradients] == [each.shape for each in primals]
    assert not any(each.any() for each in gradients[:2])
    if c is not None:
        assert gradients[2].sum().item() == y.size


@pytest.mark.parametrize("transposed", [False, True])
def test_automatic_is_mlxs_own_product(transposed):
    a, b, c = random((4, 40), 0), random((30, 40) if transposed else (40, 30), 1), random((30,), 2)
    right = b.T if transposed else b
    assert mx.array_equal(matmul(a, b, transpose_b=transposed), mx.matmul(a, right))
    assert mx.array_equal(matmul(a, b, transpose_b=transposed, accumulate=c), mx.addmm(c, a, right))


@pytest.mark.parametrize("variant", ["auto", *VARIANTS])
def test_automatic_is_a_kernel_on_an_apple_gpu_only_for_a_named_variant(variant, monkeypatch):
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    ran = []
    monkeypatch.setattr(op, "_product", lambda engine, named, *_: ran.append((engine, named)) or (lambda *_: (A,)))
    monkeypatch.setattr(op, "_by_mlx", lambda *_: ran.append("mlx"))
    matmul(A, B, variant=variant)
    assert ran == ["mlx" if variant == "auto" else ("metal", variant)]
    assert resolve("matmul").name == "metal"


def test_use_engine_reaches_the_kernels(monkeypatch):
    launched = recorded(monkeypatch)
    with use_engine("emulator"):
        matmul(random((4, 5), 0), random((5, 6), 1))
    assert launched == [("emulator", "matmul_naive")]


def recorded(monkeypatch):
    """Engine and name of every launch; all run on the emulator."""
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append((engine, self.source.name))
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    return launched


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = recorded(monkeypatch)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    a, b, c = random((140, 64), 0), random((64, 72), 1), random((72,), 2)
    mx.eval(mx.vjp(with_sum(matmul, impl="metal"), [a, b, c], [random((140, 72), 3)]))
    names = ["matmul_simdgroup"] * 3 + ["matmul_naive", "sum_parts"]
    assert launched == [("metal", name) for name in names]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_run_on_the_variant_that_was_asked_for(variant, monkeypatch):
    launched = recorded(monkeypatch)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    mx.eval(
        mx.vjp(with_sum(matmul, variant=variant, impl="metal"), [A, B, mx.zeros((4,))], [mx.zeros((2, 4))]),
    )
    assert launched == [("metal", f"matmul_{variant}")] * 4


def test_gradient_of_a_whole_accumulate_is_no_launch(monkeypatch):
    launched = recorded(monkeypatch)
    dy = random((2, 4), 0)
    _, gradients = mx.vjp(with_sum(matmul, impl="emulator"), [A, B, mx.zeros((1, 2, 4))[0]], [dy])
    assert launched == [("emulator", "matmul_naive")] * 3
    assert mx.array_equal(gradients[2], dy)


SHAPES = {
    "matrices": ((6, 5), (5, 4)),
    "bias": ((2, 6, 5), (5, 4), (4,)),
    "a repeated": ((6, 5), (3, 5, 4), (3, 6, 4)),
    "column": ((2, 6, 5), (2, 5, 4), (6, 1)),
    "c repeated": ((2, 6, 5), (2, 5, 4), (6, 4)),
    "one row": ((2, 1, 5), (2, 5, 4), (1, 4)),
    "number": ((6, 5), (5, 4), ()),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("impl", ["reference", "emulator"])
def test_gradients_and_second_derivatives(name, impl):
    arguments = [random(shape, seed) for seed, shape in enumerate(SHAPES[name])]
    own, plain = with_sum(matmul, impl=impl), with_sum(reference.matmul)
    numbers = tuple(range(len(arguments)))
    gradients = [
        mx.grad(lambda *inner, f=function: (f(*inner) ** 3).sum(), argnums=numbers)(*arguments)
        for function in (own, plain)
    ]
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, 1e-4)
    for a, b in zip(second_derivative(own, *arguments), second_derivative(plain, *arguments), strict=True):
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("impl", ["reference", "emulator"])
def test_kernels_in_a_checkpoint(impl):
    arguments = [random((3, 40), 0), random((40, 5), 1), random((5,), 2)]

    def loss(*inputs):
        return (with_sum(matmul, impl=impl)(*inputs) ** 2).sum()

    got = mx.grad(mx.checkpoint(loss), argnums=(0, 1, 2))(*arguments)
    for a, b in zip(got, mx.grad(loss, argnums=(0, 1, 2))(*arguments), strict=True):
        assert mx.array_equal(a, b)


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formula, with what the kernels ask of their inputs."""

    def product(engine, variant, a, b, c, *, transpose_a, transpose_b, batch, dtype):
        assert (engine, variant) == ("metal", None)
        assert max(a.ndim, b.ndim, 2 if c is None else c.ndim) <= len(batch) + 2
        y = reference.forward(a, b, c, transpose_a, transpose_b, mx.float32)
        shape = (*batch, *y.shape[-2:])
        assert c is None or (c.shape[-1] == y.shape[-1] and c.shape[-2] in (1, y.shape[-2]))
        if y.size < np.prod(shape):
            y = mx.broadcast_to(y, shape)
        summed = [axis for axis, size in enumerate(batch) if size == 1 != y.shape[axis]]
        return (mx.sum(y, axis=summed, keepdims=True) if summed else y).reshape(shape).astype(dtype)

    op._product.cache_clear()
    monkeypatch.setattr(op, "product", product)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    yield with_sum(matmul, transpose_b=True, impl="metal")
    op._product.cache_clear()


plain = with_sum(reference.matmul, transpose_b=True)
# What is mapped over which axis; None: shared.
MAPPED = {
    "a": (((4, 3, 5), (6, 5)), (0, None)),
    "a over its last axis": (((3, 5, 4), (6, 5), (6,)), (2, None, None)),
    "b": (((3, 5), (4, 6, 5)), (None, 0)),
    "a and b": (((4, 3, 5), (6, 4, 5)), (0, 1)),
    "a of batches": (((4, 2, 3, 5), (6, 5), (6,)), (0, None, None)),
    "b under batches of a": (((2, 3, 5), (6, 4, 5), (2, 3, 6)), (None, 1, None)),
    "a and a bias": (((4, 3, 5), (6, 5), (4, 6)), (0, None, 0)),
    "everything": (((4, 2, 3, 5), (4, 6, 5), (4, 2, 3, 6)), (0, 0, 0)),
    "accumulate alone": (((2, 3, 5), (6, 5), (4, 6)), (None, None, 0)),
    "a column": (((4, 3, 5), (6, 5), (3, 1)), (0, None, None)),
}


def arrays(name):
    shapes, axes = MAPPED[name]
    return [random(shape, seed) for seed, shape in enumerate(shapes)], axes


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name, lazy_kernels):
    arguments, axes = arrays(name)
    assert_close(mx.vmap(lazy_kernels, in_axes=axes)(*arguments), mx.vmap(plain, in_axes=axes)(*arguments))


def transformed(function, arguments, axes):
    """The gradient of vmap, then vmap of the gradient."""
    numbers = tuple(range(len(arguments)))
    of_vmap = mx.grad(lambda *inputs: (mx.vmap(function, in_axes=axes)(*inputs) ** 3).sum(), argnums=numbers)
    gradient = mx.grad(lambda *inputs: (function(*inputs) ** 3).sum(), argnums=numbers)
    return [*of_vmap(*arguments), *mx.vmap(gradient, in_axes=axes)(*arguments)]


@pytest.mark.parametrize("name", MAPPED)
def test_gradient_of_vmap_and_vmap_of_gradient(name, lazy_kernels):
    arguments, axes = arrays(name)
    got, want = (transformed(function, arguments, axes) for function in (lazy_kernels, plain))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("name", [name for name in MAPPED if name != "accumulate alone"])
def test_vmap_on_the_reference(name):
    arguments, axes = arrays(name)
    own = with_sum(matmul, transpose_b=True)
    assert_close(mx.vmap(own, in_axes=axes)(*arguments), mx.vmap(plain, in_axes=axes)(*arguments))
    for a, b in zip(*(transformed(function, arguments, axes) for function in (own, plain)), strict=True):
        assert_close(a, b, 1e-4)


def test_vmap_over_accumulate_alone_raises_on_the_reference():
    arguments, axes = arrays("accumulate alone")
    with pytest.raises(ValueError, match="addmm"):
        mx.vmap(with_sum(matmul, transpose_b=True), in_axes=axes)(*arguments)


def test_vmap_over_nothing(lazy_kernels):
    arguments, axes = [mx.zeros((0, 3, 5)), random((6, 5), 1), random((6,), 2)], (0, None, None)
    assert mx.vmap(lazy_kernels, in_axes=axes)(*arguments).shape == (0, 3, 6)


def test_vmap_in_vmap(lazy_kernels):
    a, b = random((2, 4, 3, 5), 0), random((4, 6, 5), 1)

    def twice(function):
        return mx.vmap(mx.vmap(function, in_axes=(0, 0)), in_axes=(0, None))(a, b)

    assert_close(twice(lazy_kernels), twice(plain))


def test_compiled_function(lazy_kernels):
    arguments = [random((3, 40), 0), random((6, 40), 1), random((6,), 2)]

    def gradients(function):
        return mx.grad(lambda *inputs: (function(*inputs) ** 3).sum(), argnums=(0, 1, 2))

    for own in (lazy_kernels, with_sum(matmul, transpose_b=True)):
        for a, b in zip(mx.compile(gradients(own))(*arguments), gradients(plain)(*arguments), strict=True):
            assert_close(a, b)
