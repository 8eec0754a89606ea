"""`metal_kernel`, which stands in for `mx.fast.metal_kernel`: the same arguments, errors and results, on the CPU."""

from collections.abc import Callable, Iterator, Sequence
import os
from pathlib import Path
import sys
from typing import Any, NoReturn
import warnings

from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.emulator.arrays import Bytes, View, filled, read, to_array
from forge_mlx.metal.emulator.compile import compile_kernel
from forge_mlx.metal.emulator.errors import MetalWarning
from forge_mlx.metal.emulator.launch import Buffer, launch
from forge_mlx.metal.emulator.report import LaunchRecord, count_launch, count_warning, record
from forge_mlx.metal.emulator.settings import current_settings
from forge_mlx.metal.signature import GeneratedSource, Input, Output, Parameter, generate
import mlx.core as mx
import numpy as np

# MLX's own: it checks every argument, and nothing is launched where it is called here.
_mlx_metal_kernel: Callable[..., Any] = mx.fast.metal_kernel
_ENGINES = str(Path(__file__).parents[1]) + os.sep
_NO_METAL = "No Metal back-end"
_IN_TRANSFORMATION = "[eval] Attempting to eval an array during function transformations"


class EmulatedKernel:
    """What `metal_kernel` returns: called as MLX's kernels are, with keyword arguments only.

    Args:
        name: the kernel's name.
        input_names: names of the inputs.
        output_names: names of the outputs.
        source: the body.
        header: what stands before the kernel.
        ensure_row_contiguous: whether inputs are put into row order first.
        atomic_outputs: whether outputs are `device atomic<T>*`.
        compile_options: `{"math_mode": ...}`.
        header_file: where the header comes from, for messages.
        header_line: the line there on which it begins.
        body_file: where the body comes from.
        body_line: the line there on which it begins.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
        *,
        header_file: str | None = None,
        header_line: int = 1,
        body_file: str | None = None,
        body_line: int = 1,
    ) -> None:
        self._mlx_kernel = _mlx_metal_kernel(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            header=header,
            ensure_row_contiguous=ensure_row_contiguous,
            atomic_outputs=atomic_outputs,
            compile_options=compile_options,
        )
        self._name = name
        self._input_names = list(input_names)
        self._output_names = list(output_names)
        self._ensure_row_contiguous = ensure_row_contiguous
        self._math_mode_told = False
        self._text = {
            "source": source,
            "header": header,
            "atomic_outputs": atomic_outputs,
            "math_mode": (compile_options or {}).get("math_mode", "safe"),
            "header_file": header_file,
            "header_line": header_line,
            "body_file": body_file,
            "body_line": body_line,
        }

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, mx.Dtype | int | bool]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Run the kernel on the CPU, now.

        Args:
            inputs: arrays and Python numbers.
            output_shapes: one shape per output.
            output_dtypes: one dtype per output.
            grid: threads along x, y, z.
            threadgroup: threads of a threadgroup along x, y, z.
            template: name and value of each template parameter.
            init_value: what the outputs are filled with first.
            verbose: print the generated source.
            stream: None or a stream of the GPU, which stands for itself.

        Returns:
            One array per output. It has no gradient and no vmap, and says so when asked.

        Raises:
            ValueError: what MLX does not accept, and inputs without values (inside `mx.compile`).
            TypeError: an argument of another type than MLX takes.
            MetalError: what the emulator finds.
        """
        _check(
            self._mlx_kernel,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template=template,
            init_value=init_value,
            # MLX would print on a Mac.
            verbose=False if verbose is True else verbose,
            stream=stream,
        )
        _check_stream(stream)
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        shapes = [tuple(int(size) for size in shape) for shape in output_shapes]
        generated = self._generate(arrays, output_dtypes, template or ())
        if verbose:
            print(f"Generated source code for `{self._name}`:\n```\n{generated.text}\n```")
        _check_launch(arrays, shapes, output_dtypes, grid, threadgroup)
        _evaluate(arrays)
        outputs = self._launch(generated, arrays, shapes, output_dtypes, grid, threadgroup, init_value)
        return _tied(arrays, outputs)

    def _generate(
        self,
        arrays: Sequence[mx.array],
        dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, mx.Dtype | int | bool]],
    ) -> GeneratedSource:
        return generate(
            self._name,
            [
                Input(name, array.dtype, array.size, array.ndim)
                for name, array in zip(self._input_names, arrays, strict=True)
            ],
            [Output(name, dtype) for name, dtype in zip(self._output_names, dtypes, strict=True)],
            template=[(key, value) for key, value in template],
            **self._text,  # type: ignore[arg-type]
        )

    def _launch(
        self,
        generated: GeneratedSource,
        arrays: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        init_value: float | None,
    ) -> list[mx.array]:
        settings = current_settings()
        count_launch()
        value = None if init_value is None else float(init_value)
        buffers = self._buffers(generated, arrays, shapes, dtypes, value)
        kernel = compile_kernel(generated, settings)
        outcome = launch(kernel, buffers, _triple(grid), _triple(threadgroup), settings)
        record(LaunchRecord(self._name, _triple(grid), _triple(threadgroup), outcome.counts))
        for warning in (*self._about_math_mode(), *kernel.warnings, *outcome.warnings):
            count_warning()
            warnings.warn(f"[{self._name}] {warning}", MetalWarning, stacklevel=_callers_level())
        return [
            to_array(data, shape, dtype) for data, shape, dtype in zip(outcome.outputs, shapes, dtypes, strict=True)
        ]

    def _about_math_mode(self) -> Iterator[str]:
        """Once for each kernel: what the emulator does not follow."""
        mode = self._text["math_mode"]
        if mode != "safe" and not self._math_mode_told:
            self._math_mode_told = True
            yield (
                f"math_mode {mode!r} is computed as 'safe' here: on Metal, results may differ in their last bits, and "
                "infinities and NaN may be lost."
            )

    def _buffers(
        self,
        generated: GeneratedSource,
        arrays: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> list[Buffer]:
        """One buffer per parameter of the generated signature."""
        inputs = iter(arrays)
        outputs = iter(zip(shapes, dtypes, strict=True))
        buffers = []
        for parameter in generated.parameters:
            if parameter.role == "output":
                shape, dtype = next(outputs)
                data = filled(init_value, shape, dtype)
                buffers.append(_output_buffer(parameter, dtype, data, init_value is not None))
                continue
            if parameter.role == "input":
                array = next(inputs)
                view = read(array, ensure_row_contiguous=self._ensure_row_contiguous)
            buffers.append(_input_buffer(parameter, array, view))
        return buffers


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
) -> EmulatedKernel:
    """A custom Metal kernel that runs on the CPU, with checks; see `mx.fast.metal_kernel` for the arguments.

    Args:
        name: the kernel's name.
        input_names: names of the inputs in the body.
        output_names: names of the outputs.
        source: the body of the kernel; the signature is generated as MLX does it.
        header: what stands before the kernel.
        ensure_row_contiguous: whether inputs are put into row order first.
        atomic_outputs: whether outputs are `device atomic<T>*`.
        compile_options: `{"math_mode": "safe" | "relaxed" | "fast"}`.

    Returns:
        A function of `inputs`, `output_shapes`, `output_dtypes`, `grid`, `threadgroup`, `template`, `init_value`,
        `verbose` and `stream`.

    Raises:
        ValueError: what MLX does not accept.
        TypeError: an argument of another type than MLX takes.
    """
    return EmulatedKernel(
        name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs, compile_options
    )


def _callers_level() -> int:
    """For `warnings.warn` in the function that calls this: the first line outside of this package's engines."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ENGINES):
        level, frame = level + 1, frame.f_back
    return level


def _check(kernel: Callable[..., object], **arguments: object) -> None:
    """Let MLX judge the arguments; without Metal it stops after that, with Metal it launches when outputs are read."""
    try:
        kernel(**arguments)
    except RuntimeError as error:
        if _NO_METAL not in str(error):
            raise


def _check_stream(stream: Any) -> None:
    device = getattr(stream, "device", stream)
    if device is not None and device != mx.gpu:
        raise ValueError("[metal_kernel] Only supports the GPU.")


def _check_launch(
    arrays: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
    grid: Sequence[int],
    threadgroup: Sequence[int],
) -> None:
    """Refuse what MLX accepts as arguments and cannot run."""
    if any(dtype == mx.float64 for dtype in [*dtypes, *(array.dtype for array in arrays)]):
        raise ValueError("float64 is not supported on the GPU")
    for shape in shapes:
        if any(size < 0 for size in shape):
            raise ValueError(f"[metal_kernel] output_shapes must not be negative but got {shape}.")
    for name, size in (("grid", _triple(grid)), ("threadgroup", _triple(threadgroup))):
        if min(size) < 1:
            raise ValueError(
                f"[metal_kernel] {name} must be at least 1 on each axis but got {size}. Metal launches no empty grid: "
                "return empty outputs before the call."
            )


def _triple(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = sizes
    return int(x), int(y), int(z)


def _evaluate(arrays: Sequence[mx.array]) -> None:
    try:
        mx.eval(arrays)
    except ValueError as error:
        if not str(error).startswith(_IN_TRANSFORMATION):
            raise
        raise ValueError(
            "[metal_kernel] The emulator runs a kernel when it is called and its inputs have no values yet: it cannot "
            "run inside mx.compile or an export. Call mx.disable_compile() first. Inside mx.vmap: "
            "[Primitive::vmap] Not implemented for CustomKernel."
        ) from error


def _input_buffer(parameter: Parameter, array: mx.array, view: View) -> Buffer:
    """The buffer of an input, or of the shape, strides or ndim that describe it."""
    descriptions: dict[str, np.ndarray[tuple[int], np.dtype[np.signedinteger[Any]]]] = {
        "shape": np.array(array.shape, dtype=np.int32),
        "strides": np.array(view.strides, dtype=np.int64),
        "ndim": np.array([array.ndim], dtype=np.int32),
    }
    is_input = parameter.role == "input"
    return Buffer(
        name=parameter.name,
        data=view.data if is_input else descriptions[parameter.role].view(np.uint8),
        itemsize=array.dtype.size if is_input else descriptions[parameter.role].itemsize,
        dtype=dtype_name(array.dtype) if is_input else str(descriptions[parameter.role].dtype),
        space=parameter.space,
        writable=False,
        initialised=True,
        misalignment=view.misalignment if is_input else 0,
        offset=view.offset if is_input else 0,
    )


def _output_buffer(parameter: Parameter, dtype: mx.Dtype, data: Bytes, initialised: bool) -> Buffer:
    return Buffer(
        name=parameter.name,
        data=data,
        itemsize=dtype.size,
        dtype=dtype_name(dtype),
        space=parameter.space,
        writable=True,
        initialised=initialised,
        misalignment=0,
        offset=0,
    )


def _tied(inputs: Sequence[mx.array], outputs: list[mx.array]) -> list[mx.array]:
    """The outputs as results of a function of the inputs that has no derivative and no vmap, as MLX's primitive."""
    if not inputs:
        return outputs
    function = mx.custom_function(lambda *_: outputs)
    function.vjp(_not_implemented("vjp"))
    function.jvp(_not_implemented("jvp"))
    function.vmap(_not_implemented("vmap"))
    results: list[mx.array] = function(*inputs)  # type: ignore[assignment]
    mx.eval(results)
    return results


def _not_implemented(transformation: str) -> Callable[..., NoReturn]:
    def rule(*_: object, **__: object) -> NoReturn:
        raise ValueError(f"[Primitive::{transformation}] Not implemented for CustomKernel.")

    return rule
