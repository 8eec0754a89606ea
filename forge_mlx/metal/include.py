"""Reads Metal text without its comments and strings, and inlines `#include "..."`."""

from collections.abc import Sequence
from pathlib import Path
import re

_COMMENT = r"//[^\n]*|/\*.*?\*/"
_STRING = r'"(?:\\.|[^"\\\n])*"'
_TOKEN = re.compile(f"({_COMMENT})|{_STRING}", re.DOTALL)
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
_OPEN = re.compile(r"[ \t]*#[ \t]*if")
_CLOSE = re.compile(r"[ \t]*#[ \t]*endif")
_GUARD = re.compile(r"\s*#[ \t]*ifndef[ \t]+(\w+)\s*\n\s*#[ \t]*define[ \t]+\1\b")
_ONCE = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+once\b")


class SourceError(ValueError):
    """A Metal file that cannot be handed to MLX; the message begins with `file:line`."""

    def __init__(self, message: str, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}: {message}")
        self.file = file
        self.line = line


def blank(text: str, *, strings: bool = True) -> str:
    """The text with spaces for comments (and for strings): every offset and line stays where it was.

    Args:
        text: C++ or Metal source.
        strings: whether string literals go too.

    Returns:
        A text of the same length with the same line ends.
    """

    def spaces(match: re.Match[str]) -> str:
        if match[1] is None and not strings:
            return match[0]
        return re.sub(r"[^\n]", " ", match[0])

    return _TOKEN.sub(spaces, text)


def line_at(text: str, offset: int) -> int:
    """The line, counted from 1, on which an offset lies."""
    return text.count("\n", 0, offset) + 1


def display_name(path: Path) -> str:
    """A file's name as messages give it: its folder and itself, the same wherever the package is installed."""
    return "/".join(path.parts[-2:])


def open_conditions(code: str) -> int:
    """How many `#if` are still open at the end of a text without comments, its include guard left out."""
    lines = code.split("\n")
    count = sum(bool(_OPEN.match(line)) - bool(_CLOSE.match(line)) for line in lines)
    return count - 1 if _GUARD.match(code) and count else count


def inline(text: str, path: Path, folders: Sequence[Path], seen: set[Path]) -> str:
    """Put the text of every `#include "..."` in its place, each file once, with `#line` around it.

    A name is looked for beside the file that includes it, then in `folders`. `#include <...>` stays.

    Args:
        text: the text, from the first line of `path` on.
        path: where it comes from.
        folders: where included files lie that are not beside the file.
        seen: the files that are in already; grows.

    Returns:
        The text, beginning with a `#line` of its own.

    Raises:
        SourceError: a file that is missing, or an include that a condition may leave out.
    """
    name = display_name(path)
    pieces = [f'#line 1 "{name}"']
    code_lines = blank(text, strings=False).split("\n")
    for number, (line, code) in enumerate(zip(text.split("\n"), code_lines, strict=True), start=1):
        match = _INCLUDE.match(code)
        if match is None:
            pieces.append("" if _ONCE.match(code) else line)
            continue
        if open_conditions("\n".join(code_lines[: number - 1])):
            raise SourceError(f'#include "{match[1]}" may not stand inside #if: it is inlined once.', name, number)
        target = _find(match[1], path, folders, number)
        if target in seen:
            pieces.append("")
            continue
        seen.add(target)
        pieces.append(inline(target.read_text(encoding="utf-8"), target, folders, seen))
        pieces.append(f'#line {number + 1} "{name}"')
    return "\n".join(pieces)


def _find(name: str, path: Path, folders: Sequence[Path], line: int) -> Path:
    for folder in (path.parent, *folders):
        if (folder / name).is_file():
            return (folder / name).resolve()
    looked = ", ".join(str(folder) for folder in (path.parent, *folders))
    raise SourceError(f'#include "{name}" must name a file but there is none in {looked}.', display_name(path), line)
