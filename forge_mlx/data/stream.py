"""Rows of tokens for training and for validation."""

from collections.abc import Iterator
from typing import Any

from forge_mlx.data.cache import TokenFile
import numpy as np
from numpy.typing import NDArray


class BatchStream:
    """An endless stream of training batches, int32 `[batch_size, seq_len + 1]`.

    A row holds `seq_len` inputs and, one to the right, their targets. The corpus is treated as a ring: in
    each epoch rows start every `seq_len` tokens from a random place, `num_tokens // seq_len` of them in a
    random order, so that no token is a target twice and fewer than `seq_len` tokens are none. Place and
    order follow from `(seed, epoch)`. A batch may take its rows from the end of one epoch and the start of
    the next; none is dropped.

    Args:
        tokens: the corpus.
        batch_size: rows a batch.
        seq_len: inputs a row.
        seed: 0 or more.

    Raises:
        ValueError: the corpus is shorter than one batch, or an argument is out of its range.
    """

    def __init__(self, tokens: TokenFile, batch_size: int, seq_len: int, seed: int) -> None:
        _require_positive("batch_stream", batch_size=batch_size, seq_len=seq_len)
        if seed < 0:
            raise ValueError(f"[batch_stream] seed must be at least 0 but got {seed}.")
        needed = batch_size * seq_len + 1
        if tokens.num_tokens < needed:
            raise ValueError(
                f"[batch_stream] the training text must fill one batch, batch_size * seq_len + 1 = {needed} "
                f"tokens, but has {tokens.num_tokens}. Lower the batch size ({batch_size}) or the sequence "
                f"length ({seq_len}), or give more text."
            )
        self._tokens = tokens
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._seed = seed
        self._columns = np.arange(seq_len + 1)
        self.rows_per_epoch = tokens.num_tokens // seq_len
        self._start_epoch(0, 0)

    @property
    def epoch(self) -> float:
        """How many times the corpus has been seen, with its fraction."""
        return self._epoch + self._row / self.rows_per_epoch

    def __iter__(self) -> "BatchStream":
        """The stream itself, at its current position."""
        return self

    def __next__(self) -> NDArray[np.int32]:
        """The next batch."""
        starts: list[int] = []
        while len(starts) < self._batch_size:
            if self._row == self.rows_per_epoch:
                self._start_epoch(self._epoch + 1, 0)
            take = self._order[self._row : self._row + self._batch_size - len(starts)]
            starts += (int(row) * self._seq_len + self._phase for row in take)
            self._row += len(take)
        places = (np.array(starts)[:, None] + self._columns) % self._tokens.num_tokens
        return self._tokens.tokens[places].astype(np.int32)

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in: plain ints, ready for JSON."""
        return {"epoch": self._epoch, "row": self._row, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a saved position with the very batches that would have followed.

        Raises:
            ValueError: the state belongs to another corpus, tokenizer, seed or shape, or is none.
        """
        identity = self._identity()
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
                    "seed, batch size and sequence length, or start anew."
                )
        if state["epoch"] < 0 or not 0 <= state["row"] <= self.rows_per_epoch:
            raise ValueError(
                f"[batch_stream] a position must lie in 0 ... {self.rows_per_epoch} rows of an epoch but got "
                f"row {state['row']} of epoch {state['epoch']}."
            )
        self._start_epoch(state["epoch"], state["row"])

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "seq_len": self._seq_len,
            "num_tokens": self._tokens.num_tokens,
            # 52 bits of the hash: JSON readers that hold numbers as doubles keep them exactly.
            "corpus": int(self._tokens.fingerprint[:13], 16),
        }

    def _start_epoch(self, epoch: int, row: int) -> None:
        # NumPy keeps a bit generator's raw output stable over its versions, but not `permutation`'s.
        raw = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.rows_per_epoch + 1)
        self._phase = int(raw[0] % self._tokens.num_tokens)
        self._order = np.argsort(raw[1:], kind="stable")
        self._epoch = epoch
        self._row = row


def eval_batches(
    tokens: TokenFile, batch_size: int, seq_len: int, max_tokens: int | None = None
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """The same validation batches every time, all of one shape.

    Rows start every `seq_len` tokens, so that each token but the first is the target of one row. With
    `max_tokens`, `ceil(max_tokens / seq_len)` of the rows are taken, evenly spaced.

    Args:
        tokens: the validation split.
        batch_size: rows a batch.
        seq_len: inputs a row.
        max_tokens: targets to evaluate at most, rounded up to whole rows; None: all.

    Returns:
        An iterator of int32 `[batch_size, seq_len + 1]` and the float32 mask `[batch_size, seq_len]` of
        targets that count: 0 behind the end of the text and in the rows that fill up the last batch.

    Raises:
        ValueError: there is no target, or an argument is out of its range.
    """
    _require_positive("eval_batches", batch_size=batch_size, seq_len=seq_len)
    if max_tokens is not None:
        _require_positive("eval_batches", max_tokens=max_tokens)
    if tokens.num_tokens < 2:
        raise ValueError(
            f"[eval_batches] the validation text must have at least 2 tokens but has {tokens.num_tokens}. "
            "Raise data.valid_fraction or give more data.valid_paths."
        )
    num_rows = -(-(tokens.num_tokens - 1) // seq_len)
    taken = num_rows if max_tokens is None else min(num_rows, -(-max_tokens // seq_len))
    starts = [index * num_rows // taken * seq_len for index in range(taken)]
    return _eval_rows(tokens, starts, batch_size, seq_len)


def _eval_rows(
    tokens: TokenFile, starts: list[int], batch_size: int, seq_len: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    for first in range(0, len(starts), batch_size):
        batch = np.zeros((batch_size, seq_len + 1), np.int32)
        mask = np.zeros((batch_size, seq_len), np.float32)
        for row, start in enumerate(starts[first : first + batch_size]):
            window: NDArray[Any] = tokens.tokens[start : start + seq_len + 1]
            batch[row, : len(window)] = window
            mask[row, : len(window) - 1] = 1
        yield batch, mask


def _require_positive(name: str, **values: int) -> None:
    for key, value in values.items():
        if value < 1:
            raise ValueError(f"[{name}] {key} must be at least 1 but got {value}.")
