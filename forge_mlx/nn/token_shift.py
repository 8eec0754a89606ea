"""A learnable share of the token before: the cheapest look back."""

from typing import Final

from forge_mlx.kernels._common.checks import check_integers, check_shape
import mlx.core as mx
import mlx.nn as nn

_START: Final = 0.3


class LastToken:
    """The last position that a `TokenShift` saw, kept from call to call while text is generated.

    Attributes:
        value: `[B, 1, C]`, or None before the first call.
    """

    def __init__(self) -> None:
        self.value: mx.array | None = None


class TokenShift(nn.Module):
    """y_t = x_t + w * x_(t-1), with x_(-1) = 0 and one w per channel.

    RWKV (Peng et al. 2023) shifts its inputs so; modded-nanogpt smears embeddings so. To copy what followed a token the
    last time, attention needs two layers, the first only to look one token back. With the shift one layer is enough,
    and it is learned in a fraction of the steps.

    Args:
        size: Channels C.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = mx.full((size,), _START)

    def __call__(self, x: mx.array, last: LastToken | None = None, *, segment_ids: mx.array | None = None) -> mx.array:
        """Map `[B, T, C]` to `[B, T, C]`.

        Args:
            x: Positions that follow what `last` holds, or the start of the text.
            last: Read and then set to the last position of x.
            segment_ids: Integers `[B, T]`: a position gets no share of one with another id before it. Ids above
                2^31 - 1 wrap around in attention: keep them below here too.

        Raises:
            ValueError: When the batch differs from that of the call before, or there are segment ids together with
                `last`, which has none, or they are no integers `[B, T]`.
        """
        if segment_ids is not None:
            check_integers("TokenShift", segment_ids=segment_ids)
            check_shape("TokenShift", "segment_ids", segment_ids, x.shape[:2], "an id for each position")
        if last is not None and segment_ids is not None:
            raise ValueError(
                "[TokenShift] segment_ids must be left out with the last position of a call before but got both. "
                "Give whole rows at once."
            )
        before = mx.zeros_like(x[:, :1]) if last is None or last.value is None else last.value
        if before.shape[0] != x.shape[0]:
            raise ValueError(
                f"[TokenShift] every call must have the batch of the first, {before.shape[0]}, but got {x.shape[0]}. "
                "Start a new cache for another batch."
            )
        if last is not None:
            last.value = x[:, -1:]
        before = mx.concatenate([before, x[:, :-1]], axis=1)
        if segment_ids is not None:
            starts = segment_ids[:, 1:] != segment_ids[:, :-1]
            before = mx.where(mx.pad(starts, [(0, 0), (1, 0)])[..., None], 0, before)
        return x + self.weight * before
