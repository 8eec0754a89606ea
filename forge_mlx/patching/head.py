"""The head of a model of mlx-lm, and the loss through it without the logits of all tokens."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

from forge_mlx.kernels.cross_entropy import cross_entropy
from forge_mlx.kernels.linear_cross_entropy import gradients_in_forward, linear_cross_entropy
from forge_mlx.kernels.linear_cross_entropy.chunks import chunk_rows
from forge_mlx.patching.families import text_model
from forge_mlx.patching.parameters import given_parameters, trained
import mlx.core as mx
import mlx.nn as nn

_EMBEDDINGS = ("Embedding", "QuantizedEmbedding", "LoRAEmbedding", "DoRAEmbedding")


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states.

    Attributes:
        module: `lm_head`, or the embedding that takes its place.
        softcap: Bound of the logits; None: none.
        vocab_size: V.
    """

    module: nn.Module
    softcap: float | None
    vocab_size: int

    @property
    def is_plain(self) -> bool:
        """Whether it is one matrix, perhaps with a bias, in a floating dtype."""
        return type(self.module) in (nn.Linear, nn.Embedding)

    @property
    def description(self) -> str:
        """How the loss is computed, for a person to read."""
        how = "kernels.linear_cross_entropy" if self.is_plain else "chunk by chunk through its own product"
        return f"no logits of all tokens: {type(self.module).__name__}, {how}"

    def logits(self, hidden: mx.array) -> mx.array:
        """`[..., C]` to `[..., V]`, before the softcap."""
        project = self.module.as_linear if type(self.module).__name__ in _EMBEDDINGS else self.module
        return cast(mx.array, project(hidden))


def head_of(model: nn.Module) -> Head:
    """The head of a model.

    Args:
        model: A model of a family that `patch` takes, patched or not.

    Raises:
        ValueError: A model of another type.
    """
    inner = text_model("loss", model)
    module = inner.lm_head if "lm_head" in inner else inner.model.embed_tokens
    return Head(module, getattr(inner, "final_logit_softcapping", None), inner.model.vocab_size)


def summed_loss(head: Head, hidden: mx.array, targets: mx.array, weights: mx.array, *, training: bool) -> mx.array:
    """sum of weight * cross_entropy(head(hidden), target).

    Args:
        head: The head.
        hidden: `[..., C]`.
        targets: Integers `[...]`.
        weights: float32 `[...]`, without a gradient.
        training: Whether gradients are computed with the loss, from one product instead of two.

    Returns:
        A float32 scalar.
    """
    if not head.is_plain:
        rows = (hidden.reshape(-1, hidden.shape[-1]), targets.flatten(), weights.flatten())
        return _with_gradients(head, *rows) if training else _plain_sum(head, *rows)
    is_trained = "weight" in head.module.trainable_parameters()
    with gradients_in_forward(weight=is_trained) if training else nullcontext():
        return linear_cross_entropy(
            hidden,
            head.module.weight,
            targets,
            bias=head.module.get("bias"),
            softcap=head.softcap,
            weights=weights,
            reduction="sum",
        )


def _plain_sum(head: Head, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    total = mx.zeros(())
    for part in _slices(head, hidden):
        total = total + _chunk_sum(head, mx.depends(hidden[part], total), targets[part], weights[part])
    return total


def _with_gradients(head: Head, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """As `_plain_sum`, the gradients of hidden and of what the head has to train computed chunk by chunk with it.

    Once and not again in the backward pass, so that a dropout in the head is the same for both.
    """
    of_head = trained(head.module)
    names = [name for name, _ in of_head]

    @mx.custom_function
    def function(hidden: mx.array, *parameters: mx.array) -> tuple[mx.array, ...]:
        def of_chunk(part: slice) -> Callable[..., mx.array]:
            def value(rows: mx.array, *own: mx.array) -> mx.array:
                with given_parameters(head.module, names, own):
                    return _chunk_sum(head, rows, targets[part], weights[part])

            return value

        total = mx.zeros(())
        dhidden: list[mx.array] = []
        sums = [mx.zeros(array.shape) for array in parameters]
        for part in _slices(head, hidden):
            # MLX would compute the logits of all chunks before it uses the first.
            rows = mx.depends(hidden[part], [total, *dhidden[-1:], *sums])
            (value,), (drows, *found) = mx.vjp(of_chunk(part), [rows, *parameters], [mx.ones(())])
            total = total + value
            dhidden.append(drows)
            sums = [known + new.astype(mx.float32) for known, new in zip(sums, found, strict=True)]
        rounded = (each.astype(like.dtype) for each, like in zip(sums, parameters, strict=True))
        return total, mx.concatenate(dhidden), *rounded

    @function.vjp
    def vjp(
        _primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        return tuple(cast(mx.array, _scaled(unit, cotangents[0])) for unit in outputs[1:])

    return cast(tuple[mx.array, ...], function(hidden, *(array for _, array in of_head)))[0]


@mx.custom_function
def _scaled(unit: mx.array, scale: mx.array) -> mx.array:
    return (unit * scale).astype(unit.dtype)


@_scaled.vjp
def _scaled_vjp(*_: object) -> tuple[mx.array, ...]:
    raise ValueError(
        "[loss] second derivatives must be left out where the head is no plain matrix but were asked for. "
        "Take mlx_lm.tuner.trainer.default_loss."
    )


def _chunk_sum(head: Head, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    logits = head.logits(hidden)
    return cross_entropy(logits, targets, softcap=head.softcap, weights=weights, reduction="sum")


def _slices(head: Head, hidden: mx.array) -> list[slice]:
    rows = hidden.shape[0]
    size = chunk_rows(rows, head.vocab_size * hidden.dtype.size, mx.default_device().type)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
