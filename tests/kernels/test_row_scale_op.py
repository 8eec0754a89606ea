"""What callers of row_scale and row_scale_accumulate see: errors, engines, gradients, vmap, compiled functions."""

from functools import partial

from forge_mlx.kernels.dispatch import launch, reference, row_scale, row_scale_accumulate
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

ENGINES = ["emulator", "reference"]
X, GATES = mx.ones((4, 3)), mx.ones((4, 5))
OPS = {
    "row_scale": (row_scale, reference.row_scale, ()),
    "row_scale_accumulate": (row_scale_accumulate, reference.row_scale_accumulate, (X,)),
}
# Mistake: x, gates, e, message.
MISTAKES = {
    "x is an integer": (X.astype(mx.int32), GATES, 0, "x must be float32, .* but got int32"),
    "gates are integers": (X, GATES.astype(mx.int32), 0, "gates must be float32, .* but got int32"),
    "gates have no axis": (X, GATES[0, 0], 0, "gates must have 1 or more axes"),
    "gates of other tokens": (X, GATES[:3], 0, r"gates must have the shape \(4, 5\), the leading axes of x"),
    "e is behind the last": (X, GATES, 5, "e must be from 0 to 4, a column of gates, but got 5"),
    "e is negative": (X, GATES, -1, "e must be from 0 to 4, a column of gates, but got -1"),
    "e is a float": (X, GATES, 1.0, r"e must be a Python integer but got 1\.0"),
    "e is a truth value": (X, GATES, True, "e must be a Python integer but got True"),
    "e is an array": (X, GATES, mx.array(1), r"e must be a Python integer but got an mx\.array\. Convert it: e\.item"),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, op):
    *arguments, message = MISTAKES[mistake]
    for function in OPS[op][:2]:
        with pytest.raises(ValueError, match=rf"\[{op}\] {message}"):
            function(*OPS[op][2], *arguments)


def test_dst_is_checked():
    for function in (row_scale_accumulate, reference.row_scale_accumulate):
        with pytest.raises(ValueError, match=r"dst must have the shape \(4, 3\), that of x, but got \(4, 1\)"):
            function(X[:, :1], X, GATES, 0)
        with pytest.raises(ValueError, match=r"dst must be float32, .* but got int32"):
            function(X.astype(mx.int32), X, GATES, 0)


@pytest.mark.parametrize("op", OPS)
def test_unknown_and_missing_engines_raise(op):
    call = partial(OPS[op][0], *OPS[op][2], X, GATES, 0)
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        call(impl="emulater")
    with pytest.raises(RuntimeError, match=rf"\[{op}\] engine cuda cannot run"):
        call(impl="cuda")


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("e", [0, 3, 4, np.int64(2)])
def test_each_column_of_gates(e, impl):
    x, gates = random((2, 3, 8), 0), random((2, 3, 5), 1)
    want = x * gates[..., int(e), None]
    assert mx.array_equal(row_scale(x, gates, e, impl=impl), want)
    assert_close(row_scale_accumulate(x, x, gates, e, impl=impl), x + want)


@pytest.mark.parametrize("impl", ENGINES)
def test_all_experts_after_each_other_are_the_dense_layer(impl):
    x, gates = random((6, 8), 0, mx.bfloat16), random((6, 4), 1)
    out = mx.zeros((6, 8))
    for e in range(4):
        out = row_scale_accumulate(out, x * 2**e, gates, e, impl=impl)
    assert out.dtype == mx.float32
    assert_close(out, x.astype(mx.float32) * (gates * mx.array([1, 2, 4, 8])).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("impl", ENGINES)
def test_result_has_the_dtype_of_x_or_dst_and_is_rounded_once(impl):
    x, gates, dst = mx.array([[1.0078125]], mx.bfloat16), mx.array([[1.001]]), mx.array([[1024.0]])
    assert row_scale(x, gates, 0, impl=impl).dtype == mx.bfloat16
    added = row_scale_accumulate(dst, x, gates, 0, impl=impl)
    assert added.dtype == mx.float32
    assert abs(added.item() - (1024 + 1.0078125 * np.float32(1.001))) < 1e-4
    # The product is 1 + 1.4 steps of bfloat16 and the sum 1 + 1.6; in two roundings both would be 1 + 1 step.
    dst, gates = mx.array([[0.2 / 128]], mx.bfloat16), mx.array([[(1 + 1.4 / 128) / 1.0078125]])
    assert row_scale_accumulate(dst, x, gates, 0, impl=impl).item() == 1 + 2 / 128


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("shape", "experts"), [((0, 3), 2), ((3, 0), 2), ((2, 0, 3), 2)])
@pytest.mark.parametrize("impl", ENGINES)
def test_empty_arrays_give_zeros(op, shape, experts, impl):
    x, gates = mx.ones(shape), mx.ones((*shape[:-1], experts))
    arrays = [x, gates] if op == "row_scale" else [x, x, gates]
    (out,), gradients = mx.vjp(lambda *arrays: OPS[op][0](*arrays, 1, impl=impl), arrays, [x])
    assert out.shape == shape
    assert [each.shape for each in gradients] == [each.shape for each in arrays]
    assert not any(each.any() for each in gradients)


def call(op, impl, dst, x, gates):
    arrays = (x, gates) if op == "row_scale" else (dst, x, gates)
    return OPS[op][1](*arrays, 1) if impl == "plain" else OPS[op][0](*arrays, 1, impl=impl)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("impl", ENGINES)
def test_second_derivative(op, impl):
    arrays = [random((5, 6), 0), random((5, 6), 1), random((5, 4), 2)]
    by = (0, 1, 2) if op == "row_scale_accumulate" else (1, 2)

    def second(impl):
        def first(*arrays):
            found = mx.grad(lambda *each: (call(op, impl, *each) ** 3).sum(), argnums=by)(*arrays)
            return sum((each * random(each.shape, 7)).sum() for each in found)

        return mx.grad(first, argnums=by)(*arrays)

    for got, want in zip(second(impl), second("plain"), strict=True):
        assert_close(got, want)
        assert want.any()


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    whole = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append((self.source.name, engine))
        return whole(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    arrays = [random((4, 6), 0), random((4, 6), 1), random((4, 5), 2)]
    mx.eval(mx.vjp(lambda *each: call("row_scale_accumulate", "metal", *each), arrays, [arrays[0]]))
    with use_engine("metal"):
        row_scale(arrays[1], arrays[2], 0)
    assert launched == [(f"row_scale_{name}", "metal") for name in ("forward", "backward", "forward")]


@pytest.fixture(params=["reference", "metal"])
def engine(request, monkeypatch):
    """The reference, and an engine whose launches are lazy, as those of a GPU."""

    def forward(engine, dst, x, gates, e):
        assert engine == request.param
        assert (x.ndim, gates.ndim) == (2, 2)
        return reference.scale_forward(x, gates, e) if dst is None else reference.accumulate_forward(dst, x, gates, e)

    def backward(engine, x, gates, e, dout):
        assert engine == request.param
        assert dout.shape == x.shape
        return reference.scale_backward(x, gates, e, dout)

    if request.param == "metal":
        monkeypatch.setattr(launch, "row_scale", forward)
        monkeypatch.setattr(launch, "row_scale_backward", backward)
        monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return request.param


# Where the mapped axis is in dst, x and gates; None: nowhere.
MAPPED = {"all": (0, 0, 0), "other axes": (1, 2, 1), "x": (None, 0, None), "gates": (None, None, 0)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_gradients(name, op, engine):
    axes = MAPPED[name]
    arrays = [
        mx.moveaxis(random((3, *shape), seed), 0, axis) if axis is not None else random(shape, seed)
        for seed, (shape, axis) in enumerate(zip(((5, 6), (5, 6), (5, 4)), axes, strict=True))
    ]
    by = (1, 2)

    def results(impl):
        mapped = mx.vmap(partial(call, op, impl), in_axes=axes)
        gradient = mx.grad(lambda *each: (call(op, impl, *each) ** 3).sum(), argnums=by)
        of_vmap = mx.grad(lambda *each: (mapped(*each) ** 3).sum(), argnums=by)
        return [mapped(*arrays), *of_vmap(*arrays), *mx.vmap(gradient, in_axes=axes)(*arrays)]

    for got, want in zip(results(engine), results("plain"), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("op", OPS)
def test_compiled_function(op, engine):
    arrays = [random((2, 5, 6), 0), random((2, 5, 6), 1), random((2, 5, 4), 2)]

    def gradient(impl):
        return mx.grad(lambda *each: (call(op, impl, *each) ** 3).sum(), argnums=(1, 2))

    for got, want in zip(mx.compile(gradient(engine))(*arrays), gradient("plain")(*arrays), strict=True):
        assert_close(got, want)
