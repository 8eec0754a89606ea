"""Writes the source that `mx.fast.metal_kernel` would hand to Metal, character for character (MLX 0.32.4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

# An input with fewer elements arrives in the constant address space.
CONSTANT_BELOW = 8

# In the order in which MLX looks for them, and so of the kernel's last parameters.
ATTRIBUTES: dict[str, str] = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

TYPE_NAMES: dict[mx.Dtype, str] = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.float64: "double",
    mx.complex64: "complex64_t",
}

TemplateValue = mx.Dtype | int | bool


@dataclass(frozen=True)
class Input:
    """What the signature depends on of one input array.

    Attributes:
        name: the parameter's name.
        dtype: its type.
        size: number of elements.
        ndim: number of axes; 0 makes the parameter a reference.
    """

    name: str
    dtype: mx.Dtype
    size: int
    ndim: int

    @property
    def space(self) -> Literal["device", "constant"]:
        """The address space in which it arrives."""
        return "constant" if self.size < CONSTANT_BELOW else "device"


@dataclass(frozen=True)
class Output:
    """What the signature depends on of one output array.

    Attributes:
        name: the parameter's name.
        dtype: its type.
    """

    name: str
    dtype: mx.Dtype


@dataclass(frozen=True)
class Parameter:
    """One buffer of the kernel, in the order of `[[buffer(i)]]`.

    Attributes:
        name: the parameter's name.
        type: its element type as spelled in the source, for example `float16_t`.
        space: its address space.
        is_const: whether the kernel may only read it.
        is_reference: whether it is `T& name` and not `T* name`.
        role: an input, one of the three arrays that describe an input, or an output.
        atomic: whether its elements are `atomic<type>`.
    """

    name: str
    type: str
    space: Literal["device", "constant"]
    is_const: bool
    is_reference: bool
    role: Literal["input", "shape", "strides", "ndim", "output"]
    atomic: bool = False

    @property
    def declaration(self) -> str:
        """The parameter as MLX writes it, without its `[[buffer(i)]]`."""
        element = f"atomic<{self.type}>" if self.atomic else self.type
        return (
            f"{'const ' if self.is_const else ''}{self.space} {element}{'&' if self.is_reference else '*'} {self.name}"
        )


@dataclass(frozen=True)
class GeneratedSource:
    """The text that MLX would compile after its own preamble, and what is known about it.

    Attributes:
        kernel_name: name of the kernel function.
        user_name: the name given to `metal_kernel`.
        text: the whole text: header, signature, body, closing brace and the template's instantiation.
        header: the header as given.
        signature: what stands between header and body, from `template <` or `[[kernel]]` to the opening brace.
        body: the body as given.
        parameters: the buffers.
        attributes: names of the `[[attributes]]`, the parameters that follow the buffers.
        template: name and argument, as spelled in the source, of every template parameter.
        header_file: where the header came from, for messages.
        header_line: the line there on which it begins.
        body_file: where the body came from.
        body_line: the line there on which it begins.
        math_mode: "safe", "relaxed" or "fast".
    """

    kernel_name: str
    user_name: str
    text: str
    header: str
    signature: str
    body: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]
    template: tuple[tuple[str, str], ...]
    header_file: str
    header_line: int
    body_file: str
    body_line: int
    math_mode: str


def _kind(value: TemplateValue) -> str:
    # bool first: a bool is an int.
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _argument(value: TemplateValue) -> str:
    """A template argument as MLX spells it: true is 1."""
    return str(int(value)) if isinstance(value, int) else TYPE_NAMES[value]


def _kernel_name(name: str, arguments: Sequence[str], inputs: Sequence[Input], outputs: Sequence[Output]) -> str:
    parts = ["custom_kernel_" + name]
    if arguments:
        # Two underscores: one joins, one was the `<` of the template's argument list. A minus sign becomes one too.
        parts.append("_" + "_".join(arguments).replace("-", "_"))
    for each in inputs:
        suffix = "s" if each.ndim == 0 else "c" if each.size < CONSTANT_BELOW else ""
        parts.append(TYPE_NAMES[each.dtype] + suffix)
    parts.extend(TYPE_NAMES[each.dtype] for each in outputs)
    return "_".join(parts)


def _parameters(
    inputs: Sequence[Input], outputs: Sequence[Output], source: str, atomic_outputs: bool
) -> tuple[Parameter, ...]:
    """Buffers in order; an input's shape, strides and ndim follow it where their names occur in the source at all."""
    found: list[Parameter] = []
    for each in inputs:
        type_name = TYPE_NAMES[each.dtype]
        found.append(Parameter(each.name, type_name, each.space, True, each.ndim == 0, "input"))
        if each.ndim == 0:
            continue
        if f"{each.name}_shape" in source:
            found.append(Parameter(f"{each.name}_shape", "int", "constant", True, False, "shape"))
        if f"{each.name}_strides" in source:
            found.append(Parameter(f"{each.name}_strides", "int64_t", "constant", True, False, "strides"))
        if f"{each.name}_ndim" in source:
            found.append(Parameter(f"{each.name}_ndim", "int", "constant", True, True, "ndim"))
    found.extend(
        Parameter(each.name, TYPE_NAMES[each.dtype], "device", False, False, "output", atomic_outputs)
        for each in outputs
    )
    return tuple(found)


def _signature(
    kernel_name: str,
    template: Sequence[tuple[str, str]],
    parameters: Sequence[Parameter],
    attributes: Sequence[str],
) -> str:
    """The text from `template <` (or `[[kernel]]`) to the opening brace.

    MLX decides between `,` and `) {` after an output by counting inputs and outputs alone. With shapes among the
    buffers, several outputs and no attributes the list is closed too early: the same broken text is written here.
    """
    lines: list[str] = []
    if template:
        lines.append("template <" + ", ".join(f"{kind} {name}" for name, kind in template) + ">\n")
    lines.append(f"[[kernel]] void {kernel_name}(\n")
    arrays = sum(each.role in ("input", "output") for each in parameters)
    for index, each in enumerate(parameters):
        comma = each.role != "output" or index < arrays - 1 or bool(attributes)
        lines.append(f"  {each.declaration} [[buffer({index})]]" + (",\n" if comma else ") {\n"))
    for index, name in enumerate(attributes):
        last = index == len(attributes) - 1
        lines.append(f"  {ATTRIBUTES[name]} {name} [[{name}]]" + (") {\n" if last else ",\n"))
    return "".join(lines)


def generate(
    name: str,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    source: str,
    header: str = "",
    *,
    template: Sequence[tuple[str, TemplateValue]] = (),
    atomic_outputs: bool = False,
    header_file: str | None = None,
    header_line: int = 1,
    body_file: str | None = None,
    body_line: int = 1,
    math_mode: str = "safe",
) -> GeneratedSource:
    """The text that MLX 0.32.4 would compile for one launch of `mx.fast.metal_kernel`.

    Args:
        name: the kernel's name as given to `metal_kernel`.
        inputs: the inputs, in order.
        outputs: the outputs, in order.
        source: the body.
        header: what stands before the kernel.
        template: name and value of each template parameter.
        atomic_outputs: whether outputs are `device atomic<T>*`.
        header_file: file that the header came from; `NAME header` for a string.
        header_line: the line there on which it begins.
        body_file: file that the body came from; `NAME body` for a string.
        body_line: the line there on which it begins.
        math_mode: "safe", "relaxed" or "fast"; it changes the compiler's flags, not the text.

    Returns:
        The text with its parameters.
    """
    kinds = tuple((key, _kind(value)) for key, value in template)
    arguments = tuple((key, _argument(value)) for key, value in template)
    kernel_name = _kernel_name(name, [spelling for _, spelling in arguments], inputs, outputs)
    parameters = _parameters(inputs, outputs, source, atomic_outputs)
    attributes = tuple(each for each in ATTRIBUTES if each in source)
    signature = _signature(kernel_name, kinds, parameters, attributes)
    text = f"{header}{signature}{source}\n}}\n"
    if arguments:
        instance = f"{kernel_name}<{', '.join(spelling for _, spelling in arguments)}>"
        text += f'\ntemplate [[host_name("{kernel_name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return GeneratedSource(
        kernel_name=kernel_name,
        user_name=name,
        text=text,
        header=header,
        signature=signature,
        body=source,
        parameters=parameters,
        attributes=attributes,
        template=arguments,
        header_file=header_file or f"{name} header",
        header_line=header_line,
        body_file=body_file or f"{name} body",
        body_line=body_line,
        math_mode=math_mode,
    )
