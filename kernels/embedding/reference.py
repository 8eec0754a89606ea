"""The formulas of embedding and of its gradient in plain MLX operations."""

from forge_mlx.kernels._common.checks import check_floating, check_integers
import mlx.core as mx


def check_arguments(weight: mx.array, ids: mx.array) -> None:
    """Raise what `embedding` raises for its arguments.

    Args:
        weight: `[V, C]`.
        ids: `[...]`, integers.

    Raises:
        ValueError: weight of another dtype or without two axes, ids that are no integers.
    """
    check_floating("embedding", weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"[embedding] weight must have the 2 axes [V, C] but got the shape {weight.shape}.")
    check_integers("embedding", ids=ids)


def flat_ids(ids: mx.array, rows: int) -> mx.array:
    """ids of any integer dtype and shape as int32 `[N]`, -1 for those outside of `[0, rows)`."""
    if ids.dtype.size < 4:
        # 8 and 16 bits may not hold the number of rows that they are compared with.
        ids = ids.astype(mx.int32)
    known = (ids >= 0) & (ids < rows)
    # Chosen in its own dtype: what int32 does not hold would wrap around to an id that exists.
    return mx.where(known, mx.where(known, ids, mx.zeros_like(ids)).astype(mx.int32), -1).reshape(-1)


def forward(weight: mx.array, ids: mx.array) -> mx.array:
    """weight[ids], and a row of zeros for -1.

    Args:
        weight: `[V, C]`.
        ids: int32 `[N]`, as from `flat_ids`.

    Returns:
        `[N, C]`.
    """
    rows = mx.take(weight, mx.maximum(ids, 0), axis=0)
    return mx.where(ids[:, None] < 0, mx.zeros((), weight.dtype), rows)


def backward(weight: mx.array, ids: mx.array, dy: mx.array) -> mx.array:
    """dweight[v] = the sum of dy[n] over all n with ids[n] = v, in float32 and rounded once.

    Args:
        weight: `[V, C]`; only its shape and dtype count.
        ids: int32 `[N]`, as from `flat_ids`.
        dy: `[N, C]`, the cotangent of the rows.

    Returns:
        `[V, C]` in the dtype of weight.
    """
    rows, columns = weight.shape
    # One row more, which takes what no row gets and is cut off: no masked copy of dy.
    target = mx.where(ids < 0, rows, ids)
    return mx.zeros((rows + 1, columns)).at[target].add(dy.astype(mx.float32))[:rows].astype(weight.dtype)


def embedding(weight: mx.array, ids: mx.array) -> mx.array:
    """weight[ids], as `forge_mlx.kernels.embedding` but for `impl`.

    Args:
        weight: `[V, C]`.
        ids: `[...]`, integers.

    Returns:
        `[..., C]`.

    Raises:
        ValueError: As `check_arguments`.
    """
    check_arguments(weight, ids)
    shape = (*ids.shape, weight.shape[1])
    if weight.size == 0 or ids.size == 0:
        return mx.zeros(shape, weight.dtype)
    return forward(weight, flat_ids(ids, weight.shape[0])).reshape(shape)
