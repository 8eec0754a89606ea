"""The formulas of softmax and of its gradient in plain MLX operations."""

from forge_mlx.kernels._common.checks import check_axes, check_floating
import mlx.core as mx


def check_arguments(x: mx.array) -> None:
    """Raise what `softmax` raises for its argument.

    Args:
        x: `[..., C]`.

    Raises:
        ValueError: x without axes or of another dtype than the three.
    """
    check_floating("softmax", x=x)
    check_axes("softmax", 1, x=x)


def forward(x: mx.array) -> mx.array:
    """p = e^(x - max(x)) / sum(e^(x - max(x))), in float32 and rounded once.

    Args:
        x: `[..., C]`, C at least 1.
    """
    values = x.astype(mx.float32)
    exponentials = mx.exp(values - mx.max(values, axis=-1, keepdims=True))
    return (exponentials / mx.sum(exponentials, axis=-1, keepdims=True)).astype(x.dtype)


def backward(p: mx.array, dp: mx.array) -> mx.array:
    """dx = p (dp - sum(p dp)), in float32 and rounded once.

    Args:
        p: `[..., C]`, as `forward` returns it.
        dp: Its cotangent.
    """
    values, g = p.astype(mx.float32), dp.astype(mx.float32)
    return (values * (g - mx.sum(values * g, axis=-1, keepdims=True))).astype(p.dtype)


def softmax(x: mx.array) -> mx.array:
    """e^x / sum(e^x) over the last axis, as `forge_mlx.kernels.softmax` but for `impl`.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]`.

    Raises:
        ValueError: As `check_arguments`.
    """
    check_arguments(x)
    return forward(x) if x.size else mx.zeros(x.shape, x.dtype)
