"""`packing: documents`: whole documents in rows, so that no document sees another."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from copy import copy

from forge_mlx.data.batch import PADDING_SEGMENT, Batch
from forge_mlx.data.cache import TokenFile
import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 24

Ints = NDArray[np.int64]


class DocumentRows:
    """The rows of one epoch: every token is the target of one row, and every document a segment of one row.

    A document of n tokens, its end token included, becomes the inputs [end, t1, ..., t(n-1)] and the targets
    [t1, ..., tn]. One that is longer than a row is cut into pieces of `seq_len` targets, each a segment of its own
    that begins with the token before it. Rows are filled by best fit, the longest pieces first, which follows from the
    lengths alone; which of the pieces of one length takes which place, the epoch decides. What is left of a row is
    padding: token 0, weight 0, segment -1, position 0.

    Args:
        tokens: the corpus; its last token is the end token.
        seq_len: inputs a row.

    Attributes:
        num_rows: rows an epoch.
        num_targets: targets an epoch: all tokens.
        cut_documents: documents that are longer than a row.
        cut_pieces: how many pieces these became.

    Raises:
        ValueError: there are more or fewer end tokens than documents.
    """

    packing = "documents"

    def __init__(self, tokens: TokenFile, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.num_targets = tokens.num_tokens
        borders = document_borders(tokens)
        pieces = -(-np.diff(borders) // seq_len)
        self.cut_documents = int((pieces > 1).sum())
        self.cut_pieces = int(pieces[pieces > 1].sum())
        self._starts, self._lengths = _cut(borders, pieces, seq_len)
        self.draws = len(self._lengths)
        self._piece_at = np.argsort(-self._lengths, kind="stable")
        rows, self._offsets = pack(self._lengths[self._piece_at].tolist(), seq_len)
        # Places by row: those of row r are _places[_bounds[r] : _bounds[r + 1]].
        self._places = np.argsort(rows, kind="stable")
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        self.num_rows = len(self._bounds) - 1

    def shuffled(self, raw: NDArray[np.uint64]) -> "DocumentRows":
        """The rows of another epoch: pieces of one length change places.

        Args:
            raw: a random number for each piece, `[draws]`.
        """
        other = copy(self)
        other._piece_at = np.lexsort((raw, -self._lengths))
        return other

    def batch(self, rows: Ints) -> Batch:
        """Some of the rows, by their numbers."""
        shape = (len(rows), self.seq_len)
        inputs, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
        weights, segment_ids = np.zeros(shape, np.float32), np.full(shape, PADDING_SEGMENT, np.int32)
        first, counts = self._bounds[rows], self._bounds[rows + 1] - self._bounds[rows]
        segments = _counted(counts)
        places = self._places[np.repeat(first, counts) + segments]
        pieces = self._piece_at[places]
        lengths = self._lengths[pieces]
        index = _counted(lengths)
        lines = np.repeat(np.arange(len(rows)), counts)
        spots = np.repeat(lines, lengths), np.repeat(self._offsets[places], lengths) + index
        source = np.repeat(self._starts[pieces], lengths) + index
        # The place before the first token is the last one of the file, which is an end token too.
        inputs[spots], targets[spots] = self.tokens.tokens[source - 1], self.tokens.tokens[source]
        positions[spots], segment_ids[spots], weights[spots] = index, np.repeat(segments, lengths), 1
        return Batch(inputs, targets, weights, segment_ids, positions)


def document_borders(tokens: TokenFile) -> Ints:
    """Where documents start, and behind them where the last one ends, `[num_documents + 1]`.

    Raises:
        ValueError: there are more or fewer end tokens than documents.
    """
    values = tokens.tokens
    ends = [
        np.flatnonzero(values[start : start + _BLOCK] == values[-1]) + start
        for start in range(0, tokens.num_tokens, _BLOCK)
    ]
    borders = np.concatenate([[0], *(each + 1 for each in ends)])
    if len(borders) - 1 != tokens.num_documents:
        raise ValueError(
            f"[packing] each document must have one end token, but {tokens.path} has {len(borders) - 1} of them for "
            f"{tokens.num_documents} documents. Set data.packing: concat, or use a tokenizer that puts its end token "
            "into no text."
        )
    return borders


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


def _cut(borders: Ints, pieces: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Where each piece starts, and its length; documents in order, each in as many pieces as said."""
    first = np.repeat(borders[:-1], pieces)
    number = np.arange(len(first)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = first + number * seq_len
    return starts, np.minimum(np.repeat(borders[1:], pieces) - starts, seq_len)


def _counted(lengths: Ints) -> Ints:
    """0 to n - 1 for each of the lengths n, one behind the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
