"""The formulas of sum and sum_squares and of their gradients in plain MLX operations, and the way they go on a CPU."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final

from forge_mlx.kernels._common.checks import check_arrays, check_floating, check_scalar
from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx

SIZE_LIMIT: Final = 2**31
"""Elements of an array from which on no axis can hold them all."""
_ROW: Final = 256
_LONGEST_ROW: Final = 4096
_SMALL: Final = 2**20


def as_arrays(op: str, x: mx.array | Sequence[mx.array]) -> list[mx.array]:
    """The arrays of an argument, or what the ops raise for it.

    Args:
        op: The op's name, for the message.
        x: An array or a list of arrays.

    Returns:
        The arrays.

    Raises:
        ValueError: An element that is no array, another dtype than the three, 2^31 elements or more.
    """
    is_list = isinstance(x, Sequence)
    arrays = list(x) if isinstance(x, Sequence) else [x]
    for index, array in enumerate(arrays):
        name = f"x[{index}]" if is_list else "x"
        if isinstance(array, (Mapping, Sequence)):
            raise ValueError(f"[{op}] {name} must be an mx.array but got {type(array).__name__}. Flatten a tree first.")
        check_arrays(op, **{name: array})
        check_floating(op, **{name: array})
        if array.size >= SIZE_LIMIT:
            raise ValueError(f"[{op}] {name} must have fewer than 2^31 elements but got {array.size}. Split it.")
    return arrays


def as_rows(arrays: Sequence[mx.array]) -> Arrays:
    """Each array that is not empty as one row `[1, n]`.

    Args:
        arrays: Arrays of any shape.
    """
    return tuple(each.reshape(1, -1) for each in arrays if each.size)


def as_batches(arrays: Sequence[mx.array]) -> Arrays:
    """Each array that is not empty as a batch of one, `[1, ...]`: one that is transposed stays so, without a copy.

    Args:
        arrays: Arrays of any shape.
    """
    return tuple(each[None] if each.ndim else each.reshape(1, 1) for each in arrays if each.size)


def total(arrays: Arrays, squares: bool) -> mx.array:
    """The formula: the sum over all elements of all arrays, in float32.

    Args:
        arrays: `[B, ...]` each, with axes of its own.
        squares: Whether of the squares.

    Returns:
        `[B]` in float32.
    """
    sums = [
        mx.sum(mx.square(each) if squares else each, axis=list(range(1, each.ndim))) for each in map(_widened, arrays)
    ]
    return reduce(mx.add, sums)


def total_in_rows(arrays: Arrays, squares: bool) -> mx.array:
    """The same for a CPU, by products of rows with ones, then of their sums.

    MLX adds up all of a CPU array in a few numbers: of 20 million elements the sum is off by up to 5e-2, and this one
    by 3e-6. Rows are those of the array where they have 256 to 4096 elements, so that a transposed one is not
    copied; elsewhere 256 elements each.

    Args:
        arrays: `[B, ...]` each, with axes of its own.
        squares: Whether of the squares.

    Returns:
        `[B]` in float32.
    """
    return reduce(mx.add, [_array_total(each, squares) for each in arrays])


def gradients(arrays: Arrays, dtotal: mx.array, squares: bool) -> Arrays:
    """dx = dtotal for every element, or 2 x dtotal.

    Args:
        arrays: `[B, ...]` each.
        dtotal: `[B]` in float32.
        squares: Whether the squares were summed.

    Returns:
        The shape of each array, in its dtype.
    """
    found = []
    for each in arrays:
        column = dtotal.reshape(-1, *[1] * (each.ndim - 1))
        if not squares:
            found.append(mx.broadcast_to(column.astype(each.dtype), each.shape))
        else:
            found.append((2 * column * _widened(each)).astype(each.dtype))
    return tuple(found)


def sum(x: mx.array | Sequence[mx.array], mul: float | mx.array = 1.0) -> mx.array:
    """mul times the sum of all elements, as `forge_mlx.kernels.sum` but for `impl`.

    Args:
        x: An array of any shape or a list of them.
        mul: A number or a 0-d array.

    Returns:
        0-d, in float32.

    Raises:
        ValueError: As `as_arrays`, and for a mul that is not one number.
    """
    arrays = as_arrays("sum", x)
    return scaled(_over_all(arrays, False), mul)


def sum_squares(x: mx.array | Sequence[mx.array]) -> mx.array:
    """The sum of the squares of all elements, as `forge_mlx.kernels.sum_squares` but for `impl`.

    Args:
        x: An array of any shape or a list of them.

    Returns:
        0-d, in float32.

    Raises:
        ValueError: As `as_arrays`.
    """
    return _over_all(as_arrays("sum_squares", x), True)


def scaled(value: mx.array, mul: float | mx.array) -> mx.array:
    """value * mul in float32, where mul may be an array with a gradient.

    Args:
        value: 0-d, in float32.
        mul: A number or a 0-d array.

    Raises:
        ValueError: A mul that is not one number.
    """
    check_scalar("sum", "mul", mul)
    if isinstance(mul, mx.array):
        if not mx.issubdtype(mul.dtype, mx.floating):
            raise ValueError(f"[sum] mul must be a floating array but got {dtype_name(mul.dtype)}.")
        return value * mul.astype(mx.float32)
    return value if mul == 1 else value * float(mul)


def _over_all(arrays: list[mx.array], squares: bool) -> mx.array:
    rows = as_rows(arrays)
    return total(rows, squares)[0] if rows else mx.array(0.0)


def _widened(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _array_total(x: mx.array, squares: bool) -> mx.array:
    """`[B, ...]` -> `[B]`."""
    batches, columns = x.shape[0], x.shape[-1]
    if squares and (x.dtype != mx.float32 or x.size <= _SMALL):
        # Faster than rows times themselves; not for large arrays, for which the squares are a pass through new memory.
        x, squares = mx.square(_widened(x)), False
    x = _widened(x)
    if x.ndim > 2 and not squares and _ROW <= columns <= _LONGEST_ROW:
        x = x @ mx.ones((columns, 1))
    return _rows_total(x.reshape(batches, -1), squares)


def _rows_total(x: mx.array, squares: bool) -> mx.array:
    batches, columns = x.shape
    whole = columns // _ROW * _ROW
    rest = _products(x[:, whole:], squares)
    if whole == 0:
        return rest
    return _rows_total(_products(x[:, :whole].reshape(batches, -1, _ROW), squares), False) + rest


def _products(rows: mx.array, squares: bool) -> mx.array:
    """The sum of each row `[..., C]` as a product of matrices."""
    other = rows[..., None] if squares else mx.ones((rows.shape[-1], 1))
    return (rows[..., None, :] @ other)[..., 0, 0]
