"""A tiny model trained for 32 steps with the kernels of rms_norm and without: the same run."""

from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.nn.losses import cross_entropy
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten
import numpy as np
import pytest

CONFIG = GPTConfig(vocab_size=29, num_layers=2, hidden_size=24, num_heads=2, max_seq_len=12, qk_norm=True)
STEPS = 32
TOP = 5


def train():
    """Losses, top-k log-probabilities of the last batch, and parameters after all steps."""
    model = GPT(CONFIG)
    optimizer = optimizers.AdamW(learning_rate=5e-3, weight_decay=0.1, bias_correction=True)
    random = np.random.default_rng(0)

    def loss(model, tokens):
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    losses = []
    for _ in range(STEPS):
        tokens = mx.array((random.integers(0, 29, (3, 1)) + np.arange(13)) % 29)
        value, gradients = nn.value_and_grad(model, loss)(model, tokens)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(value.item())
    logits = model(tokens[:, :-1])
    best = mx.sort(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)[..., -TOP:]
    return losses, np.array(best), {name: np.array(array) for name, array in tree_flatten(model.parameters())}


@pytest.mark.slow
def test_32_steps_with_the_kernels_and_without_are_the_same_run():
    without = train()
    emulator.reset()
    with use_engine("emulator"), emulator.settings(schedules=2):
        losses, best, parameters = train()
    # Two norms in each of 2 blocks, two more on q and k, one at the end: forward, backward and the sum of dw.
    assert emulator.report().started == STEPS * 9 * 3 + 9
    assert without[0][-1] < without[0][0] / 2
    np.testing.assert_allclose(losses, without[0], rtol=1e-5)
    np.testing.assert_allclose(best, without[1], atol=1e-4)
    assert parameters.keys() == without[2].keys()
    for name, array in parameters.items():
        assert np.abs(array - without[2][name]).max() <= 1e-3 * np.abs(array).max(), name
