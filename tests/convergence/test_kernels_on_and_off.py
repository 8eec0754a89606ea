"""Tiny models trained for 32 steps with the kernels and without: the same run."""

from collections import Counter

from forge_mlx import kernels
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import use_engine
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.optim import AdamW
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest

STEPS = 32
TOP = 5
SHAPE = {"vocab_size": 29, "num_layers": 2, "hidden_size": 24, "num_heads": 2, "max_seq_len": 12}
MODELS = {
    "llama": GPTConfig(**SHAPE, qk_norm=True, logit_softcap=20.0),
    "gpt-2": GPTConfig(**SHAPE, norm="layer_norm", position="learned", mlp="gelu_tanh", bias=True),
    "modded-nanogpt": GPTConfig(**SHAPE, mlp="relu2", tie_embeddings=False, norm_weight=False, token_shift=True),
    "geglu": GPTConfig(**SHAPE, mlp="geglu"),
    "documents": GPTConfig(
        **SHAPE, num_kv_heads=1, sliding_window=5, attention_softcap=5.0, attention_sinks=True, token_shift=True
    ),
}
# Two of them in each row, and some padding.
DOCUMENTS = {
    "segment_ids": mx.broadcast_to(mx.array([0] * 4 + [1] * 7 + [-1]), (3, 12)),
    "positions": mx.broadcast_to(mx.array([*range(4), *range(7), 0]), (3, 12)),
}
# What every model launches, and what each does beside it.
EVERY = {
    *("embedding_forward", "embedding_backward", "matmul_tiled", "cross_entropy_forward", "cross_entropy_backward"),
    *("sum_elements", "adamw_step"),
    *(f"flash_attention_{kernel}" for kernel in ("forward", "delta", "dq", "dkv")),
}
OWN = {
    "llama": {"rms_norm_forward", "add_rms_norm_forward", "rms_norm_backward", "rope", "gated_forward"},
    "gpt-2": {"layer_norm_forward", "layer_norm_backward", "sum_parts", "activation_forward", "activation_backward"},
    "modded-nanogpt": {"rms_norm_forward", "add_rms_norm_forward", "rms_norm_backward", "rope", "activation_backward"},
    "geglu": {"rms_norm_forward", "add_rms_norm_forward", "rope", "gated_forward", "gated_backward"},
    "documents": {"rms_norm_forward", "add_rms_norm_forward", "rope", "gated_forward", "gated_backward"},
}


def train(config, steps):
    """Losses, top-k log-probabilities of the last batch, and parameters after all steps."""
    model = GPT(config)
    optimizer = AdamW(learning_rate=5e-3, weight_decay=0.1)
    random = np.random.default_rng(0)
    documents = DOCUMENTS if config.attention_sinks else {}

    def loss(model, tokens):
        options = {"z_loss": 1e-4, "softcap": config.logit_softcap}
        hidden = model.hidden(tokens[:, :-1], **documents)
        return kernels.linear_cross_entropy(hidden, model.head_weight, tokens[:, 1:], **options)

    losses = []
    for _ in range(steps):
        tokens = mx.array((random.integers(0, 29, (3, 1)) + np.arange(13)) % 29)
        value, gradients = nn.value_and_grad(model, loss)(model, tokens)
        norm = mx.sqrt(kernels.sum_squares([gradient for _, gradient in tree_flatten(gradients)]))
        model.update(optimizer.apply_gradients(gradients, model, 1 / mx.maximum(norm, 1)))
        mx.eval(model.parameters(), optimizer.state)
        losses.append(value.item())
    logits = model(tokens[:, :-1], **documents)
    best = mx.sort(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)[..., -TOP:]
    return losses, np.array(best), {name: np.array(array) for name, array in tree_flatten(model.parameters())}


def compare(config, steps):
    """Train both ways; raise where they differ. Returns the losses and how often each kernel was launched."""
    losses, best, parameters = train(config, steps)
    emulator.reset()
    with use_engine("emulator"), emulator.settings(schedules=2):
        on = train(config, steps)
    launched = Counter(launch.name for launch in emulator.report().launches)
    np.testing.assert_allclose(on[0], losses, rtol=1e-5)
    np.testing.assert_allclose(on[1], best, atol=1e-4)
    assert on[2].keys() == parameters.keys()
    for name, array in parameters.items():
        if name.endswith("k_proj.bias"):
            # It moves all scores of a query alike, which softmax does not see: its gradient is rounding alone.
            continue
        # Adam's step is nearly the sign of the gradient: a parameter near 0 has only its neighbours for a measure.
        assert np.abs(on[2][name] - array).max() <= 1e-3 * np.abs(array).max(), name
    return losses, launched


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_32_steps_with_the_kernels_and_without_are_the_same_run(model):
    losses, _ = compare(MODELS[model], STEPS)
    assert losses[-1] < losses[0] / 1.5


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-2", "documents"))]
)
def test_two_steps_launch_the_kernels_of_every_part(model):
    _, launched = compare(MODELS[model], 2)
    assert EVERY | OWN[model] <= launched.keys()
