"""Takes a complete `.metal` file apart into what `mx.fast.metal_kernel` wants: header, body, names of its arrays.

MLX writes the kernel's signature itself. The one in the file is for Xcode and `xcrun metal`, and what a launch is
checked against; whatever MLX would write differently is refused here, with file and line.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
import re
from typing import Literal

from forge_mlx.metal.include import SourceError, blank, display_name, inline, line_at, open_conditions
from forge_mlx.metal.limits import MAX_BUFFERS
from forge_mlx.metal.parameters import DESCRIPTIONS, Array, Parameters, read_parameters
from forge_mlx.metal.signature import ATTRIBUTES

__all__ = ["Array", "KernelSource", "SourceError", "TemplateParameter", "load"]

# The folder beside a room with the headers that rooms share.
COMMON = "_common"

_KERNEL = re.compile(
    r"(?:\[\[\s*kernel\b(?P<inner>[^\]]*)\]\]|\bkernel\b)\s*(?P<more>(?:\[\[[^\]]*\]\]\s*)*)void\s+(?P<name>\w+)\s*\("
)
_TEMPLATE = re.compile(r"\btemplate\s*<(?P<list>[^<>]*)>\s*$")
# What gives one instance a name for the host: MLX writes its own.
_INSTANCE = re.compile(r"\btemplate\s*\[\[\s*host_name\b[^;{]*;")


@dataclass(frozen=True)
class TemplateParameter:
    """A template parameter of a kernel.

    Attributes:
        name: its name.
        kind: what MLX passes for it: a dtype, an int or a bool.
    """

    name: str
    kind: Literal["typename", "int", "bool"]


@dataclass(frozen=True)
class KernelSource:
    """One kernel, ready to hand to MLX.

    Attributes:
        name: the kernel function's name.
        file: the file that it comes from, as messages give it.
        header: all that stands before the kernel, includes inlined; `#line` keeps files and lines.
        body: what stands between the kernel's braces.
        body_line: the line on which the body begins.
        inputs: the arrays that the kernel reads, in order.
        outputs: the arrays that it writes, in order.
        template: its template parameters, in order.
        attributes: names of the parameters for the thread's position and the like.
    """

    name: str
    file: str
    header: str
    body: str
    body_line: int
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    template: tuple[TemplateParameter, ...]
    attributes: tuple[str, ...]

    @property
    def atomic_outputs(self) -> bool:
        """Whether the outputs are `device atomic<T>*`."""
        return any(array.atomic for array in self.outputs)


def load(path: str | Path, folders: Sequence[Path] | None = None) -> KernelSource:
    """Read a `.metal` file that holds one kernel.

    Args:
        path: the file. `#include "..."` is inlined, each file once; `#include <...>` stays.
        folders: where an included file is looked for when it is not beside the file that includes it; None for
            `_common` beside the folder of `path`, as rooms have it.

    Returns:
        Its header, its body and what its signature declares.

    Raises:
        SourceError: not exactly one kernel, or one that MLX could not write as it is.
        OSError: the file cannot be read.
    """
    path = Path(path).resolve()
    folders = [path.parent.parent / COMMON] if folders is None else folders
    file, text = display_name(path), path.read_text(encoding="utf-8")
    code = _INSTANCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), blank(text))
    head = _kernel(code, file)
    if open_conditions(code[: head.start()]):
        raise SourceError("the kernel may not stand inside #if.", file, line_at(code, head.start()))
    start, template = _template(code, head.start(), file)
    end = _matching(code, head.end() - 1, file)
    parameters = read_parameters(
        code, head.end(), end, file, [each.name for each in template if each.kind == "typename"]
    )
    opening = end + 1 + len(code[end + 1 :]) - len(code[end + 1 :].lstrip())
    if code[opening : opening + 1] != "{":
        raise SourceError("the kernel's body must follow its parameters.", file, line_at(code, end))
    closing = _matching(code, opening, file)
    if rest := code[closing + 1 :].strip():
        line = line_at(code, code.index(rest, closing))
        raise SourceError(f"nothing may follow the kernel but got {rest.splitlines()[0]}.", file, line)
    line = line_at(code, opening)
    source = KernelSource(
        name=head["name"],
        file=file,
        header=inline(text[:start], path, folders, {path}).rstrip("\n") + "\n",
        body=f'#line {line} "{file}"\n{text[opening + 1 : closing]}',
        body_line=line,
        inputs=tuple(array for array in parameters.arrays if not array.is_output),
        outputs=tuple(array for array in parameters.arrays if array.is_output),
        template=template,
        attributes=tuple(name for name in ATTRIBUTES if name in parameters.attributes),
    )
    _check_signature(source, parameters, line_at(code, head.start()))
    _check_body(source, parameters, code[opening + 1 : closing])
    return source


def _kernel(code: str, file: str) -> re.Match[str]:
    found = list(_KERNEL.finditer(code))
    if len(found) != 1:
        line = line_at(code, found[1].start()) if found else 1
        names = ", ".join(match["name"] for match in found) or "none"
        raise SourceError(f"a file must hold one [[kernel]] function but got {names}.", file, line)
    (head,) = found
    if more := ((head["inner"] or "") + head["more"]).strip(" ,"):
        raise SourceError(f"MLX writes [[kernel]] and nothing else but got {more}.", file, line_at(code, head.start()))
    return head


def _template(code: str, start: int, file: str) -> tuple[int, tuple[TemplateParameter, ...]]:
    """Where the kernel begins, its `template <...>` included, and the parameters in there."""
    match = _TEMPLATE.search(code[:start])
    before = code[: match.start() if match else start].rstrip()
    last_line = before.rpartition("\n")[2].lstrip()
    if before and before[-1] not in "};" and not last_line.startswith("#"):
        raise SourceError(
            f"only `template <...>` with typename, int and bool may stand before [[kernel]] but got {last_line}.",
            file,
            line_at(code, len(before)),
        )
    if match is None:
        return start, ()
    found = []
    for piece in match["list"].split(","):
        words = piece.split()
        if len(words) != 2 or words[0] not in ("typename", "class", "int", "bool"):
            raise SourceError(
                f"MLX passes a dtype, an int or a bool to a template, without default, but got {piece.strip()}.",
                file,
                line_at(code, match.start("list")),
            )
        kind: Literal["typename", "int", "bool"] = "typename"
        if words[0] == "int" or words[0] == "bool":
            kind = words[0]  # type: ignore[assignment]
        found.append(TemplateParameter(words[1], kind))
    return match.start(), tuple(found)


def _matching(code: str, opening: int, file: str) -> int:
    """The offset of the parenthesis or brace that closes the one at `opening`."""
    pairs = {"(": ")", "{": "}"}
    left, right = code[opening], pairs[code[opening]]
    depth = 0
    for offset in range(opening, len(code)):
        depth += (code[offset] == left) - (code[offset] == right)
        if depth == 0:
            return offset
    raise SourceError(f"{left} is never closed.", file, line_at(code, opening))


def _check_signature(source: KernelSource, parameters: Parameters, line: int) -> None:
    """Refuse a parameter list that MLX cannot pass as a whole."""
    if not source.outputs:
        raise SourceError("a kernel must have an output, `device T* name`.", source.file, line)
    plain = [array for array in source.outputs if not array.atomic]
    if source.atomic_outputs and plain:
        raise SourceError(
            f"MLX makes all outputs atomic or none but {plain[0].name} is not.", source.file, plain[0].line
        )
    described = sum(len(array.descriptions) for array in source.inputs)
    count = len(parameters.arrays) + described
    if count > MAX_BUFFERS:
        raise SourceError(f"Metal passes at most {MAX_BUFFERS} buffers but got {count}.", source.file, line)
    # MLX closes the list after an output by counting inputs and outputs alone.
    if described and len(source.outputs) > 1 and not source.attributes:
        raise SourceError(
            "MLX writes a broken list for several outputs after a shape, strides or ndim without any attribute: "
            "use one, such as thread_position_in_grid.",
            source.file,
            line,
        )


def _check_body(source: KernelSource, parameters: Parameters, code: str) -> None:
    """MLX adds a parameter wherever its name occurs in the body, comments and longer names included."""
    for array in source.inputs:
        if not array.is_reference:
            declared = {f"{array.name}_{suffix}": array.line for suffix in array.descriptions}
            _compare(source, code, [f"{array.name}_{suffix}" for suffix in DESCRIPTIONS], declared)
    _compare(source, code, ATTRIBUTES, parameters.attributes)


def _compare(source: KernelSource, code: str, names: Iterable[str], declared: dict[str, int]) -> None:
    for name in names:
        if name in declared and name not in source.body:
            raise SourceError(
                f"{name} is declared and never used, so MLX would leave it out: remove it.",
                source.file,
                declared[name],
            )
        if name in source.body and name not in declared:
            lines_before = source.body.count("\n", 0, source.body.index(name))
            where = "the body" if name in code else "a comment" if lines_before else "the file's path"
            raise SourceError(
                f"{where} holds {name}, so MLX would add it as a parameter: declare it, or write another word.",
                source.file,
                source.body_line - 1 + lines_before,
            )
