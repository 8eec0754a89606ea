"""Examples as rows: several in one, or one in each."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
import hashlib
from typing import TypeVar

from forge_mlx.data.batch import Batch
from forge_mlx.data.chat import Encoded
from forge_mlx.data.piece_rows import Ints, PieceRows, Pieces, cut
import numpy as np
from numpy.typing import NDArray

# Rows that are shorter than seq_len have a multiple of this length: kernels are built for few lengths, and full tiles.
_ROW_STEP = 64

_Rows = TypeVar("_Rows", bound="PaddedRows")


@dataclass(frozen=True)
class ExampleTokens:
    """Tokenised examples, one behind the other, in memory: 5 bytes a token.

    Attributes:
        tokens: int32 `[num_tokens]`.
        is_target: bool `[num_tokens]`, which tokens are learnt. The first of an example never is: nothing precedes it.
        borders: int64 `[num_documents + 1]`, where examples start, and behind them where the last one ends.
        fingerprint: hash of all of these.
    """

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    borders: Ints
    fingerprint: str

    @classmethod
    def of(cls, encoded: Iterable[Encoded]) -> "ExampleTokens":
        """The examples in their order, at least one."""
        texts = list(encoded)
        borders = np.concatenate([[0], np.cumsum([len(text.ids) for text in texts])]).astype(np.int64)
        tokens = np.concatenate([text.ids for text in texts]).astype(np.int32, copy=False)
        is_target = np.concatenate([text.is_target for text in texts]).astype(np.bool_, copy=False)
        is_target[borders[:-1]] = False
        digest = hashlib.blake2b(digest_size=16)
        for array in (borders, tokens, is_target):
            digest.update(array.tobytes())
        return cls(tokens, is_target, borders, digest.hexdigest())

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Examples."""
        return len(self.borders) - 1

    @property
    def lengths(self) -> Ints:
        """How many inputs each example has: its tokens but the last, int64 `[num_documents]`."""
        return np.diff(self.borders) - 1

    def pieces(self, seq_len: int) -> tuple[Pieces, Ints]:
        """Pieces of at most `seq_len` inputs that have a target, and the lengths of those without one."""
        starts, lengths = cut(self.borders[:-1] + 1, self.lengths, seq_len)
        before = np.concatenate([[0], np.cumsum(self.is_target)])
        kept = before[starts + lengths] > before[starts]
        return Pieces(self.tokens, starts[kept], lengths[kept], self.is_target), lengths[~kept]


class ExampleRows(PieceRows):
    """The rows of one epoch, several examples in each: every token to learn is the target of one row.

    An example of n tokens becomes the inputs [t0, ..., t(n-2)] and the targets [t1, ..., t(n-1)], those that are not
    learnt with the weight 0, and is a segment of one row. One that is longer than a row is cut into pieces of
    `seq_len` inputs, each a segment of its own that begins with the last token of the piece before it; pieces without
    a target are left out. Rows are filled as those of `PieceRows`.

    Args:
        tokens: the examples.
        seq_len: inputs a row.

    Attributes:
        num_targets: targets an epoch that count.
        piece_lengths: inputs of each segment of all rows.
        left_out: inputs of each piece without a target.
    """

    packing = "examples"

    def __init__(self, tokens: ExampleTokens, seq_len: int) -> None:
        self.tokens = tokens
        self.num_targets = int(tokens.is_target.sum())
        pieces, self.left_out = tokens.pieces(seq_len)
        self.piece_lengths = pieces.lengths
        super().__init__(pieces, seq_len)


class PaddedRows:
    """Rows that hold one piece of an example each, and padding behind it.

    Args:
        tokens: the examples.
        seq_len: the longest row. When all pieces are shorter, rows are only as long as the longest needs, rounded up
            to a multiple of 64.

    Attributes:
        seq_len: positions of a row.
        num_rows: rows an epoch, or groups of them.
        num_targets: targets an epoch that count.
        num_positions: positions that are no padding.
        piece_lengths: inputs of each piece of all examples.
        left_out: inputs of each piece without a target, which is no row.
    """

    packing = "padded"
    group_size = 1
    draws = 0

    def __init__(self, tokens: ExampleTokens, seq_len: int) -> None:
        self.tokens = tokens
        self._pieces, self.left_out = tokens.pieces(seq_len)
        lengths = self._pieces.lengths
        self.seq_len = min(seq_len, -(-int(lengths.max()) // _ROW_STEP) * _ROW_STEP)
        self.piece_lengths = lengths
        self.num_rows = len(lengths) // self.group_size
        self.num_targets = int(tokens.is_target.sum())
        self.num_positions = int(lengths.sum())

    def shuffled(self: _Rows, _raw: NDArray[np.uint64]) -> _Rows:
        """The rows of another epoch, which are the same.

        Args:
            _raw: random numbers `[0]`.
        """
        return copy(self)

    def batch(self, rows: Ints) -> Batch:
        """Some of the rows, by their numbers."""
        pieces = (rows[:, None] * self.group_size + np.arange(self.group_size)).ravel()
        nothing = np.zeros_like(pieces)
        return self._pieces.laid_out(pieces, np.arange(len(pieces)), nothing, nothing, (len(pieces), self.seq_len))
