"""Where each line of a text came from, by the `#line` directives in it."""

from collections.abc import Sequence
import re

_LINE = re.compile(r'\s*#\s*line\s+(?P<number>\d+)(?:\s+"(?P<file>[^"]*)")?')


def origins(lines: Sequence[str], file: str, line: int) -> list[tuple[str, int] | None]:
    """The file and line that each line of a text came from.

    Args:
        lines: the text.
        file: where its first line came from.
        line: the line there.

    Returns:
        One entry per line; None for the `#line` directives themselves.
    """
    found: list[tuple[str, int] | None] = []
    for text in lines:
        if match := _LINE.match(text):
            file, line = match["file"] or file, int(match["number"])
            found.append(None)
        else:
            found.append((file, line))
            line += 1
    return found
