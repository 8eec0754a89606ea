"""The bytes that each token of a Hugging Face tokenizer stands for, from its decoder."""

from collections.abc import Callable, Mapping
import json
import re
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable(NamedTuple):
    """What decoding knows of the tokens.

    Attributes:
        pieces: the bytes of each id; of a special token, and of an id without a token, none.
        drops_space: whether a space at the very beginning of a decoded text was put there by the tokenizer.
    """

    pieces: list[bytes]
    drops_space: bool


def token_table(backend: Tokenizer, name: str) -> TokenTable:
    """Read what each token stands for off the decoder: byte-level, or U+2581 for spaces with bytes as `<0x0A>`.

    Args:
        backend: the tokenizer.
        name: how messages call it.

    Raises:
        ValueError: the decoder is of another kind.
    """
    steps = _flat(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else []
    to_bytes = _reader(steps, name)
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, token in vocab.items():
        if token not in added:
            pieces[token] = to_bytes(text)
        elif not added[token].special:
            # Byte-level names spell bytes, added ones themselves; U+2581 is a space in both kinds of names.
            pieces[token] = text.encode() if _has(steps, "ByteLevel") else to_bytes(text)
    return TokenTable(pieces, drops_space=_has(steps, "Strip") or _strips_metaspace(steps))


def _reader(steps: list[dict[str, Any]], name: str) -> Callable[[str], bytes]:
    replaced: dict[str, str] = {}
    for at, step in enumerate(steps):
        match step:
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Metaspace", "replacement": str(space)}:
                replaced[space] = " "
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced[old] = new
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if _has(steps[:at], "Fuse"):
                pass
            case _:
                raise _unknown(json.dumps(step, ensure_ascii=False), name)
    if not steps:
        raise _unknown("none", name)
    has_bytes = _has(steps, "ByteFallback")

    def to_bytes(text: str) -> bytes:
        if has_bytes and (found := _BYTE_PIECE.fullmatch(text)):
            return bytes([int(found[1], 16)])
        for old, new in replaced.items():
            text = text.replace(old, new)
        return text.encode()

    return _from_byte_level if _has(steps, "ByteLevel") else to_bytes


def _unknown(found: str, name: str) -> ValueError:
    return ValueError(
        f"[hub_tokenizer] the decoder in the tokenizer.json of {name} must be ByteLevel, Metaspace, or Replace with "
        f"ByteFallback, which say the bytes of each token, but got {found}. Use a language model's tokenizer."
    )


def _flat(decoder: Mapping[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat(part)]
    return [dict(decoder)]


def _has(steps: list[dict[str, Any]], kind: str) -> bool:
    return any(step.get("type") == kind for step in steps)


def _strips_metaspace(steps: list[dict[str, Any]]) -> bool:
    return any(step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: those that print stand for themselves, the others for U+0100 and on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in prints]
    return {chr(value): value for value in prints} | {chr(256 + at): value for at, value in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    if all(char in _ALPHABET for char in text):
        return bytes(_ALPHABET[char] for char in text)
    return text.encode()
