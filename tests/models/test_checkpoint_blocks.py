"""Models whose blocks are computed again in the backward pass: the same gradients from less memory."""

from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.models.qat import QATConfig, prepare_qat
from forge_mlx.nn.losses import cross_entropy
from forge_mlx.nn.parameters import count_elements
from forge_mlx.nn.routing_record import routing_records
import mlx.core as mx
from mlx.utils import tree_flatten
import numpy as np
import pytest

SHAPE = {"vocab_size": 61, "num_layers": 3, "hidden_size": 32, "num_heads": 4, "dropout": 0.2}
GEMMA = {"norm_offset": True, "post_norms": True, "sliding_window": 5, "sliding_layers": [0, 2], "mlp": "geglu_tanh"}
ROUTING = {"aux_loss_weight": 0.1, "router_z_loss_weight": 0.1}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "post_norms": True}
MODELS = {
    "gemma": lambda: GPT(GPTConfig(**SHAPE, **GEMMA)),
    "gpt2": lambda: GPT(GPTConfig(**SHAPE, norm="layer_norm", position="learned", mlp="gelu_tanh", bias=True)),
    "moe": lambda: MoE(MoEConfig(**SHAPE, **ROUTING, num_experts=4, dense_layers=1)),
    "latent-moe": lambda: MoE(MoEConfig(**SHAPE, **ROUTING, **LATENT, num_experts=4)),
    "qat": lambda: prepared(GPT(GPTConfig(**SHAPE))),
}
TOKENS = mx.array(np.random.default_rng(0).integers(0, 61, (2, 24)).astype(np.int32))
SEGMENTS = mx.array(np.repeat([[0, 1, 1, -1]], 2, axis=0).repeat(6, axis=1).astype(np.int32))


def prepared(model):
    prepare_qat(model, QATConfig(weights="affine", bits=4, group_size=32))
    return model


def step(model, compiled, packed):
    """The loss with the routing's penalty, the loads of the experts, all gradients, and the generator's state."""
    held = model.trainable_parameters()

    def loss(parameters):
        model.update(parameters)
        with routing_records() as records:
            total = cross_entropy(model(TOKENS, segment_ids=SEGMENTS if packed else None), TOKENS)
        if isinstance(model, MoE):
            total = total + model.routing_penalty(records)
        return total, [record.load for record in records]

    mx.random.seed(3)
    function = mx.value_and_grad(loss)
    if compiled:
        function = mx.compile(function, inputs=mx.random.state, outputs=mx.random.state)
    (value, loads), grads = function(held)
    model.update(held)
    mx.eval(value, loads, grads)
    return value.item(), [load.tolist() for load in loads], dict(tree_flatten(grads)), mx.random.state[0].tolist()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("compiled", "packed"),
    [(False, False), (False, True), pytest.param(True, True, marks=pytest.mark.slow)],
    ids=["rows", "packed", "packed-compiled"],
)
def test_a_step_is_the_same_to_the_bit(name, compiled, packed):
    model = MODELS[name]().train()
    want = step(model, compiled, packed)
    model.checkpoint_blocks = True
    got = step(model, compiled, packed)
    assert (got[0], got[1], got[3]) == (want[0], want[1], want[3])
    assert got[2].keys() == want[2].keys()
    # Compiled, loops are fused differently.
    tolerance = 1e-6 if compiled else 0
    for key, grad in want[2].items():
        assert mx.abs(got[2][key] - grad).max().item() <= tolerance * mx.abs(grad).max().item(), key


def peak_of_gradients(num_layers, checkpoint_blocks):
    """Bytes at the peak of a backward pass over 2 rows of 256 tokens, beside the weights."""
    model = GPT(GPTConfig(vocab_size=61, num_layers=num_layers, hidden_size=64, num_heads=4, max_seq_len=256))
    model.checkpoint_blocks = checkpoint_blocks
    tokens = mx.zeros((2, 256), mx.int32)
    held = model.trainable_parameters()
    mx.eval(held)
    gradient = mx.grad(lambda parameters: cross_entropy(model.update(parameters)(tokens), tokens))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(gradient(held))
    return mx.get_peak_memory() - before


def test_a_block_more_costs_its_input_and_its_gradients():
    block = GPT(GPTConfig(vocab_size=61, num_layers=1, hidden_size=64, num_heads=4)).layers[0]
    kept = 4 * (2 * 256 * 64 + count_elements(block.parameters()))
    without, checkpointed = ((peak_of_gradients(10, on) - peak_of_gradients(4, on)) / 6 for on in (False, True))
    assert checkpointed < 1.1 * kept < 0.15 * without


def test_generation_is_as_without():
    model = MODELS["gemma"]().eval()
    want = model(TOKENS)
    model.checkpoint_blocks = True
    cache = model.make_cache()
    parts = [model(part, cache) for part in (TOKENS[:, :9], TOKENS[:, 9:])]
    assert mx.allclose(mx.concatenate(parts, axis=1), want, rtol=1e-4, atol=1e-5)
    assert mx.array_equal(model(TOKENS), want)
