"""The differentiable functions behind linear_cross_entropy, and which gradients a backward pass computes together.

MLX evaluates all outputs of a custom function with the first, so that what may stay unused is a function of its own,
and what is used together is one: each function goes through all chunks, and computes their logits, once.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Literal, cast

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Axes, Function
from forge_mlx.kernels.linear_cross_entropy import chunks, reference
from forge_mlx.kernels.linear_cross_entropy.chunks import Setup
from forge_mlx.kernels.linear_cross_entropy.forward_gradients import Variable
import mlx.core as mx

Wanted = tuple[Variable, ...]


def row_losses(setup: Setup, hidden: mx.array, weight: mx.array, bias: mx.array, codes: mx.array) -> mx.array:
    """The loss of each row, whose gradients the backward pass computes from new logits.

    Args:
        setup: How.
        hidden: `[N, C]`, N at least 1.
        weight: `[V, C]`.
        bias: `[V]`, or `[0]` for none.
        codes: int32 `[N]`, as `target_codes` makes them.

    Returns:
        float32 `[N]`.
    """
    needed: set[Variable] = set()
    losses = _losses_of(setup, needed)(hidden, weight, bias, codes)
    # MLX goes backwards from the last argument to the first, so that the gradient of the losses knows who is needed.
    losses = losses + _note(needed, "hidden")(hidden) + _note(needed, "weight")(weight)
    return losses + _note(needed, "bias")(bias) if setup.biased else losses


def weighted_sum(
    setup: Setup,
    early: Wanted,
    hidden: mx.array,
    weight: mx.array,
    bias: mx.array,
    codes: mx.array,
    counts: mx.array,
) -> mx.array:
    """The sum of the rows' losses, each times its count, whose gradients are computed with it.

    Args:
        setup: How.
        early: Whose gradients; the others are computed from new logits if they are needed.
        hidden: `[N, C]`, N at least 1.
        weight: `[V, C]`.
        bias: `[V]`, or `[0]` for none.
        codes: int32 `[N]`, as `target_codes` makes them.
        counts: float32 `[N]`.

    Returns:
        A float32 scalar.
    """
    return _weighted_sum(setup, early)(hidden, weight, bias, codes, counts)[0]


def _variables(setup: Setup) -> Wanted:
    return ("hidden", "weight", "bias") if setup.biased else ("hidden", "weight")


def _losses_of(setup: Setup, needed: set[Variable]) -> Callable[..., mx.array]:
    """hidden, weight, bias, codes -> losses; `needed` names who has a gradient when it comes to the backward pass."""

    @mx.custom_function
    def function(hidden: mx.array, weight: mx.array, bias: mx.array, codes: mx.array) -> mx.array:
        return chunks.losses(setup, hidden, weight, bias, codes)

    @function.vjp
    def vjp(primals: Arrays, cotangent: mx.array, _output: mx.array) -> Arrays:
        # A wrong note would cost time only: every gradient is there, and right, if someone evaluates it.
        wanted = tuple(name for name in _variables(setup) if name in needed)
        needed.clear()
        return (*_all_gradients(setup, wanted, primals, cotangent), mx.zeros_like(primals[3]))

    @function.vmap
    def vmap(inputs: Arrays, axes: Axes) -> tuple[mx.array, int | None]:
        def again(*arrays: mx.array) -> Arrays:
            return (row_losses(setup, *arrays),)

        (losses,), (axis,) = _map_rows(again, inputs, axes)
        return losses, axis

    return cast(Callable[..., mx.array], function)


def _note(needed: set[Variable], name: Variable) -> Callable[[mx.array], mx.array]:
    """x -> 0, with a gradient of zeros; notes the name when it comes to the backward pass."""

    @mx.custom_function
    def function(_x: mx.array) -> mx.array:
        return mx.zeros(())

    @function.vjp
    def vjp(x: mx.array, _cotangent: mx.array, _output: mx.array) -> mx.array:
        needed.add(name)
        # Takes no memory, and adding the real gradient to it none either.
        return mx.broadcast_to(mx.zeros((), x.dtype), x.shape)

    @function.vmap
    def vmap(x: mx.array, _axis: int) -> tuple[mx.array, None]:
        return call(x), None

    def call(x: mx.array) -> mx.array:
        return cast(mx.array, function(x))

    return call


def _all_gradients(setup: Setup, wanted: Wanted, inputs: Arrays, dloss: mx.array, **known: mx.array) -> Arrays:
    """The gradients of hidden, weight and bias: those that are wanted at one go, each of the others by itself."""
    found: dict[str, mx.array] = dict(known)
    rest: list[Wanted] = [(name,) for name in _variables(setup) if name not in wanted and name not in known]
    for names in ([wanted] if wanted else []) + rest:
        found |= zip(names, _gradients(setup, names)(*inputs, dloss), strict=True)
    if not setup.biased:
        found["bias"] = mx.zeros_like(inputs[2])
    return tuple(found[name] for name in ("hidden", "weight", "bias"))


@cache
def _gradients(setup: Setup, wanted: Wanted) -> Function:
    """The differentiable function hidden, weight, bias, codes, dloss -> the gradients that are wanted."""

    def forward(hidden: mx.array, weight: mx.array, bias: mx.array, codes: mx.array, dloss: mx.array) -> Arrays:
        _, found = chunks.gradients(setup, wanted, hidden, weight, bias, codes, dloss)
        like = {"hidden": hidden, "weight": weight, "bias": bias}
        return tuple(found[name].astype(like[name].dtype) for name in wanted)

    def plain(hidden: mx.array, weight: mx.array, bias: mx.array, codes: mx.array, dloss: mx.array) -> Arrays:
        found = _plain_gradients(setup, hidden, weight, bias, codes, dloss)
        return tuple(found[name] for name in wanted)

    second = partial(_derivative, plain, 5, (3,))
    return differentiable(
        forward,
        second,
        second,
        constants=(3,),
        vmap=_map_rows if wanted == ("hidden",) else _map_each,
        backward_vmap=_map_each,
    )


@cache
def _weighted_sum(setup: Setup, early: Wanted) -> Function:
    """hidden, weight, bias, codes, counts -> the sum, the losses, and the early gradients of the sum."""

    @mx.custom_function
    def function(*inputs: mx.array) -> Arrays:
        losses, found = chunks.gradients(setup, early, *inputs)
        return mx.sum(losses * inputs[4]), losses, *(found[name] for name in early)

    @function.vjp
    def vjp(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        scale = cotangents[0]
        # Of the other outputs nothing is made but these, so that their own cotangents are zeros.
        known = {
            name: _scaled(setup, name)(*primals, scale, unit)[0] for name, unit in zip(early, outputs[2:], strict=True)
        }
        (dcounts,) = _scaled(setup, "counts")(*primals, scale, outputs[1])
        late = tuple(name for name in _variables(setup) if name not in early)
        found = _all_gradients(setup, late, primals[:4], scale * primals[4], **known)
        return *found, mx.zeros_like(primals[3]), dcounts

    @function.vmap
    def vmap(inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        return _map_each(call, inputs, axes)

    def call(*inputs: mx.array) -> Arrays:
        return cast(Arrays, function(*inputs))

    return call


@cache
def _scaled(setup: Setup, name: Variable | Literal["counts"]) -> Function:
    """hidden, weight, bias, codes, counts, scale, unit -> scale * unit, differentiated as the gradient that it is."""

    def forward(*inputs: mx.array) -> Arrays:
        *arrays, scale, unit = inputs
        like = dict(zip(("hidden", "weight", "bias", "codes", "counts"), arrays, strict=True))
        return ((scale * unit).astype(like[name].dtype),)

    def plain(*inputs: mx.array) -> Arrays:
        hidden, weight, bias, codes, counts, scale, _ = inputs
        if name == "counts":
            return (scale * reference.losses(hidden, weight, bias if setup.biased else None, codes, setup.options),)
        return (_plain_gradients(setup, hidden, weight, bias, codes, scale * counts)[name],)

    second = partial(_derivative, plain, 7, (3, 6))
    return differentiable(forward, second, second, constants=(3, 6), vmap=_map_each)


def _plain_gradients(
    setup: Setup, hidden: mx.array, weight: mx.array, bias: mx.array, codes: mx.array, dloss: mx.array
) -> dict[Variable, mx.array]:
    """The gradients in plain MLX operations, to be differentiated themselves."""
    found = reference.backward(hidden, weight, bias if setup.biased else None, codes, dloss, setup.options)
    return dict(zip(_variables(setup), found, strict=True))


def _derivative(function: Function, count: int, constants: tuple[int, ...], *arrays: mx.array) -> Arrays:
    """The gradients of a function's inputs, the first `count` arrays, for cotangents, the others."""
    inputs, cotangents = arrays[:count], arrays[count:]

    def of_variables(*variables: mx.array) -> Arrays:
        rest = iter(variables)
        return function(*(array if index in constants else next(rest) for index, array in enumerate(inputs)))

    variables = [array for index, array in enumerate(inputs) if index not in constants]
    return tuple(mx.vjp(of_variables, variables, list(cotangents))[1])


def _map_rows(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of a function of rows: a mapped axis that weight and bias do not have becomes more rows."""
    if axes[1] is not None or axes[2] is not None:
        return _map_each(function, inputs, axes)
    hidden, weight, bias, *rest = _with_mapped_axis_first(inputs, axes)
    size = hidden.shape[0]
    outputs = function(hidden.flatten(0, 1), weight[0], bias[0], *(array.flatten(0, 1) for array in rest))
    return tuple(mx.unflatten(array, 0, (size, -1)) for array in outputs), (0,) * len(outputs)


def _map_each(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of any function: it is called for each element of the mapped axis."""
    of_each = [function(*arrays) for arrays in zip(*_with_mapped_axis_first(inputs, axes), strict=True)]
    outputs = tuple(mx.stack(list(arrays)) for arrays in zip(*of_each, strict=True))
    return outputs, (0,) * len(outputs)


def _with_mapped_axis_first(inputs: Arrays, axes: Axes) -> list[mx.array]:
    """Every array with the mapped axis as its first, repeated where it had none."""
    size = next(array.shape[axis] for array, axis in zip(inputs, axes, strict=True) if axis is not None)
    return [
        mx.broadcast_to(array, (size, *array.shape)) if axis is None else mx.moveaxis(array, axis, 0)
        for array, axis in zip(inputs, axes, strict=True)
    ]
