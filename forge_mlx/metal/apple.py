"""Engine "metal": the source goes to `mx.fast.metal_kernel`, which compiles it for the Apple GPU."""

from collections.abc import Callable
from functools import cache

from forge_mlx.metal.checked_launch import Launch
from forge_mlx.metal.source import KernelSource
import mlx.core as mx

Kernel = Callable[..., list[mx.array]]


# The function is part of the key: while the emulator stands in for it, its kernels are others.
@cache
def _kernel(build: Callable[..., Kernel], source: KernelSource, ensure_row_contiguous: bool, math_mode: str) -> Kernel:
    return build(
        name=source.name,
        input_names=[array.name for array in source.inputs],
        output_names=[array.name for array in source.outputs],
        source=source.body,
        header=source.header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=source.atomic_outputs,
        compile_options={"math_mode": math_mode},
    )


def run(launch: Launch) -> list[mx.array]:
    """The outputs of one launch, not yet evaluated.

    Args:
        launch: a launch that was checked.

    Returns:
        One array per output.

    Raises:
        RuntimeError: MLX has no Metal here; a source that does not compile raises when an output is evaluated.
    """
    kernel = _kernel(mx.fast.metal_kernel, launch.source, launch.ensure_row_contiguous, launch.math_mode)
    return kernel(
        inputs=list(launch.inputs),
        output_shapes=list(launch.output_shapes),
        output_dtypes=list(launch.output_dtypes),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        template=list(launch.template),
        init_value=launch.init_value,
        verbose=launch.verbose,
    )
