"""The formulas of rms_norm and of its gradient in plain MLX operations."""

from forge_mlx.kernels._common.checks import check_axes, check_eps, check_floating, check_shape
from forge_mlx.kernels._common.folding import as_rows
import mlx.core as mx


def check_arguments(x: mx.array, w: mx.array | None, eps: float) -> None:
    """Raise what `rms_norm` raises for its arguments.

    Args:
        x: `[..., C]`.
        w: `[C]` or None.
        eps: Added to the mean square.

    Raises:
        ValueError: x without axes, w of another shape, another dtype than the three, eps below 0 or not finite.
    """
    check_floating("rms_norm", x=x, w=w)
    check_axes("rms_norm", 1, x=x)
    if w is not None:
        check_shape("rms_norm", "w", w, (x.shape[-1],), "the last axis of x")
    check_eps("rms_norm", eps)


def output_dtype(x: mx.array, w: mx.array | None) -> mx.Dtype:
    """The dtype of the result: what MLX promotes x and w to."""
    return x.dtype if w is None else mx.result_type(x, w)


def forward(x: mx.array, w: mx.array | None, eps: float) -> tuple[mx.array, mx.array]:
    """y = x r w and r = 1 / sqrt(mean(x^2) + eps), in float32 and rounded once.

    Args:
        x: `[B, M, C]`.
        w: `[B, C]` or None.
        eps: Added to the mean square.

    Returns:
        y `[B, M, C]`, and r `[B, M]` in float32.
    """
    values = x.astype(mx.float32)
    r = mx.rsqrt(mx.mean(mx.square(values), axis=-1) + eps)
    y = values * r[..., None]
    if w is not None:
        y = y * w.astype(mx.float32)[:, None]
    return y.astype(output_dtype(x, w)), r


def backward(
    x: mx.array, w: mx.array | None, r: mx.array, dy: mx.array, dr: mx.array
) -> tuple[mx.array, mx.array | None]:
    """dx = r (g - n c) with n = x r, g = dy w and c = (sum(g n) + dr r) / C; dw = sum(dy n) over the rows.

    Args:
        x: `[B, M, C]`.
        w: `[B, C]` or None.
        r: `[B, M]` in float32, as `forward` returns it.
        dy: Cotangent of y.
        dr: Cotangent of r.

    Returns:
        dx and dw (None without w), each in the dtype of what it is the gradient of.
    """
    n = x.astype(mx.float32) * r[..., None]
    g = dy.astype(mx.float32)
    dw = None
    if w is not None:
        dw = mx.sum(g * n, axis=1).astype(w.dtype)
        g = g * w.astype(mx.float32)[:, None]
    c = (mx.sum(g * n, axis=-1) + dr * r) / x.shape[-1]
    dx = r[..., None] * (g - n * c[..., None])
    return dx.astype(x.dtype), dw


def rms_norm(x: mx.array, w: mx.array | None = None, eps: float = 1e-5) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * w over the last axis, as `forge_mlx.kernels.rms_norm` but for `impl`.

    Args:
        x: `[..., C]`.
        w: `[C]` or None.
        eps: Added to the mean square.

    Returns:
        `[..., C]`.

    Raises:
        ValueError: As `check_arguments`.
    """
    check_arguments(x, w, eps)
    y, _ = forward(as_rows(x), None if w is None else w[None], eps)
    return y.reshape(x.shape)
