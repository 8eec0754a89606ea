"""`packing: concat`: the corpus as one text, cut into rows."""

from forge_mlx.data.batch import Batch
from forge_mlx.data.cache import TokenFile
import numpy as np
from numpy.typing import NDArray


class ConcatRows:
    """The rows of one epoch of training; the corpus is a ring.

    Rows start every `seq_len` tokens from some place, `num_tokens // seq_len` of them, so that no token is a target
    twice and fewer than `seq_len` tokens are none.

    Args:
        tokens: the corpus.
        seq_len: inputs a row.
        phase: where the first row starts.
    """

    packing = "concat"
    group_size = 1
    draws = 1

    def __init__(self, tokens: TokenFile, seq_len: int, phase: int = 0) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.num_rows = tokens.num_tokens // seq_len
        self.num_targets = self.num_rows * seq_len
        self._phase = phase
        self._columns = np.arange(seq_len + 1)

    def shuffled(self, raw: NDArray[np.uint64]) -> "ConcatRows":
        """The rows of another epoch, from another place.

        Args:
            raw: random numbers `[1]`.
        """
        return ConcatRows(self.tokens, self.seq_len, int(raw[0] % self.tokens.num_tokens))

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Some of the rows, by their numbers."""
        places = (rows[:, None] * self.seq_len + self._phase + self._columns) % self.tokens.num_tokens
        window = self.tokens.tokens[places].astype(np.int32)
        return Batch(window[:, :-1], window[:, 1:])


class ConcatWindows:
    """The rows of an evaluation: each token but the first is the target of one row.

    Args:
        tokens: the validation text.
        seq_len: inputs a row.

    Raises:
        ValueError: there is no target.
    """

    packing = "concat"
    group_size = 1

    def __init__(self, tokens: TokenFile, seq_len: int) -> None:
        if tokens.num_tokens < 2:
            raise ValueError(
                f"[eval_batches] the validation text must have at least 2 tokens but has {tokens.num_tokens}. "
                "Raise data.valid_fraction or give more data.valid_paths."
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.num_targets = tokens.num_tokens - 1
        self.num_rows = -(-self.num_targets // seq_len)
        self._columns = np.arange(seq_len + 1)

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Some of the rows, by their numbers; what is behind the end of the text has the weight 0."""
        places = rows[:, None] * self.seq_len + self._columns
        inside = places < self.tokens.num_tokens
        window = np.where(inside, self.tokens.tokens[np.where(inside, places, 0)], 0).astype(np.int32)
        return Batch(window[:, :-1], window[:, 1:], inside[:, 1:].astype(np.float32))
