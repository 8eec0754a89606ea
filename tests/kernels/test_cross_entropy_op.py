"""What callers of cross_entropy see: dtypes, errors, engines, vmap, second derivatives, checkpoints, compiling."""

from dataclasses import replace

from forge_mlx.kernels.cross_entropy import cross_entropy, op, reference
from forge_mlx.kernels.cross_entropy.cases import EVERY
from forge_mlx.kernels.cross_entropy.options import Options
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

FUNCTIONS = {"op": cross_entropy, "reference": reference.cross_entropy}
ALL = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01}


def some_targets(shape, vocabulary, seed=5):
    """Every third is ignored, from the second on."""
    targets = np.random.default_rng(seed).integers(0, vocabulary, shape).astype(np.int32)
    targets[..., 1::3] = -100
    return mx.array(targets)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("weights_dtype", [mx.float32, mx.bfloat16, None], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_loss_is_float32_and_gradients_have_the_dtypes_of_the_inputs(dtype, weights_dtype, impl):
    primals = [random((3, 9), 0, dtype)] + ([] if weights_dtype is None else [mx.ones((3,), weights_dtype)])

    def loss(logits, weights=None):
        return cross_entropy(logits, some_targets((3,), 9), weights=weights, impl=impl)

    (value,), gradients = mx.vjp(loss, primals, [mx.array(1.0)])
    assert value.dtype == mx.float32
    assert [each.dtype for each in gradients] == [each.dtype for each in primals]


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("dtype", [mx.bool_, mx.int32, mx.uint8], ids=str)
def test_weights_may_be_a_mask(dtype, impl):
    logits, targets, mask = random((6, 9), 0), some_targets((6,), 9), mx.array([1, 0, 1, 0, 1, 1])
    got = cross_entropy(logits, targets, weights=mask.astype(dtype), impl=impl)
    assert_close(got, cross_entropy(logits, targets, weights=mask.astype(mx.float32)))


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_weights_are_summed_in_float32(impl):
    logits, targets = random((5000, 2), 0), mx.zeros((5000,), mx.int32)
    weights = random((5000,), 1, mx.bfloat16)
    got = cross_entropy(logits, targets, weights=weights, impl=impl)
    assert_close(got, cross_entropy(logits, targets, weights=weights.astype(mx.float32)))


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(mx.float32, 6e4), (mx.float32, 1e6), (mx.float32, 1e30), (mx.float16, 6e4), (mx.bfloat16, 1e6)],
    ids=str,
)
def test_gradient_of_large_logits(dtype, scale, impl):
    """Their logsumexp, rounded, would be off by more than the logarithm of the probabilities."""
    logits = mx.full((2, 3), scale, dtype)
    logits[1, 0] = -scale
    gradient = mx.grad(lambda logits: cross_entropy(logits, mx.array([1, 1]), reduction="sum", impl=impl))(logits)
    want = np.array([[1 / 3, -2 / 3, 1 / 3], [0, -1 / 2, 1 / 2]])
    rounding = {mx.float32: 1e-6, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
    np.testing.assert_allclose(np.array(gradient.astype(mx.float32)), want, rtol=rounding)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_gradient_of_weights_is_rounded_once(dtype, reduction, impl):
    logits, targets = random((512, 5), 0), mx.arange(512) % 5
    weights = (mx.abs(random((512,), 1)) + 0.1).astype(dtype)

    def loss(weights):
        return cross_entropy(logits, targets, weights=weights, reduction=reduction, impl=impl)

    got, want = mx.grad(loss)(weights), mx.grad(loss)(weights.astype(mx.float32))
    assert got.dtype == dtype
    assert mx.array_equal(got, want.astype(dtype))


@pytest.mark.parametrize("columns", [32000, 128256])
def test_reference_engine_adds_up_long_rows_in_pieces(columns):
    logits = random((4, columns), 0)
    targets = mx.array([0, 1, 2, columns - 1])
    numbers = np.array(logits, np.float64)
    lse = np.log(np.exp(numbers).sum(axis=1))
    want = lse - 0.9 * numbers[range(4), np.array(targets)] - 0.1 * numbers.mean(axis=1)
    got = cross_entropy(logits, targets, label_smoothing=0.1, reduction="none", impl="reference")
    np.testing.assert_allclose(np.array(got), want, rtol=3e-7)
    mapped = mx.vmap(lambda *row: cross_entropy(*row, label_smoothing=0.1, impl="reference"))(logits, targets)
    assert mx.array_equal(mapped, got)


# Targets, which of them are ignored under ignore_index=-100, which are no tokens.
TARGETS = {
    "uint8": (np.array([0, 8, 156, 9], np.uint8), [], [2, 3]),
    "int8": (np.array([0, 8, -100, -1], np.int8), [2], [3]),
    "int16": (np.array([0, 8, -100, 300], np.int16), [2], [3]),
    "uint32": (np.array([0, 8, 2**32 - 100, 2**31], np.uint32), [], [2, 3]),
    "int64": (np.array([0, -100, 2**32, 2**40 + 1], np.int64), [1], [2, 3]),
    "uint64": (np.array([0, 8, 2**40, 2**63], np.uint64), [], [2, 3]),
    "uint64 that int64 does not hold": (np.array([0, 2**63, 2**64 - 100, 2**64 - 1], np.uint64), [], [1, 2, 3]),
    "int32": (np.array([-100, -1, -2, 2**31 - 1], np.int32), [0], [1, 2, 3]),
}


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_any_integer_dtype(name, impl):
    targets, ignored, unknown = TARGETS[name]
    logits = random((4, 9), 0)
    losses, vjp = mx.vjp(
        lambda logits: cross_entropy(logits, mx.array(targets), reduction="none", impl=impl), [logits], [mx.ones(4)]
    )
    losses, gradient = np.array(losses[0]), np.array(vjp[0])
    assert np.flatnonzero(np.isnan(losses)).tolist() == unknown
    assert np.flatnonzero(np.isnan(gradient).any(axis=1)).tolist() == unknown
    assert np.flatnonzero(losses == 0).tolist() == np.flatnonzero((gradient == 0).all(axis=1)).tolist() == ignored


X, T = mx.zeros((2, 3)), mx.zeros((2,), mx.int32)
# Mistake: logits, targets, options, message.
MISTAKES = {
    "logits are integers": (X.astype(mx.int32), T, {}, "logits must be float32, float16 or bfloat16 but got int32"),
    "logits have no axes": (mx.array(1.0), mx.array(0), {}, r"logits must have 1 or more axes but got the shape \(\)"),
    "no tokens": (X[:, :0], T, {}, r"logits must be of one token or more but got the shape \(2, 0\)"),
    "targets are floats": (X, X[:, 0], {}, "targets must be integers but got float32"),
    "targets are bool": (X, T.astype(mx.bool_), {}, "targets must be integers but got bool"),
    "targets are too many": (
        X,
        mx.zeros((3,), mx.int32),
        {},
        r"without its last axis but got \(3,\) for logits \(2, 3\)",
    ),
    "weights are too many": (X, T, {"weights": mx.ones((3,))}, r"weights must have the shape \(2,\), that of targets"),
    "weights are complex": (
        X,
        T,
        {"weights": mx.ones((2,), mx.complex64)},
        "weights must be real numbers .* complex64",
    ),
    "ignore_index is a float": (X, T, {"ignore_index": 1.0}, "ignore_index must be an integer of 32 bits but got 1.0"),
    "ignore_index is a bool": (X, T, {"ignore_index": True}, "ignore_index must be an integer of 32 bits but got True"),
    "ignore_index is too large": (X, T, {"ignore_index": 2**31}, "ignore_index must be an integer of 32 bits"),
    "smoothing is negative": (X, T, {"label_smoothing": -0.1}, "label_smoothing must be between 0 and 1 but got -0.1"),
    "smoothing is over 1": (X, T, {"label_smoothing": 1.1}, "label_smoothing must be between 0 and 1 but got 1.1"),
    "smoothing is nan": (
        X,
        T,
        {"label_smoothing": float("nan")},
        "label_smoothing must be between 0 and 1 but got nan",
    ),
    "softcap is 0": (X, T, {"softcap": 0.0}, "softcap must be a finite number above 0 or None but got 0.0"),
    "softcap is infinite": (X, T, {"softcap": float("inf")}, "softcap must be a finite number above 0 or None"),
    "softcap is over what float32 holds": (X, T, {"softcap": 1e39}, "softcap must be between 1.18e-38 and 8.51e"),
    "softcap has no reciprocal in float32": (X, T, {"softcap": 1e-40}, "softcap must be between 1.18e-38 and 8.51e"),
    "smoothing is None": (X, T, {"label_smoothing": None}, "label_smoothing must be a Python number but got None"),
    "z_loss is None": (X, T, {"z_loss": None}, "z_loss must be a Python number but got None"),
    "z_loss is over what float32 holds": (X, T, {"z_loss": 1e39}, r"z_loss must be a finite number .* 1e\+39"),
    "z_loss is negative": (X, T, {"z_loss": -1.0}, "z_loss must be a finite number of 0 or more but got -1.0"),
    "z_loss is nan": (X, T, {"z_loss": float("nan")}, "z_loss must be a finite number of 0 or more but got nan"),
    "unknown reduction": (X, T, {"reduction": "avg"}, "reduction must be one of 'mean', 'sum', 'none' but got 'avg'"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    logits, targets, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=r"\[cross_entropy\] .*" + message):
        FUNCTIONS[function](logits, targets, **options)


# Array or value given for an option.
NO_NUMBERS = {
    "a 0-d array": (mx.array(0.5), "an array"),
    "a 1-d array": (mx.array([0.5]), "an array"),
    "a bool": (True, "True"),
    "text": ("0.5", "'0.5'"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("option", ALL)
def test_options_that_are_no_numbers_raise(option, value, function):
    value, shown = NO_NUMBERS[value]
    with pytest.raises(ValueError, match=rf"\[cross_entropy\] {option} must be a Python number.* but got {shown}"):
        FUNCTIONS[function](X, T, **{option: value})


def test_an_option_that_is_an_array_raises_in_a_gradient():
    with pytest.raises(ValueError, match="z_loss must be a Python number but got an array"):
        mx.grad(lambda z_loss: cross_entropy(X, T, z_loss=z_loss))(mx.array(0.1))


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16])
def test_options_may_be_numbers_of_numpy(number, impl):
    logits, options = random((2, 3), 0), {name: number(value) for name, value in ALL.items()}
    got = cross_entropy(logits, T, ignore_index=np.int64(-100), impl=impl, **options)
    want = cross_entropy(logits, T, impl=impl, **{name: float(value) for name, value in options.items()})
    assert got.item() == want.item()


def test_unknown_engine_raises():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        cross_entropy(X, T, impl="emulater")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_no_rows(reduction, impl):
    logits, targets, weights = mx.zeros((2, 0, 5)), mx.zeros((2, 0), mx.int32), mx.zeros((2, 0))
    shape = (2, 0) if reduction == "none" else ()

    def loss(logits, weights):
        return cross_entropy(logits, targets, weights=weights, reduction=reduction, impl=impl)

    (value,), gradients = mx.vjp(loss, [logits, weights], [mx.ones(shape)])
    assert value.shape == shape
    assert value.tolist() == reference.cross_entropy(logits, targets, weights=weights, reduction=reduction).tolist()
    assert not value.any()
    assert [each.shape for each in gradients] == [logits.shape, weights.shape]


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("columns", [5, 264, 4104])
def test_tokens_that_cannot_occur(columns, impl):
    """-inf at the target, everywhere, and everywhere but at the target; NaN and inf."""
    logits = np.array(random((5, columns), 0))
    logits[0, 2] = logits[1] = logits[2, :2] = logits[2, 3:] = -np.inf
    logits[3, -1], logits[4, 0] = np.nan, np.inf
    (losses,), (gradient,) = mx.vjp(
        lambda logits: cross_entropy(logits, mx.full((5,), 2, mx.int32), reduction="none", impl=impl),
        [mx.array(logits)],
        [mx.ones(5)],
    )
    np.testing.assert_array_equal(np.array(losses), [np.inf, np.nan, 0, np.nan, np.nan])
    gradient = np.array(gradient)
    assert np.isnan(gradient).any(axis=1).tolist() == [False, True, False, True, True]
    assert gradient[0, 2] == -1
    np.testing.assert_allclose(gradient[0].sum(), 0, atol=1e-5)
    assert not gradient[2].any()


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize("columns", [5, 264])
def test_with_smoothing_or_a_cap_the_formula_decides_about_minus_infinity(columns, impl):
    logits = np.array(random((1, columns), 0))
    logits[0, 1] = -np.inf
    at = {"logits": mx.array(logits), "targets": mx.array([2])}
    assert cross_entropy(**at, label_smoothing=0.1, impl=impl).item() == np.inf
    logits[0, 1] = -1e30
    at_cap = cross_entropy(mx.array(logits), mx.array([2]), softcap=4.0, label_smoothing=0.1, impl=impl)
    assert cross_entropy(**at, softcap=4.0, label_smoothing=0.1, impl=impl).item() == at_cap.item()
    gradient = mx.grad(lambda logits: cross_entropy(logits, mx.array([2]), softcap=4.0, impl=impl))(at["logits"])
    assert gradient[0, 1].item() == 0
    assert mx.isfinite(gradient).all()


# The plain operations multiply by the logits: NaN and inf do matter to their gradient.
HELD = [("emulator", each) for each in ("nan", "inf", "-inf", "3e38")] + [
    ("reference", each) for each in ("-inf", "3e38")
]


@pytest.mark.parametrize("columns", [5, 264, 4104])
@pytest.mark.parametrize(("impl", "value"), HELD)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}, ALL], ids=str)
def test_logits_of_an_ignored_row_do_not_matter(columns, impl, value, options):
    logits = mx.concatenate([random((2, columns), 0), mx.full((2, columns), float(value))])

    def run(rows):
        targets = mx.array([0, 3, -100, -100])[:rows]
        return mx.value_and_grad(lambda logits: cross_entropy(logits, targets, impl=impl, **options))(logits[:rows])

    (loss, gradient), (want, of_kept) = run(4), run(2)
    assert_close(loss, want)
    assert_close(gradient[:2], of_kept)
    assert not gradient[2:].any()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nan_in_an_ignored_row_stays_in_its_gradient_on_the_reference_engine(value):
    logits = mx.concatenate([random((2, 5), 0), mx.full((1, 5), float(value))])

    def run(rows):
        targets = mx.array([0, 3, -100])[:rows]
        return mx.value_and_grad(lambda logits: cross_entropy(logits, targets, impl="reference"))(logits[:rows])

    (loss, gradient), (want, of_kept) = run(3), run(2)
    assert_close(loss, want)
    assert_close(gradient[:2], of_kept)
    assert mx.isnan(gradient[2]).all()


def test_use_engine_reaches_the_kernels(monkeypatch):
    ran = []
    kernel = op._kernel
    monkeypatch.setattr(op, "_kernel", lambda name: ran.append(name) or kernel(name))
    with use_engine("emulator"):
        mx.eval(mx.grad(lambda logits: cross_entropy(logits, T))(random((2, 3), 0)))
    assert ran == ["cross_entropy_forward", "cross_entropy_backward"]


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    mx.eval(mx.grad(lambda logits: cross_entropy(logits, T, impl="metal"))(random((2, 3), 0)))
    assert launched == ["metal"] * 2


def second_derivative(function, *arguments):
    """Gradients of a weighted sum of the first gradients, which are not linear in the cotangent."""
    numbers = tuple(range(len(arguments)))

    def first(*arguments):
        gradients = mx.grad(lambda *inner: (function(*inner) ** 3).sum(), argnums=numbers)(*arguments)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*arguments)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "every"])
def test_second_derivative_on_the_kernels(options, reduction):
    arguments = [random((7, 40), 0), mx.abs(random((7,), 1)) + 0.1]
    options = {**options, "reduction": reduction}

    def of(impl):
        return second_derivative(
            lambda logits, weights: cross_entropy(
                logits, some_targets((7,), 40), weights=weights, impl=impl, **options
            ),
            *arguments,
        )

    for got, want in zip(of("emulator"), of("reference"), strict=True):
        assert mx.isfinite(got).all()
        assert_close(got, want, 1e-4)


@pytest.mark.parametrize("columns", [40, 264, 4104])
@pytest.mark.parametrize("options", [Options(), EVERY], ids=["plain", "every"])
def test_cotangent_of_the_logsumexp_is_used(columns, options):
    logits, cotangents = random((5, columns), 0), [random((5,), 1), random((5, 2), 2)]
    codes = reference.target_codes(some_targets((5,), columns), columns, -100)
    options = replace(options, ignore_index=reference.IGNORED)
    outputs, (got,) = mx.vjp(lambda logits: op._of_kernels("emulator", options)(logits, codes), [logits], cotangents)
    results, (want,) = mx.vjp(lambda logits: reference.row_losses(logits, codes, options), [logits], cotangents)
    assert_close(got, want)
    for a, b in zip(outputs, results, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_targets_are_an_argument_in_a_checkpoint(impl):
    arguments = random((7, 40), 0), some_targets((7,), 40), mx.abs(random((7,), 1))

    def loss(logits, targets, weights):
        return cross_entropy(logits, targets, weights=weights, impl=impl, **ALL)

    got = mx.grad(mx.checkpoint(loss), argnums=(0, 2))(*arguments)
    for a, b in zip(got, mx.grad(loss, argnums=(0, 2))(*arguments), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
def test_in_a_checkpoint(impl):
    arguments = random((7, 40), 0), mx.abs(random((7,), 1))

    def loss(logits, weights):
        return cross_entropy(logits, some_targets((7,), 40), weights=weights, impl=impl, **ALL)

    got = mx.grad(mx.checkpoint(loss), argnums=(0, 1))(*arguments)
    for a, b in zip(got, mx.grad(loss, argnums=(0, 1))(*arguments), strict=True):
        assert mx.array_equal(a, b)


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formulas."""

    def forward(engine, options, logits, codes):
        assert engine == "metal"
        assert codes.shape == logits.shape[:-1]
        return reference.row_losses(logits, codes, options)

    def backward(engine, options, logits, codes, parts, dloss, dparts):
        assert engine == "metal"
        assert codes.shape == dloss.shape == logits.shape[:-1]
        assert parts.shape == dparts.shape == (*codes.shape, 2)
        return (reference.row_gradients(logits, codes, parts, dloss, dparts, options),)

    op._of_kernels.cache_clear()
    monkeypatch.setattr(op, "_forward", forward)
    monkeypatch.setattr(op, "_backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    yield "metal"
    op._of_kernels.cache_clear()


# What is mapped over which axis of logits, targets and weights; None: shared.
MAPPED = {
    "everything": ((4, 3, 5), (4, 3), (4, 3), (0, 0, 0)),
    "logits": ((4, 3, 5), (3,), (3,), (0, None, None)),
    "logits over their second axis": ((3, 4, 5), (3,), (3,), (1, None, None)),
    "logits over their last axis": ((3, 5, 4), (3,), (3,), (2, None, None)),
    "targets": ((3, 5), (4, 3), (3,), (None, 0, None)),
    "weights": ((3, 5), (3,), (3, 4), (None, None, 1)),
    "logits and targets": ((4, 3, 5), (3, 4), (3,), (0, 1, None)),
    "single rows": ((4, 5), (4,), (4,), (0, 0, 0)),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_its_gradient_and_vmap_of_the_gradient(name, reduction, lazy_kernels):
    logits_shape, targets_shape, weights_shape, axes = MAPPED[name]
    arguments = random(logits_shape, 0), some_targets(targets_shape, 5), mx.abs(random(weights_shape, 1)) + 0.1

    def transformed(impl):
        def loss(logits, targets, weights):
            return cross_entropy(logits, targets, weights=weights, reduction=reduction, impl=impl, **ALL)

        mapped = mx.vmap(loss, in_axes=axes)
        of_vmap = mx.grad(lambda *arguments: (mapped(*arguments) ** 3).sum(), argnums=(0, 2))
        gradient = mx.grad(lambda *arguments: (loss(*arguments) ** 3).sum(), argnums=(0, 2))
        return mapped(*arguments), *of_vmap(*arguments), *mx.vmap(gradient, in_axes=axes)(*arguments)

    for got, want in zip(transformed(lazy_kernels), transformed("reference"), strict=True):
        assert_close(got, want)


def test_reference_engine_maps_as_a_loop_does():
    logits, targets = random((4, 3, 5), 0), some_targets((4, 3), 5)
    got = mx.vmap(lambda logits, targets: cross_entropy(logits, targets, **ALL))(logits, targets)
    assert_close(got, mx.stack([cross_entropy(a, b, **ALL) for a, b in zip(logits, targets, strict=True)]))


@pytest.mark.parametrize("engine", ["reference", "lazy"])
def test_compiled_function(engine, request):
    impl = request.getfixturevalue("lazy_kernels") if engine == "lazy" else engine
    arguments = random((7, 40), 0), mx.abs(random((7,), 1))

    def gradients(impl):
        def loss(logits, weights):
            return cross_entropy(logits, some_targets((7,), 40), weights=weights, impl=impl, **ALL)

        return mx.grad(loss, argnums=(0, 1))

    for got, want in zip(mx.compile(gradients(impl))(*arguments), gradients("reference")(*arguments), strict=True):
        assert_close(got, want)
