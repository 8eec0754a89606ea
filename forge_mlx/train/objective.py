"""What a run minimises: the sum over a batch of the losses of its units, tokens or pairs."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from forge_mlx.data.batch import Batch
from forge_mlx.kernels.linear_cross_entropy import linear_cross_entropy
from forge_mlx.models.moe import MoE
from forge_mlx.nn.log_probs import HasHead
from forge_mlx.nn.losses import cross_entropy
import mlx.core as mx
import mlx.nn as nn

Arrays: TypeAlias = tuple[mx.array | None, ...]
"""The arrays of a batch, in its order."""

Measures: TypeAlias = dict[str, mx.array]
"""Sums over the units of a batch, beside the loss."""


class Objective(Protocol):
    """A loss that is summed over units, so that batches can be added up and divided once.

    Attributes:
        unit: what the loss is counted in, in the singular.
    """

    unit: str

    def __call__(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, Measures]:
        """The summed loss of a batch, a float32 scalar, and what else is summed over its units."""

    def count(self, batch: Batch) -> int:
        """How many units of a batch count."""

    def means(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """What a record says of the measures: their means over `count` units, and what follows from them."""


def batch_arrays(batch: Batch) -> Arrays:
    """The arrays of a batch, in its order, as MLX's; what there is not stays None."""
    return tuple(None if each is None else mx.array(each) for each in batch)


def document_arguments(segment_ids: mx.array | None, positions: mx.array | None) -> dict[str, mx.array | None]:
    """What a model is given beside tokens: nothing where a row is one text, so that any model can be trained on it."""
    return {} if segment_ids is None else {"segment_ids": segment_ids, "positions": positions}


def padding_arguments(
    model: nn.Module, segment_ids: mx.array | None, positions: mx.array | None
) -> dict[str, mx.array | None]:
    """What a model is given of rows that hold one text and padding behind it, which no token of the text sees.

    Routers alone must know which is which, as they count tokens; for other models attention is simpler without.
    """
    return document_arguments(segment_ids, positions) if isinstance(model, MoE) else {}


def summed_loss(
    model: nn.Module,
    inputs: mx.array,
    targets: mx.array,
    weights: mx.array | None = None,
    segment_ids: mx.array | None = None,
    positions: mx.array | None = None,
) -> mx.array:
    """Sum over the targets of ``-weight ln p(target)``, in nats.

    The logits of a model that has ``hidden`` and ``head_weight`` are computed and dropped chunk by chunk.

    Args:
        model: maps tokens ``[B, T]`` to logits ``[B, T, V]``; with segment ids it is given these and positions too.
        inputs: int32 ``[B, T]``.
        targets: int32 ``[B, T]``.
        weights: float32 ``[B, T]``; None: all targets count once.
        segment_ids: int32 ``[B, T]``, or None.
        positions: int32 ``[B, T]``, or None.
    """
    documents = document_arguments(segment_ids, positions)
    if not isinstance(model, HasHead):
        return cross_entropy(model(inputs, **documents), targets, weights=weights, reduction="sum")
    return linear_cross_entropy(
        model.hidden(inputs, **documents),
        model.head_weight,
        targets,
        softcap=model.config.logit_softcap,
        weights=weights,
        reduction="sum",
    )


class NextToken:
    """The cross entropy of each target that counts.

    Args:
        segments: whether the model is given the segment ids and positions of a batch. A row that is one text with
            padding behind it needs none: causal order hides the padding, and plain attention is faster.
    """

    unit = "token"

    def __init__(self, *, segments: bool = True) -> None:
        self._segments = segments

    def __call__(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, Measures]:
        """The summed loss of a batch; nothing beside it."""
        inputs, targets, weights, *documents = arrays
        assert inputs is not None
        assert targets is not None
        return summed_loss(model, inputs, targets, weights, *(documents[:2] if self._segments else ())), {}

    def count(self, batch: Batch) -> int:
        """The targets that count."""
        return batch.counted_targets().size

    def means(self, _sums: Mapping[str, float], _count: int) -> dict[str, float]:
        """Nothing."""
        return {}
