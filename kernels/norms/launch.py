"""How the kernels of the norms are launched: on rows that a threadgroup holds in its registers, or on longer ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels._common.rows import BACKWARD, FORWARD, column_tiling, is_long, tiling
from forge_mlx.metal.checked_launch import Scalar
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import MAX_THREADS
from forge_mlx.metal.signature import TemplateValue
import mlx.core as mx

_ROOM = Path(__file__).parent

Inputs = Mapping[str, mx.array | Scalar]
Outputs = Sequence[tuple[tuple[int, ...], mx.Dtype]]
Template = Mapping[str, TemplateValue]


@cache
def kernel(name: str) -> MetalKernel:
    """The kernel of a file of the room.

    Args:
        name: The file's name without its suffix.
    """
    return MetalKernel(_ROOM / f"{name}.metal")


@dataclass(frozen=True)
class Rows:
    """What is normalised.

    Attributes:
        batches: Batches, each with weights of its own.
        rows: Rows of a batch, at least 1.
        columns: Elements of a row, at least 1.
        dtype: 16 bytes of it are a thread's vector.
    """

    batches: int
    rows: int
    columns: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, x: mx.array, dtype: mx.Dtype | None = None) -> "Rows":
        """What `[B, M, C]` holds.

        Args:
            x: The array.
            dtype: As the attribute; None: that of the array.
        """
        batches, rows, columns = x.shape
        return cls(batches, rows, columns, dtype or x.dtype)

    @property
    def is_long(self) -> bool:
        """Whether a row is more than the threads of one threadgroup hold."""
        return is_long(self.columns, self.dtype)


def launch_forward(
    engine: EngineName, op: str, rows: Rows, inputs: Inputs, outputs: Outputs, template: Template
) -> Arrays:
    """The kernel `op`_forward, or `op`_forward_long for long rows.

    Args:
        engine: One that runs kernels.
        op: The op's name.
        rows: What is normalised.
        inputs: Those that both kernels have.
        outputs: Shape and dtype of each.
        template: Those parameters that both kernels have.

    Returns:
        The outputs.
    """
    if rows.is_long:
        grid, threads = (rows.rows * MAX_THREADS, rows.batches, 1), MAX_THREADS
        return _launch(f"{op}_forward_long", engine, inputs, outputs, template, grid, threads)
    tiles = tiling(rows.batches, rows.rows, rows.columns, rows.dtype, FORWARD)
    return _launch(
        f"{op}_forward",
        engine,
        {**inputs, "lanes_per_row": tiles.lanes, "rows_per_group": tiles.rows_per_group},
        outputs,
        {**template, "NARROW": tiles.is_narrow},
        (tiles.groups * tiles.threads, rows.batches, 1),
        tiles.threads,
    )


def launch_backward(
    engine: EngineName, op: str, rows: Rows, inputs: Inputs, template: Template, sums: int
) -> tuple[mx.array, mx.array]:
    """The kernel `op`_backward, for rows that are not long.

    Args:
        engine: One that runs kernels.
        op: The op's name.
        rows: What was normalised.
        inputs: Of the kernel, but for how rows are shared out.
        template: Its parameters, but for NARROW.
        sums: How many sums over rows, of all columns each, it leaves beside each other.

    Returns:
        The gradient `[B, M, C]`, and `[B, parts, sums * C]`, what each threadgroup has summed.
    """
    tiles = tiling(rows.batches, rows.rows, rows.columns, rows.dtype, BACKWARD)
    gradient, parts = _launch(
        f"{op}_backward",
        engine,
        {**inputs, "lanes_per_row": tiles.lanes, "rows_per_group": tiles.rows_per_group},
        _gradients(rows, tiles.groups, sums),
        {**template, "NARROW": tiles.is_narrow},
        (tiles.groups * tiles.threads, rows.batches, 1),
        tiles.threads,
    )
    return gradient, parts


def launch_backward_rows(
    engine: EngineName, op: str, rows: Rows, inputs: Inputs, template: Template, numbers: int
) -> mx.array:
    """The kernel `op`_backward_long_rows, the first of two for long rows.

    Args:
        engine: One that runs kernels.
        op: The op's name.
        rows: What was normalised.
        inputs: Of the kernel.
        template: Its parameters.
        numbers: How many numbers it leaves for each row.

    Returns:
        `[B, M, numbers]` in float32.
    """
    outputs = [((rows.batches, rows.rows, numbers), mx.float32)]
    grid = (rows.rows * MAX_THREADS, rows.batches, 1)
    (of_rows,) = _launch(f"{op}_backward_long_rows", engine, inputs, outputs, template, grid, MAX_THREADS)
    return of_rows


def launch_backward_columns(
    engine: EngineName, op: str, rows: Rows, inputs: Inputs, template: Template, sums: int
) -> tuple[mx.array, mx.array]:
    """The kernel `op`_backward_long, the second of two for long rows.

    Args:
        engine: One that runs kernels.
        op: The op's name.
        rows: What was normalised.
        inputs: Of the kernel, but for how rows are shared out.
        template: Its parameters.
        sums: As `launch_backward` takes it.

    Returns:
        What `launch_backward` returns.
    """
    tiles = column_tiling(rows.batches, rows.rows, rows.columns, rows.dtype, BACKWARD)
    gradient, parts = _launch(
        f"{op}_backward_long",
        engine,
        {**inputs, "rows_per_group": tiles.rows_per_group},
        _gradients(rows, tiles.groups, sums),
        template,
        (tiles.blocks * tiles.threads, tiles.groups, rows.batches),
        tiles.threads,
    )
    return gradient, parts


def _gradients(rows: Rows, groups: int, sums: int) -> Outputs:
    """The outputs of a backward kernel. Without sums the second is a single element that nobody reads."""
    parts = (rows.batches, groups, sums * rows.columns) if sums else (1,)
    return [((rows.batches, rows.rows, rows.columns), rows.dtype), (parts, mx.float32)]


def _launch(
    name: str,
    engine: EngineName,
    inputs: Inputs,
    outputs: Outputs,
    template: Template,
    grid: tuple[int, int, int],
    threads: int,
) -> Arrays:
    found = kernel(name)(
        inputs,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        grid=grid,
        threadgroup=(threads, 1, 1),
        template=template,
        engine=engine,
    )
    return tuple(found)
