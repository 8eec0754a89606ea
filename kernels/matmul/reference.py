"""The formulas of matmul and of its gradient in plain MLX operations."""

from forge_mlx.kernels._common.checks import check_axes, check_floating, given
from forge_mlx.kernels.matmul.tiles import VARIANTS
import mlx.core as mx


def check_arguments(
    a: mx.array, b: mx.array, accumulate: mx.array | None, variant: str, transpose_a: bool, transpose_b: bool
) -> tuple[int, ...]:
    """Raise what `matmul` raises for its arguments.

    Args:
        a: `[..., M, K]`, or `[..., K, M]` if transposed.
        b: `[..., K, N]`, or `[..., N, K]` if transposed.
        accumulate: Broadcasts to `[..., M, N]`, or None.
        variant: "auto" or one of `VARIANTS`.
        transpose_a: Whether op swaps the last axes of a.
        transpose_b: Whether op swaps the last axes of b.

    Returns:
        The result's shape.

    Raises:
        ValueError: An array of another dtype than the three or with too few axes, depths or batches that do not fit,
            an accumulate that would enlarge the result, an unknown variant.
    """
    check_floating("matmul", a=a, b=b, **given(accumulate=accumulate))
    check_axes("matmul", 2, a=a, b=b)
    if variant not in ("auto", *VARIANTS):
        raise ValueError(f"[matmul] variant must be among auto, {', '.join(VARIANTS)} but got {variant!r}.")
    rows, depth = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    b_depth, columns = b.shape[:-3:-1] if transpose_b else b.shape[-2:]
    if depth != b_depth:
        raise ValueError(
            f"[matmul] op(b) must have as many rows as op(a) has columns, {depth}, but got {b_depth}: a is {a.shape}"
            f"{' transposed' if transpose_a else ''}, b is {b.shape}{' transposed' if transpose_b else ''}."
        )
    try:
        batch = a.shape[:-2] if b.ndim == 2 else mx.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"[matmul] the batch axes of a and b must broadcast but got {a.shape[:-2]} and {b.shape[:-2]}."
        ) from None
    shape = (*batch, rows, columns)
    if accumulate is not None and not _broadcasts_to(accumulate.shape, shape):
        raise ValueError(
            f"[matmul] accumulate must broadcast to the result's shape {shape} but got {accumulate.shape}."
        )
    return shape


def _broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    behind = target[max(0, len(target) - len(shape)) :]
    # The usual case first: a layer's bias comes here at every call.
    return shape == behind or (
        len(shape) == len(behind) and all(a in (1, b) for a, b in zip(shape, behind, strict=True))
    )


def output_dtype(a: mx.array, b: mx.array, accumulate: mx.array | None) -> mx.Dtype:
    """The dtype of the result: what MLX promotes the arrays to."""
    return mx.result_type(a, b) if accumulate is None else mx.result_type(a, b, accumulate)


def forward(
    a: mx.array, b: mx.array, c: mx.array | None, transpose_a: bool, transpose_b: bool, dtype: mx.Dtype
) -> mx.array:
    """op(a) op(b) + c, in float32 and rounded once.

    Args:
        a: `[..., M, K]`, or `[..., K, M]` if transposed.
        b: `[..., K, N]`, or `[..., N, K]` if transposed.
        c: Broadcasts with `[..., M, N]`; None for nothing.
        transpose_a: Whether op swaps the last axes of a.
        transpose_b: Whether op swaps the last axes of b.
        dtype: Of the result.

    Returns:
        `[..., M, N]`.
    """
    y = _operand(a, transpose_a) @ _operand(b, transpose_b)
    if c is not None:
        y = y + c.astype(mx.float32)
    return y.astype(dtype)


def backward(
    a: mx.array, b: mx.array, c: mx.array | None, dy: mx.array, transpose_a: bool, transpose_b: bool
) -> tuple[mx.array, mx.array, mx.array | None]:
    """dop(a) = dy op(b)^T, dop(b) = op(a)^T dy, dc = dy; each summed over the axes along which it was repeated.

    Args:
        a: As `forward` takes it.
        b: As `forward` takes it.
        c: As `forward` takes it.
        dy: Cotangent of the result.
        transpose_a: Whether op swaps the last axes of a.
        transpose_b: Whether op swaps the last axes of b.

    Returns:
        da, db and dc (None without c), each in the dtype of what it is the gradient of.
    """
    g = dy.astype(mx.float32)
    da = g @ _operand(b, not transpose_b)
    db = _operand(a, not transpose_a) @ g
    da, db = (each.swapaxes(-1, -2) if swap else each for each, swap in ((da, transpose_a), (db, transpose_b)))
    dc = None if c is None else _summed_to(g, c.shape).astype(c.dtype)
    return _summed_to(da, a.shape).astype(a.dtype), _summed_to(db, b.shape).astype(b.dtype), dc


def matmul(
    a: mx.array,
    b: mx.array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: mx.array | None = None,
    variant: str = "auto",
) -> mx.array:
    """op(a) op(b) + accumulate, as `forge_mlx.kernels.matmul` but for `impl`.

    Args:
        a: `[..., M, K]`, or `[..., K, M]` if transposed.
        b: `[..., K, N]`, or `[..., N, K]` if transposed.
        transpose_a: Whether op swaps the last axes of a.
        transpose_b: Whether op swaps the last axes of b.
        accumulate: Broadcasts to `[..., M, N]`; None for nothing.
        variant: Must be "auto" here: the others name kernels.

    Returns:
        `[..., M, N]`.

    Raises:
        ValueError: As `check_arguments`, and for another variant than "auto".
    """
    check_arguments(a, b, accumulate, variant, transpose_a, transpose_b)
    check_has_no_variant(variant, "reference")
    return forward(a, b, accumulate, transpose_a, transpose_b, output_dtype(a, b, accumulate))


def check_has_no_variant(variant: str, engine: object) -> None:
    """Raise unless the variant is "auto".

    Args:
        variant: What was asked for.
        engine: The engine, which runs no kernels, for the message.

    Raises:
        ValueError: A variant that names a kernel.
    """
    if variant != "auto":
        raise ValueError(
            f'[matmul] variant must be "auto" on engine {engine} but got {variant!r}, which names a kernel. '
            'Ask for impl="metal" or "emulator".'
        )


def _operand(x: mx.array, is_transposed: bool) -> mx.array:
    x = x.astype(mx.float32)
    return x.swapaxes(-1, -2) if is_transposed else x


def _summed_to(x: mx.array, shape: tuple[int, ...]) -> mx.array:
    """The sum over the axes that broadcasting gave to an array of this shape."""
    if x.size == 0:
        # MLX's sum over an axis of no elements can run for minutes on a CPU.
        return mx.zeros(shape, x.dtype)
    behind = x.ndim - len(shape)
    repeated = [axis for axis in range(x.ndim) if axis < behind or shape[axis - behind] == 1 != x.shape[axis]]
    return mx.sum(x, axis=repeated, keepdims=True).reshape(shape) if repeated else x
