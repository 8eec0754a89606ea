"""Pairs of answers to one prompt, of which one is preferred, as rows."""

from copy import copy

from forge_mlx.data.batch import Batch
from forge_mlx.data.example_rows import ExampleTokens, PaddedRows
from forge_mlx.data.piece_rows import Ints
import numpy as np
from numpy.typing import NDArray


class PreferenceRows(PaddedRows):
    """Two rows for each pair: of a batch, row 2i holds the preferred answer and row 2i + 1 the other one.

    Both hold the prompt, and their weights are 1 for the answer's tokens alone. `num_rows` counts pairs, and a batch
    of B pairs has 2B rows. In each epoch every pair comes once.

    Args:
        tokens: texts 2i and 2i + 1 are a pair, each of at most `seq_len` + 1 tokens, with a target.
        seq_len: the longest row, as `PaddedRows` has it.

    Raises:
        ValueError: a text is longer, has no target, or its pair is not there.
    """

    packing = "pairs"
    group_size = 2

    def __init__(self, tokens: ExampleTokens, seq_len: int) -> None:
        super().__init__(tokens, seq_len)
        fitting, left_out = len(self.piece_lengths), len(self.left_out)
        if left_out or fitting != tokens.num_documents or fitting % 2:
            raise ValueError(
                f"[preference_rows] tokens must be pairs of texts, each with a target and of at most {seq_len + 1} "
                f"tokens, but got {tokens.num_documents} texts in {fitting + left_out} pieces, "
                f"{left_out} of them without a target. Leave out what does not fit."
            )
        self._reference: NDArray[np.float32] | None = None

    def with_reference(self, chosen: NDArray[np.float32], rejected: NDArray[np.float32]) -> "PreferenceRows":
        """The same rows, whose batches carry a reference model's log-probabilities.

        Args:
            chosen: float32 `[num_rows]`, for each pair in the order of `batch`'s numbers the sum of the
                log-probabilities of the preferred answer's targets, in nats.
            rejected: the same of the other answer.

        Raises:
            ValueError: an array has another shape, or a number in it is not finite.
        """
        for name, values in (("chosen", chosen), ("rejected", rejected)):
            if values.shape != (self.num_rows,):
                raise ValueError(
                    f"[preference_rows] {name} must have one number for each of {self.num_rows} pairs but has the "
                    f"shape {values.shape}."
                )
            if not np.isfinite(values).all():
                first = int(np.flatnonzero(~np.isfinite(values))[0])
                raise ValueError(
                    f"[preference_rows] {name} must be finite but is {values[first]} for pair {first}. Check that the "
                    "reference model's weights are."
                )
        other = copy(self)
        other._reference = np.stack([chosen, rejected], axis=1).astype(np.float32)
        return other

    def batch(self, rows: Ints) -> Batch:
        """Some of the pairs, by their numbers."""
        batch = super().batch(rows)
        return batch if self._reference is None else batch._replace(reference=self._reference[rows].ravel())
