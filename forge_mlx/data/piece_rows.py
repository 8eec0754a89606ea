"""Pieces of texts in rows: whole ones side by side, none seeing another, and what is left is padding."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from copy import copy
from typing import Any, Protocol, TypeVar

from forge_mlx.data.batch import PADDING_SEGMENT, Batch
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_Rows = TypeVar("_Rows", bound="PieceRows")


class Tokens(Protocol):
    """Tokenised texts, one behind the other."""

    @property
    def tokens(self) -> NDArray[Any]:
        """Integers `[num_tokens]`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""

    @property
    def num_documents(self) -> int:
        """Texts."""

    @property
    def fingerprint(self) -> str:
        """Hash, in hexadecimal digits, of all that the rows are made of."""


class Pieces:
    """Stretches of tokens, each with the token before it: inputs [t(s-1), ..., t(e-2)], targets [t(s), ..., t(e-1)].

    Args:
        tokens: of all texts.
        starts: where the targets of each piece start.
        lengths: its number of targets.
        is_target: bool `[num_tokens]`, which tokens count in the loss; None: all.
    """

    def __init__(
        self, tokens: NDArray[Any], starts: Ints, lengths: Ints, is_target: NDArray[np.bool_] | None = None
    ) -> None:
        self.lengths = lengths
        self._tokens = tokens
        self._starts = starts
        self._is_target = is_target

    def laid_out(self, pieces: Ints, rows: Ints, offsets: Ints, segments: Ints, shape: tuple[int, int]) -> Batch:
        """Rows that hold some pieces; elsewhere token 0, weight 0, segment -1, position 0.

        Args:
            pieces: their numbers.
            rows: the row of each.
            offsets: where it starts there.
            segments: its id there.
            shape: `(rows, positions of a row)`.
        """
        inputs, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
        weights, segment_ids = np.zeros(shape, np.float32), np.full(shape, PADDING_SEGMENT, np.int32)
        lengths = self.lengths[pieces]
        index = counted(lengths)
        spots = np.repeat(rows, lengths), np.repeat(offsets, lengths) + index
        source = np.repeat(self._starts[pieces], lengths) + index
        # The place before the first token is the last one: of a corpus of documents, an end token as well.
        inputs[spots], targets[spots] = self._tokens[source - 1], self._tokens[source]
        positions[spots], segment_ids[spots] = index, np.repeat(segments, lengths)
        weights[spots] = 1 if self._is_target is None else self._is_target[source]
        return Batch(inputs, targets, weights, segment_ids, positions)


class PieceRows:
    """The rows of one epoch: every piece is a segment of one row.

    Rows are filled by best fit, the longest pieces first, which follows from the lengths alone; which of the pieces of
    one length takes which place, the epoch decides.

    Args:
        pieces: of 1 to `seq_len` targets.
        seq_len: inputs a row.

    Attributes:
        num_rows: rows an epoch.
        num_positions: positions of them that are no padding.
    """

    group_size = 1

    def __init__(self, pieces: Pieces, seq_len: int) -> None:
        self.seq_len = seq_len
        self._pieces = pieces
        self.num_positions = int(pieces.lengths.sum())
        self.draws = len(pieces.lengths)
        self._piece_at = np.argsort(-pieces.lengths, kind="stable")
        rows, self._offsets = pack(pieces.lengths[self._piece_at].tolist(), seq_len)
        # Places by row: those of row r are _places[_bounds[r] : _bounds[r + 1]].
        self._places = np.argsort(rows, kind="stable")
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        self.num_rows = len(self._bounds) - 1

    def shuffled(self: _Rows, raw: NDArray[np.uint64]) -> _Rows:
        """The rows of another epoch: pieces of one length change places.

        Args:
            raw: a random number for each piece, `[draws]`.
        """
        other = copy(self)
        other._piece_at = np.lexsort((raw, -self._pieces.lengths))
        return other

    def batch(self, rows: Ints) -> Batch:
        """Some of the rows, by their numbers."""
        first, counts = self._bounds[rows], self._bounds[rows + 1] - self._bounds[rows]
        segments = counted(counts)
        places = self._places[np.repeat(first, counts) + segments]
        lines = np.repeat(np.arange(len(rows)), counts)
        shape = (len(rows), self.seq_len)
        return self._pieces.laid_out(self._piece_at[places], lines, self._offsets[places], segments, shape)


def pack(lengths: Iterable[int], seq_len: int) -> tuple[Ints, Ints]:
    """Best fit: each piece goes into the fullest row that has room for it, or begins a row.

    Args:
        lengths: of the pieces, 1 to `seq_len` each, in the order in which they are placed.
        seq_len: room of a row.

    Returns:
        The row of each piece, and where it starts in that row.
    """
    # The rows that have room for r more tokens, and the r for which there are any, in order.
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    rooms: list[int] = []
    rows: list[int] = []
    offsets: list[int] = []
    count = 0
    for length in lengths:
        index = bisect_left(rooms, length)
        if index == len(rooms):
            room, row = seq_len, count
            count += 1
        else:
            room = rooms[index]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[index]
        rows.append(row)
        offsets.append(seq_len - room)
        left = room - length
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(row)
    return np.array(rows, np.int64), np.array(offsets, np.int64)


def cut(firsts: Ints, lengths: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Pieces of `seq_len` targets, the last of each text shorter; texts in order.

    Args:
        firsts: the first target of each text.
        lengths: targets of each.
        seq_len: the longest piece.

    Returns:
        Where each piece starts, and its length.
    """
    pieces = -(-lengths // seq_len)
    starts = np.repeat(firsts, pieces) + counted(pieces) * seq_len
    return starts, np.minimum(np.repeat(firsts + lengths, pieces) - starts, seq_len)


def counted(lengths: Ints) -> Ints:
    """0 to n - 1 for each of the lengths n, one behind the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
