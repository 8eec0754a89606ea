"""cross_entropy against PyTorch's in float64, over every combination of its options."""

from itertools import product

from forge_mlx.kernels.cross_entropy import cross_entropy
import mlx.core as mx
import numpy as np
import pytest
import torch

ROWS, VOCABULARY = 8, 37
INDICES = (-100, 0, 3, 99)
SMOOTHINGS = (0.0, 0.1, 1.0)
REDUCTIONS = ("mean", "sum", "none")
IGNORED = ("none", "some", "all")
COMBINATIONS = list(product(INDICES, SMOOTHINGS, (True, False), REDUCTIONS, IGNORED))


def arrays(ignore_index, ignored):
    random = np.random.default_rng(0)
    targets = random.integers(0, VOCABULARY, ROWS)
    targets[targets == ignore_index] = 1
    targets[{"none": slice(0), "some": slice(1, None, 3), "all": slice(None)}[ignored]] = ignore_index
    logits = (random.normal(size=(ROWS, VOCABULARY)) * 3).astype(np.float32)
    return logits, targets, random.uniform(0.1, 2, ROWS).astype(np.float32), random.normal(size=ROWS).astype(np.float32)


def by_pytorch(ignore_index, smoothing, weighted, reduction, ignored):
    """Loss and gradients: PyTorch's losses of the tokens times our weights, reduced as OPS does."""
    logits, targets, weights, dloss = arrays(ignore_index, ignored)
    z, w = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (logits, weights))
    losses = torch.nn.functional.cross_entropy(
        z, torch.tensor(targets), reduction="none", ignore_index=ignore_index, label_smoothing=smoothing
    )
    factor = torch.tensor(targets != ignore_index).double() * (w if weighted else torch.ones_like(w))
    loss = losses * factor
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / (factor.sum() if ignored != "all" else 1)
    scale = torch.tensor(dloss, dtype=torch.float64)
    (loss * (scale if reduction == "none" else scale[0])).sum().backward()
    return loss.detach().numpy(), z.grad.numpy(), w.grad.numpy() if weighted else np.zeros(ROWS)


@pytest.mark.parametrize("impl", ["emulator", "reference"])
@pytest.mark.parametrize(("ignore_index", "smoothing", "weighted", "reduction", "ignored"), COMBINATIONS)
def test_loss_and_gradients(ignore_index, smoothing, weighted, reduction, ignored, impl):
    logits, targets, weights, dloss = arrays(ignore_index, ignored)

    def loss(logits, weights):
        return cross_entropy(
            logits,
            mx.array(targets.astype(np.int32)),
            ignore_index=ignore_index,
            label_smoothing=smoothing,
            weights=weights if weighted else None,
            reduction=reduction,
            impl=impl,
        )

    cotangent = mx.array(dloss if reduction == "none" else dloss[0])
    (value,), gradients = mx.vjp(loss, [mx.array(logits), mx.array(weights)], [cotangent])
    want = by_pytorch(ignore_index, smoothing, weighted, reduction, ignored)
    for got, truth in zip((value, *gradients), want, strict=True):
        assert got.shape == truth.shape
        assert np.abs(np.array(got, np.float64) - truth).max() <= 1e-5 * np.abs(truth).max()
    ignored_rows = targets == ignore_index
    assert not np.array(gradients[0])[ignored_rows].any()
