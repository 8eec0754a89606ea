"""Latent attention in an MoE: its config, counts, start, documents, cache and quantised training."""

import math

from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.rope_scaling import RopeScaling, scaled_periods
from forge_mlx.nn.latent_attention import LatentAttention
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
import numpy as np
from pydantic import ValidationError
import pytest

HEADS = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
SHAPE = {"vocab_size": 37, "num_layers": 2, "hidden_size": 18, "num_heads": 4, "num_experts": 8}
QUERIES = {"with q_lora_rank": {"q_lora_rank": 7}, "without": {}}


def build(seed=1, **settings):
    """A model whose every parameter is random."""
    model = MoE(MoEConfig(**{**SHAPE, **HEADS, **settings}))
    rng = np.random.default_rng(seed)
    start = [
        (name, mx.array(rng.normal(p.ndim == 1, 0.3, p.shape).astype(np.float32)))
        for name, p in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(start))
    return model.eval()


def some_tokens(batch=2, length=9, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 37, (batch, length)).astype(np.int32))


def close(got, want, rtol=1e-5):
    got, want = np.array(got), np.array(want)
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        ({"v_head_dim": 0}, "v_head_dim"),
        ({"v_head_dim": None}, "v_head_dim must be set with kv_lora_rank but got null"),
        (
            {"qk_nope_head_dim": None, "qk_rope_head_dim": None},
            "qk_nope_head_dim and qk_rope_head_dim must be set with kv_lora_rank but got null",
        ),
        (
            {"kv_lora_rank": None, "q_lora_rank": 3, "hidden_size": 16},
            "q_lora_rank and qk_nope_head_dim and qk_rope_head_dim and v_head_dim must be null without kv_lora_rank",
        ),
        ({"qk_nope_head_dim": 254}, r"qk_nope_head_dim \+ qk_rope_head_dim must be at most 256 but got 258"),
        ({"v_head_dim": 257}, "v_head_dim must be at most 256 but got 257"),
        ({"num_kv_heads": 2}, "num_kv_heads must be left out with kv_lora_rank"),
        ({"head_dim": 8, "qk_norm": True}, "head_dim and qk_norm must be left out with kv_lora_rank"),
        ({"sliding_window": 3}, "sliding_window must be left out with kv_lora_rank"),
        ({"attention_softcap": 3.0}, "attention_softcap must be left out with kv_lora_rank"),
        ({"attention_sinks": True}, "attention_sinks must be left out with kv_lora_rank"),
        ({"bias": True}, "bias must be left out with kv_lora_rank"),
        ({"attention_bias": "qkv"}, "attention_bias must be left out with kv_lora_rank"),
        ({"norm_offset": True}, "norm_offset must be left out with kv_lora_rank"),
        ({"latent_norm_eps": 0.0}, "latent_norm_eps"),
        (
            {**dict.fromkeys(HEADS), "latent_norm_eps": 1e-6, "hidden_size": 16},
            "latent_norm_eps must be null without kv_lora_rank",
        ),
        ({"position": "learned"}, "position must be rope with kv_lora_rank but got learned"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        MoEConfig(**{**SHAPE, **HEADS, **settings})


def test_heads_have_sizes_of_their_own():
    """18 channels are no multiple of 4 heads, which only ordinary attention needs them to be."""
    config = MoEConfig(**SHAPE, **HEADS)
    assert (config.head_size, config.rotary_size, config.attention_sizes) == (10, 4, (10, 5))
    assert MoEConfig.model_validate_json(config.model_dump_json()) == config
    assert MoEConfig(**SHAPE, **{**HEADS, "qk_nope_head_dim": 5}).head_size == 9
    with pytest.raises(ValidationError, match="hidden_size must be a multiple of num_heads, 4, but got 18"):
        MoEConfig(**SHAPE)
    ordinary = MoEConfig(hidden_size=64, num_heads=4)
    assert (ordinary.head_size, ordinary.rotary_size, ordinary.attention_sizes) == (16, 16, (16, 16))


def test_the_config_reaches_the_attention():
    base = {"q_lora_rank": 7, "rope_base": 50.0}
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, attention_factor=1.3)
    for settings, options in (
        ({"rope_scale": 0.5, "norm_eps": 0.1}, {"rope_scale": 0.5, "norm_eps": 0.1}),
        ({"attention_scale": 0.2, "latent_norm_eps": 0.1}, {"scale": 0.2, "norm_eps": 0.1}),
        (
            {"rope_scaling": scaling},
            {"rope_periods": scaled_periods(scaling, 4, 50.0), "rope_factor": 1.3, "norm_eps": 1e-5},
        ),
    ):
        model = build(**base, **settings)
        x = mx.random.normal((2, 9, 18), key=mx.random.key(0))
        for layer in model.layers:
            want = LatentAttention(18, num_heads=4, **HEADS, **base, **options)
            want.update(layer.self_attn.parameters())
            assert mx.array_equal(layer.self_attn(x), want(x))
    plain = MoE(MoEConfig(**SHAPE, **HEADS, norm_weight=False))
    assert not any("norm" in name for name, _ in tree_flatten(plain.parameters()))


def test_parameters_of_deepseek_v3_are_the_published_numbers():
    """671 billion, of which a token meets 37; from one layer of each kind, of which it has 3 and 58."""
    shape = {"vocab_size": 129280, "hidden_size": 7168, "num_heads": 128, "tie_embeddings": False}
    heads = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    experts = {"num_experts": 256, "experts_per_token": 8, "shared_experts": 1, "expert_intermediate_size": 2048}
    config = {**shape, **heads, **experts, "v_head_dim": 128, "selection_bias": True}
    both = MoE(MoEConfig(**config, num_layers=2, dense_layers=1, intermediate_size=18432))
    sparse = MoE(MoEConfig(**config, num_layers=1))
    final_norm = 7168

    def all_layers(count):
        of_sparse = count(sparse) - final_norm
        return 3 * (count(both) - final_norm - of_sparse) + 58 * of_sparse + final_norm

    blocks = all_layers(lambda model: model.num_parameters(embeddings=False))
    assert blocks + 2 * 129280 * 7168 == 671026419200
    # The look-up of an embedding is no product.
    active = all_layers(lambda model: model.num_active_parameters(embeddings=False)) + 129280 * 7168
    assert round(active / 1e9) == 37


def test_flops_count_queries_and_values_by_their_own_sizes():
    model = build(q_lora_rank=7, experts_per_token=2, intermediate_size=12)
    attention = 18 * 7 + 7 * 4 * 10 + 18 * (10 + 4) + 10 * 4 * (6 + 5) + 4 * 5 * 18
    matrices = 2 * (attention + 8 * 18 + 2 * 3 * 18 * 12) + 18 * 37
    assert model.flops_per_token(11) == 6 * matrices + 3 * 2 * 4 * (10 + 5) * 12


def test_the_start_is_the_table():
    large = {"hidden_size": 128, "kv_lora_rank": 64, "q_lora_rank": 64, "init_std": 0.1}
    model = MoE(MoEConfig(**{**SHAPE, **HEADS, **large}))
    for key, value in tree_flatten(model.layers[0].self_attn.parameters()):
        if value.ndim == 1:
            assert mx.all(value == 1).item()
            continue
        std = 0.1 / math.sqrt(2 * 2) if key == "o_proj.weight" else 0.1
        assert abs(mx.std(value).item() - std) <= 0.06 * std


@pytest.mark.parametrize("queries", QUERIES)
def test_logits_are_the_same_with_a_cache(queries):
    model = build(**QUERIES[queries])
    tokens = some_tokens()
    cache = model.make_cache()
    parts = [model(tokens[:, :5], cache), *(model(tokens[:, i : i + 1], cache) for i in range(5, 9))]
    close(mx.concatenate(parts, axis=1), model(tokens))


def test_a_document_gives_what_it_gives_alone():
    model = build()
    first, second = some_tokens(1, 5), some_tokens(1, 4, seed=3)
    row = mx.concatenate([first, second, mx.zeros((1, 3), mx.int32)], axis=1)
    ids = mx.array([[0] * 5 + [1] * 4 + [-1] * 3])
    positions = mx.array([[*range(5), *range(4), *range(3)]])
    logits = model(row, segment_ids=ids, positions=positions)
    close(logits[:, :5], model(first))
    close(logits[:, 5:9], model(second))


@pytest.mark.parametrize("convert", [False, True], ids=["trained", "converted"])
def test_quantised_projections_are_the_same_with_a_cache(convert):
    """A single token must meet the quantised kv_b_proj too."""
    model = build(hidden_size=16, kv_lora_rank=16, v_head_dim=8, expert_intermediate_size=16)
    exact = model(some_tokens())
    prepare_qat(model, QATConfig(weights="int4", activations="int8"))
    if convert:
        convert_qat(model)
    tokens, cache = some_tokens(), model.make_cache()
    want = model(tokens)
    close(mx.concatenate([model(tokens[:, i : i + 1], cache) for i in range(9)], axis=1), want)
    assert np.abs(np.array(want - exact)).max() > 0.01 * np.abs(np.array(want)).max()
