"""The formulas of rope and of its gradient in plain MLX operations."""

from functools import cache
import math
from typing import Final

from forge_mlx.kernels._common.checks import (
    check_constant,
    check_float32_range,
    check_floating,
    check_integers,
    check_shape,
    given,
)
import mlx.core as mx
import numpy as np

BASE: Final = 10000.0
_INT32: Final = 2**31


def check_arguments(
    x: mx.array,
    freqs: mx.array | None,
    dims: int | None,
    base: float,
    scale: float,
    offset: int | mx.array,
    positions: mx.array | None,
) -> int:
    """Raise what `rope` raises for its arguments.

    Args:
        x: `[B, H, T, D]`.
        freqs: `[dims / 2]` or None.
        dims: Elements of each head to rotate; None for all.
        base: Base of the frequencies.
        scale: Factor on the positions.
        offset: An int, or integers `[B]` or without axes.
        positions: Integers `[B, T]` or None.

    Returns:
        dims, the default filled in.

    Raises:
        ValueError: A shape, dtype or number that does not fit, freqs together with a base, positions together with an
            offset.
    """
    check_floating("rope", x=x, **given(freqs=freqs))
    if x.ndim != 4:
        raise ValueError(f"[rope] x must have the 4 axes [B, H, T, D] but got the shape {x.shape}.")
    size = x.shape[-1]
    dims = size if dims is None else dims
    if not (0 < dims <= size and dims % 2 == 0):
        raise ValueError(f"[rope] dims must be even, above 0 and at most the last axis of x, {size}, but got {dims}.")
    check_constant("rope", "base", base)
    check_constant("rope", "scale", scale)
    if not (math.isfinite(base) and base > 0):
        raise ValueError(f"[rope] base must be a finite number above 0 but got {base}.")
    if not math.isfinite(scale):
        raise ValueError(f"[rope] scale must be a finite number but got {scale}.")
    check_float32_range("rope", "base", base)
    check_float32_range("rope", "scale", scale)
    if freqs is not None:
        check_shape("rope", "freqs", freqs, (dims // 2,), "half of dims")
        if base != BASE:
            raise ValueError(f"[rope] base must be left out with freqs, which take its place, but got {base}.")
    _check_positions(x, offset, positions)
    return dims


def _check_positions(x: mx.array, offset: int | mx.array, positions: mx.array | None) -> None:
    batch, _, length, _ = x.shape
    if isinstance(offset, mx.array):
        check_integers("rope", offset=offset)
        if offset.shape not in ((), (batch,)):
            raise ValueError(f"[rope] offset must be an int or have the shape {(batch,)} but got {offset.shape}.")
    elif isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
        raise ValueError(f"[rope] offset must be an int or an mx.array of integers but got {offset!r}.")
    elif not -_INT32 <= offset <= _INT32 - max(1, length):
        raise ValueError(f"[rope] offset must keep every position within 32 bits but got {offset}.")
    if positions is None:
        return
    check_integers("rope", positions=positions)
    check_shape("rope", "positions", positions, (batch, length), "batch and length of x")
    if isinstance(offset, mx.array) or offset != 0:
        raise ValueError("[rope] offset must be left out with positions but got both. Add it to the positions.")


def starting_positions(offset: int | mx.array, positions: mx.array | None) -> mx.array:
    """Positions as kernels and formulas take them.

    Args:
        offset: An int, or integers `[B]` or without axes.
        positions: Integers `[B, T]` or None.

    Returns:
        int32 `[B, T]`, the position of each token, or `[B, 1]` or `[1, 1]`, the position of the first one in each row.
    """
    if positions is not None:
        return positions.astype(mx.int32)
    return mx.array(offset).astype(mx.int32).reshape(-1, 1)


def inverse_frequencies(freqs: mx.array | None, dims: int, base: float) -> mx.array:
    """1 / freqs, or base^(-2i / dims) computed in float64: radians that a pair turns from one position to the next.

    Args:
        freqs: `[dims / 2]` or None.
        dims: Elements of each head that are rotated.
        base: Base of the frequencies, without freqs.

    Returns:
        `[1, dims / 2]` in float32.
    """
    if freqs is not None:
        return mx.reciprocal(freqs.astype(mx.float32))[None]
    return mx.array(_of_base(dims, base))


@cache
def _of_base(dims: int, base: float) -> np.ndarray:
    exponents = -np.arange(0, dims, 2, dtype=np.float64) / dims
    return (base**exponents).astype(np.float32)[None]


def forward(x: mx.array, positions: mx.array, inverse: mx.array, scale: float, traditional: bool) -> mx.array:
    """Each pair (a, b) of x turned by its angle: (a cos - b sin, a sin + b cos), in float32 and rounded once.

    Args:
        x: `[B, H, T, D]`.
        positions: int32 `[B or 1, T or 1]`, as from `starting_positions`.
        inverse: `[B or 1, dims / 2]` in float32, as from `inverse_frequencies`.
        scale: Factor on the positions.
        traditional: Whether a pair is two neighbours; else element i and element i + dims / 2.

    Returns:
        `[B, H, T, D]`.
    """
    return rotate(x, scaled_positions(positions, x.shape[2], scale), inverse, 1.0, traditional)


def backward(
    x: mx.array, positions: mx.array, inverse: mx.array, dy: mx.array, scale: float, traditional: bool
) -> tuple[mx.array, mx.array]:
    """dx = dy turned back; dinverse = the sum over heads and tokens of (a db - b da) position, (da, db) a pair of dx.

    Args:
        x: `[B, H, T, D]`.
        positions: As `forward` takes them.
        inverse: As `forward` takes it.
        dy: Cotangent of the result.
        scale: Factor on the positions.
        traditional: As `forward` takes it.

    Returns:
        dx in the dtype of x, and dinverse in the shape of inverse in float32; of one row for all, summed over B.
    """
    dx = rotate(dy, scaled_positions(positions, x.shape[2], scale), inverse, -1.0, traditional)
    return dx, inverse_gradient(x, positions, inverse, dy, scale, traditional)


def inverse_gradient(
    x: mx.array, positions: mx.array, inverse: mx.array, dy: mx.array, scale: float, traditional: bool
) -> mx.array:
    """dinverse alone, as `backward` has it.

    Args:
        x: `[B, H, T, D]`.
        positions: As `forward` takes them.
        inverse: As `forward` takes it.
        dy: Cotangent of the result.
        scale: Factor on the positions.
        traditional: As `forward` takes it.

    Returns:
        The shape of inverse in float32.
    """
    position, dims = scaled_positions(positions, x.shape[2], scale), 2 * inverse.shape[-1]
    turned_back = rotate(dy[..., :dims].astype(mx.float32), position, inverse, -1.0, traditional)
    a, b = _pairs(x[..., :dims].astype(mx.float32), traditional)
    da, db = _pairs(turned_back, traditional)
    dangle = mx.sum(a * db - b * da, axis=1)
    dinverse = mx.sum(dangle * position[..., None], axis=1)
    return mx.sum(dinverse, axis=0, keepdims=True) if inverse.shape[0] == 1 else dinverse


def scaled_positions(positions: mx.array, length: int, scale: float) -> mx.array:
    """`[B or 1, T]` in float32: the position of every token, times the scale."""
    if positions.shape[1] != length:
        positions = positions + mx.arange(length, dtype=mx.int32)
    return positions.astype(mx.float32) * scale


def rotate(x: mx.array, position: mx.array, inverse: mx.array, sign: float, traditional: bool) -> mx.array:
    """x with every pair turned by sign times position times inverse.

    Args:
        x: `[B, H, T, D]`.
        position: `[B or 1, T]` in float32.
        inverse: `[B or 1, dims / 2]` in float32.
        sign: 1, or -1 to turn back.
        traditional: Whether a pair is two neighbours.

    Returns:
        `[B, H, T, D]` in the dtype of x.
    """
    pairs = inverse.shape[-1]
    axis, split = (-1, (pairs, 2)) if traditional else (-2, (2, pairs))
    angle = (position[:, :, None] * inverse[:, None])[:, None]
    cosine, sine = mx.expand_dims(mx.cos(angle), axis), sign * mx.sin(angle)
    halves = x[..., : 2 * pairs].reshape(*x.shape[:-1], *split)
    # (a, b) and (b, a) side by side: mx.compile makes one loop of it, which writes y and nothing else.
    swapped = halves[..., ::-1] if traditional else halves[..., ::-1, :]
    turned = halves * cosine + swapped * mx.stack([-sine, sine], axis=axis)
    turned = turned.astype(x.dtype).reshape(*x.shape[:-1], 2 * pairs)
    return turned if 2 * pairs == x.shape[-1] else mx.concatenate([turned, x[..., 2 * pairs :]], axis=-1)


def _pairs(x: mx.array, traditional: bool) -> tuple[mx.array, mx.array]:
    """The first and the second elements of all pairs, each `[..., dims / 2]`."""
    if traditional:
        return x[..., ::2], x[..., 1::2]
    first, second = mx.split(x, 2, axis=-1)
    return first, second


def rope(
    x: mx.array,
    freqs: mx.array | None = None,
    *,
    dims: int | None = None,
    base: float = BASE,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    positions: mx.array | None = None,
    traditional: bool = False,
) -> mx.array:
    """Rotary position embedding, as `forge_mlx.kernels.rope` but for `impl`.

    Args:
        x: `[B, H, T, D]`.
        freqs: `[dims / 2]`, periods of the pairs over 2 pi; None for base^(2i / dims).
        dims: Elements of each head to rotate; None for all.
        base: Base of the frequencies.
        scale: Factor on the positions.
        offset: Position of the first token, an int or integers `[B]`.
        positions: Integers `[B, T]` instead of an offset.
        traditional: Whether a pair is two neighbours.

    Returns:
        `[B, H, T, D]`.

    Raises:
        ValueError: As `check_arguments`.
    """
    dims = check_arguments(x, freqs, dims, base, scale, offset, positions)
    inverse = inverse_frequencies(freqs, dims, base)
    return forward(x, starting_positions(offset, positions), inverse, scale, traditional)
