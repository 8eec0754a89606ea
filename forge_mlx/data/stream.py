"""Rows of tokens for training and for validation."""

from collections.abc import Iterator
import math
from typing import Final, Literal, Protocol, get_args

from forge_mlx.data.batch import Batch, joined
from forge_mlx.data.cache import TokenFile
from forge_mlx.data.concat import ConcatRows, ConcatWindows
from forge_mlx.data.documents import DocumentRows
from forge_mlx.data.piece_rows import Tokens
import numpy as np
from numpy.typing import NDArray

Packing = Literal["concat", "documents"]
_OF_CORPORA: Final = get_args(Packing)


class Rows(Protocol):
    """A corpus as rows, each `seq_len` inputs and their targets.

    Attributes:
        packing: how documents become rows.
        seq_len: positions of a row.
        num_rows: rows of the whole corpus, or groups of them.
        num_targets: targets in them that count.
        group_size: 1; of preference pairs 2: what is one row in all that is said here are two, next to each other.
    """

    packing: str
    seq_len: int
    num_rows: int
    num_targets: int
    group_size: int

    @property
    def tokens(self) -> Tokens:
        """The corpus."""

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Some of the rows, by their numbers."""


class TrainingRows(Rows, Protocol):
    """Rows that differ from epoch to epoch.

    Attributes:
        draws: random numbers that decide the rows of an epoch.
    """

    draws: int

    def shuffled(self, raw: NDArray[np.uint64]) -> "TrainingRows":
        """The rows of the epoch that these random numbers decide, `[draws]`."""


def training_rows(tokens: TokenFile, seq_len: int, packing: Packing) -> TrainingRows:
    """The rows to train on.

    Raises:
        ValueError: `seq_len` is less than 1, or as `DocumentRows`.
    """
    _require_positive("training_rows", seq_len=seq_len)
    return DocumentRows(tokens, seq_len) if packing == "documents" else ConcatRows(tokens, seq_len)


def validation_rows(tokens: TokenFile, seq_len: int, packing: Packing) -> Rows:
    """The rows to validate on: with `documents` every token is a target once, with `concat` every one but the first.

    Raises:
        ValueError: `seq_len` is less than 1, or as `DocumentRows` and `ConcatWindows`.
    """
    _require_positive("validation_rows", seq_len=seq_len)
    return DocumentRows(tokens, seq_len) if packing == "documents" else ConcatWindows(tokens, seq_len)


def require_full_batch(rows: Rows, batch_size: int) -> None:
    """Refuse a corpus that is shorter than one batch. Examples may be: a batch takes those of several epochs.

    Args:
        rows: to train on.
        batch_size: rows a batch.

    Raises:
        ValueError: as said.
    """
    if rows.num_rows < batch_size and rows.packing in _OF_CORPORA:
        raise ValueError(
            f"[batch_stream] the training text must fill one batch, {batch_size} rows of {rows.seq_len} tokens, "
            f"but its {rows.tokens.num_tokens} tokens fill {rows.num_rows} (packing: {rows.packing}). Lower the "
            "batch size or the sequence length, or give more text."
        )


class BatchStream:
    """An endless stream of training batches.

    In each epoch every row comes once, in a random order. Rows and order follow from `(seed, epoch)`. A batch may take
    its rows from the end of one epoch and the start of the next; none is dropped. Of examples, which may be few, it
    may take those of several epochs.

    Args:
        rows: of `training_rows`.
        batch_size: rows a batch.
        seed: 0 or more.

    Raises:
        ValueError: a corpus is shorter than one batch, or an argument is out of its range.
    """

    def __init__(self, rows: TrainingRows, batch_size: int, seed: int) -> None:
        _require_positive("batch_stream", batch_size=batch_size)
        if seed < 0:
            raise ValueError(f"[batch_stream] seed must be at least 0 but got {seed}.")
        require_full_batch(rows, batch_size)
        self._corpus = rows
        self._batch_size = batch_size
        self._seed = seed
        self._start_epoch(0, 0)

    @property
    def rows(self) -> TrainingRows:
        """The rows that the stream draws from."""
        return self._corpus

    @property
    def epoch(self) -> float:
        """How many times the corpus has been seen, with its fraction."""
        return self._epoch + self._row / self._corpus.num_rows

    def __iter__(self) -> "BatchStream":
        """The stream itself, at its current position."""
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        parts: list[Batch] = []
        missing = self._batch_size
        while missing:
            if self._row == self._corpus.num_rows:
                self._start_epoch(self._epoch + 1, 0)
            taken = self._order[self._row : self._row + missing]
            parts.append(self._rows.batch(taken))
            self._row += len(taken)
            missing -= len(taken)
        return parts[0] if len(parts) == 1 else joined(parts)

    def state_dict(self) -> dict[str, int | str]:
        """The position, and what it is a position in: plain ints and text, ready for JSON."""
        return {"epoch": self._epoch, "row": self._row, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue at a saved position with the very batches that would have followed.

        Raises:
            ValueError: the state belongs to another corpus, tokenizer, seed, shape or packing, or is none.
        """
        identity = self._identity()
        # Of the time when rows were packed in one way only.
        state = {"packing": "concat", **state}
        if state.keys() != {"epoch", "row", *identity}:
            raise ValueError(
                f"[batch_stream] a state must have the keys {sorted(['epoch', 'row', *identity])} "
                f"but got {sorted(state)}."
            )
        for key, value in identity.items():
            if state[key] != value:
                raise ValueError(
                    f"[batch_stream] a saved position must belong to the same data, but its {key} is "
                    f"{state[key]} and the stream's is {value}. Resume with the same corpus, tokenizer, "
                    "seed, batch size, sequence length and packing, or start anew."
                )
        epoch, row = int(state["epoch"]), int(state["row"])
        if epoch < 0 or not 0 <= row <= self._corpus.num_rows:
            raise ValueError(
                f"[batch_stream] a position must lie in 0 ... {self._corpus.num_rows} rows of an epoch but got "
                f"row {row} of epoch {epoch}."
            )
        self._start_epoch(epoch, row)

    def _identity(self) -> dict[str, int | str]:
        tokens = self._corpus.tokens
        return {
            "packing": self._corpus.packing,
            "seed": self._seed,
            "batch_size": self._batch_size,
            "seq_len": self._corpus.seq_len,
            "num_tokens": tokens.num_tokens,
            # 52 bits of the hash: JSON readers that hold numbers as doubles keep them exactly.
            "corpus": int(tokens.fingerprint[:13], 16),
        }

    def _start_epoch(self, epoch: int, row: int) -> None:
        draws = self._corpus.draws
        # NumPy keeps a bit generator's raw output stable over its versions, but not `permutation`'s.
        raw = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(draws + self._corpus.num_rows)
        self._rows = self._corpus.shuffled(raw[:draws])
        self._order = np.argsort(raw[draws:], kind="stable")
        self._epoch = epoch
        self._row = row


def eval_batches(rows: Rows, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
    """The same validation batches every time, all of one shape.

    Args:
        rows: of `validation_rows`.
        batch_size: rows a batch.
        max_tokens: about how many targets to evaluate, in rows that are evenly spaced; None: all.

    Returns:
        An iterator of batches with weights: 0 for padding, also in the rows that fill up the last batch.

    Raises:
        ValueError: an argument is out of its range.
    """
    _require_positive("eval_batches", batch_size=batch_size)
    taken = rows.num_rows
    if max_tokens is not None:
        _require_positive("eval_batches", max_tokens=max_tokens)
        # Of concat only the last row is not full.
        in_a_row = rows.seq_len if rows.packing == "concat" else rows.num_targets / rows.num_rows
        taken = min(taken, math.ceil(max_tokens / in_a_row))
    numbers = np.arange(taken) * rows.num_rows // taken
    full = batch_size * rows.group_size
    return (rows.batch(numbers[i : i + batch_size]).filled_up(full) for i in range(0, taken, batch_size))


def _require_positive(name: str, **values: int) -> None:
    for key, value in values.items():
        if value < 1:
            raise ValueError(f"[{name}] {key} must be at least 1 but got {value}.")
