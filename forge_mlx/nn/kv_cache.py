"""The keys and values of one attention layer, kept from call to call while text is generated."""

from typing import Final

import mlx.core as mx

_STEP: Final = 256


class KVCache:
    """Keys and values seen so far, in buffers that grow by whole steps of 256 positions.

    Attributes:
        offset: Number of positions held, which is also the position of the next token.
    """

    def __init__(self) -> None:
        self.offset: int = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append T positions and return everything held.

        Args:
            keys: `[B, H_kv, T, D]`.
            values: `[B, H_kv, T, D_v]`; D_v may differ from D.

        Returns:
            Keys `[B, H_kv, offset, D]` and values `[B, H_kv, offset, D_v]`, the new offset included.

        Raises:
            ValueError: When the batch, the heads or a head size differ from what is held.
        """
        end = self.offset + keys.shape[2]
        self._keys = _grown(self._keys, keys, end)
        self._values = _grown(self._values, values, end)
        self._keys[:, :, self.offset : end] = keys
        self._values[:, :, self.offset : end] = values
        self.offset = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def keep(self, length: int) -> None:
        """Forget all but the first positions, so that another text can go on from there.

        Args:
            length: How many to keep, at most `offset`.

        Raises:
            ValueError: When fewer are held, or length is negative.
        """
        if not 0 <= length <= self.offset:
            raise ValueError(f"[KVCache] length must be in 0 ... {self.offset} but got {length}.")
        self.offset = length

    @property
    def nbytes(self) -> int:
        """Bytes that both buffers take."""
        return sum(buffer.nbytes for buffer in (self._keys, self._values) if buffer is not None)


def _grown(buffer: mx.array | None, new: mx.array, end: int) -> mx.array:
    """The buffer, or a larger copy of it that has room for `end` positions."""
    batch, heads, _, dims = new.shape
    if buffer is None:
        buffer = mx.zeros((batch, heads, 0, dims), new.dtype)
    if (batch, heads, dims) != (buffer.shape[0], buffer.shape[1], buffer.shape[3]):
        raise ValueError(
            "[KVCache] every call must have the batch, heads and head size of the first, "
            f"{(buffer.shape[0], buffer.shape[1], buffer.shape[3])}, but got {(batch, heads, dims)}. "
            "Start a new cache for another batch."
        )
    missing = end - buffer.shape[2]
    if missing <= 0:
        return buffer
    room = mx.zeros((batch, heads, -(-missing // _STEP) * _STEP, dims), buffer.dtype)
    return mx.concatenate([buffer, room], axis=2)
