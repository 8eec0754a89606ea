"""The files that a config names, read only when something has to be built from them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from forge_mlx._text import count
from forge_mlx.data.config import STDLIB, DataConfig
from forge_mlx.data.corpus import Corpus, Piece
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.files import CORPUS_SUFFIXES, Listing, SourceFile, list_paths, list_stdlib

NAMES_SHOWN = 5
_SAMPLE_BLOCK = 2048


class Sources:
    """The training and the validation corpus, read only when something has to be built."""

    def __init__(self, config: DataConfig, listing: list[SourceFile], split_at: int | None) -> None:
        self._config = config
        self._listing = listing
        self._split_at = split_at
        self._states = file_states(listing)
        self._corpora: list[Corpus] | None = None

    @property
    def corpora(self) -> list[Corpus]:
        """One corpus that is split, or one for each split."""
        if self._corpora is None:
            field, at = self._config.text_field, self._split_at
            if at is None:
                corpora = [Corpus(self._listing, field, self._config.valid_fraction)]
            else:
                corpora = [Corpus(self._listing[:at], field, "train"), Corpus(self._listing[at:], field, "valid")]
            _require_text(corpora)
            self._corpora = corpora
        return self._corpora

    @property
    def not_utf8(self) -> list[int]:
        """Indices into the listing of the files that were left out."""
        first = self.corpora[0].scan.not_utf8
        rest = [index + (self._split_at or 0) for corpus in self.corpora[1:] for index in corpus.scan.not_utf8]
        return first + rest

    @property
    def split_by(self) -> str:
        """How validation text was chosen, in words."""
        if self._split_at is not None:
            return "valid_paths"
        return "document tails" if self.corpora[0].splits_documents else "documents"

    def pieces(self) -> Iterator[Piece]:
        """The text of all corpora."""
        return chain.from_iterable(corpus.pieces() for corpus in self.corpora)

    def train_bytes(self) -> int:
        """About how much text there is to train on."""
        return sum(self.corpora[0].scan.file_bytes)

    def require_unchanged(self) -> None:
        """Raise when a file is not what it was at first: what was made of it must not go into the cache."""
        require_unchanged(self._listing, self._states)


def file_states(files: list[SourceFile]) -> list[tuple[int, int] | None]:
    """Size and time of change of each file; None for one that is gone."""
    return [_state(file) for file in files]


def require_unchanged(files: list[SourceFile], states: list[tuple[int, int] | None]) -> None:
    """Compare files with their states of before.

    Raises:
        ValueError: a file has changed.
    """
    changed = [file.name for file, state in zip(files, states, strict=True) if _state(file) != state]
    if changed:
        raise ValueError(
            f"[data] source files must stay as they are while they are read but {len(changed)} changed"
            f"{some_names(changed)}. Run again when they are complete."
        )


def list_files(
    config: DataConfig | ExampleConfig, log: Callable[[str], None], suffixes: tuple[str, ...] = CORPUS_SUFFIXES
) -> tuple[list[SourceFile], int | None]:
    """All files, of folders those with one of the suffixes, and the index at which those of valid_paths begin."""
    listing = list_stdlib() if config.source == STDLIB else list_paths(list(config.source), suffixes)
    _log_left_out("source", listing, log)
    if config.valid_paths is None:
        return listing.files, None
    valid = list_paths(config.valid_paths, suffixes)
    _log_left_out("valid_paths", valid, log)
    train_paths = {file.path.resolve() for file in listing.files}
    shared = [file.name for file in valid.files if file.path.resolve() in train_paths]
    if len(shared) == len(valid.files) and isinstance(config, ExampleConfig):
        log("WARNING: valid_paths are files of the source: validation says what is remembered, not what is learnt")
    elif shared:
        raise ValueError(
            f"[data] valid_paths must not name files of the source but {len(shared)} are in both"
            f"{some_names(shared)}. Take them out of one."
        )
    return listing.files + valid.files, len(listing.files)


def sample_text(pieces: Iterable[Piece], total_bytes: int, sample_bytes: int) -> Iterator[str]:
    """Training text for the tokenizer: all of it, or blocks of about 2 kB spread evenly over the stream.

    The choice depends on the text alone, so the same corpus gives the same sample.

    Args:
        pieces: the corpus.
        total_bytes: about how much training text there is.
        sample_bytes: about how much to take.
    """
    seen = 0
    for piece in pieces:
        if piece.split != "train":
            continue
        if total_bytes <= sample_bytes:
            yield piece.text
            continue
        for block in _line_blocks(piece.text):
            before, seen = seen, seen + len(block.encode())
            taken = before * sample_bytes // total_bytes // _SAMPLE_BLOCK
            if seen * sample_bytes // total_bytes // _SAMPLE_BLOCK > taken:
                yield block


def _line_blocks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _SAMPLE_BLOCK - 1, start + 2 * _SAMPLE_BLOCK) + 1
        end = end or start + 2 * _SAMPLE_BLOCK
        yield text[start:end]
        start = end


def some_names(names: list[str], count: int | None = None) -> str:
    """` (a, b, ...)`: the first names of a list, which may itself be the first of `count`."""
    count = len(names) if count is None else count
    shown = names[:NAMES_SHOWN] + (["..."] if count > NAMES_SHOWN else [])
    return f" ({', '.join(shown)})" if names else ""


def _require_text(corpora: list[Corpus]) -> None:
    for corpus, name in zip(corpora, ("source", "valid_paths"), strict=False):
        if not corpus.scan.documents:
            bad = [corpus.files[index].name for index in corpus.scan.not_utf8]
            empty = len(corpus.files) - len(bad)
            found = [f"{count(len(bad), 'file')} that {_is(len(bad))} not UTF-8{some_names(bad)}"] if bad else []
            found += [f"{count(empty, 'file')} that {_is(empty)} empty"] if empty else []
            way_out = f"Check data.{name}."
            if any(each.lower().endswith(".parquet") for each in bad):
                way_out = "Parquet files hold examples: set data.format to what one is, text for plain texts."
            raise ValueError(f"[data] {name} must hold some text but has {' and '.join(found)}. {way_out}")


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _log_left_out(name: str, listing: Listing, log: Callable[[str], None]) -> None:
    count = sum(listing.left_out.values())
    if count:
        log(f"{name}: {len(listing.files)} files, {count} others left out{listing.describe_left_out()}")


def _state(file: SourceFile) -> tuple[int, int] | None:
    try:
        stat = file.path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns
