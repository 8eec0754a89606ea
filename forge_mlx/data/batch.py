"""A batch of rows: inputs, targets, and where documents begin and end in them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PADDING_SEGMENT = -1


class Batch(NamedTuple):
    """Rows of tokens, all of one shape `[batch_size, seq_len]`, and what there is for each row, `[batch_size]`.

    Attributes:
        inputs: int32.
        targets: int32, the token that follows each input.
        weights: float32, 1 where a target counts and 0 where it is padding; None: all count.
        segment_ids: int32, which document of its row a position belongs to, -1 for padding; None: a row is one text.
        positions: int32, the place of each input in its document, from 0; None: its place in the row.
        reference: float32 `[batch_size]`, of preference pairs: the sum of a reference model's log-probabilities of
            the row's targets that count, in nats; None: there are none.
    """

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None
    segment_ids: NDArray[np.int32] | None = None
    positions: NDArray[np.int32] | None = None
    reference: NDArray[np.float32] | None = None

    def counted_targets(self) -> NDArray[np.int32]:
        """The targets that count, `[num_targets]`."""
        return self.targets.ravel() if self.weights is None else self.targets[self.weights > 0]

    def filled_up(self, batch_size: int) -> "Batch":
        """The batch with rows of padding behind its own, `batch_size` in all."""
        missing = batch_size - len(self.inputs)
        if missing == 0:
            return self

        def padded(array: NDArray[Any], value: int = 0) -> NDArray[Any]:
            return np.pad(array, ((0, missing), (0, 0))[: array.ndim], constant_values=value)

        weights = np.ones(self.targets.shape, np.float32) if self.weights is None else self.weights
        return Batch(
            padded(self.inputs),
            padded(self.targets),
            padded(weights),
            None if self.segment_ids is None else padded(self.segment_ids, PADDING_SEGMENT),
            None if self.positions is None else padded(self.positions),
            None if self.reference is None else padded(self.reference),
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of several batches in one."""
    columns: list[Any] = [None if each[0] is None else np.concatenate(each) for each in zip(*batches, strict=True)]
    return Batch(*columns)
