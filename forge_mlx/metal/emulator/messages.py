"""The compiler's messages in Metal's words and about the user's lines."""

from collections.abc import Iterator
from dataclasses import dataclass, field
import re

from forge_mlx.metal.emulator.errors import Location
from forge_mlx.metal.emulator.line_directives import origins
from forge_mlx.metal.emulator.names import ARRAY_TYPE, users_names
from forge_mlx.metal.emulator.toolchain import undefined_functions
from forge_mlx.metal.signature import GeneratedSource

# Errors told in full; one mistake often brings many more.
MAX_ERRORS = 3
MAX_NOTES = 2

_LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+):\d+: (?P<level>fatal error|error|note|warning): (?P<text>.*)")
# Notes about how the compiler came to a line, not about what is wrong there.
_PATH = re.compile(r"in instantiation of .* requested here|in call to |expanded from |.* declared here")
_SPACES = {"__global": "device", "__local": "threadgroup", "__constant": "constant", "__private": "thread"}
_VECTOR = re.compile(
    r"\b(half|__bf16|float|(?:unsigned )?(?:char|short|int|long)) ?__attribute__\(\(ext_vector_type\((\d)\)\)\)"
)
_SHORT = {f"unsigned {name}": f"u{name}" for name in ("char", "short", "int", "long")} | {"__bf16": "bfloat"}


@dataclass
class _Diagnostic:
    where: Location
    text: str
    notes: list["_Diagnostic"] = field(default_factory=list)


def explain(stderr: str, generated: GeneratedSource) -> tuple[str, tuple[Location, ...]]:
    """What a user needs of the compiler's output.

    Args:
        stderr: the output.
        generated: the source that it is about.

    Returns:
        The first errors with the user's lines, and where they are.
    """
    errors = list(_errors(stderr))
    if not errors:
        return _linker(stderr), ()
    told = [_told(error, generated) for error in errors]
    # One that leads to no line of the user's says little beside others that do.
    kept = [each for each in told if each[1] is not None] or told
    more = len(errors) - len(kept[:MAX_ERRORS])
    text = "\n".join(message for message, _ in kept[:MAX_ERRORS])
    if more:
        text += f"\nand {more} more error{'s' if more > 1 else ''}"
    return text, tuple(where for _, where in kept[:MAX_ERRORS] if where is not None)


def metal_words(text: str) -> str:
    """A message with Metal's names for what the compiler calls by its own.

    Args:
        text: a message of the compiler.

    Returns:
        The same message; the emulator's own names are gone from it.
    """
    # Typedefs of the emulator: what they stand for says more.
    text = re.sub(rf"'[^']*\b{ARRAY_TYPE}\w+[^']*' \(aka ('[^']*')\)", r"\1", text)
    text = users_names(text)
    text = _VECTOR.sub(lambda match: _SHORT.get(match[1], match[1]) + match[2], text)
    text = re.sub(r" \(vector of \d '[^']*' values\)", "", text)
    text = (
        text.replace("address space '__generic'", "no address space")
        .replace("__generic ", "")
        .replace("__bf16", "bfloat")
    )
    for here, there in _SPACES.items():
        text = re.sub(rf"\b{here}\b", there, text)
    # A variable's own place says nothing of what it points at.
    text = re.sub(r"\* ?(const )?thread\b", r"*\1", text).replace("*const ", "*const")
    text = re.sub(r"\b(?:metal::)?emu_bool<(\d)>", r"bool\1", text)
    text = re.sub(r"'((?:\w+ )*)(bool\d)' \(aka '\1\2'\)", r"'\1\2'", text)
    text = re.sub(r"\b(?:metal::)?emu_packed<(\w+), (\d)>", r"packed_\1\2", text)
    text = text.replace("'emu_bool'", "a vector of bool").replace("'emu_packed'", "a packed vector")
    text = re.sub(r"\bemu_choose\b", "?:", text)
    text = re.sub(r"static assertion failed due to requirement '.*?': ", "", text)
    text = re.sub(r"\b(?:metal::)?emu_make\b", "constructor", text)
    return re.sub(r"\b(?:metal::)?emu_cast\b", "static_cast", text)


def _linker(stderr: str) -> str:
    missing = undefined_functions(stderr)
    if not missing:
        return metal_words(stderr.strip())
    return f"calls what is declared and not defined: {metal_words(', '.join(missing))}"


def _errors(stderr: str) -> Iterator[_Diagnostic]:
    found: list[_Diagnostic] = []
    for line in stderr.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        diagnostic = _Diagnostic(Location(match["file"], int(match["line"])), match["text"])
        if match["level"] in ("error", "fatal error"):
            found.append(diagnostic)
        elif match["level"] == "note" and found:
            found[-1].notes.append(diagnostic)
    yield from found


def _told(error: _Diagnostic, generated: GeneratedSource) -> tuple[str, Location | None]:
    """One error: at the user's line that it is on, or at the one that led to it."""
    where = next((each.where for each in (error, *error.notes) if source_line(each.where, generated) is not None), None)
    if where is None:
        return metal_words(error.text), None
    lines = [f"{where}: {metal_words(error.text)}", f"    {source_line(where, generated)}"]
    notes = [note for note in error.notes if not _PATH.match(note.text)]
    lines += [f"  {_note(note, generated)}" for note in notes[:MAX_NOTES]]
    return "\n".join(lines), where


def _note(note: _Diagnostic, generated: GeneratedSource) -> str:
    place = f"{note.where}: " if source_line(note.where, generated) is not None else ""
    return place + metal_words(note.text)


def source_line(where: Location, generated: GeneratedSource) -> str | None:
    """The text of a line of the user's source.

    Args:
        where: the line.
        generated: the source.

    Returns:
        The text; None for a line of any other file.
    """
    for file, first, text in (
        (generated.body_file, generated.body_line, generated.body),
        (f"{generated.user_name} signature", 1, generated.signature),
        (generated.header_file, generated.header_line, generated.header),
    ):
        lines = text.split("\n")
        for origin, line in zip(origins(lines, file, first), lines, strict=True):
            if origin == (where.file, where.line):
                return line.strip()
    return None
