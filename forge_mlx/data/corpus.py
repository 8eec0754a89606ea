"""Documents of a corpus as a stream of text, split into training and validation."""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
import json
from typing import Any, BinaryIO, Literal, NamedTuple
import zlib

from forge_mlx.data.files import SourceFile
from forge_mlx.data.lines import last_line_start

Split = Literal["train", "valid"]

_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 22


class Piece(NamedTuple):
    """A part of a document: the documents of a split follow each other, their parts in order.

    Attributes:
        split: which part of the corpus it belongs to.
        text: never empty; cut behind a run of newlines where there is one.
        last: whether the document (or its share in this split) ends here.
    """

    split: Split
    text: str
    last: bool


@dataclass
class Scan:
    """What one pass over all files found.

    Attributes:
        documents: documents with text.
        empty: documents without any, which are left out.
        file_bytes: UTF-8 bytes of text of each file.
        not_utf8: indices of the files that are not UTF-8, which are left out.
    """

    documents: int = 0
    empty: int = 0
    file_bytes: list[int] = field(default_factory=list)
    not_utf8: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Document:
    num_bytes: int
    pieces: Iterable[str]


class Corpus:
    """The documents of some files: one a text file, one a JSON line. Never held in memory as a whole.

    Args:
        files: in the order in which they are read.
        text_field: the field of a JSON line that holds its document.
        split: `train` or `valid` for all documents; a fraction f holds out document i for validation when
            `floor((i + 1) f) > floor(i f)`, or the last share f of every document where that gives none.

    Attributes:
        scan: what a first pass found: every JSON line is valid and every other text file UTF-8.

    Raises:
        ValueError: a file cannot be read, or a JSON line is not an object with a text.
    """

    def __init__(self, files: list[SourceFile], text_field: str, split: Split | float) -> None:
        self.files = files
        self._text_field = text_field
        self._split = split
        self.scan = self._read_all()

    @property
    def splits_documents(self) -> bool:
        """Whether validation takes the end of every document, for want of enough documents."""
        return not isinstance(self._split, str) and self.scan.documents * Fraction(str(self._split)) < 1

    def pieces(self) -> Iterator[Piece]:
        """Stream the text of all documents that are not empty, in order."""
        if isinstance(self._split, str):
            for document in self._documents():
                yield from _whole(document, self._split)
            return
        fraction = Fraction(str(self._split))
        only_tails = self.splits_documents
        for index, document in enumerate(self._documents()):
            if only_tails:
                yield from _split_tail(document, fraction)
            else:
                held_out = (index + 1) * fraction // 1 > index * fraction // 1
                yield from _whole(document, "valid" if held_out else "train")

    def _read_all(self) -> Scan:
        scan = Scan()
        for index, file in enumerate(self.files):
            sizes: list[int] = []
            try:
                if file.is_json:
                    sizes = [len(text.encode()) for text in read_json_lines(file, self._text_field)]
                else:
                    sizes = [sum(len(part.encode()) for part in read_text(file))]
            except UnicodeDecodeError:
                scan.not_utf8.append(index)
            scan.file_bytes.append(sum(sizes))
            scan.documents += sum(size > 0 for size in sizes)
            scan.empty += sizes.count(0)
        return scan

    def _documents(self) -> Iterator[_Document]:
        left_out = set(self.scan.not_utf8)
        for index, file in enumerate(self.files):
            if index in left_out or not self.scan.file_bytes[index]:
                continue
            if file.is_json:
                for text in filter(None, read_json_lines(file, self._text_field)):
                    yield _Document(len(text.encode()), (text,))
            else:
                yield _Document(self.scan.file_bytes[index], read_text(file))


def read_text(file: SourceFile) -> Iterator[str]:
    r"""Stream a text file in parts of about a megabyte; all but a byte order mark stays as it is, also `"\r\n"`.

    Parts end behind a run of newlines, unless a line is longer than 4 million characters.

    Raises:
        UnicodeDecodeError: the file is not UTF-8.
        ValueError: the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    rest = ""
    with file.open() as stream:
        while chunk := _read(stream, file):
            rest += decoder.decode(chunk)
            cut = last_line_start(rest) or (len(rest) if len(rest) > _LONGEST_LINE else 0)
            if cut:
                yield rest[:cut]
                rest = rest[cut:]
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def read_json_lines(file: SourceFile, text_field: str) -> Iterator[str]:
    """Stream the documents of a JSON-lines file; lines of whitespace alone are none.

    Raises:
        ValueError: a line is no JSON object with a text in `text_field`; the message names file and line.
    """
    for where, line in lines_of(file):
        yield _document_of(line, text_field, where)


def lines_of(file: SourceFile) -> Iterator[tuple[str, bytes]]:
    """Stream the lines of a file that are not whitespace alone, each with the `file:line` that messages call it.

    Raises:
        ValueError: the file cannot be read.
    """
    with file.open() as stream:
        number = 0
        while line := _read(stream, file, line=True):
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield f"{file.name}:{number}", line


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object that a line holds.

    Raises:
        ValueError: it holds none; the message begins with `where`.
    """
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"[data] {where}: a JSON line must be UTF-8 but is not: {error.reason}.") from error
    except (json.JSONDecodeError, RecursionError) as error:
        # Of a line the line's number in it would mislead.
        reason = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(
            f"[data] {where}: each line must be one JSON object but got {_shown(line)}: {reason}."
        ) from error
    if not isinstance(record, dict):
        raise ValueError(
            f"[data] {where}: each line must be a JSON object but got a {type(record).__name__}: {_shown(line)}."
        )
    return record


def _document_of(line: bytes, text_field: str, where: str) -> str:
    record = json_object(line, where)
    if text_field not in record:
        raise ValueError(
            f"[data] {where}: a line must have the field {text_field!r} but has {sorted(record)[:10]}. "
            "Name the field with data.text_field."
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(f"[data] {where}: the field {text_field!r} must be a string but got a {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"[data] {where}: the text must be valid Unicode but has a lone surrogate at character {error.start}."
        ) from error
    return text


def _shown(line: bytes) -> str:
    text = line[:60].decode(errors="replace").strip()
    return repr(text + "..." if len(line) > 60 else text)


def _read(stream: BinaryIO, file: SourceFile, line: bool = False) -> bytes:
    try:
        return stream.readline() if line else stream.read(_CHUNK)
    except (OSError, EOFError, zlib.error) as error:
        kind = "an intact gzip file" if file.is_gzip else "readable"
        raise ValueError(
            f"[data] {file.name} must be {kind} but reading it failed: {error}. Repair it or take it out."
        ) from error


def _whole(document: _Document, split: Split) -> Iterator[Piece]:
    held: str | None = None
    for text in document.pieces:
        if held is not None:
            yield Piece(split, held, False)
        held = text
    if held is not None:
        yield Piece(split, held, True)


def _split_tail(document: _Document, fraction: Fraction) -> Iterator[Piece]:
    """The first `1 - fraction` of the bytes to train, the rest to validate; cut where a line starts."""
    target = int(document.num_bytes * (1 - fraction))
    done = 0
    for piece in _whole(document, "train"):
        text, size = piece.text, len(piece.text.encode())
        if done >= target:
            yield piece._replace(split="valid")
        elif done + size < target or (done + size == target and not piece.last):
            # The cut falls right behind this part when the next one starts at or past the target.
            yield piece._replace(last=done + size == target)
        else:
            wanted = len(text.encode()[: target - done].decode(errors="ignore"))
            # At least one character, so that the training share that earlier parts began is ended here.
            cut = _line_start_from(text, max(wanted, 1), piece.last)
            if text[:cut]:
                yield Piece("train", text[:cut], True)
            if text[cut:]:
                yield Piece("valid", text[cut:], piece.last)
        done += size


def _line_start_from(text: str, index: int, last: bool) -> int:
    """The first start of a line at or behind `index` > 0, else `index`.

    Args:
        text: a part of a document.
        index: in characters.
        last: whether the document ends with `text`; otherwise a line starts right behind it.
    """
    start = text.find("\n", index - 1)
    while 0 <= start < len(text) - 1 and text[start + 1] == "\n":
        start += 1
    return start + 1 if 0 <= start < len(text) - (1 if last else 0) else index
