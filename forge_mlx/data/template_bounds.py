"""What one rendering of a chat template may make: so many rounds, so long texts and numbers, so much in all."""

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
import re
import sys
from typing import Any, Final, TypeVar

from forge_mlx.data.template_lengths import Extents
from jinja2.exceptions import SecurityError

MAX_ROUNDS: Final = 200_000
MAX_LENGTH: Final = 1 << 25
MAX_BYTES: Final = 1 << 28
_MAX_BITS: Final = 64
# Bytes of a list for an element that is there anyway.
_REFERENCE: Final = 16
# Of `%` and of `str.format`: a width that is long, or one of the arguments.
_PERCENT_WIDTH: Final = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")
_BRACE_WIDTH: Final = re.compile(r"[:.]\D*\d{6}|\{[^}]*\{")

_Value = TypeVar("_Value")


@dataclass
class Rendering:
    """One rendering: how much was repeated and made, and what generation tags put around their text.

    Attributes:
        rounds: of loops, and calls of macros.
        bytes_made: of texts and lists, also of those that are gone again.
        marks: what stands before and behind the text of a generation tag; None: nothing.
        extents: of the values that came by.
    """

    rounds: int = 0
    bytes_made: int = 0
    marks: tuple[str, str] | None = None
    extents: Extents = field(default_factory=Extents)

    def count_round(self) -> None:
        """One more round of a loop, or one more call of a macro.

        Raises:
            SecurityError: it is one too many.
        """
        self.rounds += 1
        if self.rounds > MAX_ROUNDS:
            raise SecurityError(f"its loops go over {MAX_ROUNDS:,} rounds")

    def require_room(self, size: int) -> None:
        """Raise unless so many bytes may still be made."""
        if self.bytes_made + size > MAX_BYTES:
            raise SecurityError(f"its texts and lists take more than {MAX_BYTES:,} bytes together")

    def require_room_for(self, kind: str | list[Any] | tuple[Any, ...], length: int) -> None:
        """Raise unless a text or a list of a kind may be so long."""
        require_length(length)
        self.require_room(length if isinstance(kind, str) else _REFERENCE * length)

    def made(self, size: int) -> None:
        """So many bytes were made."""
        self.require_room(size)
        self.bytes_made += size

    def metered(self, items: Iterable[Any]) -> Iterator[Any]:
        """Items that come to stand in a list, one after another."""
        for item in items:
            self.made(_REFERENCE)
            yield item

    def bounded(self, value: _Value) -> _Value:
        """The value, unless it is too long, too deep, or one too many.

        Raises:
            SecurityError: it is.
        """
        if isinstance(value, (str, list, tuple, dict)):
            require_length(len(value))
            self.made(sys.getsizeof(value))
        elif isinstance(value, (bytes, bytearray)):
            raise SecurityError("it makes bytes")
        if isinstance(value, (list, tuple, dict)):
            self.extents.of(value)
        return value

    def written(self, value: Any) -> str:
        """The text of a value that is none, where it is written out."""
        require_length(self.extents.text(value))
        text = str(value)
        self.made(sys.getsizeof(text))
        return text


RENDERING: ContextVar[Rendering] = ContextVar("rendering")
"""The one that runs, of this thread or task."""


def require_length(length: int) -> None:
    """Raise unless a text or a list may have so many characters or elements."""
    if length > MAX_LENGTH:
        raise SecurityError(f"it makes a text or a list longer than {MAX_LENGTH:,}")


def require_bits(bits: int) -> None:
    """Raise unless a whole number may have so many bits."""
    if bits > _MAX_BITS:
        raise SecurityError(f"it makes a number longer than {_MAX_BITS} bits")


def require_narrow(form: str, *, braces: bool) -> None:
    """Refuse a format string whose fields are wider than it takes to be read, or of a width that an argument says.

    Args:
        form: as `%` takes it, or `str.format`.
        braces: whether it is the latter.
    """
    if (_BRACE_WIDTH if braces else _PERCENT_WIDTH).search(form):
        raise SecurityError("its format string has a width of over 99,999 or a variable one")


def require_short_arguments(subject: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse widths that would make a text too long before it is made.

    Args:
        subject: what is called or formatted; a text may be a format string.
        args: of the call.
        kwargs: of the call.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            require_length(value)
    if isinstance(subject, str):
        require_narrow(subject, braces=False)
