"""Examples as files hold them: JSON lines, JSON lists, Parquet, and whole texts."""

from collections.abc import Iterator, Mapping
import json
from typing import Any, Final, Literal, NamedTuple

from forge_mlx.data.corpus import json_object, lines_of, read_text
from forge_mlx.data.example_config import Format
from forge_mlx.data.files import JSON_SUFFIXES, TEXT_SUFFIXES, SourceFile
from forge_mlx.data.parquet import read_parquet
from forge_mlx.data.sources import some_names

# What a first example must have to be of a format, in the order in which they are tried.
_SIGNS: Final[dict[Format | Literal["choices"], tuple[set[str], ...]]] = {
    "choices": ({"choices"},),
    "preference": ({"chosen", "rejected"},),
    "chat": ({"messages"}, {"conversations"}),
    "prompt_completion": ({"prompt", "completion"}, {"instruction", "output"}),
    "text": ({"text"},),
}
_FIELDS_SHOWN = 10
_LIST_SUFFIX = ".json"
_PARQUET_SUFFIX = ".parquet"


class Record(NamedTuple):
    """What one example of a file holds.

    Attributes:
        where: `file:line`, `file:row 3` or the file's name, for messages.
        content: its fields, or what is wrong with it.
    """

    where: str
    content: dict[str, Any] | ValueError

    def fields(self) -> dict[str, Any]:
        """Its fields.

        Raises:
            ValueError: what is wrong with it.
        """
        if isinstance(self.content, ValueError):
            raise self.content
        return self.content


class Told(NamedTuple):
    """What the first example of a file says of their format.

    Attributes:
        format: the one that its fields tell, `choices` being questions to choose the answer of; None: none.
        by: the fields that tell it.
        fields: all that it has.
        where: `file:line`, for messages.
    """

    format: Format | Literal["choices"] | None
    by: list[str]
    fields: list[str]
    where: str


def told_format(file: SourceFile, own: Mapping[Format, set[str]] | None = None) -> Told:
    """The format that the first example of a file looks like.

    Args:
        file: what to look at.
        own: fields that tell a format before the usual ones do, such as those that a config names.

    Raises:
        ValueError: the file cannot be read, holds nothing, or its first example is malformed.
    """
    record = next(read_records(file, "text", "text"), None)
    if record is None:
        raise ValueError(f"[data] {file.name} must hold examples but is empty.")
    where, content = record.where, record.fields()
    for name, fields in (own or {}).items():
        if fields <= content.keys():
            return Told(name, sorted(fields), list(content), where)
    return Told(*format_of(content), list(content), where)


def format_of(content: Mapping[str, Any]) -> tuple[Format | Literal["choices"] | None, list[str]]:
    """The format that the fields of an example tell, and those that tell it."""
    signs = ((name, fields) for name, alternatives in _SIGNS.items() for fields in alternatives)
    return next(((name, sorted(fields)) for name, fields in signs if fields <= content.keys()), (None, []))


def field_names(fields: Mapping[str, Any]) -> str:
    """The names of the fields that a record has, for a message, the first ten of them."""
    shown = [repr(name) for name in list(fields)[:_FIELDS_SHOWN]] + ["..."] * (len(fields) > _FIELDS_SHOWN)
    return ", ".join(shown) or "no field"


def with_others(problem: str, others: list[str]) -> str:
    """What is wrong with the first malformed record, and how many more there are.

    Args:
        problem: one sentence or more.
        others: the places of the others.
    """
    if not others:
        return problem
    return f"{problem} {len(others)} more {'is' if len(others) == 1 else 'are'} malformed{some_names(others)}."


def suffixes_of(example_format: Format) -> tuple[str, ...]:
    """The suffixes of the files that are taken from folders."""
    suffixes = (*JSON_SUFFIXES, _LIST_SUFFIX, _PARQUET_SUFFIX)
    return suffixes + TEXT_SUFFIXES if example_format == "text" else suffixes


def read_records(file: SourceFile, example_format: Format, text_field: str) -> Iterator[Record]:
    """Stream the examples of a file. One that is malformed does not end the file where the next one can be found.

    Args:
        file: what to read.
        example_format: a file of another suffix is one example where this is `text`.
        text_field: under which name its text is given then.

    Raises:
        ValueError: the file cannot be read, or holds no examples by its suffix.
    """
    if file.kind in JSON_SUFFIXES:
        return _of_lines(file)
    if file.kind == _LIST_SUFFIX:
        return _of_list(file) if _begins_a_list(file) else _of_lines(file)
    if file.kind == _PARQUET_SUFFIX:
        return _of_parquet(file)
    if example_format == "text":
        return _of_text(file, text_field)
    raise ValueError(
        f"[data] a file of examples must end in {', '.join(suffixes_of(example_format))} (all but .parquet also with "
        f".gz) but got {file.name}. Rename or convert it."
    )


def _of_lines(file: SourceFile) -> Iterator[Record]:
    for where, line in lines_of(file):
        try:
            content = json_object(line, where)
        except ValueError as error:
            yield Record(where, error)
        else:
            yield _checked(where, content, line)


def _begins_a_list(file: SourceFile) -> bool:
    first = next(lines_of(file), None)
    return first is not None and first[1].lstrip().startswith(b"[")


def _of_list(file: SourceFile) -> Iterator[Record]:
    """The items of a JSON list, whose text is held in memory as a whole."""
    try:
        text = "".join(read_text(file))
    except UnicodeDecodeError as error:
        yield Record(file.name, ValueError(f"[data] {file.name}: must be UTF-8 but is not: {error.reason}."))
        return
    decoder = json.JSONDecoder()
    at, line, seen = text.index("[") + 1, 1, 0
    while True:
        at = _behind_space(text, at)
        line, seen = line + text.count("\n", seen, at), at
        where = f"{file.name}:{line}"
        if text[at : at + 1] == "]":
            if text[at + 1 :].strip():
                yield Record(where, ValueError(f"[data] {where}: must end with the list of examples but goes on."))
            return
        try:
            content, end = decoder.raw_decode(text, at)
            after = _behind_space(text, end)
            if text[after : after + 1] not in (",", "]") or not isinstance(content, dict):
                got = type(content).__name__ if after < len(text) else "the end of the file behind it"
                raise ValueError(f"a list of objects, with commas between them, is expected but got {got}")
        except (ValueError, RecursionError) as error:
            # What follows cannot be told apart any more.
            yield Record(where, ValueError(f"[data] {where}: must hold one JSON list of objects: {error}"))
            return
        yield _checked(where, content, text[at:end].encode())
        at = after + (text[after] == ",")


def _behind_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _of_parquet(file: SourceFile) -> Iterator[Record]:
    if file.is_gzip:
        raise ValueError(f"[data] a Parquet file must not be in gzip but got {file.name}. Unpack it.")
    for number, row in enumerate(read_parquet(file.path, file.name), 1):
        yield Record(f"{file.name}:row {number}", row)


def _of_text(file: SourceFile, text_field: str) -> Iterator[Record]:
    try:
        yield Record(file.name, {text_field: "".join(read_text(file))})
    except UnicodeDecodeError as error:
        yield Record(file.name, ValueError(f"[data] {file.name}: must be UTF-8 but is not: {error.reason}."))


def _checked(where: str, content: dict[str, Any], source: bytes) -> Record:
    """The record, unless it spells half a surrogate pair: no UTF-8 text has one, and no tokenizer takes it."""
    if b"\\ud" in source.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Record(
                where, ValueError(f"[data] {where}: texts must be valid Unicode but one has a lone surrogate.")
            )
    return Record(where, content)
