"""The parts of a SentencePiece model file that its Python package gives no access to.

A model is a protocol buffer: a series of `(field number, wire type, value)`. Only the fields named here
are read; everything else is copied as it stands.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_PIECES, _MODEL_NORMALIZER = 1, 3
_PIECE_TEXT = 1
_RULE_NAME, _CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 1, 2, 3, 4, 5


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
