"""Reads the parameter list of a Metal kernel and refuses what MLX could not write."""

from collections.abc import Collection
from dataclasses import dataclass, replace
import re
from typing import Literal, NoReturn

from forge_mlx.metal.include import SourceError, line_at
from forge_mlx.metal.signature import ATTRIBUTES

# What a file may call a type -> what MLX calls it.
SCALAR_NAMES = {
    **{name: name for name in ("bool", "float", "float16_t", "bfloat16_t")},
    **{f"{sign}int{bits}_t": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"char": "int8_t", "short": "int16_t", "int": "int32_t", "long": "int64_t"},
    **{"uchar": "uint8_t", "ushort": "uint16_t", "uint": "uint32_t", "ulong": "uint64_t"},
    **{"half": "float16_t", "bfloat": "bfloat16_t"},
}
# What MLX adds after an input whose body names it: suffix -> type, and whether it is a reference.
DESCRIPTIONS = {"shape": ("int32_t", False), "strides": ("int64_t", False), "ndim": ("int32_t", True)}

_SPACE = r"(?:\b(?:const|device|constant|threadgroup|thread|volatile|coherent)\b\s*)*"
_BUFFER = re.compile(
    rf"(?P<before>{_SPACE})(?P<type>[\w:]+(?:\s*<\s*[\w:]+\s*>)?)\s*(?P<after>{_SPACE})(?P<mark>[*&]+)\s*(?P<name>\w*)"
)
_VALUE = re.compile(r"(?P<type>[\w:]+(?:\s*<[^>]*>)?)(?:\s+(?P<name>\w+))?")
_ATOMIC = re.compile(r"(?:metal::)?(?:atomic_(?P<short>\w+)|atomic\s*<\s*(?P<long>\w+)\s*>)")
_ATTRIBUTE = re.compile(r"\[\[\s*(.*?)\s*\]\]", re.DOTALL)


@dataclass(frozen=True)
class Array:
    """An input or an output of a kernel.

    Attributes:
        name: the parameter's name.
        type: its element type: a template parameter, or a scalar type by MLX's name, such as `float16_t`.
        space: the address space in which the file declares it.
        is_reference: whether it is `T& name`, a 0-d array.
        is_output: whether the kernel may write it.
        atomic: whether its elements are `atomic<type>`.
        descriptions: which of `shape`, `strides` and `ndim` follow it.
        line: the line of the file.
    """

    name: str
    type: str
    space: Literal["device", "constant"]
    is_reference: bool
    is_output: bool
    atomic: bool
    descriptions: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Parameters:
    """What a kernel's parameter list declares.

    Attributes:
        arrays: inputs, then outputs.
        attributes: the names that MLX passes for the thread's position and the like, with their lines.
    """

    arrays: tuple[Array, ...]
    attributes: dict[str, int]


class _Reader:
    """Takes the parameters one after the other; `arrays` and `attributes` grow."""

    def __init__(self, file: str, types: Collection[str]) -> None:
        self.file = file
        self.types = types
        self.arrays: list[Array] = []
        self.attributes: dict[str, int] = {}
        self.buffers = 0

    def fail(self, line: int, message: str) -> NoReturn:
        raise SourceError(message, self.file, line)

    def take(self, text: str, line: int) -> None:
        found = _ATTRIBUTE.findall(text)
        declaration = " ".join(_ATTRIBUTE.sub(" ", text).split())
        if len(found) > 1:
            self.fail(line, f"a parameter may have one [[attribute]] but got {' '.join(text.split())}.")
        attribute = found[0] if found else ""
        if match := _BUFFER.fullmatch(declaration):
            self.take_buffer(match, attribute, line)
        elif match := _VALUE.fullmatch(declaration):
            self.take_value(match, attribute, line)
        else:
            self.fail(line, f"a parameter must be an array or a thread's position but got {declaration}.")

    def take_value(self, match: re.Match[str], attribute: str, line: int) -> None:
        type_name, name = match["type"], match["name"] or ""
        if "texture" in type_name or type_name == "sampler" or attribute.startswith(("texture", "sampler")):
            self.fail(line, f"MLX passes arrays only, no texture and no sampler, but got {type_name} {name}.")
        if attribute not in ATTRIBUTES:
            known = "is none of those that MLX passes" if attribute else "is missing"
            self.fail(line, f"the [[attribute]] of {type_name} {name} {known}: {', '.join(ATTRIBUTES)}.")
        if name != attribute:
            self.fail(line, f"MLX calls a parameter as its attribute, {attribute}, but got {name or 'no name'}.")
        if type_name != ATTRIBUTES[attribute]:
            self.fail(line, f"MLX passes {ATTRIBUTES[attribute]} {attribute} but got {type_name}.")
        self.attributes[name] = line

    def take_buffer(self, match: re.Match[str], attribute: str, line: int) -> None:
        words = (match["before"] + " " + match["after"]).split()
        name, mark = match["name"], match["mark"]
        if not name:
            self.fail(line, f"a buffer must have a name but got {match[0]}.")
        spaces = [word for word in words if word in ("device", "constant")]
        if "threadgroup" in words:
            self.fail(line, f"MLX passes no threadgroup memory: declare {name} inside the kernel.")
        if len(spaces) != 1 or "volatile" in words or "coherent" in words or mark not in ("*", "&"):
            self.fail(line, f"a buffer must be `device T*` or `constant T*` or `constant T&` but got {match[0]}.")
        if attribute != f"buffer({self.buffers})" and attribute:
            self.fail(line, f"MLX gives {name} [[buffer({self.buffers})]] but got [[{attribute}]].")
        self.buffers += 1
        element, atomic = self.element(match["type"], line)
        is_output = spaces[0] == "device" and "const" not in words
        if mark == "&" and spaces[0] == "device":
            self.fail(line, f"MLX passes a 0-d array as `const constant T&` and every other as a pointer: {match[0]}.")
        space: Literal["device", "constant"] = "device" if spaces[0] == "device" else "constant"
        self.add(Array(name, element, space, mark == "&", is_output, atomic, (), line))

    def element(self, type_name: str, line: int) -> tuple[str, bool]:
        """A type by MLX's name, and whether it is atomic."""
        match = _ATOMIC.fullmatch(type_name)
        inner = type_name if match is None else match["short"] or match["long"]
        if inner in self.types:
            return inner, match is not None
        if inner not in SCALAR_NAMES:
            allowed = ", ".join([*self.types, *SCALAR_NAMES])
            self.fail(
                line, f"MLX passes arrays of scalar types, so the type must be among {allowed} but got {type_name}."
            )
        return SCALAR_NAMES[inner], match is not None

    def add(self, array: Array) -> None:
        if array.name in self.attributes or array.name in self.buffer_names():
            self.fail(array.line, f"a parameter must have a name of its own but got {array.name} twice.")
        if array.is_output:
            self.arrays.append(array)
            return
        if array.atomic:
            self.fail(array.line, f"MLX passes inputs as plain values but got an atomic type for {array.name}.")
        if self.arrays and self.arrays[-1].is_output:
            self.fail(
                array.line, f"MLX passes inputs before outputs but got {array.name} after {self.arrays[-1].name}."
            )
        if not self.describes(array):
            self.arrays.append(array)

    def describes(self, array: Array) -> bool:
        """Whether the array is the last input's shape, strides or ndim; it is then noted there."""
        owner = self.arrays[-1] if self.arrays else None
        suffix = array.name.removeprefix(owner.name + "_") if owner else array.name
        if owner is None or suffix == array.name or suffix not in DESCRIPTIONS:
            return False
        order = list(DESCRIPTIONS)
        if any(order.index(earlier) > order.index(suffix) for earlier in owner.descriptions):
            self.fail(
                array.line, f"MLX passes {owner.name}_shape, {owner.name}_strides, {owner.name}_ndim in this order."
            )
        if (array.type, array.is_reference) != DESCRIPTIONS[suffix] or array.space != "constant":
            wanted, reference = DESCRIPTIONS[suffix]
            self.fail(array.line, f"MLX passes `const constant {wanted}{'&' if reference else '*'} {array.name}`.")
        if owner.is_reference:
            self.fail(array.line, f"MLX passes no {array.name}: {owner.name} is a 0-d array.")
        self.arrays[-1] = replace(owner, descriptions=(*owner.descriptions, suffix))
        return True

    def buffer_names(self) -> set[str]:
        """Every name that is taken by a buffer."""
        described = {f"{array.name}_{suffix}" for array in self.arrays for suffix in array.descriptions}
        return described | {array.name for array in self.arrays}


def _split(code: str, begin: int, end: int) -> list[tuple[str, int]]:
    """The parameters between two parentheses, each with the offset of its first character."""
    pieces, depth, start = [], 0, begin
    for offset in range(begin, end):
        if code[offset] in "([<":
            depth += 1
        elif code[offset] in ")]>":
            depth -= 1
        elif code[offset] == "," and depth == 0:
            pieces.append((start, offset))
            start = offset + 1
    pieces.append((start, end))
    return [
        (code[first:last], first + len(code[first:last]) - len(code[first:last].lstrip())) for first, last in pieces
    ]


def read_parameters(code: str, begin: int, end: int, file: str, types: Collection[str]) -> Parameters:
    """Read a kernel's parameter list.

    Args:
        code: the file without comments.
        begin: offset after the opening parenthesis.
        end: offset of the closing one.
        file: the file's name, for messages.
        types: the template's type parameters.

    Returns:
        Its arrays and attributes.

    Raises:
        SourceError: a parameter that MLX could not write: a texture, threadgroup memory, a struct, an attribute with
            another name than its parameter, outputs before inputs.
    """
    reader = _Reader(file, types)
    for text, offset in _split(code, begin, end):
        if text.strip():
            reader.take(text, line_at(code, offset))
    return Parameters(tuple(reader.arrays), reader.attributes)
