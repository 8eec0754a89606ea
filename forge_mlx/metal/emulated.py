"""Engine "emulator": the source of a `.metal` file, run on the CPU with checks."""

from functools import cache

from forge_mlx.metal.checked_launch import Launch
from forge_mlx.metal.emulator.kernel_api import EmulatedKernel
from forge_mlx.metal.source import KernelSource
import mlx.core as mx


@cache
def _kernel(source: KernelSource, ensure_row_contiguous: bool, math_mode: str) -> EmulatedKernel:
    return EmulatedKernel(
        source.name,
        [array.name for array in source.inputs],
        [array.name for array in source.outputs],
        source.body,
        source.header,
        ensure_row_contiguous,
        source.atomic_outputs,
        {"math_mode": math_mode},
        # Both texts begin with a #line of their own.
        header_file=source.file,
        body_file=source.file,
        body_line=source.body_line - 1,
    )


def run(launch: Launch) -> list[mx.array]:
    """The outputs of one launch.

    Args:
        launch: a launch that was checked.

    Returns:
        One array per output, computed.

    Raises:
        MetalError: what the emulator finds.
    """
    return _kernel(launch.source, launch.ensure_row_contiguous, launch.math_mode)(
        inputs=launch.inputs,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        template=launch.template,
        init_value=launch.init_value,
        verbose=launch.verbose,
    )
