"""What callers of linear_cross_entropy see: dtypes, errors, engines, vmap, second derivatives, compiling."""

from contextlib import nullcontext
from functools import partial

from forge_mlx.kernels.cross_entropy import cross_entropy
from forge_mlx.kernels.cross_entropy import op as cross_entropy_op
from forge_mlx.kernels.cross_entropy import reference as cross_entropy_reference
from forge_mlx.kernels.linear_cross_entropy import functions, gradients_in_forward, linear_cross_entropy, reference
from forge_mlx.kernels.linear_cross_entropy.forward_gradients import chosen_variables
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

FUNCTIONS = {"op": linear_cross_entropy, "reference": reference.linear_cross_entropy}
ALL = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01}
# Whose gradients the forward computes.
EARLY = {"none": nullcontext, "all": gradients_in_forward, "hidden": partial(gradients_in_forward, weight=False)}


def some_targets(shape, vocabulary, seed=5):
    """Every third is ignored, from the second on."""
    targets = np.random.default_rng(seed).integers(0, vocabulary, shape).astype(np.int32)
    targets[..., 1::3] = -100
    return mx.array(targets)


def loss_of(early="none", **options):
    """A loss of hidden, weight, bias and weights."""

    def loss(hidden, weight, bias, weights, targets=None):
        targets = some_targets(hidden.shape[:-1], weight.shape[0]) if targets is None else targets
        with EARLY[early]():
            return linear_cross_entropy(
                hidden, weight, targets, **{"bias": bias, "weights": weights, "chunk": 3} | options
            )

    return loss


def plain_loss(**options):
    """The same of whole logits."""

    def loss(hidden, weight, bias, weights, targets=None):
        targets = some_targets(hidden.shape[:-1], weight.shape[0]) if targets is None else targets
        return cross_entropy(hidden @ weight.T + bias, targets, weights=weights, impl="reference", **options)

    return loss


def some_arguments(rows=(7,), columns=6, vocabulary=11):
    shapes = ((*rows, columns), (vocabulary, columns), (vocabulary,))
    arrays = [random(shape, index) for index, shape in enumerate(shapes)]
    return [*arrays, mx.abs(random(rows, 3)) + 0.1]


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("weight_dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_loss_is_float32_and_gradients_have_the_dtypes_of_the_inputs(dtype, weight_dtype, impl, early):
    hidden, weight, bias, weights = some_arguments()
    primals = [hidden.astype(dtype), weight.astype(weight_dtype), bias.astype(dtype), weights.astype(weight_dtype)]
    (value,), gradients = mx.vjp(loss_of(early, impl=impl), primals, [mx.array(1.0)])
    assert value.dtype == mx.float32
    assert [each.dtype for each in gradients] == [each.dtype for each in primals]


H, W, T = mx.zeros((2, 3)), mx.zeros((4, 3)), mx.zeros((2,), mx.int32)
# Mistake: hidden, weight, targets, options, message.
MISTAKES = {
    "hidden is integers": (H.astype(mx.int32), W, T, {}, "hidden must be float32, float16 or bfloat16 but got int32"),
    "weight is integers": (H, W.astype(mx.int8), T, {}, "weight must be float32, float16 or bfloat16 but got int8"),
    "bias is integers": (H, W, T, {"bias": mx.zeros((4,), mx.int32)}, "bias must be float32, float16 or bfloat16"),
    "hidden has no axes": (mx.array(1.0), W, T, {}, r"hidden must have 1 or more axes but got the shape \(\)"),
    "weight is transposed": (H, W.T, T, {}, r"weight must have the shape \[V, C\], .* C .* 3, but got \(3, 4\)"),
    "weight is a vector": (H, W[0], T, {}, r"weight must have the shape \[V, C\], .* but got \(3,\)"),
    "no tokens": (H, W[:0], T, {}, r"V at least 1 .* but got \(0, 3\)"),
    "bias is too long": (
        H,
        W,
        T,
        {"bias": mx.zeros((5,))},
        r"bias must have the shape \(4,\), the first axis of weight",
    ),
    "targets are floats": (H, W, H[:, 0], {}, "targets must be integers but got float32"),
    "targets are too many": (
        H,
        W,
        mx.zeros((3,), mx.int32),
        {},
        r"shape of hidden without its last axis but got \(3,\)",
    ),
    "weights are too many": (H, W, T, {"weights": mx.ones((3,))}, r"weights must have the shape \(2,\)"),
    "smoothing is over 1": (H, W, T, {"label_smoothing": 1.1}, "label_smoothing must be between 0 and 1 but got 1.1"),
    "softcap is 0": (H, W, T, {"softcap": 0.0}, "softcap must be a finite number above 0 or None but got 0.0"),
    "z_loss is negative": (H, W, T, {"z_loss": -1.0}, "z_loss must be a finite number of 0 or more but got -1.0"),
    "ignore_index is a float": (H, W, T, {"ignore_index": 1.0}, "ignore_index must be an integer of 32 bits"),
    "unknown reduction": (
        H,
        W,
        T,
        {"reduction": "avg"},
        "reduction must be one of 'mean', 'sum', 'none' but got 'avg'",
    ),
    "chunk is 0": (H, W, T, {"chunk": 0}, "chunk must be a number of rows, 1 or more, or None but got 0"),
    "chunk is a float": (H, W, T, {"chunk": 2.0}, "chunk must be a number of rows, 1 or more, or None but got 2.0"),
    "chunk is a bool": (H, W, T, {"chunk": True}, "chunk must be a number of rows, 1 or more, or None but got True"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    hidden, weight, targets, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=r"\[linear_cross_entropy\] .*" + message):
        FUNCTIONS[function](hidden, weight, targets, **options)


def test_unknown_engine_raises():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        linear_cross_entropy(H, W, T, impl="emulater")


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_rows(function, reduction, early):
    shape = (2, 0) if reduction == "none" else ()

    def loss(hidden, weight):
        with EARLY[early]():
            return FUNCTIONS[function](hidden, weight, mx.zeros((2, 0), mx.int32), reduction=reduction)

    (value,), gradients = mx.vjp(loss, [mx.zeros((2, 0, 3)), W], [mx.ones(shape)])
    assert value.shape == shape
    assert not value.any()
    assert [each.shape for each in gradients] == [(2, 0, 3), W.shape]
    assert not gradients[1].any()


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("early", EARLY)
def test_no_columns(early, impl):
    """Logits are the bias then."""
    primals = some_arguments(columns=0)
    value, gradients = mx.value_and_grad(loss_of(early, impl=impl), argnums=(0, 1, 2))(*primals)
    want, dbias = mx.value_and_grad(
        lambda bias: cross_entropy(mx.broadcast_to(bias, (7, 11)), some_targets((7,), 11), weights=primals[3])
    )(primals[2])
    assert_close(value, want)
    assert_close(gradients[2], dbias)
    assert [each.shape for each in gradients[:2]] == [(7, 0), (11, 0)]


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("dtype", [mx.uint8, mx.int16, mx.uint32, mx.int64], ids=str)
def test_unknown_targets_are_nan_and_ignored_ones_nothing(dtype, early, impl):
    hidden, weight, _, _ = some_arguments(rows=(3,))
    targets = mx.array([0, 77, 11]).astype(dtype)

    def loss(hidden, weight):
        with EARLY[early]():
            return linear_cross_entropy(hidden, weight, targets, ignore_index=77, reduction="sum", impl=impl)

    value, (dhidden, dweight) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    assert mx.isnan(value)
    assert mx.isnan(dhidden).any(axis=1).tolist() == [False, False, True]
    assert not dhidden[1].any()
    assert mx.isnan(dweight).all()


def test_use_engine_reaches_the_kernels(monkeypatch):
    ran = []
    kernel = cross_entropy_op._kernel
    monkeypatch.setattr(cross_entropy_op, "_kernel", lambda name: ran.append(name) or kernel(name))
    with use_engine("emulator"):
        mx.eval(linear_cross_entropy(random((5, 3), 0), W, mx.zeros((5,), mx.int32), chunk=2))
    assert ran == ["cross_entropy_forward"] * 3


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    mx.eval(mx.grad(loss_of(impl="metal"), argnums=(0, 1, 2))(*some_arguments()))
    # Three chunks: forward, then forward and backward.
    assert launched == ["metal"] * 9


def second_derivative(function, *arguments):
    """Gradients of a weighted sum of the first gradients, which are not linear in the cotangent."""
    numbers = tuple(range(len(arguments)))

    def first(*arguments):
        gradients = mx.grad(lambda *inner: (function(*inner) ** 3).sum(), argnums=numbers)(*arguments)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*arguments)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "every"])
def test_second_derivatives_are_those_of_whole_logits(options, reduction, early, impl):
    options = {**options, "reduction": reduction}
    got = second_derivative(loss_of(early, impl=impl, **options), *some_arguments())
    want = second_derivative(plain_loss(**options), *some_arguments())
    for a, b in zip(got, want, strict=True):
        assert b.any()
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("early", EARLY)
def test_third_derivative(early):
    arguments = some_arguments()

    def third(loss):
        return mx.grad(lambda hidden: mx.sum(second_derivative(lambda x: loss(x, *arguments[1:]), hidden)[0] ** 2))(
            arguments[0]
        )

    want = third(plain_loss(**ALL))
    assert want.any()
    assert_close(third(loss_of(early, **ALL)), want, 1e-4)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("early", EARLY)
def test_in_a_checkpoint(early, impl):
    loss, arguments = loss_of(early, impl=impl, **ALL), some_arguments()
    numbers = (0, 1, 2, 3)
    got = mx.grad(mx.checkpoint(loss), argnums=numbers)(*arguments)
    for a, b in zip(got, mx.grad(loss, argnums=numbers)(*arguments), strict=True):
        assert mx.array_equal(a, b)


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formulas."""

    def forward(engine, options, logits, codes):
        assert engine == "metal"
        return cross_entropy_reference.row_losses(logits, codes, options)

    def backward(engine, options, logits, codes, lse, dloss, dlse):
        assert engine == "metal"
        return (cross_entropy_reference.row_gradients(logits, codes, lse, dloss, dlse, options),)

    caches = (
        *(functions._gradients, functions._weighted_sum, functions._scaled),
        cross_entropy_op._of_kernels,
    )
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(cross_entropy_op, "_forward", forward)
    monkeypatch.setattr(cross_entropy_op, "_backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    yield "metal"
    for each in caches:
        each.cache_clear()


# What is mapped over which axis of hidden, weight, bias, weights and targets; None: shared.
MAPPED = {
    "hidden and targets": (0, None, None, None, 0),
    "hidden": (0, None, None, None, None),
    "hidden over its second axis": (1, None, None, None, None),
    "hidden over its last axis": (2, None, None, None, None),
    "targets": (None, None, None, None, 0),
    "token weights": (None, None, None, 1, None),
    "weight": (None, 0, None, None, None),
    "weight over its last axis, and bias": (None, 2, 0, None, None),
    "bias": (None, None, 0, None, None),
    "everything": (0, 0, 0, 0, 0),
}


def mapped_arguments(axes):
    shapes = ((5, 6), (11, 6), (11,), (5,), (5,))
    shapes = [s if a is None else (*s[:a], 4, *s[a:]) for s, a in zip(shapes, axes, strict=True)]
    arrays = [random(shape, index) for index, shape in enumerate(shapes[:3])]
    return [*arrays, mx.abs(random(shapes[3], 3)) + 0.1, some_targets(shapes[4], 11)]


@pytest.mark.parametrize("engine", ["reference", "lazy"])
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_its_gradient_and_vmap_of_the_gradient(name, reduction, early, engine, request):
    impl = request.getfixturevalue("lazy_kernels") if engine == "lazy" else engine
    axes, numbers = MAPPED[name], (0, 1, 2, 3)
    arguments = mapped_arguments(axes)

    def transformed(loss):
        mapped = mx.vmap(loss, in_axes=axes)
        of_vmap = mx.grad(lambda *arguments: (mapped(*arguments) ** 3).sum(), argnums=numbers)
        gradient = mx.grad(lambda *arguments: (loss(*arguments) ** 3).sum(), argnums=numbers)
        return mapped(*arguments), *of_vmap(*arguments), *mx.vmap(gradient, in_axes=axes)(*arguments)

    options = {**ALL, "reduction": reduction}
    got = transformed(loss_of(early, impl=impl, **options))
    for a, b in zip(got, transformed(plain_loss(**options)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("engine", ["reference", "lazy"])
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_function(reduction, early, engine, request):
    impl = request.getfixturevalue("lazy_kernels") if engine == "lazy" else engine
    options, arguments = {**ALL, "reduction": reduction}, some_arguments()

    def gradients(loss):
        return mx.value_and_grad(lambda *arguments: (loss(*arguments) ** 3).sum(), argnums=(0, 1, 2, 3))

    value, got = mx.compile(gradients(loss_of(early, impl=impl, **options)))(*arguments)
    want_value, want = gradients(plain_loss(**options))(*arguments)
    for a, b in zip((value, *got), (want_value, *want), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("early", EARLY)
def test_gradient_of_a_compiled_function(early):
    arguments = some_arguments()
    got = mx.grad(mx.compile(loss_of(early, **ALL)), argnums=(0, 1, 2, 3))(*arguments)
    want = mx.grad(plain_loss(**ALL), argnums=(0, 1, 2, 3))(*arguments)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("early", EARLY)
def test_gradients_of_a_weight_that_is_also_an_embedding_add_up(early):
    table, ids = random((11, 6), 0), mx.array([[1, 5, 5], [0, 10, 1]])

    def gradient(loss):
        return mx.grad(lambda table: loss(mx.tanh(table[ids]), table, mx.zeros(11), mx.ones(ids.shape)))(table)

    assert_close(gradient(loss_of(early)), gradient(plain_loss()))


def test_the_choice_of_early_gradients_ends_with_its_block():
    assert chosen_variables() == ()
    with gradients_in_forward(weight=False):
        with gradients_in_forward():
            assert chosen_variables() == ("hidden", "weight", "bias")
        assert chosen_variables() == ("hidden",)
    with pytest.raises(ValueError, match="mistake"), gradients_in_forward():
        raise ValueError("mistake")
    assert chosen_variables() == ()
