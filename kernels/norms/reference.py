"""The formulas of the norms and of their gradients in plain MLX operations, float32 throughout."""

from forge_mlx.kernels._common.checks import check_axes, check_eps, check_floating, check_shape, given
from forge_mlx.kernels._common.folding import as_rows
import mlx.core as mx


def check_arguments(op: str, x: mx.array, eps: float, **weights: mx.array | None) -> None:
    """Raise what an op raises for its arguments.

    Args:
        op: Its name.
        x: `[..., C]`.
        eps: Added to the mean square or to the variance.
        **weights: `[C]` or None, by the names of the op's arguments.

    Raises:
        ValueError: x without axes, weights of another shape, another dtype than the three, eps below 0 or not finite.
    """
    check_floating(op, x=x, **given(**weights))
    check_axes(op, 1, x=x)
    for name, array in weights.items():
        if array is not None:
            check_shape(op, name, array, (x.shape[-1],), "the last axis of x")
    check_eps(op, eps)


def check_add_arguments(x: mx.array, residual: mx.array, w: mx.array | None, eps: float) -> None:
    """Raise what `add_rms_norm` raises for its arguments.

    Args:
        x: `[..., C]`.
        residual: Of the same shape.
        w: `[C]` or None.
        eps: Added to the mean square.

    Raises:
        ValueError: As `check_arguments`; residual of another shape than x, or of another dtype than the three.
    """
    check_arguments("add_rms_norm", x, eps, w=w)
    check_floating("add_rms_norm", residual=residual)
    check_shape("add_rms_norm", "residual", residual, x.shape, "that of x")


def output_dtype(x: mx.array, w: mx.array | None = None, b: mx.array | None = None) -> mx.Dtype:
    """The dtype of the result: what MLX promotes x and w to, and with w also b. So does mx.fast.layer_norm."""
    if w is None:
        return x.dtype
    return mx.result_type(x, w) if b is None else mx.result_type(x, w, b)


def rms_norm_forward(x: mx.array, w: mx.array | None, eps: float) -> tuple[mx.array, mx.array]:
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


def rms_norm_backward(
    x: mx.array, w: mx.array | None, r: mx.array, dy: mx.array, dr: mx.array
) -> tuple[mx.array, mx.array | None]:
    """dx = r (g - n c) with n = x r, g = dy w and c = (sum(g n) + dr r) / C; dw = sum(dy n) over the rows.

    Args:
        x: `[B, M, C]`.
        w: `[B, C]` or None.
        r: `[B, M]` in float32, as `rms_norm_forward` returns it.
        dy: Cotangent of y.
        dr: Cotangent of r.

    Returns:
        dx and dw (None without w), each in the dtype of what it is the gradient of.
    """
    dx, dw = _rms_gradient(x, w, r, dy, dr)
    return dx.astype(x.dtype), dw


def _rms_gradient(
    x: mx.array, w: mx.array | None, r: mx.array, dy: mx.array, dr: mx.array
) -> tuple[mx.array, mx.array | None]:
    """`rms_norm_backward` with dx still in float32."""
    n = x.astype(mx.float32) * r[..., None]
    g = dy.astype(mx.float32)
    dw = None
    if w is not None:
        dw = mx.sum(g * n, axis=1).astype(w.dtype)
        g = g * w.astype(mx.float32)[:, None]
    c = (mx.sum(g * n, axis=-1) + dr * r) / x.shape[-1]
    return r[..., None] * (g - n * c[..., None]), dw


def add_rms_norm_forward(
    x: mx.array, residual: mx.array, w: mx.array | None, eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    """r = x + residual, rounded to the dtype that MLX promotes them to; y = r s w and s = 1 / sqrt(mean(r^2) + eps).

    Args:
        x: `[B, M, C]`.
        residual: `[B, M, C]`.
        w: `[B, C]` or None.
        eps: Added to the mean square.

    Returns:
        y and r, `[B, M, C]`, and s `[B, M]` in float32.
    """
    r = x + residual
    y, s = rms_norm_forward(r, w, eps)
    return y, r, s


def add_rms_norm_backward(
    x: mx.array,
    residual: mx.array,
    w: mx.array | None,
    r: mx.array,
    s: mx.array,
    dy: mx.array,
    dr: mx.array,
    ds: mx.array,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """dx = dresidual = dr + s (g - n c) with n = r s, g = dy w and c = (sum(g n) + ds s) / C; dw = sum(dy n) over rows.

    Args:
        x: `[B, M, C]`.
        residual: `[B, M, C]`.
        w: `[B, C]` or None.
        r: `[B, M, C]`, as `add_rms_norm_forward` returns it.
        s: `[B, M]` in float32, as `add_rms_norm_forward` returns it.
        dy: Cotangent of y.
        dr: Cotangent of r.
        ds: Cotangent of s.

    Returns:
        dx, dresidual and dw (None without w), each in the dtype of what it is the gradient of.
    """
    of_norm, dw = _rms_gradient(r, w, s, dy, ds)
    of_r = dr.astype(mx.float32)
    # Added twice, because `mx.vjp` takes only the first cotangent of an array that a function returns twice.
    return (of_norm + of_r).astype(x.dtype), (of_norm + of_r).astype(residual.dtype), dw


def layer_norm_forward(
    x: mx.array, w: mx.array | None, b: mx.array | None, eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    """y = (x - mean(x)) s w + b and s = 1 / sqrt(var(x) + eps), in float32 and rounded once.

    Args:
        x: `[B, M, C]`.
        w: `[B, C]` or None.
        b: `[B, C]` or None.
        eps: Added to the variance, the mean of (x - mean(x))^2.

    Returns:
        y `[B, M, C]`, and mean(x) and s, `[B, M]` in float32.
    """
    values = x.astype(mx.float32)
    mean = mx.mean(values, axis=-1)
    values = values - mean[..., None]
    s = mx.rsqrt(mx.mean(mx.square(values), axis=-1) + eps)
    y = values * s[..., None]
    if w is not None:
        y = y * w.astype(mx.float32)[:, None]
    if b is not None:
        y = y + b.astype(mx.float32)[:, None]
    return y.astype(output_dtype(x, w, b)), mean, s


def layer_norm_backward(
    x: mx.array,
    w: mx.array | None,
    b: mx.array | None,
    mean: mx.array,
    s: mx.array,
    dy: mx.array,
    dmean: mx.array,
    ds: mx.array,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """dx = s (g - a - n c) + dmean / C; dw = sum(dy n) and db = sum(dy) over the rows.

    n = (x - mean) s, g = dy w, a = sum(g) / C and c = (sum(g n) + ds s) / C.

    Args:
        x: `[B, M, C]`.
        w: `[B, C]` or None.
        b: `[B, C]` or None.
        mean: `[B, M]` in float32, as `layer_norm_forward` returns it.
        s: `[B, M]` in float32, as `layer_norm_forward` returns it.
        dy: Cotangent of y.
        dmean: Cotangent of mean.
        ds: Cotangent of s.

    Returns:
        dx, dw (None without w) and db (None without b), each in the dtype of what it is the gradient of.
    """
    columns = x.shape[-1]
    n = (x.astype(mx.float32) - mean[..., None]) * s[..., None]
    g = dy.astype(mx.float32)
    db = None if b is None else mx.sum(g, axis=1).astype(b.dtype)
    dw = None
    if w is not None:
        dw = mx.sum(g * n, axis=1).astype(w.dtype)
        g = g * w.astype(mx.float32)[:, None]
    a = mx.sum(g, axis=-1) / columns
    c = (mx.sum(g * n, axis=-1) + ds * s) / columns
    dx = s[..., None] * (g - a[..., None] - n * c[..., None]) + (dmean / columns)[..., None]
    return dx.astype(x.dtype), dw, db


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
    check_arguments("rms_norm", x, eps, w=w)
    y, _ = rms_norm_forward(as_rows(x), None if w is None else w[None], eps)
    return y.reshape(x.shape)


def add_rms_norm(
    x: mx.array, residual: mx.array, w: mx.array | None = None, eps: float = 1e-5
) -> tuple[mx.array, mx.array]:
    """rms_norm of r = x + residual, and r, as `forge_mlx.kernels.add_rms_norm` but for `impl`.

    Args:
        x: `[..., C]`.
        residual: `[..., C]`.
        w: `[C]` or None.
        eps: Added to the mean square.

    Returns:
        The norm and r, `[..., C]`.

    Raises:
        ValueError: As `check_add_arguments`.
    """
    check_add_arguments(x, residual, w, eps)
    y, r, _ = add_rms_norm_forward(as_rows(x), as_rows(residual), None if w is None else w[None], eps)
    return y.reshape(x.shape), r.reshape(x.shape)


def layer_norm(x: mx.array, w: mx.array | None = None, b: mx.array | None = None, eps: float = 1e-5) -> mx.array:
    """(x - mean(x)) / sqrt(var(x) + eps) * w + b over the last axis, as `forge_mlx.kernels.layer_norm` but for `impl`.

    Args:
        x: `[..., C]`.
        w: `[C]` or None.
        b: `[C]` or None.
        eps: Added to the variance.

    Returns:
        `[..., C]`.

    Raises:
        ValueError: As `check_arguments`.
    """
    check_arguments("layer_norm", x, eps, w=w, b=b)
    weight, bias = (None if each is None else each[None] for each in (w, b))
    y, _, _ = layer_norm_forward(as_rows(x), weight, bias, eps)
    return y.reshape(x.shape)
