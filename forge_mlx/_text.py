"""Counts, sizes and foreign texts as people read them."""

import json

_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
# C1 controls: some terminals obey them as they do ESC sequences.
_CONTROL_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def count(number: int, noun: str) -> str:
    """``1 document``, ``1,671 documents``: a number and a noun whose plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """``731 bytes``, ``50.3 kB``, ``30.0 MB``, ``1.2 GB``: decimal units."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    for unit in ("kB", "MB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} GB"


def visible_controls(text: str) -> str:
    """``text`` with each control character but newline and tab as a visible symbol.

    A model's sample may hold any byte, and an escape sequence in it would act on the reader's terminal.
    """
    return text.translate(_CONTROL_PICTURES)


def one_line(error: Exception) -> str:
    """What an error of a library says, in one line without its full stop; its class where it says nothing.

    Args:
        error: of any kind.
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def short_json(value: object, longest: int = 80) -> str:
    """A value as JSON, for a message; a long one is cut.

    Args:
        value: what JSON cannot say is written as Python does.
        longest: the most characters.
    """
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
