"""attention and the room's formulas: PyTorch in float64, finite differences, MLX's autodiff, and what callers see."""

from functools import partial
import math
import re

from attention_proofs import PROBLEMS, Problem, assert_near, by_torch, numpy64
from forge_mlx.kernels._common.proof import RTOL
from forge_mlx.kernels.attention import attention, flash_attention, reference
from forge_mlx.metal.engine import use_engine
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close

ids = pytest.mark.parametrize("problem", [pytest.param(each, id=name) for name, each in PROBLEMS.items()])
mixed = pytest.mark.parametrize(
    "problem",
    [pytest.param(PROBLEMS[name], id=name) for name in ("ids", "more queries", "everything", "padding and sinks")],
)


def formula(problem):
    """The function of the inputs that reference.py computes."""
    return lambda *arrays: reference.forward(*problem.arrange(arrays), problem.options)


def written(problem):
    """Results and gradients by a forward pass of the formula and a written backward pass."""
    inputs = problem.inputs()
    arranged = problem.arrange(inputs)
    results = reference.forward(*arranged, problem.options)
    # Of the result before it was rounded: what a dtype of 16 bits costs there is in no gradient of these formulas.
    exact, lse = reference.forward(*problem.arrange([array.astype(mx.float32) for array in inputs]), problem.options)
    return [*results, *reference.backward(*arranged, exact, lse, *problem.cotangents(), problem.options)]


def public(problem, **more):
    """The function of the inputs, sinks `[H]` among them, that `attention` computes."""
    pair = None if problem.segments == 0 else problem.ids()

    def function(q, k, v, *sinks):
        return attention(q, k, v, segment_ids=pair, sinks=sinks[0] if sinks else None, **problem.keywords, **more)

    return function


@ids
def test_formulas_agree_with_pytorch(problem):
    assert_near(written(problem), by_torch(problem), RTOL[problem.dtype])


@ids
def test_written_backward_is_the_gradient_of_forward(problem):
    inputs = problem.inputs()
    (_, lse), found = mx.vjp(formula(problem), inputs, problem.cotangents())
    assert not mx.isnan(lse).any()
    assert_near(written(problem)[2:], [numpy64(array) for array in found], RTOL[problem.dtype])


def loss_of(problem, arrays):
    """The sum of results times cotangents in float64, sums written as loops over rows."""
    q, k, v, *sinks = arrays
    options, seen = problem.options, np.array(problem.seen())
    dout, dlse = (numpy64(each) for each in problem.cotangents())
    group, total = problem.heads[0] // problem.heads[1], 0.0
    for b, h, i in np.ndindex(q.shape[:3]):
        s = options.scale * k[b, h // group] @ q[b, h, i]
        s = s if options.softcap is None else options.softcap * np.tanh(s / options.softcap)
        visible = seen[b, 0, i]
        e = np.exp(s[visible])
        denominator = e.sum() + (np.exp(sinks[0][b, h]) if sinks else 0)
        if denominator:
            total += dout[b, h, i] @ (e @ v[b, h // group][visible]) / denominator + dlse[b, h, i] * np.log(denominator)
    return total


@mixed
def test_gradients_are_those_of_finite_differences(problem):
    arrays = [numpy64(array) for array in problem.inputs()]
    random = np.random.default_rng(4)
    for index, gradient in enumerate(written(problem)[2:]):
        gradient, step = numpy64(gradient), random.normal(size=arrays[index].shape)
        ends = [[a + sign * 1e-5 * step if i == index else a for i, a in enumerate(arrays)] for sign in (1, -1)]
        difference = (loss_of(problem, ends[0]) - loss_of(problem, ends[1])) / 2e-5
        assert abs(difference - (gradient * step).sum()) <= 1e-5 * np.abs(gradient * step).sum(), index


def test_parts_see_what_the_whole_sees():
    problem = PROBLEMS["everything, more keys"]
    own, keys = problem.ids()
    whole = reference.visible(7, 19, own, keys, problem.options)
    assert whole.tolist() == problem.seen()
    part = {"first_query": 2, "first_key": 6, "offset": 12, "zero": mx.array(0)}
    found = reference.visible(3, 8, own[:, 2:5], keys[:, 6:14], problem.options, **part)
    assert mx.array_equal(found, whole[:, :, 2:5, 6:14])


def test_row_that_sees_nothing_takes_no_cotangent():
    problem = Problem(lengths=(6, 3))
    arranged = problem.arrange(problem.inputs())
    out, lse = reference.forward(*arranged, problem.options)
    dout, dlse = problem.cotangents()
    blind = mx.arange(6) < 3
    want = reference.backward(*arranged, out, lse, dout, mx.where(blind, 0.0, dlse), problem.options)
    got = reference.backward(*arranged, out, lse, dout, mx.where(blind, math.nan, dlse), problem.options)
    for a, b in zip(got, want, strict=True):
        assert mx.array_equal(a, b)
    assert mx.all(got[0][:, :, :3] == 0)


def test_sink_of_minus_infinity_is_none():
    problem = Problem(lengths=(6, 3))
    q, k, v, ids, keys, _ = problem.arrange(problem.inputs())
    found = []
    for sinks in (None, mx.full((2, 2), -math.inf)):
        results = reference.forward(q, k, v, ids, keys, sinks, problem.options)
        gradients = reference.backward(q, k, v, ids, keys, sinks, *results, *problem.cotangents(), problem.options)
        found.append([*results, *gradients])
    for a, b in zip(*found, strict=False):
        assert mx.array_equal(a, b)
    assert mx.array_equal(found[1][-1], mx.zeros((2, 2)))


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_nothing_to_see(lengths, sinks):
    problem = Problem(lengths=lengths, sinks=sinks)
    inputs = problem.inputs()
    shape = (2, 2, lengths[0])
    lse = np.broadcast_to(numpy64(inputs[3])[..., None] if sinks else -math.inf, shape)
    # Only a sink is seen: dlse is all that it gets.
    want = [np.zeros((*shape, 8)), lse, *(np.zeros(array.shape) for array in inputs[:3])]
    want += [numpy64(problem.cotangents()[1]).sum(-1)] if sinks else []
    assert_near(written(problem), want, 1e-6)
    inputs[3:] = [array[0] for array in inputs[3:]]
    results, gradients = mx.vjp(public(problem, return_probs=True), inputs, problem.cotangents(True)[::2])
    assert_near([*results, *gradients[:3]], [want[0], np.zeros((*shape, lengths[1])), *want[2:5]], 0)


@ids
def test_attention_agrees_with_pytorch_with_a_cotangent_on_the_probabilities(problem):
    inputs = problem.inputs()
    inputs[3:] = [array[0] for array in inputs[3:]]
    results, gradients = mx.vjp(
        public(problem, return_lse=True, return_probs=True), inputs, problem.cotangents(with_probs=True)
    )
    assert [each.dtype for each in results] == [problem.dtype, mx.float32, problem.dtype]
    shared = Shared(**vars(problem))
    want = by_torch(shared, with_probs=True)
    want[6:] = [array.sum(0) for array in want[6:]]
    assert_near([*results, *gradients], want, RTOL[problem.dtype])


class Shared(Problem):
    """The sinks of the first batch in both."""

    def inputs(self):
        arrays = super().inputs()
        return [*arrays[:3], *(mx.broadcast_to(array[:1], array.shape) for array in arrays[3:])]


@mixed
def test_attention_agrees_with_flash_attention(problem):
    inputs, cotangents = problem.inputs(), problem.cotangents()
    inputs[3:] = [array[0] for array in inputs[3:]]
    pair = None if problem.segments == 0 else problem.ids()

    def flash(q, k, v, *sinks):
        options = {"segment_ids": pair, "sinks": sinks[0] if sinks else None, "return_lse": True}
        return flash_attention(q, k, v, **options, **problem.keywords, impl="reference")

    want = [numpy64(each) for both in mx.vjp(flash, inputs, cotangents) for each in both]
    got = [each for both in mx.vjp(public(problem, return_lse=True), inputs, cotangents) for each in both]
    assert_near(got, want, 1e-5)


def test_results_that_are_asked_for():
    q, k, v = Problem().inputs()
    out, lse, probs = attention(q, k, v, return_lse=True, return_probs=True)
    assert probs.shape == (2, 2, 9, 9)
    assert mx.allclose(probs.sum(-1), mx.array(1.0))
    assert mx.array_equal(attention(q, k, v), out)
    for options, want in (({"return_lse": True}, lse), ({"return_probs": True}, probs)):
        found = attention(q, k, v, **options)
        assert len(found) == 2
        assert mx.array_equal(found[0], out)
        assert mx.array_equal(found[1], want)


def test_rows_of_probabilities_lack_the_share_of_the_sink():
    q, k, v = Problem().inputs()
    sinks = mx.array([0.5, -1.0])
    _, lse, probs = attention(q, k, v, sinks=sinks, return_lse=True, return_probs=True)
    assert mx.allclose(probs.sum(-1) + mx.exp(sinks[:, None] - lse), mx.array(1.0))


@mixed
def test_second_derivative(problem):
    """That of MLX's autodiff, twice, of the formula of forward."""
    inputs = problem.inputs()
    inputs[3:] = [array[0] for array in inputs[3:]]
    numbers = tuple(range(len(inputs)))
    arranged = Shared(**vars(problem))

    def plain(*arrays):
        return formula(arranged)(*arrays[:3], *(mx.broadcast_to(each, (2, *each.shape)) for each in arrays[3:]))

    def twice(function):
        def first(*arrays):
            gradients = mx.grad(lambda *inner: (function(*inner)[0] ** 3).sum(), argnums=numbers)(*arrays)
            return sum((gradient**2).sum() for gradient in gradients)

        return mx.grad(first, argnums=numbers)(*inputs)

    want = [numpy64(array) for array in twice(plain)]
    assert_near(twice(public(problem, return_probs=True)), want, 1e-4)
    assert all(np.isfinite(array).all() for array in want)


def test_vmap_and_its_gradient():
    problem = PROBLEMS["everything"]
    q, k, v, sinks = problem.inputs()
    function = public(problem, return_lse=True)
    arrays, axes = (mx.stack([q, -q], axis=1), k, v, mx.stack([sinks[0], sinks[1]])), (1, None, None, 0)

    def loss(mapped):
        return lambda *inner: sum((each**2).sum() for each in mapped(*inner))

    def one_by_one(q, k, v, sinks):
        pairs = [function(q[:, i], k, v, sinks[i]) for i in range(2)]
        return tuple(mx.stack(each) for each in zip(*pairs, strict=True))

    mapped = mx.vmap(function, in_axes=axes)
    for a, b in zip(mapped(*arrays), one_by_one(*arrays), strict=True):
        assert_close(a, b)
    got, want = (mx.grad(loss(each), argnums=(0, 1, 2, 3))(*arrays) for each in (mapped, one_by_one))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("transform", [mx.compile, mx.checkpoint])
def test_compiled_and_in_a_checkpoint(transform):
    problem = PROBLEMS["everything"]
    inputs = problem.inputs()
    inputs[3] = inputs[3][0]

    def loss(*arrays):
        return sum((each**2).sum() for each in public(problem, return_probs=True)(*arrays))

    gradient = partial(mx.grad, argnums=(0, 1, 2, 3))
    got = mx.compile(gradient(loss))(*inputs) if transform is mx.compile else gradient(transform(loss))(*inputs)
    for a, b in zip(got, gradient(loss)(*inputs), strict=True):
        assert_close(a, b)


X = mx.zeros((2, 4, 5, 8))
MISTAKES = {
    "dtype": ((X, X.astype(mx.float16), X), {}),
    "integers": ((X.astype(mx.int32), X, X), {}),
    "axes": ((X[0], X, X), {}),
    "head size": ((X[..., :7], X[..., :7], X), {}),
    "heads": ((X, X[:, :3], X[:, :3]), {}),
    "keys": ((X, X, X[:, :, :4]), {}),
    "causal": ((X, X, X), {"causal": 1}),
    "window": ((X, X, X), {"window": 0}),
    "window alone": ((X, X, X), {"window": 2, "causal": False}),
    "softcap": ((X, X, X), {"softcap": -1.0}),
    "scale": ((X, X, X), {"scale": mx.array(1.0)}),
    "ids": ((X, X, X), {"segment_ids": mx.zeros((2, 4), mx.int32)}),
    "one array of ids": ((X, X[:, :, :4], X[:, :, :4]), {"segment_ids": mx.zeros((2, 5), mx.int32)}),
    "sinks": ((X, X, X), {"sinks": mx.zeros((3,))}),
    "engine": ((X, X, X), {"impl": "mps"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_are_those_of_flash_attention(name):
    arrays, options = MISTAKES[name]
    with pytest.raises(ValueError, match=r"^\[") as other:
        flash_attention(*arrays, **options)
    message = str(other.value).replace("[flash_attention]", "[attention]")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attention(*arrays, **options)


@pytest.mark.parametrize("engine", ["metal", "cuda", "emulator"])
def test_engine_for_kernels_is_refused(engine, monkeypatch):
    message = rf"^\[attention\] engine must be reference, .* but got {engine} "
    with pytest.raises(ValueError, match=message):
        attention(X, X, X, impl=engine)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    with use_engine(engine), pytest.raises(ValueError, match=message):
        attention(X, X, X)


def test_engine_reference_is_taken_where_a_gpu_could_run_kernels(monkeypatch):
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    assert attention(X, X, X).shape == X.shape
    assert attention(X, X, X, impl="reference").shape == X.shape
