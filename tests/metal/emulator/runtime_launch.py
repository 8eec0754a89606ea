"""Runs a kernel's body on the runtime, without the public interface: inputs and outputs are NumPy arrays."""

from collections.abc import Sequence
from typing import Any

from forge_mlx.metal.emulator.compile import CompiledKernel, compile_kernel
from forge_mlx.metal.emulator.launch import Buffer, Outcome, launch
from forge_mlx.metal.emulator.settings import CHECKS, Settings
from forge_mlx.metal.signature import Input, Output, generate
import mlx.core as mx
import numpy as np

ALL = frozenset(CHECKS)


def compiled(
    body: str,
    inputs: dict[str, np.ndarray],
    outputs: dict[str, np.ndarray],
    *,
    header: str = "",
    atomic_outputs: bool = False,
    settings: Settings,
) -> CompiledKernel:
    """The body as a kernel named `k`, whose lines are `k body:1` and on."""
    generated = generate(
        "k",
        [Input(name, dtype_of(array), array.size, array.ndim) for name, array in inputs.items()],
        [Output(name, dtype_of(array)) for name, array in outputs.items()],
        body,
        header,
        atomic_outputs=atomic_outputs,
    )
    return compile_kernel(generated, settings)


def dtype_of(array: np.ndarray) -> mx.Dtype:
    """MLX's name of a NumPy type."""
    return mx.bool_ if array.dtype == np.bool_ else getattr(mx, array.dtype.name)


def start(
    body: str,
    inputs: dict[str, np.ndarray] | None = None,
    outputs: dict[str, np.ndarray] | None = None,
    *,
    grid: int | tuple[int, int, int] = 64,
    threadgroup: int | tuple[int, int, int] | None = None,
    initialised: Sequence[str] = (),
    misalignment: int = 0,
    header: str = "",
    atomic_outputs: bool = False,
    **settings: Any,
) -> Outcome:
    """Launch a body. `outputs` give sizes and types, and contents to those in `initialised`; `grid` may be one axis."""
    inputs = inputs or {}
    outputs = (
        {"out": np.zeros(grid if isinstance(grid, int) else np.prod(grid), np.float32)} if outputs is None else outputs
    )
    chosen = Settings(**{"checks": ALL, **settings})
    kernel = compiled(body, inputs, outputs, header=header, atomic_outputs=atomic_outputs, settings=chosen)
    buffers = []
    for name, array in inputs.items():
        space = "constant" if array.size < 8 else "device"
        buffers.append(Buffer(name, array, array.itemsize, array.dtype.name, space, False, True, misalignment))
    for name, array in outputs.items():
        buffers.append(Buffer(name, array, array.itemsize, array.dtype.name, "device", True, name in initialised))
    grid = (grid, 1, 1) if isinstance(grid, int) else grid
    threadgroup = grid if threadgroup is None else threadgroup
    threadgroup = (threadgroup, 1, 1) if isinstance(threadgroup, int) else threadgroup
    return launch(kernel, buffers, grid, threadgroup, chosen)


def result(outcome: Outcome, index: int = 0, dtype: type = np.float32) -> np.ndarray:
    """An output of a launch as NumPy array."""
    return outcome.outputs[index].view(dtype)
