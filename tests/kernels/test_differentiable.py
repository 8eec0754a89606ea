"""Functions made of a forward, a backward and a formula: gradients of every order, constants, vmap."""

from functools import partial

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import map_batches, map_elements, map_rows, map_rows_or_batches
import mlx.core as mx
import numpy as np
import pytest


def random(shape, seed):
    return mx.random.normal(shape, key=mx.random.key(seed))


def assert_close(got, want):
    got, want = np.array(got), np.array(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def picked(weight, ids, scale):
    """y = weight[ids] scale and z = y^2; y is saved."""
    y = weight[ids] * scale
    return y, y * y


def gradient_of_picked(weight, ids, scale, y, dy, dz):
    """Of weight and scale: ids have none."""
    g = dy + 2 * dz * y
    return mx.zeros_like(weight).at[ids].add(g * scale), (g * weight[ids]).sum(0)


def gradient_of_scaled(_x, c, dy):
    """Of x, in y = x c."""
    return (dy * c,)


def made(calls=None, backward=gradient_of_picked):
    def counted(*arguments):
        if calls is not None:
            calls.append(len(arguments))
        return backward(*arguments)

    return differentiable(picked, counted, gradient_of_picked, saved=(0,), constants={1}, vmap=map_batches)


WEIGHT, IDS, SCALE = random((5, 3), 0), mx.array([0, 2, 2, 4]), random((4, 3), 1)[0]


def loss(function, weight, scale):
    y, z = function(weight, IDS, scale)
    return (y * random(y.shape, 2)).sum() + (z * random(z.shape, 3)).sum()


def test_gradients_are_those_of_the_backward():
    calls = []
    got = mx.grad(partial(loss, made(calls)), argnums=(0, 1))(WEIGHT, SCALE)
    want = mx.grad(partial(loss, picked), argnums=(0, 1))(WEIGHT, SCALE)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    # Three inputs, the saved output, two cotangents.
    assert calls == [6]


def test_second_derivatives_are_those_of_the_formula():
    def first(function, weight, scale):
        gradients = mx.grad(partial(loss, function), argnums=(0, 1))(weight, scale)
        return sum((each * random(each.shape, 4)).sum() for each in gradients)

    # What it launches has no derivative, as no kernel has.
    launched = made(backward=lambda *arguments: tuple(map(mx.stop_gradient, gradient_of_picked(*arguments))))
    got = mx.grad(partial(first, launched), argnums=(0, 1))(WEIGHT, SCALE)
    want = mx.grad(partial(first, picked), argnums=(0, 1))(WEIGHT, SCALE)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_a_constant_has_no_gradient_though_it_could_have_one():
    function = differentiable(
        lambda x, c: (x * c,), gradient_of_scaled, gradient_of_scaled, constants={1}, vmap=map_elements
    )
    x, c = random((3,), 0), random((3,), 1)
    dx, dc = mx.grad(lambda x, c: function(x, c)[0].sum(), argnums=(0, 1))(x, c)
    assert_close(dx, c)
    assert not dc.any()
    second = mx.grad(lambda x, c: mx.grad(lambda x: (function(x, c)[0] ** 2).sum())(x).sum(), argnums=(0, 1))(x, c)
    assert_close(second[0], 2 * c * c)
    assert not second[1].any()


def test_too_few_gradients_raise():
    short = differentiable(lambda x, y: (x * y,), gradient_of_scaled, gradient_of_scaled, vmap=map_elements)
    with pytest.raises(ValueError, match="differentiable"):
        mx.grad(lambda x: short(x, x)[0].sum())(mx.ones((2,)))


@pytest.mark.parametrize("axes", [(0, None), (1, None), (None, 0), (0, 1), (2, 0)], ids=str)
def test_elements_are_mapped_over_any_axis(axes):
    function = differentiable(
        lambda x, y: (x * y,), lambda x, y, dz: (dz * y, dz * x), lambda x, y, dz: (dz * y, dz * x), vmap=map_elements
    )
    shapes = [[3, 4], [3, 4]]
    for shape, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            shape.insert(axis, 5)
    arrays = [random(shape, seed) for seed, shape in enumerate(shapes)]

    def total(inner, *arrays):
        return (mx.vmap(inner, in_axes=axes)(*arrays) ** 3).sum()

    assert_close(
        mx.vmap(lambda *a: function(*a)[0], in_axes=axes)(*arrays), mx.vmap(mx.multiply, in_axes=axes)(*arrays)
    )
    got = mx.grad(partial(total, lambda *a: function(*a)[0]), argnums=(0, 1))(*arrays)
    want = mx.grad(partial(total, mx.multiply), argnums=(0, 1))(*arrays)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_rows_grow_where_no_weight_is_mapped_and_batches_elsewhere():
    seen = []

    def scaled(x, w):
        seen.append(x.shape)
        return (x * w[:, None],)

    x, w = random((4, 1, 3, 5), 0), random((1, 5), 1)
    (y,), axes = map_rows_or_batches(scaled, (x, w), (0, None))
    assert seen == [(1, 12, 5)]
    assert axes == (1,)
    assert_close(y, (x * w[:, None]).swapaxes(0, 1))
    (y,), _ = map_rows(scaled, (x, w), (0, None), shared={1})
    assert_close(y, (x * w[:, None]).swapaxes(0, 1))
    many = random((4, 1, 5), 2)
    (y,), axes = map_rows_or_batches(scaled, (x, many), (0, 0))
    assert seen[-1] == (4, 3, 5)
    assert axes == (0,)
    assert_close(y, x * many[:, :, None])


def test_ids_may_come_from_what_has_no_derivative():
    def of_largest(weight, function):
        y, _ = function(weight, mx.argsort(-weight[:, 0])[:2], SCALE)
        return y.sum()

    got = mx.grad(partial(of_largest, function=made()))(WEIGHT)
    assert_close(got, mx.grad(lambda weight: picked(weight, mx.argsort(-WEIGHT[:, 0])[:2], SCALE)[0].sum())(WEIGHT))


def cubed(x, order, _back):
    return (x[order] ** 3,)


def gradient_of_cubed(x, _order, back, dy):
    return (3 * x * x * dy[back],)


ORDER, BACK = mx.array([2, 0, 3, 1]), mx.array([1, 3, 0, 2])


@pytest.mark.parametrize("has_kernel", [False, True])
def test_forward_mode_does_not_meet_the_constants(has_kernel):
    """MLX refuses tangents of indices; the gradient's own derivative in forward mode is 6 x v w."""
    backward = (lambda *given: gradient_of_cubed(*given)) if has_kernel else gradient_of_cubed
    function = differentiable(cubed, backward, gradient_of_cubed, constants={1, 2}, vmap=map_batches)
    x, v, w = (random((4,), seed) for seed in range(3))
    _, (moved,) = mx.jvp(lambda x: function(x, ORDER, BACK)[0], [x], [v])
    assert_close(moved, (3 * x * x * v)[ORDER])
    _, (moved,) = mx.jvp(mx.grad(lambda x: (function(x, ORDER, BACK)[0] * w).sum()), [x], [v])
    assert_close(moved, 6 * x * v * w[BACK])


def test_gradient_has_a_rule_of_its_own():
    rules = []

    def rule(name, function, inputs, axes):
        rules.append(name)
        return map_elements(function, inputs, axes)

    def backward(x, y, dz):
        return dz * y, dz * x

    forward, of_backward = partial(rule, "forward"), partial(rule, "backward")
    product = differentiable(lambda x, y: (x * y,), backward, backward, vmap=forward, backward_vmap=of_backward)
    x, y = random((5, 3), 0), random((3,), 1)
    cube = mx.grad(lambda x, y: (product(x, y)[0] ** 3).sum())
    assert_close(mx.vmap(cube, in_axes=(0, None))(x, y), 3 * x**2 * y**3)
    assert {"forward", "backward"} == set(rules)


def test_second_derivative_of_two_equal_gradients():
    def backward(x, y, dz):
        cubed = 3 * dz * (x + y) ** 2
        return cubed, cubed

    cube = differentiable(
        lambda x, y: ((x + y) ** 3,),
        lambda *given: tuple(map(mx.stop_gradient, backward(*given))),
        backward,
        vmap=map_elements,
    )
    x, y, a, b = (random((3,), seed) for seed in range(4))

    def first(x, y):
        dx, dy = mx.grad(lambda x, y: cube(x, y)[0].sum(), argnums=(0, 1))(x, y)
        return (a * dx).sum() + (b * dy).sum()

    for each in mx.grad(first, argnums=(0, 1))(x, y):
        assert_close(each, 6 * (x + y) * (a + b))


def test_an_unread_input_is_not_kept_and_has_its_gradients():
    def backward(x, c, dy):
        return (3 * dy * c).astype(x.dtype), mx.zeros_like(c)

    def function(unread):
        return differentiable(
            lambda x, c: (3 * x * c,),
            lambda *given: backward(*given),
            backward,
            unread=unread,
            vmap=map_elements,
        )

    def held(unread):
        x, c = mx.ones((4096,)), mx.full((4096,), 2.0)
        mx.eval(x, c)
        before = mx.get_active_memory()
        y, dx = mx.value_and_grad(lambda x: mx.sum(function(unread)(x + 1, c)[0]))(x)
        mx.eval(y)
        kept = mx.get_active_memory() - before
        assert_close(dx, 6 * mx.ones((4096,)))
        return kept

    assert held(()) >= 4 * 4096 > held({0})
    x, c = random((5,), 0), random((5,), 1)
    square = mx.grad(lambda x: mx.sum(mx.square(function({0})(x, c)[0])))
    assert_close(square(x), 18 * x * c * c)
    assert_close(mx.vmap(square)(x[:, None] * mx.ones((5, 5))), 18 * x[:, None] * (c * c))
    assert_close(mx.grad(lambda x: mx.sum(square(x)))(x), 18 * c * c)
