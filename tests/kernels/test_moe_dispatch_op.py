"""What callers of moe_dispatch and moe_combine see: errors, engines, shapes, gradients, vmap, compiled functions."""

from functools import partial

from forge_mlx.kernels.dispatch import DispatchPlan, launch, moe_combine, moe_dispatch, reference
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

ENGINES = ["emulator", "reference"]
X, GATES, Y = mx.ones((4, 3)), mx.ones((4, 5)), mx.ones((8, 3))
INDICES = mx.array([[1, 0], [1, 2], [4, 1], [2, 2]])
PLAN = reference.moe_dispatch(X, INDICES)[1]
DISPATCHES = {"op": moe_dispatch, "reference": reference.moe_dispatch}
COMBINES = {"op": moe_combine, "reference": reference.moe_combine}
# Mistake: arguments, message.
DISPATCH_MISTAKES = {
    "x is an integer": ((X.astype(mx.int32), INDICES), r"\[moe_dispatch\] x must be float32, .* but got int32"),
    "indices are floats": ((X, GATES), r"\[moe_dispatch\] indices must be integers but got float32"),
    "x has no axis": ((X[0, 0], INDICES), "x must have 1 or more axes but got the shape"),
    "indices have no axis": ((X, INDICES[0, 0]), "indices must have 1 or more axes but got the shape"),
    "other tokens": ((X[:3], INDICES), r"indices must have the shape \(3, 2\), the leading axes of x"),
    "tokens in another shape": ((X.reshape(2, 2, 3), INDICES), r"indices must have the shape \(2, 2, 2\)"),
}
COMBINE_MISTAKES = {
    "y is an integer": ((Y.astype(mx.int32), GATES, PLAN), r"\[moe_combine\] y must be float32, .* but got int32"),
    "gates are integers": ((Y, GATES.astype(mx.int8), PLAN), "gates must be float32, .* but got int8"),
    "gates have no axis": ((Y, GATES[0, 0], PLAN), "gates must have 1 or more axes"),
    "no plan": ((Y, GATES, INDICES), "plan must be the DispatchPlan that moe_dispatch returns but got array"),
    "a tuple": ((Y, GATES, tuple(PLAN)), "plan must be the DispatchPlan .* but got tuple"),
    "rows of another plan": ((Y[1:], GATES, PLAN), r"y must have the shape \(8, C\), as plan, but got \(7, 3\)"),
    "y with other axes": ((Y.reshape(4, 2, 3), GATES, PLAN), r"but got \(4, 2, 3\)"),
    "gates of other tokens": ((Y, GATES[:3], PLAN), r"gates must have the shape \(4, 5\)"),
    "a list in the plan": ((Y, GATES, PLAN._replace(slots=[1])), "plan.slots must be an mx.array but got list"),
    "another dtype": (
        (Y, GATES, PLAN._replace(slots=PLAN.slots.astype(mx.int64))),
        "plan.slots must be int32 but got int64",
    ),
    "fields of two plans": (
        (Y, GATES, PLAN._replace(positions=PLAN.positions[:2])),
        r"plan.positions must have the shape \(4, 2\), that of plan.indices, but got \(2, 2\)",
    ),
    "too few slots": ((Y, GATES, PLAN._replace(tokens=PLAN.tokens[:2])), r"plan.tokens must have the shape \(8,\)"),
}


@pytest.mark.parametrize("function", DISPATCHES)
@pytest.mark.parametrize("mistake", DISPATCH_MISTAKES)
def test_mistakes_in_moe_dispatch_raise_the_same_errors(mistake, function):
    arguments, message = DISPATCH_MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        DISPATCHES[function](*arguments)


@pytest.mark.parametrize("function", COMBINES)
@pytest.mark.parametrize("mistake", COMBINE_MISTAKES)
def test_mistakes_in_moe_combine_raise_the_same_errors(mistake, function):
    arguments, message = COMBINE_MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        COMBINES[function](*arguments)


@pytest.mark.parametrize("call", [partial(moe_dispatch, X, INDICES), partial(moe_combine, Y, GATES, PLAN)])
def test_unknown_and_missing_engines_raise(call):
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        call(impl="emulater")
    with pytest.raises(RuntimeError, match=r"\[moe_\w+\] engine cuda cannot run"):
        call(impl="cuda")


@pytest.mark.parametrize("impl", ENGINES)
def test_what_is_dispatched_comes_back(impl):
    # The gates of each token are halves: what is not changed in between is as it was, bit for bit.
    x, indices = random((2, 5, 12), 0), mx.array(np.argsort(np.random.default_rng(0).random((2, 5, 4)))[..., :2])
    gates = mx.put_along_axis(mx.zeros((2, 5, 4)), indices, mx.array(0.5), axis=-1)
    rows, plan = moe_dispatch(x, indices, impl=impl)
    assert rows.shape == (20, 12)
    assert mx.array_equal(moe_combine(rows, gates, plan, impl=impl), x)


@pytest.mark.parametrize("impl", ENGINES)
def test_rows_may_have_another_width_on_the_way_back(impl):
    rows, plan = moe_dispatch(X, INDICES, impl=impl)
    out = moe_combine(mx.ones((8, 17), mx.float16), GATES, plan, impl=impl)
    assert rows.shape == (8, 3)
    assert (out.shape, out.dtype) == ((4, 17), mx.float16)
    assert (out == 2).all()


@pytest.mark.parametrize("impl", ENGINES)
def test_a_single_token_without_leading_axes(impl):
    rows, plan = moe_dispatch(X[0], mx.array([3, 0]), impl=impl)
    assert rows.shape == (2, 3)
    assert moe_combine(rows, mx.arange(5).astype(mx.float32), plan, impl=impl).tolist() == [3, 3, 3]


@pytest.mark.parametrize("impl", ENGINES)
def test_an_expert_named_twice_counts_twice(impl):
    x = random((1, 8), 0)
    rows, plan = moe_dispatch(x, mx.array([[2, 2]]), impl=impl)
    gates = mx.array([[9.0, 9.0, 0.25]])
    out, gradients = mx.vjp(lambda gates: moe_combine(rows, gates, plan, impl=impl), [gates], [mx.ones((1, 8))])
    assert mx.array_equal(out[0], 0.5 * x)
    assert_close(gradients[0], mx.array([[0, 0, 2 * x.sum().item()]]))


@pytest.mark.parametrize("impl", ENGINES)
def test_16_bit_rows_are_added_in_float32(impl):
    k = 300
    rows, plan = moe_dispatch(mx.ones((1, 8), mx.bfloat16), mx.zeros((1, k), mx.int32), impl=impl)
    gates = mx.ones((1, 1))
    assert moe_combine(rows, gates, plan, impl=impl).tolist() == [[k] * 8]
    indices = plan.indices
    dx = mx.grad(lambda x: moe_dispatch(x, indices, impl=impl)[0].sum())(mx.ones((1, 8), mx.bfloat16))
    assert dx.tolist() == [[k] * 8]


EMPTY = {"tokens": (0, 2, 3, 5), "slots": (4, 0, 3, 5), "columns": (4, 2, 0, 5), "experts": (4, 2, 3, 0)}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("impl", ENGINES)
def test_empty_arrays_give_zeros(name, impl):
    tokens, k, columns, experts = EMPTY[name]
    x, gates, indices = mx.ones((tokens, columns)), mx.ones((tokens, experts)), mx.zeros((tokens, k), mx.int32)

    def layer(x, gates):
        rows, plan = moe_dispatch(x, indices, impl=impl)
        assert rows.shape == (tokens * k, columns)
        return moe_combine(rows, gates, plan, impl=impl)

    (out,), gradients = mx.vjp(layer, [x, gates], [mx.ones((tokens, columns))])
    assert out.shape == x.shape
    assert [each.shape for each in gradients] == [x.shape, gates.shape]
    assert not any(each.any() for each in (out, *gradients))


def layer(impl, x, gates, indices):
    """What is not linear in between makes every derivative depend on everything."""
    if impl == "plain":
        rows, plan = reference.moe_dispatch(x, indices)
        return reference.moe_combine(mx.sin(rows), gates, plan)
    rows, plan = moe_dispatch(x, indices, impl=impl)
    return moe_combine(mx.sin(rows), gates, plan, impl=impl)


@pytest.mark.parametrize("impl", ENGINES)
def test_second_derivative(impl):
    x, gates, indices = random((5, 6), 0), random((5, 4), 1), mx.array([[3, 3], [-1, 0], [2, 1], [0, 4], [1, 2]])

    def second(impl):
        def first(x, gates):
            dx, dgates = mx.grad(lambda *each: (layer(impl, *each, indices) ** 3).sum(), argnums=(0, 1))(x, gates)
            return (dx * random((5, 6), 2)).sum() + (dgates * random((5, 4), 3)).sum()

        return mx.grad(first, argnums=(0, 1))(x, gates)

    for got, want in zip(second(impl), second("plain"), strict=True):
        assert_close(got, want)
        assert want.any()


def by_steps(function, inputs, tangents):
    """The derivative along tangents by central differences in float64."""
    step = 1e-6
    above, below = (function(*(a + sign * step * t for a, t in zip(inputs, tangents, strict=True))) for sign in (1, -1))
    return mx.array((above - below) / (2 * step))


@pytest.mark.parametrize("moving", ["y", "gates", "both"])
def test_forward_mode_of_the_reference_matches_finite_differences(moving):
    indices = np.array([[3, 3], [-1, 0], [2, 1], [0, 4], [1, 2]])
    order = np.argsort(np.maximum(indices, -1).reshape(-1), kind="stable")
    slots = np.argsort(order).reshape(indices.shape)
    x, gates, y = (np.array(random(shape, seed), np.float64) for seed, shape in enumerate([(5, 6), (5, 4), (10, 6)]))
    dx, dgates, dy = (np.array(random(each.shape, 7), np.float64) for each in (x, gates, y))
    rows, plan = moe_dispatch(mx.array(x, mx.float32), mx.array(indices), impl="reference")

    def combined(y, gates):
        known = (indices >= 0) & (indices < 4)
        weights = np.where(known, np.take_along_axis(gates, np.where(known, indices, 0), axis=1), 0)
        return (weights[..., None] * y[slots]).sum(axis=1)

    def combine(y, gates):
        return moe_combine(y, gates, plan, impl="reference")

    inputs, tangents = (y, gates), (dy * (moving != "gates"), dgates * (moving != "y"))
    _, (got,) = mx.jvp(combine, [mx.array(a, mx.float32) for a in inputs], [mx.array(t, mx.float32) for t in tangents])
    assert_close(got, by_steps(combined, inputs, tangents))
    _, (got,) = mx.jvp(
        lambda x: moe_dispatch(x, mx.array(indices), impl="reference")[0],
        [mx.array(x, mx.float32)],
        [mx.array(dx, mx.float32)],
    )
    assert_close(got, by_steps(lambda x: x[order // 2], (x,), (dx,)))
    assert rows.shape == got.shape


def test_gradient_of_moe_dispatch_holds_no_input():
    shape, indices = (2**10, 2**12), mx.zeros((2**10, 1), mx.int32)
    gradient = mx.vjp(lambda x: moe_dispatch(x, indices, impl="reference")[0], [mx.zeros(shape)], [mx.ones(shape)])[1]
    mx.reset_peak_memory()
    mx.eval(gradient)
    # The cotangent, and sums of rows in float32: x, of zeros that nothing reads, would be one more.
    assert mx.get_peak_memory() < 4.5 * 4 * 2**22


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append((self.source.name, engine))
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    x, gates = random((4, 6), 0), random((4, 5), 1)
    mx.eval(mx.vjp(lambda *each: layer("metal", *each, INDICES), [x, gates], [x]))
    with use_engine("metal"):
        layer(None, x, gates, INDICES)
    names = ["dispatch_forward", "combine_forward", "combine_backward", "dispatch_backward"]
    assert launched == [(f"moe_{name}", "metal") for name in [*names, *names[:2]]]


@pytest.fixture(params=["reference", "metal"])
def engine(request, monkeypatch):
    """The reference, and an engine whose launches are lazy, as those of a GPU: with what the kernels ask of inputs."""

    def checked(formula, engine, first, *rest):
        positions = rest[-1] if formula in (scatter, reference.dispatch_backward) else rest[1]
        assert engine == request.param
        assert {each.ndim for each in (first, *rest)} == {2}
        assert positions.dtype == mx.int32
        assert first.shape[0] == (positions.shape[0] if formula is scatter else positions.size)
        return formula(first, *rest)

    def scatter(x, positions):
        return x[mx.argsort(positions.reshape(-1)) // positions.shape[1]]

    def combine_backward(y, gates, positions, indices, dout):
        slots = mx.argsort(positions.reshape(-1)).astype(mx.int32)
        return reference.combine_backward(y, gates, positions, indices, slots, dout)

    if request.param == "metal":
        monkeypatch.setattr(launch, "dispatch_forward", partial(checked, scatter))
        monkeypatch.setattr(launch, "dispatch_backward", partial(checked, reference.dispatch_backward))
        monkeypatch.setattr(launch, "combine_forward", partial(checked, reference.combine_forward))
        monkeypatch.setattr(launch, "combine_backward", partial(checked, combine_backward))
        monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return request.param


def some_indices(*shape):
    return mx.array(np.random.default_rng(0).integers(-1, 5, shape))


# What is mapped over which axis; None: shared.
MAPPED = {
    "all": ((random((3, 5, 6), 0), random((3, 5, 4), 1), some_indices(3, 5, 2)), (0, 0, 0)),
    "other axes": ((random((5, 6, 3), 0), random((5, 3, 4), 1), some_indices(5, 3, 2)), (2, 1, 1)),
    "x": ((random((3, 5, 6), 0), random((5, 4), 1), some_indices(5, 2)), (0, None, None)),
    "gates": ((random((5, 6), 0), random((3, 5, 4), 1), some_indices(5, 2)), (None, 0, None)),
    "indices": ((random((5, 6), 0), random((5, 4), 1), some_indices(3, 5, 2)), (None, None, 0)),
    "x and indices of a single token": ((random((3, 6), 0), random((4,), 1), some_indices(3, 2)), (0, None, 0)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_gradients(name, engine):
    (x, gates, indices), axes = MAPPED[name]

    def of_vmap(impl):
        mapped = mx.vmap(partial(layer, impl), in_axes=axes)
        return mx.grad(lambda x, gates: (mapped(x, gates, indices) ** 3).sum(), argnums=(0, 1))(x, gates)

    def vmap_of(impl):
        gradient = mx.grad(lambda *each: (layer(impl, *each) ** 3).sum(), argnums=(0, 1))
        return mx.vmap(gradient, in_axes=axes)(x, gates, indices)

    results = [
        [mx.vmap(partial(layer, impl), in_axes=axes)(x, gates, indices), *of_vmap(impl), *vmap_of(impl)]
        for impl in (engine, "plain")
    ]
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


def test_vmap_in_vmap(engine):
    arguments = random((2, 3, 5, 6), 0), random((3, 5, 4), 1), some_indices(2, 3, 5, 2)

    def twice(impl):
        return mx.vmap(mx.vmap(partial(layer, impl)), in_axes=(0, None, 0))(*arguments)

    assert_close(twice(engine), twice("plain"))


def test_vmap_of_too_many_rows_raises(engine):
    x = mx.broadcast_to(mx.zeros((1, 2**12, 1)), (2**13, 2**12, 1))
    plan = DispatchPlan(*(mx.zeros((2**18,), mx.int32) for _ in range(3)), *(mx.zeros((2**12, 64), mx.int32),) * 2)
    gates = mx.zeros((2**12, 1))
    y = mx.broadcast_to(mx.zeros((1, 2**18, 1)), (2**13, 2**18, 1))
    with pytest.raises(ValueError, match=r"all elements of vmap must have fewer than 2\^31 rows together but got"):
        mx.vmap(lambda x: moe_dispatch(x, plan.indices, impl=engine)[0])(x)
    with pytest.raises(ValueError, match=r"all elements of vmap must have fewer than 2\^31 rows together but got"):
        mx.vmap(lambda y: moe_combine(y, gates, plan, impl=engine))(y)


def test_compiled_function(engine):
    x, gates, indices = random((3, 5, 6), 0), random((3, 5, 4), 1), some_indices(3, 5, 2)

    def gradient(impl):
        return mx.grad(lambda *each: (layer(impl, *each) ** 3).sum(), argnums=(0, 1))

    compiled = mx.compile(gradient(engine))
    for got, want in zip(compiled(x, gates, indices), gradient("plain")(x, gates, indices), strict=True):
        assert_close(got, want)
