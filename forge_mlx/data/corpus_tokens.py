"""The tokens of a corpus on disk: a token file for each split, and what was counted on the way."""

from collections.abc import Callable, Iterator
import hashlib
from pathlib import Path
import time
from typing import Any
import zlib

from forge_mlx._text import size
from forge_mlx.data.cache import DamagedCacheError, TokenFile, TokenWriter, build_folder, read_json, write_json
from forge_mlx.data.corpus import Piece, Split
from forge_mlx.data.sources import Sources
from forge_mlx.data.text_tokenizer import TextTokenizer

_SPLITS: tuple[Split, Split] = ("train", "valid")
_COUNTS = {"not_utf8", "empty_documents", "split_by", "gzip_bits_per_byte", "bytes_per_token"}
_BATCH_CHARACTERS = 1 << 21
_GZIP_BYTES = 1 << 26


def cache_key(*parts: str) -> str:
    """A name for what is made of these: their BLAKE2b hash, 32 hexadecimal digits.

    Args:
        *parts: all that decides what is made.
    """
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def open_tokens(folder: Path, log: Callable[[str], None]) -> tuple[TokenFile, TokenFile, dict[str, Any]] | None:
    """The tokens to train on, those to validate on, and what was counted while they were made.

    Args:
        folder: from `build_tokens`.
        log: told why what is there cannot be used.

    Returns:
        None where the folder does not exist or is damaged. The counts are `not_utf8`, indices of the files that are
        left out, `empty_documents`, `split_by`, `bytes_per_token` of the validation text without end tokens, and
        `gzip_bits_per_byte` of its first 64 MiB.
    """
    if not folder.exists():
        return None
    try:
        train, valid = (TokenFile(folder / f"{split}.bin") for split in _SPLITS)
        stored = read_json(folder / "facts.json")
        if stored.keys() != _COUNTS:
            raise DamagedCacheError("facts.json has other fields than expected")
    except DamagedCacheError as error:
        log(f"the cached tokens {folder} are damaged ({error}): building them again")
        return None
    return train, valid, stored


def build_tokens(folder: Path, sources: Sources, tokenizer: TextTokenizer, log: Callable[[str], None]) -> None:
    """Tokenise both splits into a folder that `open_tokens` reads.

    Args:
        folder: named by the `cache_key` of the corpus and the tokenizer; it appears when it is complete.
        sources: the corpus.
        tokenizer: of the model.
        log: told in a line how much was tokenised, and in what time.

    Raises:
        ValueError: a split is empty, a source cannot be read, or a file changed meanwhile.
        OSError: the folder cannot be written.
    """
    started = time.monotonic()
    with build_folder(folder, lambda path: open_tokens(path, lambda _: None) is not None) as temporary:
        writers = {
            split: TokenWriter(
                temporary / f"{split}.bin",
                vocab_size=tokenizer.vocab_size,
                tokenizer=tokenizer.fingerprint,
                fingerprint=cache_key(folder.name, split),
            )
            for split in _SPLITS
        }
        try:
            gzip_bits = _write_tokens(sources, tokenizer, writers)
            sources.require_unchanged()
            _require_both_splits(writers)
            for writer in writers.values():
                writer.close()
        finally:
            for writer in writers.values():
                writer.abandon()
        valid = writers["valid"]
        stored = {
            "not_utf8": sources.not_utf8,
            "empty_documents": sum(corpus.scan.empty for corpus in sources.corpora),
            "split_by": sources.split_by,
            "gzip_bits_per_byte": gzip_bits,
            "bytes_per_token": valid.num_bytes / max(valid.num_tokens - valid.num_documents, 1),
        }
        write_json(temporary / "facts.json", stored)
    total = sum(writer.num_bytes for writer in writers.values())
    log(f"tokenised {size(total)} in {time.monotonic() - started:.1f} s")


def _write_tokens(sources: Sources, tokenizer: TextTokenizer, writers: dict[Split, TokenWriter]) -> float:
    """Encode everything in batches; return the validation text's bits per byte under gzip."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    raw = packed = 0
    for batch in _batches(sources.pieces()):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            data = piece.text.encode()
            writers[piece.split].add(ids, len(data))
            if piece.last:
                writers[piece.split].end_document(tokenizer.end_id)
            if piece.split == "valid" and raw < _GZIP_BYTES:
                raw += len(data)
                packed += len(packer.compress(data))
    packed += len(packer.flush())
    return 8 * packed / max(raw, 1)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces until each group is worth the cost of starting the threads."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _require_both_splits(writers: dict[Split, TokenWriter]) -> None:
    for split, writer in writers.items():
        if not writer.num_bytes:
            raise ValueError(
                f"[data] the {split} split must hold some text but is empty: the source is too small to be "
                "split. Give more text, change data.valid_fraction, or name data.valid_paths."
            )
