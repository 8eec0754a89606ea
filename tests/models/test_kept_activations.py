"""What a block keeps for the backward pass where its weights are frozen and adapters are trained, to the array."""

from forge_mlx.models.adapters import AdapterConfig, add_adapters
from forge_mlx.models.gpt import GPT, GPTConfig
import mlx.core as mx
import mlx.nn as nn

LENGTH, RANK = 256, 4
SHAPE = {"vocab_size": 32, "hidden_size": 96, "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 160}


def kept(layers):
    """Bytes that are there between the forward and the backward pass."""
    model = GPT(GPTConfig(**SHAPE, num_layers=layers, max_seq_len=LENGTH))
    add_adapters(model, AdapterConfig(rank=RANK), seed=0)
    tokens = mx.zeros((1, LENGTH), mx.int32)
    documents = {"segment_ids": mx.zeros((1, LENGTH), mx.int32), "positions": mx.arange(LENGTH)[None]}
    mx.eval(model.parameters(), tokens, documents)
    mx.synchronize()
    before = mx.get_active_memory()
    loss, gradients = nn.value_and_grad(model, lambda tokens: mx.sum(model.hidden(tokens, **documents)))(tokens)
    mx.eval(loss)
    mx.synchronize()
    held = mx.get_active_memory() - before
    mx.eval(gradients)
    return held


def test_a_block_keeps_each_array_once():
    hidden, heads, kv, mlp = (SHAPE[key] for key in ("hidden_size", "num_heads", "num_kv_heads", "intermediate_size"))
    # The block's input and its half's, both normalised too; rotated q; out, as the projection reads it.
    floats = 6 * hidden
    # Rotated k, and v; the logarithm of each row's sum.
    floats += 2 * kv * (hidden // heads) + heads
    # Gate, its sigmoid, up and their product; and x A of the seven layers.
    floats += 4 * mlp + 7 * RANK
    per_token = (kept(3) - kept(2)) / (4 * LENGTH)
    # The rest is of the positions.
    assert floats <= per_token < floats + hidden // 4
