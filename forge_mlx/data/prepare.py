"""From the `data:` section to a tokenizer and two token files, cached by content."""

from collections.abc import Callable
from dataclasses import dataclass
import json
from pathlib import Path
import time

from forge_mlx._cache import cache_dir
from forge_mlx._text import count, size
from forge_mlx.data.cache import DamagedCacheError, TokenFile, build_folder, read_json, write_json
from forge_mlx.data.config import DataConfig
from forge_mlx.data.corpus_tokens import build_tokens, cache_key, open_tokens
from forge_mlx.data.files import SourceFile
from forge_mlx.data.sources import NAMES_SHOWN, Sources, list_files, sample_text, some_names
from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.data.tokenizer import Tokenizer

# Changes when the same corpus and config would give other files: it is part of every key.
_VERSION = 2


@dataclass(frozen=True)
class DataFacts:
    """What a corpus holds; `dataclasses.asdict` gives plain JSON values.

    Attributes:
        source: the config's source.
        files: files read, those left out not counted.
        files_not_utf8: files that are left out because they are not UTF-8.
        names_not_utf8: the first of their names.
        empty_documents: documents without text, left out.
        split_by: `documents`, `document tails` or `valid_paths`.
        train_documents, valid_documents: documents of each split.
        train_bytes, valid_bytes: UTF-8 bytes of text.
        train_tokens, valid_tokens: tokens, an end token for each document included.
        bytes_per_token: of the validation text, without end tokens.
        gzip_bits_per_byte: `gzip -9` over all validation text in one stream, its first 64 MiB: a yardstick.
        vocab_size: pieces of the tokenizer.
        from_cache: whether the token files were there already.
        seconds: what preparing took this time.
    """

    source: str | list[str]
    files: int
    files_not_utf8: int
    names_not_utf8: list[str]
    empty_documents: int
    split_by: str
    train_documents: int
    valid_documents: int
    train_bytes: int
    valid_bytes: int
    train_tokens: int
    valid_tokens: int
    bytes_per_token: float
    gzip_bits_per_byte: float
    vocab_size: int
    from_cache: bool
    seconds: float


@dataclass(frozen=True)
class PreparedData:
    """A corpus that is ready for training.

    Attributes:
        tokenizer: made or loaded as the config says.
        train: tokens to train on.
        valid: tokens to validate on.
        facts: counts of both.
    """

    tokenizer: TextTokenizer
    train: TokenFile
    valid: TokenFile
    facts: DataFacts


def prepare(config: DataConfig, *, log: Callable[[str], None], tokenizer: TextTokenizer | None = None) -> PreparedData:
    """Find the files, train or load the tokenizer, and tokenise both splits.

    Token files and tokenizer are kept in the cache under a hash of the files' contents, of the settings
    and of the tokenizer; when all are there, only the files' contents are hashed again.

    Args:
        config: the `data:` section.
        log: takes one line of text for everything that a person should know.
        tokenizer: that of an existing model; None: as the config says.

    Raises:
        ValueError: a source is missing, unreadable or empty, a JSON line is invalid, the vocabulary does
            not fit the text, or a file changed meanwhile.
        OSError: the cache's folder cannot be written.
    """
    started = time.monotonic()
    listing, split_at = list_files(config, log)
    sources = Sources(config, listing, split_at)
    corpus_key = _corpus_key(config, listing, split_at)
    try:
        tokenizer = tokenizer or _get_tokenizer(config, sources, corpus_key, log)
        folder = cache_dir() / "data" / f"tokens-{cache_key(corpus_key, tokenizer.fingerprint)}"
        from_cache = True
        while (found := open_tokens(folder, log)) is None:
            from_cache = False
            build_tokens(folder, sources, tokenizer, log)
    except OSError as error:
        # Sources that cannot be read are ValueErrors.
        raise OSError(
            f"[data] the cache folder must be writable but got: {error}. FORGE_MLX_CACHE=/path names another."
        ) from error
    train, valid, stored = found
    not_utf8 = [listing[index].name for index in stored["not_utf8"]]
    facts = DataFacts(
        source=config.source,
        files=len(listing) - len(not_utf8),
        files_not_utf8=len(not_utf8),
        names_not_utf8=not_utf8[:NAMES_SHOWN],
        empty_documents=stored["empty_documents"],
        split_by=stored["split_by"],
        train_documents=train.num_documents,
        valid_documents=valid.num_documents,
        train_bytes=train.num_bytes,
        valid_bytes=valid.num_bytes,
        train_tokens=train.num_tokens,
        valid_tokens=valid.num_tokens,
        bytes_per_token=stored["bytes_per_token"],
        gzip_bits_per_byte=stored["gzip_bits_per_byte"],
        vocab_size=tokenizer.vocab_size,
        from_cache=from_cache,
        seconds=round(time.monotonic() - started, 3),
    )
    _log_facts(facts, log)
    return PreparedData(tokenizer, train, valid, facts)


def _corpus_key(config: DataConfig, listing: list[SourceFile], split_at: int | None) -> str:
    contents = [f"{file.is_json:d}{file.is_gzip:d}{file.digest()}" for file in listing]
    split = config.valid_fraction if split_at is None else split_at
    # Tokens do not depend on the packing: its name is that of the first one, so that old keys stay.
    return cache_key(str(_VERSION), json.dumps([config.text_field, "concat", split]), *contents)


def _get_tokenizer(config: DataConfig, sources: Sources, corpus_key: str, log: Callable[[str], None]) -> Tokenizer:
    wanted = config.tokenizer
    if wanted.path is not None:
        tokenizer = Tokenizer.load(wanted.path)
        log(
            f"tokenizer: {wanted.path}, {tokenizer.vocab_size} pieces; "
            "tokenizer.kind, vocab_size and sample_bytes do not apply"
        )
        return tokenizer
    key = cache_key(corpus_key, wanted.kind, str(wanted.vocab_size), str(wanted.sample_bytes))
    folder = cache_dir() / "data" / f"tokenizer-{key}"
    found = _open_tokenizer(folder, log)
    if found is not None:
        return found
    started = time.monotonic()
    tokenizer = Tokenizer.train(
        sample_text(sources.pieces(), sources.train_bytes(), wanted.sample_bytes),
        kind=wanted.kind,
        vocab_size=wanted.vocab_size,
    )
    with build_folder(folder, lambda path: _open_tokenizer(path, lambda _: None) is not None) as temporary:
        sources.require_unchanged()
        tokenizer.save(temporary / "tokenizer.model")
        write_json(temporary / "tokenizer.json", {"fingerprint": tokenizer.fingerprint})
    seconds = time.monotonic() - started
    log(f"tokenizer: {wanted.kind}, {tokenizer.vocab_size} pieces, trained in {seconds:.1f} s")
    return tokenizer


def _open_tokenizer(folder: Path, log: Callable[[str], None]) -> Tokenizer | None:
    if not folder.exists():
        return None
    try:
        expected = read_json(folder / "tokenizer.json").get("fingerprint")
        tokenizer = Tokenizer.load(folder / "tokenizer.model")
        if tokenizer.fingerprint != expected:
            raise DamagedCacheError("tokenizer.model is not the file that was written")
    except ValueError as error:
        log(f"the cached tokenizer {folder} is damaged ({error}): training it again")
        return None
    return tokenizer


def _log_facts(facts: DataFacts, log: Callable[[str], None]) -> None:
    if facts.files_not_utf8:
        names = some_names(facts.names_not_utf8, facts.files_not_utf8)
        log(f"left out as not UTF-8: {count(facts.files_not_utf8, 'file')}{names}")
    if facts.empty_documents:
        log(f"left out as empty: {count(facts.empty_documents, 'document')}")
    log(
        f"data: {facts.train_tokens:,} tokens to train on ({count(facts.train_documents, 'document')}, "
        f"{size(facts.train_bytes)}), {facts.valid_tokens:,} to validate ({count(facts.valid_documents, 'document')}, "
        f"{size(facts.valid_bytes)}; gzip -9: {facts.gzip_bits_per_byte:.2f} bits per byte), "
        f"{'from the cache' if facts.from_cache else 'built'} in {facts.seconds:.1f} s"
    )
