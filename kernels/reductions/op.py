"""sum and sum_squares: each input read once, the sums of threadgroups joined in a second stage."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_batches
from forge_mlx.kernels._common.rows import Sharing, round_up, vector_size
from forge_mlx.kernels.reductions import reference
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import SIMDGROUP
import mlx.core as mx

_ROOM = Path(__file__).parent
THREADS: Final = 256
SHARING: Final = Sharing(groups=1024, passes=4)


def sum(x: mx.array | Sequence[mx.array], mul: float | mx.array = 1.0, *, impl: str | None = None) -> mx.array:
    """mul times the sum of all elements, of one array or of all arrays of a list.

    Added up in float32 whatever the dtype, and float32 is the result: 16 bits would not hold it. The order of the
    additions follows from the shapes and, in a list, from its order: the same arrays give the same bits every time.

    Differentiable in x (dx = mul * dout everywhere, not stored element by element) and in mul if it is an array.

    Args:
        x: An array of any shape or a list of them: float32, float16 or bfloat16, in a list also mixed. Of no
            elements the sum is 0. Fewer than 2^31 elements an array.
        mul: A number, or a 0-d floating array: then nothing is compiled again for another one.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides. "reference", which automatic takes on a CPU, adds up rows by matrix products: `mx.sum`
            of 20 million elements is off by up to 5e-2 there. Its order follows from the layout in memory too.

    Returns:
        0-d, in float32.

    Raises:
        ValueError: Something that is no array, of another dtype or too large, a mul that is not one number, an
            unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    return reference.scaled(_over_all("sum", x, False, impl), mul)


def sum_squares(x: mx.array | Sequence[mx.array], *, impl: str | None = None) -> mx.array:
    """The sum of the squares of all elements, of one array or of all arrays of a list: the square of a global norm.

    Replaces ``sum(mx.square(g.astype(mx.float32)).sum() for g in gradients)``. Dtypes, order and engines as `sum`.
    Squares of numbers above 1.8e19 are infinite.

    Differentiable: dx = 2 x dout.

    Args:
        x: As `sum` takes it.
        impl: As `sum` takes it.

    Returns:
        0-d, in float32.

    Raises:
        ValueError: Something that is no array, of another dtype or too large, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    return _over_all("sum_squares", x, True, impl)


def _over_all(op: str, x: mx.array | Sequence[mx.array], squares: bool, impl: str | None) -> mx.array:
    arrays = reference.as_arrays(op, x)
    engine = resolve(op, impl)
    rows = (reference.as_batches if engine.name == "reference" else reference.as_rows)(arrays)
    if not rows:
        return mx.array(0.0)
    # Not by an index, whose gradient is a scatter.
    return _total(engine.name, squares)(*rows)[0].reshape(())


@cache
def _total(engine: EngineName, squares: bool) -> Function:
    """The differentiable function of arrays `[B, n]`, with n of its own each -> `[B]` in float32.

    The engine "reference" also takes arrays `[B, ...]`.
    """

    def forward(*arrays: mx.array) -> Arrays:
        if engine != "reference":
            return (_forward(engine, arrays, squares),)
        # Only there are products the better sums: NVIDIA's round to TF32, and GPUs add up in a tree anyway.
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return ((reference.total_in_rows if on_cpu else reference.total)(arrays, squares),)

    def formula(*inputs: mx.array) -> Arrays:
        return reference.gradients(inputs[:-1], inputs[-1], squares)

    def backward(*inputs: mx.array) -> Arrays:
        return tuple(_backward(engine, each, inputs[-1]) for each in inputs[:-1])

    launches = squares and engine != "reference"
    return differentiable(forward, backward if launches else formula, formula, vmap=map_batches)


@cache
def _kernel(name: str) -> MetalKernel:
    return MetalKernel(_ROOM / f"{name}.metal")


def _forward(engine: EngineName, arrays: Arrays, squares: bool) -> mx.array:
    """Sums of threadgroups, one launch an array, then those of all arrays in one more."""
    sums = [_partial_sums(engine, each, squares) for each in arrays]
    joined = sums[0] if len(sums) == 1 else mx.concatenate(sums, axis=1)
    while joined.shape[1] > 1:
        joined = _partial_sums(engine, joined, False, in_one=joined.shape[1] <= SHARING.groups)
    return joined[:, 0]


def _partial_sums(engine: EngineName, x: mx.array, squares: bool, in_one: bool = False) -> mx.array:
    """`[B, n]` -> `[B, threadgroups]`; in_one: of a single threadgroup."""
    batches, columns = x.shape
    vectors = -(-columns // vector_size(x.dtype))
    threads = min(THREADS, round_up(vectors, SIMDGROUP))
    passes = -(-vectors // threads)
    if not in_one:
        passes = max(-(-passes // max(1, SHARING.groups // batches)), min(passes, SHARING.passes))
    per_group = passes * threads * vector_size(x.dtype)
    groups = -(-columns // per_group)
    (sums,) = _kernel("sum_elements")(
        {"x": x, "elements_per_group": min(per_group, columns)},
        output_shapes=[(batches, groups)],
        output_dtypes=[mx.float32],
        grid=(groups * threads, batches, 1),
        threadgroup=(threads, 1, 1),
        template={"T": x.dtype, "SQUARES": squares},
        engine=engine,
    )
    return sums


def _backward(engine: EngineName, x: mx.array, dtotal: mx.array) -> mx.array:
    """2 x dtotal of `[B, n]`."""
    batches, columns = x.shape
    vectors = -(-columns // vector_size(x.dtype))
    (dx,) = _kernel("sum_squares_backward")(
        {"x": x, "dtotal": dtotal},
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        grid=(round_up(vectors, SIMDGROUP), batches, 1),
        threadgroup=(min(THREADS, round_up(vectors, SIMDGROUP)), 1, 1),
        template={"T": x.dtype},
        engine=engine,
    )
    return dx
