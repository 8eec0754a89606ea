"""matmul: products of matrices in batches, with a sum that goes on, and gradients that are products themselves."""

from functools import cache, partial
from typing import Final, cast

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Axes, Function
from forge_mlx.kernels.matmul import reference
from forge_mlx.kernels.matmul.launch import product
from forge_mlx.kernels.matmul.tiles import Variant
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx

_PREFER_MLX: Final = "MLX's own matmul is tuned for each chip; impl= asks for a kernel"


def matmul(
    a: mx.array,
    b: mx.array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: mx.array | None = None,
    variant: str = "auto",
    impl: str | None = None,
) -> mx.array:
    """op(a) op(b) + accumulate with op(x) = x or its transpose, summed in float32 and rounded once.

    The engine "reference" is `mx.matmul` and `mx.addmm`, and automatic takes it on every device, also where there is
    an Apple GPU: MLX tunes its product for each chip and uses the matrix units of the newest, which kernels like these
    cannot reach. `impl=`, `use_engine`, FORGE_MLX_ENGINE or a variant other than "auto" asks for the kernels. `mx.vmap`
    over accumulate alone raises in `mx.addmm`; on the kernels it works.

    Differentiable in a, b and accumulate; the gradients are products on the same engine. Sums have an order that
    follows from the shapes alone. Second derivatives are those of the gradient's formula in plain MLX operations.

    Args:
        a: `[..., M, K]`, or `[..., K, M]` if transposed; float32, float16 or bfloat16.
        b: `[..., K, N]`, or `[..., N, K]` if transposed; any of these dtypes. The batch axes of a and b broadcast,
            and no kernel copies what is repeated, except where repeated and other axes alternate more than twice.
        transpose_a: Whether op swaps the last two axes of a.
        transpose_b: Whether op swaps the last two axes of b.
        accumulate: What is added, for example a bias `[N]`; broadcasts to `[..., M, N]`. None for nothing.
        variant: "naive" (one thread an element), "tiled" (16 x 16 elements a threadgroup), "simdgroup" (64 x 64,
            matrix units) or "auto": "simdgroup" where M, N >= 64 and K >= 16, else the better of the others. M counts
            the rows of all batches where b has no batches.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        `[..., M, N]` in the dtype that MLX promotes the arrays to. With K = 0 it is accumulate, or zeros.

    Raises:
        ValueError: Another dtype, too few axes, shapes that do not fit, an unknown variant or engine, a variant on an
            engine that runs no kernels, rows that are too long for the variant.
        RuntimeError: The engine that was asked for cannot run here.
    """
    shape = reference.check_arguments(a, b, accumulate, variant, transpose_a, transpose_b)
    dtype = reference.output_dtype(a, b, accumulate)
    engine = resolve("matmul", impl, prefer_mlx=_PREFER_MLX if variant == "auto" else None)
    if engine.name == "reference":
        reference.check_has_no_variant(variant, engine)
    if 0 in shape:
        return mx.zeros(shape, dtype)
    if a.size == 0:
        return mx.zeros(shape, dtype) if accumulate is None else mx.broadcast_to(accumulate.astype(dtype), shape)
    if engine.name == "reference":
        return _by_mlx(a, b, accumulate, transpose_a, transpose_b)
    named = None if variant == "auto" else cast(Variant, variant)
    function = _product(engine.name, named, transpose_a, transpose_b, dtype)
    (y,) = function(a, b) if accumulate is None else function(a, b, _as_rows(accumulate, shape))
    return y


def _by_mlx(a: mx.array, b: mx.array, c: mx.array | None, transpose_a: bool, transpose_b: bool) -> mx.array:
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    return mx.matmul(a, b) if c is None else mx.addmm(c, a, b)


def _as_rows(c: mx.array, shape: tuple[int, ...]) -> mx.array:
    """c with rows of N elements, M or one of them, as the kernels read it."""
    c = c.reshape((1,) * (2 - c.ndim) + c.shape)
    if c.shape[-1] == shape[-1]:
        return c
    # Wide before it is repeated, so that its gradient is summed in float32.
    return mx.broadcast_to(c.astype(mx.float32), (*c.shape[:-1], shape[-1]))


@cache
def _product(
    engine: EngineName, variant: Variant | None, transpose_a: bool, transpose_b: bool, dtype: mx.Dtype
) -> Function:
    """The differentiable function of a, b and perhaps c, whose batch axes broadcast."""
    launch = partial(product, engine, variant)

    def forward(a: mx.array, b: mx.array, *rest: mx.array) -> Arrays:
        batch = mx.broadcast_shapes(*(each.shape[:-2] for each in (a, b, *rest)))
        c = rest[0] if rest else None
        return (launch(a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, batch=batch, dtype=dtype),)

    def backward(a: mx.array, b: mx.array, *rest: mx.array) -> Arrays:
        dy = rest[-1]
        to_a, to_b = _target(a, dy), _target(b, dy)
        if transpose_a:
            da = launch(b, dy, None, transpose_a=transpose_b, transpose_b=True, batch=to_a, dtype=a.dtype)
        else:
            da = launch(dy, b, None, transpose_a=False, transpose_b=not transpose_b, batch=to_a, dtype=a.dtype)
        if transpose_b:
            db = launch(dy, a, None, transpose_a=True, transpose_b=transpose_a, batch=to_b, dtype=b.dtype)
        else:
            db = launch(a, dy, None, transpose_a=not transpose_a, transpose_b=False, batch=to_b, dtype=b.dtype)
        found = [da.reshape(a.shape), db.reshape(b.shape)]
        return tuple(found + [_gradient_of_sum(engine, variant, dy, c) for c in rest[:-1]])

    def formula(a: mx.array, b: mx.array, *rest: mx.array) -> Arrays:
        c = rest[0] if len(rest) == 2 else None
        found = reference.backward(a, b, c, rest[-1], transpose_a, transpose_b)
        return tuple(each for each in found if each is not None)

    return differentiable(forward, backward, formula, vmap=_map_batch, backward_vmap=_map_repeated)


def _target(x: mx.array, dy: mx.array) -> tuple[int, ...]:
    """The batch axes of a gradient, as many as dy has."""
    return (1,) * (dy.ndim - x.ndim) + x.shape[:-2]


def _gradient_of_sum(engine: EngineName, variant: Variant | None, dy: mx.array, c: mx.array) -> mx.array:
    """dy summed over the axes along which c was repeated: ones multiplied with it."""
    batch = _target(c, dy)
    if c.size == dy.size:
        return dy.reshape(c.shape).astype(c.dtype)
    rows = dy.shape[-2]
    if c.shape[-2] == rows:
        # Only batches are summed over: a matrix is one row.
        dy, rows = dy.reshape(*dy.shape[:-2], 1, dy.shape[-2] * dy.shape[-1]), 1
    ones = mx.ones((*dy.shape[:-2], rows, 1), dy.dtype)
    dc = product(engine, variant, ones, dy, None, transpose_a=True, transpose_b=False, batch=batch, dtype=c.dtype)
    return dc.reshape(c.shape)


def _map_batch(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of arrays whose batch axes broadcast: the mapped axis is one more of them, the first."""
    ndim = max(array.ndim - (axis is not None) for array, axis in zip(inputs, axes, strict=True))
    placed = []
    for array, axis in zip(inputs, axes, strict=True):
        if axis is not None:
            array = mx.moveaxis(array, axis, 0)
            array = array.reshape(array.shape[0], *[1] * (ndim + 1 - array.ndim), *array.shape[1:])
        placed.append(array)
    outputs = function(*placed)
    return outputs, (0,) * len(outputs)


def _map_repeated(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of the gradients: each element of the mapped axis has its own, so all arrays get that axis."""
    size = next(array.shape[axis] for array, axis in zip(inputs, axes, strict=True) if axis is not None)
    whole = [
        mx.broadcast_to(array, (size, *array.shape)) if axis is None else mx.moveaxis(array, axis, 0)
        for array, axis in zip(inputs, axes, strict=True)
    ]
    outputs = _map_batch(function, tuple(whole), (0,) * len(whole))[0]
    shaped = tuple(gradient.reshape(array.shape) for gradient, array in zip(outputs, whole, strict=False))
    return shaped, (0,) * len(shaped)
