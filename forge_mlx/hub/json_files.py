"""Reading the small JSON files of a model folder, which may come from anywhere."""

import json
from pathlib import Path
from typing import Any, Final

from forge_mlx._text import one_line
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.regular_files import regular_size

# A tokenizer.json of 260,000 tokens has 33 MB.
_LARGEST: Final = 256 << 20


def parse_object(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object.

    Args:
        content: UTF-8.
        what: What the error calls it.

    Raises:
        HubError: It is no JSON object, or has a key twice.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise HubError(f"{what} must be JSON but is damaged: {one_line(error)}.") from None
    if not isinstance(value, dict):
        raise HubError(f"{what} must be a JSON object but is a {type(value).__name__}.")
    return value


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        HubError: It cannot be read, is no regular file, is larger than such a file ever is, or is no JSON object.
    """
    try:
        size = regular_size(file)
        if size > _LARGEST:
            raise HubError(f"{file}: must be JSON of at most {_LARGEST >> 20} MiB but has {size >> 20} MiB.")
        return parse_object(file.read_bytes(), f"{file}:")
    except OSError as error:
        raise HubError(f"{file}: cannot be read: {error.strerror or error}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return found
