"""What callers of embedding see: errors, engines, ids, second derivatives, vmap, checkpoints, compiled functions."""

from forge_mlx.kernels.embedding import op, reference
from forge_mlx.kernels.embedding.cases import INTEGERS
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from room_proofs import assert_close, random

FUNCTIONS = {"op": op.embedding, "reference": reference.embedding}
ENGINES = ["emulator", "reference"]


W = mx.zeros((4, 3))
IDS = mx.array([1, 2])
# Mistake: arguments, message.
MISTAKES = {
    "weight is an integer": ((W.astype(mx.int32), IDS), r"\[embedding\] weight must be float32, .* but got int32"),
    "weight has 1 axis": ((W[0], IDS), r"\[embedding\] weight must have the 2 axes \[V, C\] but got the shape \(3,\)"),
    "weight has 3 axes": ((W[None], IDS), r"but got the shape \(1, 4, 3\)"),
    "ids are floats": ((W, IDS.astype(mx.float32)), r"\[embedding\] ids must be integers but got float32"),
    "ids are bools": ((W, IDS > 1), "ids must be integers but got bool"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](*arguments)


def test_unknown_and_missing_engines_raise():
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        op.embedding(W, IDS, impl="emulater")
    with pytest.raises(RuntimeError, match=r"\[embedding\] engine cuda cannot run"):
        op.embedding(W, IDS, impl="cuda")


@pytest.mark.parametrize("impl", ENGINES)
def test_known_ids_give_what_mlx_gives(impl):
    weight, ids = random((9, 5), 0), mx.array([[3, 0], [8, 3]])
    module = nn.Embedding(9, 5)
    module.weight = weight
    assert mx.array_equal(op.embedding(weight, ids, impl=impl), module(ids))


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_ids_out_of_range_give_zeros_and_no_gradient(dtype, impl):
    limits = mx.iinfo(dtype)
    # The last ones would be 1 if they were cut down to 32 bits.
    outside = [limits.min, -1, 5, limits.max, 2**32 + 1, 1 - 2**32]
    numbers = [1, *(each for each in outside if limits.min <= each <= limits.max and not 0 <= each < 5)]
    ids, weight = mx.array(np.array(numbers, dtype=object).astype(str(dtype)[9:])), random((5, 6), 0)
    assert ids.dtype == dtype
    (y,), (dweight,) = mx.vjp(
        lambda weight: op.embedding(weight, ids, impl=impl), [weight], [mx.ones((len(numbers), 6))]
    )
    assert mx.array_equal(y[0], weight[1])
    assert not y[1:].any()
    assert dweight.sum(axis=1).tolist() == [0, 6, 0, 0, 0]


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("rows", [100, 128, 256, 70_000])
@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int16, mx.uint16], ids=str)
def test_narrow_ids_of_a_table_with_more_rows_than_they_can_name(dtype, rows, impl):
    limits = mx.iinfo(dtype)
    numbers = [limits.min, 1, 99, limits.max]
    weight = mx.arange(1, rows + 1, dtype=mx.float32)[:, None]
    got = op.embedding(weight, mx.array(numbers, dtype=dtype), impl=impl)[:, 0].tolist()
    assert got == [each + 1 if 0 <= each < rows else 0 for each in numbers]


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("columns", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_rows_keep_their_bits_and_zeros_do_not_come_from_numbers(dtype, columns, impl):
    # 0 times an infinity or a NaN of the row that is read in its place would be NaN.
    weight = mx.array([[float("nan")] * columns, [float("-inf")] * columns, [-0.0] * columns], dtype=dtype)
    y = op.embedding(weight, mx.array([-1, 3, 1, 2]), impl=impl).astype(mx.float32)
    assert np.array_equal(y, np.array([[0.0], [0], [-np.inf], [-0.0]]).repeat(columns, 1))
    assert np.signbit(np.array(y)).tolist() == [[False] * columns] * 2 + [[True] * columns] * 2


@pytest.mark.parametrize("impl", ENGINES)
def test_ids_of_any_shape(impl):
    weight = random((5, 6), 0)
    assert mx.array_equal(op.embedding(weight, mx.array(3), impl=impl), weight[3])
    ids = mx.array(np.arange(24).reshape(2, 3, 4) % 5)
    assert mx.array_equal(op.embedding(weight, ids.T, impl=impl), weight[ids.T])


@pytest.mark.parametrize(("table", "shape"), [((5, 6), (0,)), ((5, 6), (2, 0)), ((0, 6), (3,)), ((5, 0), (3,))])
@pytest.mark.parametrize("impl", ENGINES)
def test_empty_arrays_give_zeros(table, shape, impl):
    weight, ids = mx.ones(table), mx.zeros(shape, mx.int32)
    cotangent = mx.ones((*shape, table[1]))
    (y,), (dweight,) = mx.vjp(lambda weight: op.embedding(weight, ids, impl=impl), [weight], [cotangent])
    assert y.shape == (*shape, table[1])
    assert dweight.shape == table
    assert not y.any()
    assert not dweight.any()


@pytest.mark.parametrize("impl", ENGINES)
def test_16_bit_gradients_are_summed_in_float32(impl):
    weight, ids = mx.zeros((2, 4), mx.bfloat16), mx.ones((1000,), mx.int32)
    gradient = mx.grad(lambda weight: op.embedding(weight, ids, impl=impl).sum())(weight)
    assert gradient.tolist() == [[0] * 4, [1000] * 4]


@pytest.mark.parametrize("impl", ENGINES)
def test_second_derivative(impl):
    weight, ids = random((5, 6), 0), mx.array([3, 3, -1, 0])

    def second(function):
        def first(weight):
            return (mx.grad(lambda weight: (function(weight) ** 3).sum())(weight) * random((5, 6), 1)).sum()

        return mx.grad(first)(weight)

    want = second(lambda weight: reference.embedding(weight, ids))
    assert_close(second(lambda weight: op.embedding(weight, ids, impl=impl)), want)
    assert want.any()


@pytest.mark.parametrize("impl", ENGINES)
def test_in_a_checkpoint(impl):
    weight, ids = random((5, 6), 0), mx.array([3, 3, -1, 0])

    def loss(weight):
        return (op.embedding(weight, ids, impl=impl) ** 3).sum()

    assert mx.array_equal(mx.grad(mx.checkpoint(loss))(weight), mx.grad(loss)(weight))


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append((self.source.name, engine))
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    weight, ids = random((5, 6), 0), mx.zeros((70,), mx.int32)
    mx.eval(mx.vjp(lambda weight: op.embedding(weight, ids, impl="metal"), [weight], [mx.ones((70, 6))]))
    with use_engine("metal"):
        op.embedding(weight, ids)
    names = ["forward", "segments", "chunks", "backward", "forward"]
    assert launched == [(f"embedding_{name}", "metal") for name in names]


@pytest.fixture(params=["reference", "metal"])
def engine(request, monkeypatch):
    """The reference, and an engine whose launches are lazy, as those of a GPU: with what the kernels ask of inputs."""

    def gather(engine, weight, ids):
        assert engine == request.param
        assert (weight.ndim, ids.ndim, ids.dtype) == (2, 1, mx.int32)
        return reference.forward(weight, ids)

    def sum_rows(engine, weight, ids, dy):
        assert engine == request.param
        assert (weight.ndim, dy.shape) == (2, (ids.size, weight.shape[1]))
        return reference.backward(weight, ids, dy)

    if request.param == "metal":
        monkeypatch.setattr(op, "_gather", gather)
        monkeypatch.setattr(op, "_sum_rows", sum_rows)
        monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return request.param


def some_ids(*shape):
    return mx.array(np.random.default_rng(0).integers(-1, 8, shape))


# What is mapped over which axis; None: shared.
MAPPED = {
    "ids": ((random((7, 5), 0), some_ids(4, 3)), (None, 0)),
    "ids over their second axis": ((random((7, 5), 0), some_ids(3, 4, 2)), (None, 1)),
    "single ids": ((random((7, 5), 0), some_ids(4)), (None, 0)),
    "weight": ((random((4, 7, 5), 0), some_ids(3)), (0, None)),
    "weight over its last axis": ((random((7, 5, 4), 0), some_ids(3, 2)), (2, None)),
    "both": ((random((7, 4, 5), 0), some_ids(4, 3)), (1, 0)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_gradients(name, engine):
    arguments, axes = MAPPED[name]

    def ours(weight, ids):
        return op.embedding(weight, ids, impl=engine)

    def of_vmap(function):
        mapped = mx.vmap(function, in_axes=axes)
        return mx.grad(lambda weight: (mapped(weight, arguments[1]) ** 3).sum())(arguments[0])

    def vmap_of(function):
        gradient = mx.grad(lambda weight, ids: (function(weight, ids) ** 3).sum())
        return mx.vmap(gradient, in_axes=axes)(*arguments)

    plain = reference.embedding
    assert_close(mx.vmap(ours, in_axes=axes)(*arguments), mx.vmap(plain, in_axes=axes)(*arguments))
    assert_close(of_vmap(ours), of_vmap(plain))
    assert_close(vmap_of(ours), vmap_of(plain))


def test_vmap_in_vmap(engine):
    weight, ids = random((3, 7, 5), 0), some_ids(3, 4, 2)

    def twice(function):
        inner = mx.vmap(function, in_axes=(None, 0))
        return mx.vmap(inner, in_axes=(0, 0))(weight, ids)

    assert_close(twice(lambda *each: op.embedding(*each, impl=engine)), twice(reference.embedding))


def test_vmap_of_too_many_tables_raises(engine):
    weight, ids = mx.zeros((1, 2**21, 1)), mx.zeros((1024, 3), mx.int32)
    weight = mx.broadcast_to(weight, (1024, 2**21, 1))
    with pytest.raises(
        ValueError, match=r"vmap must keep the tables together below 2\^31 rows but got 1024 of 2097152"
    ):
        mx.vmap(lambda *each: op.embedding(*each, impl=engine))(weight, ids)


def test_compiled_function(engine):
    weight, ids = random((7, 5), 0), some_ids(3, 4)

    def gradient(function):
        return mx.grad(lambda weight, ids: (function(weight, ids) ** 3).sum())

    compiled = mx.compile(gradient(lambda *each: op.embedding(*each, impl=engine)))
    assert_close(compiled(weight, ids), gradient(reference.embedding)(weight, ids))
