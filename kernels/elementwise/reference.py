"""The formulas of this room and of their gradients in plain MLX operations, float32 throughout."""

from forge_mlx.kernels._common.checks import check_axes, check_floating, check_scalar, check_shape
from forge_mlx.kernels._common.folding import Arrays
import mlx.core as mx


def check_pair(op: str, **arrays: mx.array) -> None:
    """Raise unless two arrays have one shape and a floating dtype each.

    Args:
        op: The op's name, for the message.
        **arrays: Both, by the names of the op's arguments.

    Raises:
        ValueError: Two shapes, another dtype than the three.
    """
    check_floating(op, **arrays)
    (first, x), (second, y) = arrays.items()
    if x.shape != y.shape:
        raise ValueError(
            f"[{op}] {first} and {second} must have one shape but got {x.shape} and {y.shape}. "
            f"Nothing is broadcast: use mx.broadcast_to(..., shape)."
        )


def check_factor(op: str, s: float | mx.array) -> None:
    """Raise unless s is one number.

    Args:
        op: The op's name, for the message.
        s: A number or a 0-d array.

    Raises:
        ValueError: An array with axes or of another dtype than the three; anything that is no number.
    """
    check_scalar(op, "s", s)
    if isinstance(s, mx.array):
        check_floating(op, s=s)


def check_bias(x: mx.array, b: mx.array) -> None:
    """Raise what `add_bias` raises for its arguments.

    Args:
        x: `[..., C]`.
        b: `[C]`.

    Raises:
        ValueError: x without axes, b of another shape, another dtype than the three.
    """
    check_floating("add_bias", x=x, b=b)
    check_axes("add_bias", 1, x=x)
    check_shape("add_bias", "b", b, (x.shape[-1],), "the last axis of x")


def wide(x: mx.array) -> mx.array:
    """x in float32."""
    return x.astype(mx.float32)


def add_forward(x: mx.array, y: mx.array, dtype: mx.Dtype) -> mx.array:
    """x + y.

    Args:
        x: Any shape.
        y: The same shape.
        dtype: Of the result.
    """
    return (wide(x) + wide(y)).astype(dtype)


def add_backward(x: mx.array, y: mx.array, dout: mx.array) -> Arrays:
    """dx = dy = dout, each in its dtype.

    Args:
        x: Any shape.
        y: The same shape.
        dout: Cotangent of x + y.
    """
    return dout.astype(x.dtype), dout.astype(y.dtype)


def mul_forward(x: mx.array, y: mx.array) -> mx.array:
    """x y.

    Args:
        x: Any shape.
        y: The same shape.
    """
    return (wide(x) * wide(y)).astype(mx.result_type(x, y))


def mul_backward(x: mx.array, y: mx.array, dout: mx.array) -> Arrays:
    """dx = dout y and dy = dout x.

    Args:
        x: Any shape.
        y: The same shape.
        dout: Cotangent of x y.
    """
    return (wide(dout) * wide(y)).astype(x.dtype), (wide(dout) * wide(x)).astype(y.dtype)


def scaled(src: mx.array, s: mx.array, dtype: mx.Dtype) -> mx.array:
    """s src.

    Args:
        src: `[B, ...]`.
        s: `[B]` in float32.
        dtype: Of the result.
    """
    return (_beside(s, src) * wide(src)).astype(dtype)


def added_scaled(dst: mx.array, src: mx.array, s: mx.array) -> mx.array:
    """dst + s src in the dtype of dst.

    Args:
        dst: `[B, ...]`.
        src: `[B, ...]`.
        s: `[B]` in float32.
    """
    return (wide(dst) + _beside(s, src) * wide(src)).astype(dst.dtype)


def scaled_backward(x: mx.array, s: mx.array, dout: mx.array) -> Arrays:
    """dx = s dout, and ds = sum(x dout) over each batch.

    Args:
        x: `[B, ...]`.
        s: `[B]` in float32.
        dout: Cotangent of s x.

    Returns:
        dx in the dtype of x, ds `[B]` in float32.
    """
    if x.size == 0:
        return mx.zeros_like(x), mx.zeros_like(s)
    ds = mx.sum((wide(x) * wide(dout)).reshape(x.shape[0], -1), axis=1)
    return scaled(dout, s, x.dtype), ds


def column_sums(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """The sum over rows.

    Args:
        x: `[B, M, C]`.
        dtype: Of the result.

    Returns:
        `[B, C]`.
    """
    if x.size == 0:
        # MLX's sum over an axis of no elements can run for minutes on a CPU.
        return mx.zeros((x.shape[0], x.shape[2]), dtype)
    return mx.sum(wide(x), axis=1).astype(dtype)


def add_bias_backward(x: mx.array, b: mx.array, dout: mx.array) -> Arrays:
    """dx = dout, and db = the sums of its columns.

    Args:
        x: `[B, M, C]`.
        b: `[B, C]`.
        dout: Cotangent of x + b.
    """
    return dout.astype(x.dtype), column_sums(dout, b.dtype)


def add(x: mx.array, y: mx.array) -> mx.array:
    """x + y, as `forge_mlx.kernels.add` but for `impl`.

    Args:
        x: Any shape.
        y: The same shape.

    Raises:
        ValueError: As `check_pair`.
    """
    check_pair("add", x=x, y=y)
    return add_forward(x, y, mx.result_type(x, y))


def mul(x: mx.array, y: mx.array) -> mx.array:
    """x y, as `forge_mlx.kernels.mul` but for `impl`.

    Args:
        x: Any shape.
        y: The same shape.

    Raises:
        ValueError: As `check_pair`.
    """
    check_pair("mul", x=x, y=y)
    return mul_forward(x, y)


def scale(x: mx.array, s: float | mx.array) -> mx.array:
    """s x, as `forge_mlx.kernels.scale` but for `impl`.

    Args:
        x: Any shape.
        s: A number or a 0-d array.

    Raises:
        ValueError: x of another dtype than the three; as `check_factor`.
    """
    check_floating("scale", x=x)
    check_factor("scale", s)
    return scaled(x[None], factor(s), x.dtype)[0]


def add_bias(x: mx.array, b: mx.array) -> mx.array:
    """x + b, as `forge_mlx.kernels.add_bias` but for `impl`.

    Args:
        x: `[..., C]`.
        b: `[C]`.

    Raises:
        ValueError: As `check_bias`.
    """
    check_bias(x, b)
    if x.size == 0:
        return mx.zeros(x.shape, mx.result_type(x, b))
    return (wide(x) + wide(b)).astype(mx.result_type(x, b))


def accumulate(dst: mx.array, src: mx.array) -> mx.array:
    """dst + src, as `forge_mlx.kernels.accumulate` but for `impl`.

    Args:
        dst: Any shape.
        src: The same shape.

    Raises:
        ValueError: As `check_pair`.
    """
    check_pair("accumulate", dst=dst, src=src)
    return add_forward(dst, src, dst.dtype)


def axpy(dst: mx.array, src: mx.array, s: float | mx.array) -> mx.array:
    """dst + s src, as `forge_mlx.kernels.axpy` but for `impl`.

    Args:
        dst: Any shape.
        src: The same shape.
        s: A number or a 0-d array.

    Raises:
        ValueError: As `check_pair` and `check_factor`.
    """
    check_pair("axpy", dst=dst, src=src)
    check_factor("axpy", s)
    return added_scaled(dst[None], src[None], factor(s))[0]


def factor(s: float | mx.array) -> mx.array:
    """s as `[1]` in float32, with its gradient.

    Args:
        s: A number or a 0-d array.
    """
    return (wide(s) if isinstance(s, mx.array) else mx.array(float(s), mx.float32))[None]


def _beside(s: mx.array, x: mx.array) -> mx.array:
    """s `[B]` with as many axes as x `[B, ...]`."""
    return s.reshape(-1, *[1] * (x.ndim - 1))
