"""Products by floats made of codes, for CPUs: MLX's quantised products take as long again there for every row."""

from collections.abc import Callable
from typing import Final, cast

from forge_mlx.kernels.matmul import matmul
from forge_mlx.nn.expert_linear import expert_product
from forge_mlx.nn.weight_format import Packed
import mlx.core as mx

# From so many rows on, making floats of the codes of a layer takes a CPU less time than MLX's quantised product.
_FLOAT_ROWS: Final = 8
# Of each expert, on average: MLX's product makes no floats of the experts that no row goes to.
_FLOAT_ROWS_OF_EXPERTS: Final = 16


def prefers_floats(x: mx.array, num_experts: int | None = None) -> bool:
    """Whether the default device is a CPU and x has so many rows that floats made of codes are the faster factor.

    Args:
        x: `[..., in]`.
        num_experts: How many matrices the rows are shared out over; None: there is one.
    """
    least = _FLOAT_ROWS if num_experts is None else _FLOAT_ROWS_OF_EXPERTS * num_experts
    return bool(mx.default_device().type == mx.cpu and x.size >= least * x.shape[-1])


def float_product(x: mx.array, packed: Packed, values: Callable[[Packed], mx.array]) -> mx.array:
    """x W^T of the weight that codes stand for, `[..., out]`; the backward pass makes its floats anew.

    No layer's floats are kept from the forward to the backward pass. Codes and scales get no gradient.

    Args:
        x: `[..., in]`.
        packed: Codes and scales.
        values: Makes the weight `[out, in]` of them.
    """
    return _through_floats(x, packed, lambda x, packed: matmul(x, values(packed), transpose_b=True))


def float_expert_product(
    x: mx.array, packed: Packed, values: Callable[[Packed], mx.array], experts: mx.array
) -> mx.array:
    """x W_e^T for the rows of each expert e, otherwise as `float_product`.

    The floats of all experts exist during the product.

    Args:
        x: `[M, R, in]`.
        packed: Codes and scales of all experts.
        values: Makes the weight `[E, out, in]` of them.
        experts: The expert of each block, integers `[M]` in [0, E), not falling.

    Returns:
        `[M, R, out]`.
    """
    return _through_floats(x, packed, lambda x, packed: expert_product(x, values(packed), experts))


def _through_floats(x: mx.array, packed: Packed, product: Callable[[mx.array, Packed], mx.array]) -> mx.array:
    arrays = [mx.stop_gradient(array) for array in packed if array is not None]

    def multiplied(x: mx.array, codes: mx.array, scales: mx.array, *biases: mx.array) -> mx.array:
        return product(x, Packed(codes, scales, biases[0] if biases else None))

    @mx.custom_function
    def function(x: mx.array) -> mx.array:
        return multiplied(x, *arrays)

    @function.vjp
    def vjp(x: mx.array, cotangent: mx.array, _output: mx.array) -> mx.array:
        # Behind the cotangent, or a compiled function would keep the floats of the forward pass. mx.checkpoint puts
        # them behind the product instead, and so keeps that of every layer.
        late = mx.depends(arrays, [cotangent])
        _, (of_x,) = mx.vjp(lambda x: multiplied(x, *late), [x], [cotangent])
        return of_x

    return cast(mx.array, function(x))
