"""The engine "reference": what is fastest in plain MLX operations."""

from functools import cache
from typing import cast

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Axes, Function, map_elements
from forge_mlx.kernels.elementwise.reference import wide
from forge_mlx.kernels.reductions.reference import total, total_in_rows
import mlx.core as mx


def scale(x: mx.array, s: float | mx.array) -> mx.array:
    """s x in the dtype of x.

    Args:
        x: Any shape.
        s: A number, or a 0-d array with a gradient.
    """
    if x.dtype == mx.float32:
        return x * _factor(x, s)
    return _scaled()(x, _factor(x, s))[0]


def axpy(dst: mx.array, src: mx.array, s: float | mx.array) -> mx.array:
    """dst + s src in the dtype of dst.

    Args:
        dst: Any shape.
        src: The same shape.
        s: A number, or a 0-d array with a gradient.
    """
    return (_added() if isinstance(s, mx.array) else _added_by_number())(dst, src, _factor(src, s))[0]


def _compiled(function: Function) -> Function:
    """The function as one loop, where nothing differentiates or compiles it with more around it."""
    return cast(Function, mx.compile(function, shapeless=True))


@cache
def _scaled() -> Function:
    return _compiled(lambda x, s: ((wide(x) * s).astype(x.dtype),))


@cache
def _added() -> Function:
    return _compiled(lambda dst, src, s: ((wide(dst) + wide(src) * s).astype(dst.dtype),))


@cache
def _added_by_number() -> Function:
    """dst + s src, whose gradient in 16 bits MLX would make in arrays of float32."""
    in_dtype_of = _compiled(lambda dout, src, s: ((wide(dout) * s).astype(src.dtype),))

    def backward(_dst: mx.array, src: mx.array, s: mx.array, dout: mx.array) -> Arrays:
        return dout, *in_dtype_of(dout, src, s)

    return differentiable(_added(), backward, backward, constants=(2,), vmap=_map_around_s)


def _map_around_s(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of a function of arrays of one shape and of a number behind them."""
    *arrays, s = inputs
    return map_elements(lambda *mapped: function(*mapped, s), tuple(arrays), axes[:-1])


def _factor(x: mx.array, s: float | mx.array) -> mx.array:
    """s in float32, of the shape of x if it has a gradient."""
    return _spread()(x, wide(s))[0] if isinstance(s, mx.array) else mx.array(float(s), mx.float32)


@cache
def _spread() -> Function:
    """x, s -> s in the shape of x, where MLX's own gradient of s would be the sum that loses digits on a CPU."""

    def forward(x: mx.array, s: mx.array) -> Arrays:
        return (mx.broadcast_to(s, x.shape),)

    def backward(_x: mx.array, _s: mx.array, dout: mx.array) -> Arrays:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return ((total_in_rows if on_cpu else total)((dout.reshape(1, dout.size),), False)[0],)

    def vmap(_function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        return tuple(mx.vmap(forward, in_axes=axes)(*inputs)), (0,)

    return differentiable(forward, backward, backward, constants=(0,), vmap=vmap)
