"""mlx-lm's loss without the logits of all tokens, and with packed documents."""

from forge_mlx.kernels._common.checks import check_integers, check_shape
from forge_mlx.patching.families import text_model
from forge_mlx.patching.head import head_of, summed_loss
from forge_mlx.patching.rows import packed_rows
import mlx.core as mx
import mlx.nn as nn


def loss(
    model: nn.Module, batch: mx.array, lengths: mx.array, segment_ids: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """mean of cross_entropy(model(batch[:, :-1]), batch[:, 1:]) over the tokens from one length to the other.

    Takes the place of `mlx_lm.tuner.trainer.default_loss`, as `train(..., loss=forge_mlx.patching.loss)` and in
    `evaluate`. The logits exist for a chunk of tokens at a time, and cross entropy is float32 whatever their dtype. The
    mean over no tokens is 0, where mlx-lm's is NaN. The model need not be patched, unless there are segment ids.

    In training mode (`model.train()`) the gradients of the hidden states and of the head are computed with the loss.

    Args:
        model: A model of a family that `patch` takes.
        batch: Tokens `[B, T + 1]`.
        lengths: Integers `[B, 2]`: of each row the targets count whose place in it, from 1 on, is from the first to the
            second.
        segment_ids: Integers `[B, T + 1]`, the document that each token of the batch belongs to: attention and
            positions keep to it, and no token counts as the target of another document's last. Negative: padding. None:
            a row is one text.

    Returns:
        The mean, float32, and the number of targets that count, int32.

    Raises:
        ValueError: A model of another type, or arrays of other shapes.
        RuntimeError: Segment ids, and a model that is not patched.
    """
    inner = text_model("loss", model)
    check_integers("loss", batch=batch, lengths=lengths)
    if batch.ndim != 2 or batch.shape[1] < 2:
        raise ValueError(f"[loss] batch must have the axes [B, T + 1] with T of 1 or more but got {batch.shape}.")
    check_shape("loss", "lengths", lengths, (batch.shape[0], 2), "a first and a last target for each row of batch")
    inputs, targets = batch[:, :-1], batch[:, 1:]
    steps = mx.arange(1, targets.shape[1] + 1)
    counts = (steps >= lengths[:, :1]) & (steps <= lengths[:, 1:])
    if segment_ids is None:
        hidden = inner.model(inputs)
    else:
        check_integers("loss", segment_ids=segment_ids)
        check_shape("loss", "segment_ids", segment_ids, batch.shape, "that of batch")
        ids = segment_ids[:, :-1]
        counts = counts & (ids == segment_ids[:, 1:]) & (ids >= 0)
        with packed_rows(ids):
            hidden = inner.model(inputs)
    total = summed_loss(head_of(model), hidden, targets, counts.astype(mx.float32), training=model.training)
    tokens = counts.sum()
    return total / mx.maximum(tokens, 1), tokens
