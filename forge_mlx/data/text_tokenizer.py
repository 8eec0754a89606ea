"""What every tokenizer offers, whichever library it stands on."""

from collections.abc import Iterable, Sequence
import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The largest id + 1. A model's table may have more rows than that."""
        ...

    @property
    def end_id(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens at which generation stops; `end_id` is one of them."""
        ...

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """int32 `[vocab_size]`, the UTF-8 bytes that each token stands for; 0 for special tokens."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides which ids a text gets."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without special tokens around it or out of it."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text as int32 `[num_tokens]`."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens; special tokens stand for nothing."""
        ...

    def token_to_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that one token stands for, possibly a part of a character."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what `load` of the same class reads."""
        ...


def require_encodable(text: str) -> None:
    """Raise unless UTF-8 can hold a text.

    Raises:
        ValueError: the text holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"[tokenizer] text must be valid Unicode but got the lone surrogate {text[error.start]!r} "
            f"at character {error.start}. Remove it, or decode the text with errors='replace'."
        ) from error
