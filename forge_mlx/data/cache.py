"""Token files: the tokens of a corpus on disk, mapped into memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
import json
import os
from pathlib import Path
import secrets
import shutil
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FORMAT = 1
_STALE_SECONDS = 24 * 3600


class DamagedCacheError(ValueError):
    """A cached file is not what its sidecar says; it has to be built again."""


@dataclass(frozen=True)
class _Sidecar:
    format: int
    dtype: str
    num_tokens: int
    num_bytes: int
    num_documents: int
    tokenizer: str
    fingerprint: str


class TokenFile:
    """The tokens of one split, uint16 or uint32 `[num_tokens]`, read from disk where they are used.

    Every document ends with the tokenizer's end token.

    Args:
        path: the file of tokens; its sidecar has the suffix .json.

    Attributes:
        tokens: the memory-mapped array.
        num_tokens: tokens, end tokens included.
        num_bytes: UTF-8 bytes of the documents.
        num_documents: documents.
        tokenizer: fingerprint of the tokenizer that made the tokens.
        fingerprint: hash of the corpus, the split and the tokenizer.

    Raises:
        DamagedCacheError: the file or its sidecar is missing, or they contradict each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        meta = _read_sidecar(path)
        self.num_tokens = meta.num_tokens
        self.num_bytes = meta.num_bytes
        self.num_documents = meta.num_documents
        self.tokenizer = meta.tokenizer
        self.fingerprint = meta.fingerprint
        self.tokens: NDArray[Any] = np.memmap(path, dtype=meta.dtype, mode="r", shape=(meta.num_tokens,))


class TokenWriter:
    """Write a token file part by part.

    Args:
        path: the file of tokens; the sidecar is written beside it by `close`.
        vocab_size: decides between uint16 and uint32.
        tokenizer: fingerprint of the tokenizer.
        fingerprint: hash of the corpus, the split and the tokenizer.
    """

    def __init__(self, path: Path, *, vocab_size: int, tokenizer: str, fingerprint: str) -> None:
        self._path = path
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._stream = path.open("wb")
        self.num_tokens = self.num_bytes = self.num_documents = 0

    def add(self, ids: NDArray[np.int32], num_bytes: int) -> None:
        """Append the tokens of a part of a document that holds `num_bytes` of text."""
        self._stream.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += len(ids)
        self.num_bytes += num_bytes

    def end_document(self, end_id: int) -> None:
        """Append the end token."""
        self.add(np.array([end_id], np.int32), 0)
        self.num_documents += 1

    def close(self) -> None:
        """Write what is left and the sidecar, and wait until the disk has both."""
        _sync_and_close(self._stream)
        meta = _Sidecar(
            format=_FORMAT,
            dtype=self._dtype.name,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            num_documents=self.num_documents,
            tokenizer=self._tokenizer,
            fingerprint=self._fingerprint,
        )
        write_json(self._path.with_suffix(".json"), asdict(meta))

    def abandon(self) -> None:
        """Close without a sidecar, after an error."""
        self._stream.close()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON and wait until the disk has it."""
    stream = path.open("w", encoding="utf-8")
    json.dump(content, stream, indent=1)
    _sync_and_close(stream)


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        DamagedCacheError: the file is missing or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCacheError(f"{path.name} is missing") from error
    except ValueError as error:
        raise DamagedCacheError(f"{path.name} is no JSON") from error
    if not isinstance(content, dict):
        raise DamagedCacheError(f"{path.name} is no JSON object")
    return content


@contextmanager
def build_folder(target: Path, is_complete: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary folder that becomes `target` in one step when the block ends without an error.

    Several processes may build the same folder: the first to end wins, the others' work is dropped.
    A folder at `target` that is not complete is replaced. After an error nothing is left behind.

    Args:
        target: the final folder.
        is_complete: tells whether a folder may stay.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target.parent)
    temporary = _temporary(target)
    temporary.mkdir()
    try:
        yield temporary
        _install(temporary, target, is_complete)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _install(source: Path, target: Path, is_complete: Callable[[Path], bool]) -> None:
    while not is_complete(target):
        aside = _temporary(target)
        # Renaming onto a folder that holds files fails, so a damaged one is moved out of the way first.
        with suppress(FileNotFoundError):
            os.rename(target, aside)
            shutil.rmtree(aside, ignore_errors=True)
        try:
            os.rename(source, target)
        except OSError:
            # Another process may have put its folder there in between: then that one is looked at.
            if not target.is_dir():
                raise


def _temporary(target: Path) -> Path:
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")


def _remove_stale(folder: Path) -> None:
    """Delete what killed builds left more than a day ago."""
    for path in folder.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue


def _read_sidecar(path: Path) -> _Sidecar:
    sidecar = path.with_suffix(".json")
    content = read_json(sidecar)
    try:
        meta = _Sidecar(**content)
    except TypeError as error:
        raise DamagedCacheError(f"{sidecar.name} has other fields than expected") from error
    counts = (meta.format, meta.num_tokens, meta.num_bytes, meta.num_documents)
    if not all(type(count) is int for count in counts) or meta.dtype not in ("uint16", "uint32"):
        raise DamagedCacheError(f"{sidecar.name} has values of the wrong type")
    if meta.format != _FORMAT:
        raise DamagedCacheError(f"{sidecar.name} has format {meta.format} instead of {_FORMAT}")
    expected = meta.num_tokens * np.dtype(meta.dtype).itemsize
    actual = path.stat().st_size if path.exists() else None
    if actual != expected or not expected:
        raise DamagedCacheError(f"{path.name} should have {expected} bytes but has {actual}")
    return meta


def _sync_and_close(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()
