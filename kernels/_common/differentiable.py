"""A function of kernels with its gradient, its gradient's gradient and its vmap rules: written once for every room."""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

from forge_mlx.kernels._common.folding import Arrays, Axes, Function
import mlx.core as mx

Item = TypeVar("Item")

VmapRule = Callable[[Function, Arrays, Axes], tuple[Arrays, Axes]]
"""What `mx.vmap` becomes: of the function, its arguments and where the mapped axis is in each (None: nowhere), the
results and their mapped axes. `folding` has the usual ones."""


def differentiable(
    forward: Function,
    backward: Function,
    formula: Function,
    *,
    saved: Sequence[int] = (),
    constants: Collection[int] = (),
    unread: Collection[int] = (),
    vmap: VmapRule,
    backward_vmap: VmapRule | None = None,
) -> Function:
    """The function `forward` whose gradient is `backward`, and whose second derivative is that of `formula`.

    Options go into the three functions by closure, arrays only as arguments: an array in a closure gets no gradient.
    `mx.jvp` differentiates what `forward` does, and so works where that is plain operations: a kernel has no rule.

    Args:
        forward: Takes the inputs and returns a tuple of outputs.
        backward: Takes the inputs, the saved outputs and a cotangent for each output. Returns the gradient of each
            input that is not a constant, in their order.
        formula: The same as `backward` in plain MLX operations; `backward` itself if that consists of them.
        saved: Indices of the outputs that `backward` takes. Their own cotangents count too.
        constants: Indices of the inputs without a gradient, as ids are.
        unread: Indices of the inputs of which `backward` and `formula` take shape and dtype alone: they get zeros, and
            nothing keeps the input until the backward pass.
        vmap: The rule of `forward`.
        backward_vmap: The rule of `backward`; None: the same.

    Returns:
        A function of arrays alone.
    """
    # Plain operations need nothing around them, and a compiled step then joins them with what comes before and after.
    is_plain = backward is formula and backward_vmap is None
    gradient = backward if is_plain else _gradient(backward, formula, constants, backward_vmap or vmap)

    @mx.custom_function
    def function(*inputs: mx.array) -> Arrays:
        # mx.jvp looks in here, where a cut around the call is not seen.
        return forward(*_held(inputs, constants))

    @function.vjp
    def vjp(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        primals, cotangents, outputs = as_tuple(primals), as_tuple(cotangents), as_tuple(outputs)
        primals = tuple(_zeros_of(array) if index in unread else array for index, array in enumerate(primals))
        found = gradient(*primals, *(outputs[index] for index in saved), *cotangents)
        return _with_zeros(found, primals, constants)

    @function.vmap
    def rule(inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        return vmap(call, as_tuple(inputs), as_tuple(axes))

    def call(*inputs: mx.array) -> Arrays:
        return cast(Arrays, function(*_held(inputs, constants)))

    return call


def _gradient(backward: Function, formula: Function, constants: Collection[int], vmap: VmapRule) -> Function:
    """`backward` as a function that can be differentiated and mapped itself."""

    @mx.custom_function
    def gradient(*inputs: mx.array) -> Arrays:
        return backward(*_held(inputs, constants))

    @gradient.vjp
    def vjp(primals: Arrays, cotangents: Arrays, _outputs: Arrays) -> Arrays:
        primals, cotangents = as_tuple(primals), as_tuple(cotangents)

        def of_variables(*variables: mx.array) -> Arrays:
            rest = iter(variables)
            found = formula(*(array if index in constants else next(rest) for index, array in enumerate(primals)))
            # Of an array that is returned twice, mx.vjp takes only the first cotangent.
            return tuple(1 * each for each in found)

        variables = [array for index, array in enumerate(primals) if index not in constants]
        found = mx.vjp(of_variables, variables, list(cotangents))[1]
        return _with_zeros(found, primals, constants)

    @gradient.vmap
    def rule(inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        return vmap(call, as_tuple(inputs), as_tuple(axes))

    def call(*inputs: mx.array) -> Arrays:
        return cast(Arrays, gradient(*_held(inputs, constants)))

    return call


def as_tuple(given: tuple[Item, ...] | Item) -> tuple[Item, ...]:
    """What MLX hands to a rule of a custom function: a single one comes as itself, several as a tuple or a list.

    Args:
        given: Arrays, axes or cotangents.
    """
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _zeros_of(array: mx.array) -> mx.array:
    """Zeros of the same shape and dtype that take no memory."""
    return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)


def _held(inputs: Arrays, constants: Collection[int]) -> Arrays:
    """The inputs, those without a gradient cut off from what they were made of."""
    return tuple(mx.stop_gradient(array) if index in constants else array for index, array in enumerate(inputs))


def _with_zeros(gradients: Sequence[mx.array], primals: Arrays, constants: Collection[int]) -> Arrays:
    """One array for each input: MLX would take a missing one for the cotangent."""
    wanted = len(primals) - len(constants)
    if len(gradients) != wanted:
        raise ValueError(f"[differentiable] backward must return {wanted} gradients but got {len(gradients)}.")
    rest = iter(gradients)
    return tuple(mx.zeros_like(array) if index in constants else next(rest) for index, array in enumerate(primals))
