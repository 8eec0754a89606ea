"""What callers of topk_renorm see: errors, engines, ties, NaN, bias, second derivatives, vmap."""

from functools import partial

from forge_mlx.kernels._common.proof import RTOL
from forge_mlx.kernels.routing import reference, topk_op, topk_renorm
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

FUNCTIONS = {"op": topk_renorm, "reference": reference.topk_renorm}
ENGINES = ["emulator", "reference"]
P = mx.ones((2, 4))
INF, NAN = float("inf"), float("nan")

# Mistake: arguments, message.
MISTAKES = {
    "p is an integer": ({"p": P.astype(mx.int32)}, r"\[topk_renorm\] p must be float32, .* but got int32. Convert it"),
    "p has no axes": ({"p": mx.array(1.0), "k": 1}, r"p must have 1 or more axes but got the shape \(\)."),
    "p has no experts": ({"p": mx.ones((2, 0)), "k": 1}, "k must be an integer from 1 to 0, the experts"),
    "1025 experts": (
        {"p": mx.ones((2, 1025))},
        r"\[topk_renorm\] p must have at most 1024 experts on its last axis but got 1025.",
    ),
    "k is 0": ({"k": 0}, r"\[topk_renorm\] k must be an integer from 1 to 4, the experts .* of p, but got 0."),
    "k is over E": ({"k": 5}, "k must be an integer from 1 to 4, .* but got 5."),
    "k is a float": ({"k": 2.0}, "k must be an integer from 1 to 4, .* but got 2.0."),
    "k is a bool": ({"k": True}, "k must be an integer from 1 to 4, .* but got True."),
    "k is an array": ({"k": mx.array(2)}, r"k must be an integer from 1 to 4, .* but got array\(2"),
    "bias is an integer": ({"bias": mx.zeros((4,), mx.int32)}, "bias must be float32, .* but got int32"),
    "bias has other experts": (
        {"bias": mx.zeros((3,))},
        r"\[topk_renorm\] bias must broadcast to the shape of p, \(2, 4\), but got \(3,\).",
    ),
    "bias has other rows": ({"bias": mx.zeros((3, 4))}, r"bias must broadcast to .*, \(2, 4\), but got \(3, 4\)."),
    "bias has more axes": ({"bias": mx.zeros((1, 2, 4))}, r"bias must broadcast to .* but got \(1, 2, 4\)."),
    "normalize is no bool": ({"normalize": 1}, r"\[topk_renorm\] normalize must be True or False but got 1."),
    "eps is negative": ({"eps": -1.0}, "eps must be a finite number of 0 or more but got -1.0"),
    "eps is an array": ({"eps": mx.array(0.1)}, r"eps must be a Python number but got an mx.array.*eps.item\(\)"),
    "eps is 0 in float32": ({"eps": 1e-60}, "eps must be within float32's range, .* but got 1e-60"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](**{"p": P, "k": 2} | arguments)


def test_unknown_and_missing_engines_raise():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        topk_renorm(P, 2, impl="emulater")
    with pytest.raises(RuntimeError, match=r"\[topk_renorm\] engine cuda cannot run"):
        topk_renorm(P, 2, impl="cuda")


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_dtypes_of_results(dtype, impl):
    p = mx.softmax(random((3, 9), 0), axis=-1).astype(dtype)
    gates, indices = topk_renorm(p, np.int64(2), impl=impl)
    gradient = mx.grad(lambda p: (topk_renorm(p, 2, impl=impl)[0] ** 2).sum())(p)
    assert (gates.dtype, indices.dtype, gradient.dtype) == (dtype, mx.int32, dtype)
    assert (gates.shape, indices.shape, gradient.shape) == ((3, 9), (3, 2), (3, 9))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("impl", ENGINES)
def test_no_rows_give_no_rows(shape, impl):
    p, bias = mx.zeros(shape, mx.bfloat16), mx.ones((5,))
    (gates, indices), (dp,) = mx.vjp(
        lambda p: topk_renorm(p, 3, bias, impl=impl), [p], [p, mx.zeros((*shape[:-1], 3), mx.int32)]
    )
    assert (gates.shape, gates.dtype, dp.shape) == (shape, mx.bfloat16, shape)
    assert (indices.shape, indices.dtype) == ((*shape[:-1], 3), mx.int32)


@pytest.mark.parametrize(
    ("experts", "impl"),
    [
        *((experts, "reference") for experts in (5, 40, 300)),
        (40, "emulator"),
        *(pytest.param(experts, "emulator", marks=pytest.mark.slow) for experts in (5, 300)),
    ],
)
def test_of_equals_the_lowest_index_comes_first(experts, impl):
    zeros = mx.where(mx.arange(experts) % 2 == 0, -0.0, 0.0)[None]
    for p in (mx.full((1, experts), 0.25), zeros, mx.full((1, experts), -INF), mx.full((1, experts), NAN)):
        assert topk_renorm(p, 4, impl=impl)[1].tolist() == [[0, 1, 2, 3]]
    bias = mx.zeros((experts,)).at[mx.array([2, 4])].add(1.0)
    assert topk_renorm(zeros, 4, bias, impl=impl)[1].tolist() == [[2, 4, 0, 1]]


@pytest.mark.parametrize("impl", ENGINES)
def test_the_order_is_that_of_the_scores_in_float32(impl):
    # In float16 both are 1: 2^-12 is lost there.
    p, bias = mx.array([[1.0, 1, 0.5]], mx.float16), mx.array([0, 2.0**-12, 0])
    assert topk_renorm(p, 2, bias, impl=impl)[1].tolist() == [[1, 0]]
    p = mx.array([[-3.0, 2, -INF, 1e-40, INF, -0.0, -1e30, 0.5]])
    assert topk_renorm(p, 8, normalize=False, impl=impl)[1].tolist() == [[4, 1, 7, 3, 5, 0, 6, 2]]


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_nan_comes_first_and_shows_in_the_gates(dtype, impl):
    p = np.full((3, 40), 0.125, np.float32)
    p[0, [7, 30]], p[1], p[2, 39] = NAN, NAN, -NAN
    p[0, 3] = INF
    gates, indices = topk_renorm(mx.array(p).astype(dtype), 4, impl=impl)
    assert indices.tolist() == [[7, 30, 3, 0], [0, 1, 2, 3], [39, 0, 1, 2]]
    is_nan = mx.isnan(gates)
    assert all(
        set(np.flatnonzero(row)) == set(each) for row, each in zip(is_nan.tolist(), indices.tolist(), strict=True)
    )
    gates, _ = topk_renorm(mx.array(p).astype(dtype), 4, normalize=False, impl=impl)
    assert np.flatnonzero(mx.isnan(gates)[0]).tolist() == [7, 30]
    # inf - inf is NaN too: of the scores, not of the gates.
    gates, indices = topk_renorm(mx.ones((1, 3)).at[0, 2].add(INF), 1, mx.array([0.0, NAN, -INF]), impl=impl)
    assert (gates.tolist(), indices.tolist()) == ([[0, 1, 0]], [[1]])


@pytest.mark.parametrize("impl", ENGINES)
def test_indices_are_different_and_in_range_whatever_p_holds(impl):
    bits = np.random.default_rng(0).integers(0, 2**32, (40, 33), dtype=np.uint32)
    bits[:20] |= 0x7F800000
    indices = np.array(topk_renorm(mx.array(bits).view(mx.float32), 33, normalize=False, impl=impl)[1])
    assert (np.sort(indices, axis=-1) == np.arange(33)).all()


@pytest.mark.parametrize("impl", ENGINES)
def test_experts_out_of_reach_are_chosen_when_too_few_are_left(impl):
    p, bias = mx.array([[0.1, 0.2, 0.3, 0.4]]), mx.array([[-INF, -INF, 0, -INF]])
    gates, indices = topk_renorm(p, 3, bias, impl=impl)
    assert indices.tolist() == [[2, 0, 1]]
    assert_close(gates, mx.array([[0.1, 0.2, 0.3, 0]]) / 0.6)
    gates, indices = topk_renorm(p, 1, bias, impl=impl)
    assert (gates.tolist(), indices.tolist()) == ([[0, 0, 1, 0]], [[2]])


@pytest.mark.parametrize("impl", ENGINES)
def test_rows_of_zeros(impl):
    p = mx.zeros((1, 6))
    gates, indices = topk_renorm(p, 2, mx.arange(6).astype(mx.float32), impl=impl)
    assert (gates.tolist(), indices.tolist()) == ([[0] * 6], [[5, 4]])
    assert np.isnan(topk_renorm(p, 2, eps=0, impl=impl)[0]).tolist() == [[True, True, False, False, False, False]]


@pytest.mark.parametrize("impl", ENGINES)
def test_eps_counts_in_float32(impl):
    p = mx.array([[6e-8, 0, 0]], mx.float16)
    assert topk_renorm(p, 2, impl=impl)[0].tolist() == [[1, 0, 0]]
    assert_close(topk_renorm(mx.array([[1.0, 3, 2]]), 2, eps=5, impl=impl)[0], mx.array([[0, 0.3, 0.2]]))


BIASES = [(4,), (1,), (), (1, 4), (3, 1, 4), (1, 2, 4), (3, 2, 4), (3, 2, 1), (1, 1, 4)]


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias_of_any_shape_that_broadcasts_selects_and_has_no_gradient(shape, impl):
    p, bias = mx.softmax(random((3, 2, 4), 0), axis=-1), random(shape, 1)
    gates, indices = topk_renorm(p, 2, bias, impl=impl)
    want = np.argsort(-np.array(p + bias), axis=-1)[..., :2]
    assert np.array_equal(indices, want)
    mask = mx.put_along_axis(mx.zeros(p.shape), mx.array(want), mx.array(1.0), axis=-1)
    assert_close(gates, p * mask / (p * mask).sum(-1, keepdims=True))
    gradients = mx.grad(lambda p, bias: (topk_renorm(p, 2, bias * 1, impl=impl)[0] ** 3).sum(), (0, 1))(p, bias)
    assert gradients[0].any()
    assert gradients[1].shape == shape
    assert not gradients[1].any()


def dense(p, k, bias=None):
    """The gates by a mask, with MLX's own gradients of every order."""
    indices = mx.stop_gradient(mx.argsort(-(p if bias is None else p + bias), axis=-1)[..., :k])
    mask = mx.put_along_axis(mx.zeros(p.shape), indices, mx.array(1.0), axis=-1)
    return p * mask / (p * mask).sum(-1, keepdims=True), indices.astype(mx.int32)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("impl", ENGINES)
def test_second_derivative(impl, normalize):
    p, direction = mx.softmax(random((3, 9), 0), axis=-1), random((3, 9), 1)

    def second(route):
        def first(p):
            def loss(p):
                gates, indices = route(p)
                return (gates**3).sum() + (mx.take_along_axis(gates, indices, axis=-1) ** 2).sum()

            return (mx.grad(loss)(p) * direction).sum()

        return mx.grad(first)(p)

    def plain(p):
        gates, indices = dense(p, 3)
        return (gates, indices) if normalize else (p * (gates > 0), indices)

    got, want = second(lambda p: topk_renorm(p, 3, None, normalize, impl=impl)), second(plain)
    assert_close(got, want, 1e-4)
    assert want.any()


def test_use_engine_reaches_the_kernels(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append((self.source.name, engine))
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    p = random((3, 8), 0)
    mx.eval(mx.grad(lambda p: topk_renorm(p, 2, impl="metal")[0].max())(p))
    with use_engine("metal"):
        topk_renorm(p, 2)
    assert launched == [(f"topk_renorm_{name}", "metal") for name in ("forward", "backward", "forward")]


@pytest.fixture(params=["reference", "metal"])
def engine(request, monkeypatch):
    """The reference, and an engine whose launches are lazy, as those of a GPU: the formulas."""

    def forward(engine, p, bias, k, normalize, eps):
        assert engine == "metal"
        mode, rows = topk_op._bias_rows(p, bias)
        assert mode == 0 or rows.shape == ((p.shape[-1],) if mode == 1 else (p.size // p.shape[-1], p.shape[-1]))
        return reference.forward(p, bias, k, normalize, eps)

    def backward(engine, p, indices, dgates, normalize, eps):
        assert engine == "metal"
        assert p.shape == dgates.shape
        assert indices.shape[:-1] == p.shape[:-1]
        return reference.backward(p, indices, dgates, normalize, eps)

    if request.param == "metal":
        monkeypatch.setattr(topk_op, "_forward", forward)
        monkeypatch.setattr(topk_op, "_backward", backward)
        monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return request.param


# What is mapped over which axis; None: shared.
MAPPED = {
    "p": (((4, 3, 6),), (0,)),
    "p over its second axis": (((3, 4, 6),), (1,)),
    "p over its last axis": (((3, 6, 4),), (2,)),
    "rows of p": (((4, 6),), (0,)),
    "p with one bias": (((4, 3, 6), (6,)), (0, None)),
    "p with a bias of each row": (((4, 3, 6), (3, 6)), (0, None)),
    "both": (((4, 3, 6), (6, 4)), (0, 1)),
    "both, each element": (((3, 4, 6), (4, 3, 6)), (1, 0)),
    "bias": (((3, 6), (4, 6)), (None, 0)),
    "bias of each row": (((3, 6), (3, 4, 6)), (None, 1)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_gradients(name, engine):
    shapes, axes = MAPPED[name]
    arrays = [random(shape, seed) for seed, shape in enumerate(shapes)]

    def run(p, bias=None):
        return topk_renorm(p, 2, bias, normalize=False, impl=engine)

    def plain(p, bias=None):
        gates, indices = dense(p, 2, bias)
        return p * (gates != 0), indices

    def loss(function, *arrays):
        gates, indices = function(*arrays)
        return (gates**3).sum() + (mx.take_along_axis(gates, indices, axis=-1) ** 2).sum()

    def each(function):
        mapped = mx.vmap(function, in_axes=axes)
        gradient = mx.vmap(mx.grad(partial(loss, function)), in_axes=axes)
        return *mapped(*arrays), mx.grad(partial(loss, mapped))(*arrays), gradient(*arrays)

    for got, want in zip(each(run), each(plain), strict=True):
        assert got.dtype == want.dtype
        assert_close(got, want)


def test_vmap_in_vmap(engine):
    p, bias = random((2, 3, 4, 6), 0), random((2, 6), 1)

    def twice(function):
        inner = mx.vmap(function, in_axes=(0, None))
        return mx.vmap(inner, in_axes=(0, 0))(p, bias)

    ours = twice(lambda p, bias: topk_renorm(p, 2, bias, impl=engine))
    plain = twice(lambda p, bias: dense(p, 2, bias))
    for got, want in zip(ours, plain, strict=True):
        assert_close(got, want)


def test_compiled_function(engine):
    p = mx.softmax(random((3, 40), 0), axis=-1)

    def gradient(route):
        return mx.grad(lambda p: (route(p, 3)[0] ** 3).sum())

    compiled = mx.compile(gradient(partial(topk_renorm, impl=engine)))
    assert_close(compiled(p), gradient(dense)(p), 1e-4)
