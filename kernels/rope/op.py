"""rope: rotary position embedding, forward and backward by one kernel."""

from functools import cache
from pathlib import Path

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Axes, Function, map_batches
from forge_mlx.kernels.rope import reference
from forge_mlx.kernels.rope.reference import BASE
from forge_mlx.kernels.rope.tiles import tiling
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx


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
    impl: str | None = None,
) -> mx.array:
    """Each pair (a, b) of a head becomes (a cos - b sin, a sin + b cos), at the angle position * scale / freqs.

    Replaces `mx.fast.rope`. In plain operations, for all of a head and pairs of halves::

        angle = (offset + mx.arange(T)) * scale
        angle = angle[:, None] * base ** (-mx.arange(0, D, 2) / D)
        a, b = mx.split(x, 2, axis=-1)
        y = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    The frequencies of a base are computed in float64 and rounded once, angles and rotation are in float32, and the
    result is rounded once: at position 10^6 an angle is off by up to 0.06, which is the last bit of position times
    frequency. x may have any strides: what an attention gets by `transpose(0, 2, 1, 3)` is read as it lies.

    Differentiable in x and in freqs. The gradient of x is the rotation back, by the same kernel; that of freqs is
    plain MLX operations, which run only where it is used. Engine "reference": plain MLX operations, on a GPU
    `mx.fast.rope` where there are no positions, which has no gradient for freqs and raises.

    Args:
        x: `[B, H, T, D]`, float32, float16 or bfloat16; B, H and T may be 0, D not.
        freqs: `[dims / 2]`, as in `mx.fast.rope`: periods over 2 pi, so that the angle is position / freqs. None for
            base^(2i / dims).
        dims: How many elements of a head to rotate, even; the others stay as they are. None for all.
        base: Base of the frequencies; left out with freqs.
        scale: Factor on the position.
        offset: Position of the first token: an int, or integers `[B]`, one for each row of the batch.
        positions: Integers `[B, T]`, the position of each token, instead of an offset; for packed rows.
        traditional: Whether a pair is the elements 2i and 2i + 1; else i and i + dims / 2.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        `[B, H, T, D]` in the dtype of x. Positions are taken as 32-bit integers.

    Raises:
        ValueError: x or freqs of another shape or dtype, dims odd or too large, base or scale no Python number or
            outside float32's range, an offset that is no integer, freqs together with a base, positions together with
            an offset, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    dims = reference.check_arguments(x, freqs, dims, base, scale, offset, positions)
    engine = resolve("rope", impl)
    if x.size == 0:
        return mx.zeros(x.shape, x.dtype)
    inverse = reference.inverse_frequencies(freqs, dims, base)
    if engine.name == "reference" and positions is None and mx.default_device() == mx.gpu:
        return _fast(x, mx.reciprocal(inverse[0]) if freqs is None else freqs, scale, offset, traditional)
    rotation = _rotation(engine.name, float(scale), traditional, freqs is not None)
    (y,) = rotation(x, reference.starting_positions(offset, positions), inverse)
    return y


def _fast(x: mx.array, freqs: mx.array, scale: float, offset: int | mx.array, traditional: bool) -> mx.array:
    dims = 2 * freqs.size
    return mx.fast.rope(x, dims, traditional=traditional, base=None, scale=scale, offset=offset, freqs=freqs)


@cache
def _rotation(engine: EngineName, scale: float, traditional: bool, with_freqs: bool) -> Function:
    """The differentiable function x `[B, H, T, D]`, positions `[B or 1, T or 1]`, inverse `[B or 1, dims / 2]` -> y."""

    def forward(x: mx.array, positions: mx.array, inverse: mx.array) -> Arrays:
        return (_rotate(engine, x, positions, inverse, 1.0, scale, traditional),)

    def backward(x: mx.array, positions: mx.array, inverse: mx.array, dy: mx.array) -> Arrays:
        dx = _rotate(engine, dy, positions, inverse, -1.0, scale, traditional)
        if not with_freqs:
            return (dx,)
        return dx, reference.inverse_gradient(x, positions, inverse, dy, scale, traditional)

    def formula(x: mx.array, positions: mx.array, inverse: mx.array, dy: mx.array) -> Arrays:
        gradients = reference.backward(x, positions, inverse, dy, scale, traditional)
        return gradients if with_freqs else gradients[:1]

    if with_freqs:
        return differentiable(forward, backward, formula, constants={1}, vmap=_map_batches)
    # dx does not depend on x, which only the gradient of the frequencies reads.
    return differentiable(forward, backward, formula, constants={1, 2}, unread={0}, vmap=_map_batches)


def _map_batches(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of forward and backward: more batches, each with a row of positions and of frequencies."""
    moved = [each if axis is None else mx.moveaxis(each, axis, 0) for each, axis in zip(inputs, axes, strict=True)]
    own = [0 if axis is None else 1 for axis in axes]
    batch, of_inverse = moved[0].shape[own[0]], moved[2].shape[own[2]]
    repeated = tuple(
        mx.broadcast_to(each, (*each.shape[:first], batch, *each.shape[first + 1 :]))
        for each, first in zip(moved, own, strict=True)
    )
    outputs, out_axes = map_batches(function, repeated, tuple(None if axis is None else 0 for axis in axes))
    if len(outputs) == 1 or of_inverse == batch:
        return outputs, out_axes
    # The gradient of the one row that was repeated.
    return (outputs[0], outputs[1].sum(axis=1, keepdims=True)), out_axes


@cache
def _kernel() -> MetalKernel:
    return MetalKernel(Path(__file__).parent / "rope.metal", ensure_row_contiguous=False)


def _rotate(
    engine: EngineName,
    x: mx.array,
    positions: mx.array,
    inverse: mx.array,
    sign: float,
    scale: float,
    traditional: bool,
) -> mx.array:
    """x with every pair turned, or turned back with the sign -1."""
    if engine == "reference":
        position = reference.scaled_positions(positions, x.shape[2], scale)
        return reference.rotate(x, position, inverse, sign, traditional)
    tiles = tiling(x.shape, 2 * inverse.shape[1], x.dtype)
    # One row for all batches has the stride 0, and no copy.
    small = {"positions": positions, "inverse": inverse}
    inputs = {"x": x, **{name: mx.broadcast_to(each, (x.shape[0], each.shape[1])) for name, each in small.items()}}
    (y,) = _kernel()(
        {**inputs, "scale": scale, "sign": sign, "heads_per_thread": tiles.heads},
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": x.dtype, "TRADITIONAL": traditional},
        engine=engine,
    )
    return y
