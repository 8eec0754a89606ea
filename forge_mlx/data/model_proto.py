"""The parts of a SentencePiece model file that its Python package gives no access to.

A model is a protocol buffer: a series of `(field number, wire type, value)`. Only the fields named here
are read; everything else is copied as it stands.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
import struct
from typing import Final

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_ROLE = 1, 2, 3
_TRAINER_ALGORITHM = 3
_RULE_NAME, _CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 1, 2, 3, 4, 5


ALGORITHMS: Final = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
ROLES: Final = {1: "normal", 2: "unknown", 3: "control", 4: "user-defined", 5: "unused", 6: "byte"}


@dataclass(frozen=True)
class Piece:
    """One piece of a vocabulary; the defaults are SentencePiece's.

    Attributes:
        text: as the model writes it, a space as U+2581.
        score: the logarithm of its probability; in a bpe model the highest is merged first.
        role: a value of `ROLES`.
    """

    text: str = ""
    score: float = 0.0
    role: str = ROLES[1]


@dataclass(frozen=True)
class Normalizer:
    """What a model does to the text before it looks for pieces; the defaults are SentencePiece's."""

    rule: str = ""
    has_charsmap: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def read_normalizer(model: bytes) -> Normalizer:
    """The normaliser of a serialised model.

    Raises:
        ValueError: the bytes are not a SentencePiece model.
    """
    found = Normalizer()
    for number, value, _ in _fields(model):
        if number == _MODEL_NORMALIZER and isinstance(value, bytes):
            values = {inner: content for inner, content, _ in _fields(value)}
            rule = values.get(_RULE_NAME, b"")
            found = Normalizer(
                rule=rule.decode() if isinstance(rule, bytes) else "",
                has_charsmap=bool(values.get(_CHARSMAP)),
                add_dummy_prefix=bool(values.get(_DUMMY_PREFIX, True)),
                remove_extra_whitespaces=bool(values.get(_REMOVE_SPACES, True)),
                escape_whitespaces=bool(values.get(_ESCAPE_SPACES, True)),
            )
    return found


def read_algorithm(model: bytes) -> str:
    """How a serialised model cuts text into pieces: a value of `ALGORITHMS`.

    Raises:
        ValueError: the bytes are not a SentencePiece model, or name no algorithm that is known.
    """
    found = 1
    for number, value, _ in _fields(model):
        if number == _MODEL_TRAINER and isinstance(value, bytes):
            written = dict(_numbers(value)).get(_TRAINER_ALGORITHM, found)
            found = int(written)
    return _named(ALGORITHMS, found, "algorithm")


def read_pieces(model: bytes) -> list[Piece]:
    """The pieces of a serialised model, in the order of their ids.

    Raises:
        ValueError: the bytes are not a SentencePiece model.
    """
    pieces = []
    for number, value, _ in _fields(model):
        if number == _MODEL_PIECES and isinstance(value, bytes):
            texts = [content for inner, content, _ in _fields(value) if inner == _PIECE_TEXT]
            numbers = dict(_numbers(value))
            pieces.append(
                Piece(
                    b"".join(text for text in texts if isinstance(text, bytes)).decode(),
                    numbers.get(_PIECE_SCORE, 0.0),
                    _named(ROLES, int(numbers.get(_PIECE_ROLE, 1)), "role of a piece"),
                )
            )
    return pieces


def map_pieces(model: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The same model with `change` applied to the UTF-8 text of every piece."""
    parts: list[bytes] = []
    for number, value, raw in _fields(model):
        if number == _MODEL_PIECES and isinstance(value, bytes):
            piece = b"".join(
                _message(inner, change(content)) if inner == _PIECE_TEXT and isinstance(content, bytes) else copy
                for inner, content, copy in _fields(value)
            )
            parts.append(_message(number, piece))
        else:
            parts.append(raw)
    return b"".join(parts)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Yield `(field number, value, all bytes of the field)` in order."""
    at = 0
    while at < len(data):
        start = at
        key, at = _read_varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == _VARINT:
            value, at = _read_varint(data, at)
        else:
            if wire == _BYTES:
                size, at = _read_varint(data, at)
            elif wire in (_FIXED32, _FIXED64):
                size = 4 if wire == _FIXED32 else 8
            else:
                raise ValueError(f"[tokenizer] a SentencePiece model has no wire type {wire} (byte {start}).")
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError(f"[tokenizer] the SentencePiece model ends inside a field (byte {start}).")
        yield number, value, data[start:at]


def _numbers(data: bytes) -> Iterator[tuple[int, float]]:
    """The whole numbers and 32-bit floats of a message, with their field numbers."""
    for number, value, raw in _fields(data):
        if isinstance(value, int):
            yield number, value
        elif raw[0] & 7 == _FIXED32:
            yield number, struct.unpack("<f", value)[0]


def _named(names: dict[int, str], value: int, what: str) -> str:
    if value not in names:
        raise ValueError(f"[tokenizer] a SentencePiece model has no {what} {value}.")
    return names[value]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("[tokenizer] the SentencePiece model ends inside a number.")


def _message(number: int, value: bytes) -> bytes:
    return _write_varint(number << 3 | _BYTES) + _write_varint(len(value)) + value


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
