"""Texts as rows of at most so many tokens, in which each target is scored once."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LENGTHS: Final = 64


class Row(NamedTuple):
    """What a model reads at once, and which of what follows is scored.

    Attributes:
        inputs: int32 `[T]`.
        targets: int32 `[T]`, the token behind each input.
        counted: bool `[T]`, whether the target is scored.
    """

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    counted: NDArray[np.bool_]

    @property
    def counted_targets(self) -> NDArray[np.int32]:
        """The targets that are scored."""
        return self.targets[self.counted]


def windows(ids: NDArray[np.int32], is_target: NDArray[np.bool_], seq_len: int, stride: int) -> Iterator[Row]:
    """Cut a text into rows, each of which counts the targets that no row before it has counted.

    The first row counts all of its own, each other one the last `stride`; the last row ends where the text does and
    reaches back `seq_len` inputs like the others. So each target but the first ones has `seq_len - stride` inputs or
    more before its own to look back on. With a stride of `seq_len` these are the windows of lm-evaluation-harness'
    rolling log-likelihoods; a smaller one gives lower losses and costs `seq_len / stride` times as much.

    Rows without a target to score are left out.

    Args:
        ids: the text, `[num_tokens]`.
        is_target: which of them are scored, `[num_tokens]`; the first one never is, as nothing stands before it.
        seq_len: the most inputs of a row.
        stride: targets of each row but the first, 1 to `seq_len`.

    Raises:
        ValueError: `seq_len` or `stride` is out of its range.
    """
    if seq_len < 1:
        raise ValueError(f"[evaluate] --seq-len must be at least 1 but got {seq_len}.")
    if not 1 <= stride <= seq_len:
        raise ValueError(f"[evaluate] --stride must lie in 1 ... {seq_len}, which is --seq-len, but got {stride}.")
    inputs, targets, wanted = ids[:-1], ids[1:], is_target[1:]
    done = 0
    while done < len(inputs):
        end = min(done + (stride if done else seq_len), len(inputs))
        start = max(0, end - seq_len)
        counted = wanted[start:end] & (np.arange(start, end) >= done)
        if counted.any():
            yield Row(inputs[start:end], targets[start:end], counted)
        done = end


def padded(rows: list[Row], longest: int) -> Row:
    """Some rows as one, `[B, T]`, with zeros behind the shorter ones, which are not counted.

    T is a multiple of 64, so that there are few shapes, or `longest`.

    Args:
        rows: at least one.
        longest: the most positions that the model has, at least those of each row.
    """
    length = min(-(-max(len(row.inputs) for row in rows) // _LENGTHS) * _LENGTHS, longest)
    inputs, targets = np.zeros((2, len(rows), length), np.int32)
    counted = np.zeros((len(rows), length), np.bool_)
    for index, row in enumerate(rows):
        size = len(row.inputs)
        inputs[index, :size], targets[index, :size], counted[index, :size] = row
    return Row(inputs, targets, counted)
