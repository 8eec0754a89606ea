"""Compiles a `.metal` file for each of its dtypes, with the checks of the language, without running it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from forge_mlx.metal.check import SIGNATURE_TYPES, Row
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.emulator import MetalError, ToolchainError
from forge_mlx.metal.emulator.settings import Settings
from forge_mlx.metal.signature import (
    CONSTANT_BELOW,
    TYPE_NAMES,
    GeneratedSource,
    Input,
    Output,
    TemplateValue,
    generate,
)
from forge_mlx.metal.source import Array, KernelSource, load
import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_BY_NAME = {name: dtype for dtype, name in TYPE_NAMES.items()}


def check_file(file: Path, dtypes: Sequence[mx.Dtype], template: Mapping[str, Sequence[int]]) -> list[Row]:
    """Compile a kernel for each dtype, as inputs of any length arrive and as short ones do.

    MLX passes an input of fewer than 8 elements in constant memory: a body has to compile for both.

    Args:
        file: a `.metal` file.
        dtypes: what each `typename` of its template stands for, all of them the same.
        template: the values to try for its template parameters that are an int.

    Returns:
        One row for each dtype; one without a dtype for a file that has no `typename`.

    Raises:
        SourceError: a file that MLX could not write as it is.
        ValueError: a template parameter that has no value.
        ToolchainError: there is no compiler, or one that does not work.
        OSError: the file cannot be read.
    """
    source = load(file)
    known = {each.name for each in source.template if each.kind == "int"}
    if unknown := sorted(set(template) - known):
        raise ValueError(f"{source.file}: has no int template parameter {', '.join(unknown)}.")
    generic = any(each.kind == "typename" for each in source.template)
    rows = []
    for dtype in dtypes if generic else (None,):
        row = Row("", source.name, "" if dtype is None else dtype_name(dtype))
        for values in _instances(source, dtype, template):
            for size in (CONSTANT_BELOW, 1):
                row.findings += _compile(source, values, size)
        # The same message for each set of values says no more than once.
        row.findings = list(dict.fromkeys(row.findings))
        rows.append(row)
    return rows


def _instances(
    source: KernelSource, dtype: mx.Dtype | None, given: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, TemplateValue]]:
    """Every set of template values to compile for."""
    choices: list[Sequence[TemplateValue]] = []
    for each in source.template:
        if each.kind == "typename" and dtype is not None:
            choices.append([dtype])
        elif each.kind == "bool":
            choices.append([False, True])
        elif each.name in given:
            choices.append(given[each.name])
        else:
            raise ValueError(
                f"{source.file}: the template parameter {each.name} needs a value. Add --template {each.name}=..."
            )
    for values in product(*choices):
        yield {each.name: value for each, value in zip(source.template, values, strict=True)}


def _compile(source: KernelSource, values: Mapping[str, TemplateValue], size: int) -> list[str]:
    """Findings of one instance, with MLX's header and without."""
    # Only here: the command also runs where the extra `emulator` is not installed.
    from forge_mlx.metal.emulator.compile import compile_kernel

    generated = _generated(source, values, size)
    for settings in (Settings(), Settings(mlx_preamble=False, defines=SIGNATURE_TYPES)):
        try:
            warnings = compile_kernel(generated, settings).warnings
        except ToolchainError:
            # Says nothing about the kernel.
            raise
        except MetalError as error:
            about = "" if settings.mlx_preamble else "without MLX's header: "
            if size < CONSTANT_BELOW:
                about += f"for inputs of fewer than {CONSTANT_BELOW} elements: "
            return [f"{about}{type(error).__name__}: {error}"]
        if warnings:
            return [f"warning: [{source.name}] {text}" for text in warnings]
    return []


def _generated(source: KernelSource, values: Mapping[str, TemplateValue], size: int) -> GeneratedSource:
    def dtype(array: Array) -> mx.Dtype:
        value = values.get(array.type)
        return value if isinstance(value, mx.Dtype) else _BY_NAME[array.type]

    return generate(
        source.name,
        [
            Input(array.name, dtype(array), 1 if array.space == "constant" else size, 0 if array.is_reference else 1)
            for array in source.inputs
        ],
        [Output(array.name, dtype(array)) for array in source.outputs],
        source.body,
        source.header,
        template=list(values.items()),
        atomic_outputs=source.atomic_outputs,
        header_file=source.file,
        body_file=source.file,
        body_line=source.body_line - 1,
    )
