"""One launch of a kernel, checked against the signature in its file before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import math
from operator import index
from typing import Any

from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.limits import MAX_THREADS
from forge_mlx.metal.signature import CONSTANT_BELOW, TYPE_NAMES, TemplateValue
from forge_mlx.metal.source import Array, KernelSource
import mlx.core as mx

_INT32 = 2**31
_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
# Metal has no double, and its complex type comes from MLX alone.
_TEMPLATE_DTYPES = [dtype for dtype in TYPE_NAMES if dtype not in (mx.float64, mx.complex64)]

Scalar = float | int | bool
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """What an engine runs.

    Attributes:
        source: the kernel.
        inputs: its inputs, in order, of the types that the file declares.
        template: name and value of each template parameter, in order.
        output_shapes: the outputs' shapes.
        output_dtypes: their types.
        grid: threads along x, y, z.
        threadgroup: threads of a threadgroup along x, y, z.
        init_value: what the outputs are filled with first; None leaves them unset.
        ensure_row_contiguous: whether inputs with gaps or another order of axes are copied first.
        math_mode: "safe", "relaxed" or "fast".
        verbose: whether the generated source is printed.
    """

    source: KernelSource
    inputs: tuple[mx.array, ...]
    template: tuple[tuple[str, TemplateValue], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    grid: Size
    threadgroup: Size
    init_value: float | None
    ensure_row_contiguous: bool
    math_mode: str
    verbose: bool

    @property
    def is_empty(self) -> bool:
        """Whether no thread would run."""
        return 0 in self.grid


class Checker:
    """Turns a call's arguments into those of a `Launch`; each error names the kernel, the rule and the value.

    Args:
        source: the kernel that is called.
    """

    def __init__(self, source: KernelSource) -> None:
        self.source = source

    def error(self, rule: str, value: object) -> ValueError:
        """The error for a rule that a value breaks."""
        return ValueError(f"[{self.source.name}] {rule} but got {value}.")

    def template(self, given: Mapping[str, TemplateValue]) -> dict[str, TemplateValue]:
        """One value of the right kind for each template parameter, in the file's order."""
        names = [each.name for each in self.source.template]
        if set(given) != set(names):
            raise self.error(f"template must have the keys {_list(names)}", _list(given))
        for each in self.source.template:
            value = given[each.name]
            if each.kind == "typename" and value not in _TEMPLATE_DTYPES:
                allowed = ", ".join(dtype_name(dtype) for dtype in _TEMPLATE_DTYPES)
                raise self.error(f"template {each.name} must be a dtype among {allowed}", _text(value))
            if each.kind == "bool" and not isinstance(value, bool):
                raise self.error(f"template {each.name} must be a bool", _text(value))
            if each.kind == "int" and (
                isinstance(value, bool) or not isinstance(value, int) or not -_INT32 <= value < _INT32
            ):
                raise self.error(f"template {each.name} must be an int of 32 bits", _text(value))
        return {name: given[name] for name in names}

    def dtype(self, array: Array, template: Mapping[str, TemplateValue]) -> mx.Dtype:
        """The dtype that an array of this launch must have."""
        value = template.get(array.type)
        return value if isinstance(value, mx.Dtype) else _DTYPES[array.type]

    def inputs(
        self,
        given: Mapping[str, mx.array | Scalar] | Sequence[mx.array | Scalar],
        template: Mapping[str, TemplateValue],
    ) -> tuple[mx.array, ...]:
        """The inputs in order, Python numbers turned into 0-d arrays of the declared type."""
        names = [array.name for array in self.source.inputs]
        if isinstance(given, Mapping):
            if set(given) != set(names):
                raise self.error(f"inputs must have the keys {_list(names)}", _list(given))
            values = [given[name] for name in names]
        else:
            values = list(given)
            if len(values) != len(names):
                raise self.error(f"inputs must be the {len(names)} arrays {_list(names)}", len(values))
        return tuple(
            self._input(array, value, self.dtype(array, template))
            for array, value in zip(self.source.inputs, values, strict=True)
        )

    def _input(self, array: Array, value: object, dtype: mx.Dtype) -> mx.array:
        if array.is_reference and isinstance(value, bool | int | float):
            return self._scalar(array, value, dtype)
        kind = "a 0-d array or a number" if array.is_reference else "an array of one axis or more"
        if not isinstance(value, mx.array):
            raise self.error(f"input {array.name} must be {kind}", _text(value))
        if (value.ndim == 0) != array.is_reference:
            raise self.error(f"input {array.name} must be {kind}", f"shape {value.shape}")
        if value.dtype != dtype:
            raise self.error(f"input {array.name} must be {dtype_name(dtype)}", dtype_name(value.dtype))
        if array.space == "constant" and value.size >= CONSTANT_BELOW:
            rule = f"input {array.name} is declared constant, where MLX passes fewer than {CONSTANT_BELOW} elements,"
            raise self.error(rule, value.size)
        return value

    def _scalar(self, array: Array, value: Scalar, dtype: mx.Dtype) -> mx.array:
        is_bool, is_float = dtype == mx.bool_, mx.issubdtype(dtype, mx.floating)
        if isinstance(value, bool) != is_bool or (isinstance(value, float) and not is_float):
            raise self.error(f"input {array.name} must be {dtype_name(dtype)}", _text(value))
        if mx.issubdtype(dtype, mx.integer):
            limits = mx.iinfo(dtype)
            if not limits.min <= value <= limits.max:
                raise self.error(f"input {array.name} must fit into {dtype_name(dtype)}", value)
        return mx.array(value, dtype=dtype)

    def outputs(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        template: Mapping[str, TemplateValue],
    ) -> tuple[tuple[int, ...], ...]:
        """The output shapes, after a look at the dtypes."""
        names = [array.name for array in self.source.outputs]
        for what, values in (("output_shapes", shapes), ("output_dtypes", dtypes)):
            if len(values) != len(names):
                raise self.error(f"{what} must have one entry for each of {_list(names)}", len(values))
        for array, dtype in zip(self.source.outputs, dtypes, strict=True):
            wanted = self.dtype(array, template)
            if dtype != wanted:
                raise self.error(f"output {array.name} must be {dtype_name(wanted)}", _text(dtype))
        return tuple(self._shape(name, shape) for name, shape in zip(names, shapes, strict=True))

    def _shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        try:
            sizes = tuple(index(size) for size in shape)
        except TypeError:
            raise self.error(f"the shape of output {name} must be ints of 0 or more", _text(shape)) from None
        if any(not 0 <= size < _INT32 for size in sizes):
            raise self.error(f"the shape of output {name} must be ints of 0 or more", sizes)
        return sizes

    def size(self, name: str, given: Sequence[int], least: int) -> Size:
        """Three ints of at least `least`."""
        try:
            x, y, z = (index(size) for size in given)
        except (TypeError, ValueError):
            raise self.error(f"{name} must be three ints", _text(given)) from None
        if not all(least <= size < _INT32 for size in (x, y, z)):
            raise self.error(f"{name} must be three ints of {least} or more", (x, y, z))
        return x, y, z

    def threadgroup(self, given: Sequence[int]) -> Size:
        """A threadgroup's size: three ints of at least 1, at most 1024 threads together."""
        size = self.size("threadgroup", given, 1)
        if math.prod(size) > MAX_THREADS:
            raise self.error(f"threadgroup must have at most {MAX_THREADS} threads", f"{size}: {math.prod(size)}")
        return size


def check_launch(
    source: KernelSource,
    inputs: Mapping[str, mx.array | Scalar] | Sequence[mx.array | Scalar],
    *,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    template: Mapping[str, TemplateValue],
    **options: Any,
) -> Launch:
    """Check a call against the signature in the kernel's file.

    Args:
        source: the kernel.
        inputs: arrays and numbers, by name or in order.
        output_shapes: one shape per output.
        output_dtypes: one dtype per output.
        grid: threads along x, y, z.
        threadgroup: threads of a threadgroup along x, y, z.
        template: value of each template parameter.
        **options: the other fields of `Launch`.

    Returns:
        The launch.

    Raises:
        ValueError: something that the file does not declare so, or that Metal cannot launch.
    """
    check = Checker(source)
    values = check.template(template)
    launch = Launch(
        source=source,
        inputs=check.inputs(inputs, values),
        template=tuple(values.items()),
        output_shapes=check.outputs(output_shapes, output_dtypes, values),
        output_dtypes=tuple(output_dtypes),
        grid=check.size("grid", grid, 0),
        threadgroup=check.threadgroup(threadgroup),
        **options,
    )
    if launch.is_empty and any(math.prod(shape) for shape in launch.output_shapes):
        raise check.error("grid must have threads where an output has elements", launch.grid)
    return launch


def _list(names: object) -> str:
    return ", ".join(names) if names else "none"  # type: ignore[arg-type, call-overload, unused-ignore]


def _text(value: object) -> str:
    """A value of the wrong kind, short."""
    if isinstance(value, mx.Dtype):
        return dtype_name(value)
    if isinstance(value, mx.array):
        return f"an array of shape {value.shape}"
    return f"{value!r} ({type(value).__name__})"
