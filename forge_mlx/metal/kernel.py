"""A Metal kernel from a file, launched on the engine of one's choice."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forge_mlx.metal import apple
from forge_mlx.metal.checked_launch import Launch, Scalar, check_launch
from forge_mlx.metal.engine import resolve
from forge_mlx.metal.signature import TemplateValue
from forge_mlx.metal.source import KernelSource, load
import mlx.core as mx

MATH_MODES = ("safe", "relaxed", "fast")


class MetalKernel:
    """The kernel of a `.metal` file: every call is checked against the signature in the file, then launched.

    Args:
        source: the file, or what `load` made of it.
        ensure_row_contiguous: whether inputs with gaps or another order of axes are copied first. Without it the
            kernel must read the inputs' strides.
        math_mode: Metal's math mode. "safe" keeps infinities and NaN; the others need a reason.

    Raises:
        ValueError: an unknown math mode, or a file that MLX could not write as it is (`SourceError`).
        OSError: the file cannot be read.
    """

    def __init__(
        self, source: str | Path | KernelSource, *, ensure_row_contiguous: bool = True, math_mode: str = "safe"
    ) -> None:
        self.source = source if isinstance(source, KernelSource) else load(source)
        if math_mode not in MATH_MODES:
            raise ValueError(
                f"[{self.source.name}] math_mode must be among {', '.join(MATH_MODES)} but got {math_mode}."
            )
        self.ensure_row_contiguous = ensure_row_contiguous
        self.math_mode = math_mode

    def __call__(
        self,
        inputs: Mapping[str, mx.array | Scalar] | Sequence[mx.array | Scalar],
        *,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Mapping[str, TemplateValue] | None = None,
        init_value: float | None = None,
        engine: str | None = None,
        verbose: bool = False,
    ) -> list[mx.array]:
        """Launch the kernel.

        Args:
            inputs: the inputs by name or in order. A number stands for a 0-d array of the declared type.
            output_shapes: one shape per output.
            output_dtypes: one dtype per output.
            grid: threads (not threadgroups) along x, y, z. A 0 returns the outputs without a launch, all of which
                must then be empty.
            threadgroup: threads of a threadgroup along x, y, z, at most 1024 together.
            template: a dtype, an int or a bool for each template parameter.
            init_value: what the outputs are filled with first.
            engine: "metal", "cuda" or "emulator"; None takes the one that `resolve` finds.
            verbose: print the source that MLX generates.

        Returns:
            One array per output.

        Raises:
            ValueError: something that the file does not declare so, that Metal cannot launch, or an unknown engine.
            RuntimeError: the engine cannot run here, or is the reference, which no Metal kernel runs on.
            MetalError: what the emulator finds.
        """
        launch = check_launch(
            self.source,
            inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template={} if template is None else template,
            init_value=None if init_value is None else float(init_value),
            ensure_row_contiguous=self.ensure_row_contiguous,
            math_mode=self.math_mode,
            verbose=verbose,
        )
        run = _runner(self.source.name, engine)
        if launch.is_empty:
            return [
                mx.zeros(shape, dtype) for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True)
            ]
        return run(launch)


def _runner(name: str, engine: str | None) -> Callable[[Launch], list[mx.array]]:
    resolved = resolve(name, engine)
    if resolved.name == "metal":
        return apple.run
    if resolved.name == "emulator":
        # Loaded when it is used: the base installation has no compiler for it.
        from forge_mlx.metal.emulated import run

        return run
    raise RuntimeError(
        f"[{name}] engine {resolved} runs no Metal kernel: ask for metal or emulator, or call the op's reference."
    )
