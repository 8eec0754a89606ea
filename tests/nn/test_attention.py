"""causal_attention against a float64 formula, in the CPU's blocks and without them."""

from forge_mlx.nn.attention import causal_attention
import mlx.core as mx
import numpy as np
import pytest
import torch


def oracle(q, k, v, scale):
    """Softmax attention in PyTorch float64: query i of T sees keys 0 to S - T + i."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    return torch.einsum("bhts,bhsd->bhtd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 9), (5, 5), (3, 8), (127, 127), (128, 128), (131, 131), (130, 259), (513, 513)],
)
def test_values_and_gradients_match_float64(queries, keys, kv_heads):
    rng = np.random.default_rng(queries)
    shapes = [(2, 4, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8), (2, 4, queries, 8)]
    q, k, v, direction = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v)]
    want = oracle(*inputs, 0.7)
    wants = torch.autograd.grad((want * torch.tensor(direction)).sum(), inputs)

    got, grads = mx.vjp(
        lambda q, k, v: causal_attention(q, k, v, scale=0.7),
        list(map(mx.array, (q, k, v))),
        [mx.array(direction)],
    )
    for a, b in zip([*got, *grads], [want.detach(), *wants], strict=True):
        assert a.shape == b.shape
        assert np.abs(np.array(a) - b.numpy()).max() <= 1e-5 * b.abs().max().item()


@pytest.mark.parametrize("queries", [3, 200])
def test_more_queries_than_keys_are_refused(queries):
    q, k = mx.zeros((1, 2, queries, 8)), mx.zeros((1, 2, 2, 8))
    message = rf"\[causal_attention\] k must hold at least as many positions as q, {queries}, but got 2\."
    with pytest.raises(ValueError, match=message):
        causal_attention(q, k, k, scale=1.0)
