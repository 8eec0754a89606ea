"""A hash of a checkpoint's weights, which tells one from another wherever its files lie."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
import hashlib
import os
from pathlib import Path
from typing import Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_file import read_gguf
from forge_mlx.hub.gguf_parts import part_files
from forge_mlx.hub.safetensors_files import weight_files

_PIECE: Final = 1 << 25


def weights_fingerprint(path: Path) -> str:
    """SHA-256 over the SHA-256 of each 32 MiB of the files of weights, 32 hexadecimal digits of it.

    All of the content is read, on all cores: files of another model may be as long, and a copy of the same one newer.

    Args:
        path: A folder with safetensors, or a GGUF file; of a split one the first part stands for all.

    Raises:
        HubError: There are no weights, or they cannot be read.
    """
    whole = hashlib.sha256()
    try:
        files = part_files(read_gguf(path)) if path.is_file() else weight_files(path)[1]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for digest in pool.map(_digest, *zip(*_pieces(files), strict=True)):
                whole.update(digest)
    except OSError as error:
        raise HubError(f"{path}: the weights cannot be read: {error.strerror or error}.") from None
    return whole.hexdigest()[:32]


def say_if_other_weights(adapters: Path, base: Path, trained_on: str | None, log: Callable[[str], None]) -> None:
    """Warn where adapters are put on another model than the one that they were trained on.

    Args:
        adapters: Where they come from.
        base: The model that they are put on, as `weights_fingerprint` takes it.
        trained_on: Fingerprint of the weights that they were trained on; None: not known, and nothing is said.
        log: Told in a line.

    Raises:
        HubError: The weights cannot be read.
    """
    if trained_on is not None and weights_fingerprint(base) != trained_on:
        log(
            f"WARNING: {adapters}: these adapters were trained on other weights than those of {base}: expect another "
            "model than the trained one"
        )


def _pieces(files: list[Path]) -> Iterator[tuple[Path, int]]:
    """Where each piece of each file begins; an empty file has one too."""
    for file in files:
        for start in range(0, max(1, file.stat().st_size), _PIECE):
            yield file, start


def _digest(file: Path, start: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return hashlib.sha256(opened.read(_PIECE)).digest()
