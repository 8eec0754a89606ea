"""How the kernels of this room are launched: one thread for each 16 bytes of an array."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels._common.rows import vector_size
from forge_mlx.kernels.activations.reference import Function
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx

_THREADS: Final = 256
# As functions.h numbers them.
_NUMBERS: Final[dict[Function, int]] = {
    "sigmoid": 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu2": 4,
    "softcap": 5,
}


@cache
def kernel(name: str) -> MetalKernel:
    """The kernel of a file.

    Args:
        name: The file's, without its ending.
    """
    return MetalKernel(Path(__file__).parent / f"{name}.metal")


def launch(
    name: str,
    engine: EngineName,
    function: Function,
    arrays: Mapping[str, mx.array],
    scalars: Mapping[str, float],
    outputs: int,
) -> Arrays:
    """Run a kernel over all elements.

    Args:
        name: The kernel's file.
        engine: An engine that runs kernels.
        function: The activation.
        arrays: Inputs of one shape and dtype, with an element or more.
        scalars: Further inputs.
        outputs: How many arrays like the inputs come out.
    """
    first = next(iter(arrays.values()))
    # A kernel sees one element without an axis as a reference.
    shape: Sequence[int] = first.shape or (1,)
    threads = -(-first.size // vector_size(first.dtype))
    found = kernel(name)(
        {**{key: array.reshape(shape) for key, array in arrays.items()}, "size": first.size, **scalars},
        output_shapes=[shape] * outputs,
        output_dtypes=[first.dtype] * outputs,
        grid=(threads, 1, 1),
        threadgroup=(min(_THREADS, threads), 1, 1),
        template={"T": first.dtype, "FUNCTION": _NUMBERS[function]},
        engine=engine,
    )
    return tuple(array.reshape(first.shape) for array in found)
