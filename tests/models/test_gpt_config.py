"""The config: defaults that follow from other fields, and every combination that is refused."""

from forge_mlx.models.gpt import GPTConfig
from pydantic import ValidationError
import pytest

YARN = {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 64}


def test_defaults_follow_from_the_other_fields():
    config = GPTConfig(hidden_size=256, num_heads=8)
    assert (config.kv_heads, config.head_size, config.mlp_size) == (8, 32, 704)
    assert GPTConfig(hidden_size=256, mlp="relu2").mlp_size == 1024
    assert GPTConfig(hidden_size=192, mlp="geglu").mlp_size == 512
    explicit = GPTConfig(num_heads=8, num_kv_heads=2, head_dim=128, intermediate_size=10)
    assert (explicit.kv_heads, explicit.head_size, explicit.mlp_size) == (2, 128, 10)


def test_a_head_dim_frees_the_width_from_the_number_of_heads():
    assert GPTConfig(hidden_size=100, num_heads=3, num_kv_heads=1, head_dim=64).head_size == 64


def test_every_field_has_a_help_text():
    assert all(field.description for field in GPTConfig.model_fields.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 100, "num_heads": 3}, "hidden_size must be a multiple of num_heads, 3, but got 100"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, 3, but got 4"),
        ({"num_heads": 4, "num_kv_heads": 8}, "num_heads must be a multiple of num_kv_heads, 8, but got 4"),
        ({"hidden_size": 12, "num_heads": 4}, "position: rope needs an even head size but got 3"),
        ({"head_dim": 5}, "position: rope needs an even head size but got 5"),
        ({"position": "learned", "rope_base": 5e5}, "rope_base must not be set with position: learned"),
        (
            {"position": "none", "rope_scale": 0.5, "rope_base": 5e5},
            "rope_base and rope_scale must not be set with position: none",
        ),
        (
            {"position": "learned", "rope_scaling": YARN},
            "rope_scaling must not be set with position: learned",
        ),
        (
            {"position": "none", "rope_local_base": 5e5, "sliding_window": 4, "sliding_layers": [0]},
            "rope_local_base must not be set with position: none",
        ),
        ({"rope_scaling": YARN, "rope_scale": 0.5}, "rope_scale must be 1 with rope_scaling, .* but got 0.5"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "original_max_seq_len"),
        ({"rope_scaling": {**YARN, "kind": "ntk"}}, "rope_scaling.kind"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": {**YARN, "fast": 1.0}}, "rope_scaling.fast"),
        (
            {"rope_scaling": {**YARN, "low_freq_factor": 2.0, "high_freq_factor": 3.0}},
            "low_freq_factor and high_freq_factor must not be set with kind: yarn",
        ),
        (
            {"rope_scaling": {**YARN, "kind": "llama3", "attention_factor": 1.5}},
            "attention_factor must not be set with kind: llama3",
        ),
        (
            {"rope_scaling": {**YARN, "kind": "llama3", "low_freq_factor": 4.0}},
            "high_freq_factor must be greater than low_freq_factor, 4.0, but got 4.0",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_fast must be greater than beta_slow, 1.0, but got 0.5"),
        ({"sliding_layers": [0]}, r"sliding_layers must be null without sliding_window but got \[0\]"),
        ({"sliding_window": 4, "sliding_layers": []}, "sliding_layers"),
        ({"sliding_window": 4, "sliding_layers": [-1]}, "sliding_layers"),
        ({"sliding_window": 4, "sliding_layers": [3, 4]}, "sliding_layers must be less than num_layers, 4, but got 4"),
        (
            {"sliding_window": 4, "sliding_layers": [1, 2, 1]},
            "sliding_layers must name each layer once but got 1 twice",
        ),
        (
            {"sliding_window": 4, "rope_local_base": 1e4},
            "rope_local_base must be null without sliding_layers but got 10000.0",
        ),
        ({"attention_scale": 0.0}, "attention_scale"),
        ({"attention_bias": "q"}, "attention_bias"),
        ({"mlp_bias": "qkv"}, "mlp_bias"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"norm_offset": True, "norm": "layer_norm"}, "norm_offset must be false with norm: layer_norm but got true"),
        ({"norm_offset": True, "norm_weight": False}, "norm_offset must be false with norm_weight: false but got true"),
        ({"post_norms": 1}, "post_norms"),
        ({"hiden_size": 3}, "hiden_size"),
        ({"arch": "gtp"}, "arch"),
        ({"norm": "rmsnorm"}, "norm"),
        ({"position": "alibi"}, "position"),
        ({"mlp": "relu"}, "mlp"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": "4"}, "num_layers"),
        ({"num_layers": 4.0}, "num_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 264, "sliding_window": 9}, "head_dim must be at most 256 with sliding_window but .* is 264"),
        (
            {"hidden_size": 600, "num_heads": 2, "attention_softcap": 9.0, "attention_sinks": True},
            "head_dim must be at most 256 with attention_softcap and attention_sinks but the head size is 300",
        ),
        ({"sliding_window": 0}, "sliding_window"),
        ({"attention_softcap": 0.0}, "attention_softcap"),
        ({"attention_sinks": 1}, "attention_sinks"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_weight": "yes"}, "norm_weight"),
        ({"rope_base": 1.0}, "rope_base"),
        ({"rope_scale": 0.0}, "rope_scale"),
        ({"bias": 1}, "bias"),
        ({"qk_norm": None}, "qk_norm"),
        ({"tie_embeddings": "no"}, "tie_embeddings"),
        ({"logit_softcap": 0.0}, "logit_softcap"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"init_std": 0.0}, "init_std"),
        ({"zero_init_residual": 0}, "zero_init_residual"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        GPTConfig(**settings)


def test_a_window_holds_for_its_layers():
    config = GPTConfig(num_layers=3, sliding_window=7, sliding_layers=[0, 2])
    assert [config.window_of(layer) for layer in range(3)] == [7, None, 7]
    assert [GPTConfig(num_layers=2, sliding_window=7).window_of(layer) for layer in range(2)] == [7, 7]
    assert GPTConfig().window_of(0) is None


def test_biases_and_scale_follow_from_the_other_fields():
    assert (GPTConfig(bias=True).projection_bias, GPTConfig(bias=True).feed_forward_bias) == (True, True)
    qwen2 = GPTConfig(attention_bias="qkv")
    assert (qwen2.projection_bias, qwen2.feed_forward_bias, qwen2.score_scale) == ("qkv", False, 64**-0.5)
    other = GPTConfig(bias=True, attention_bias=False, mlp_bias=False, attention_scale=0.5)
    assert (other.projection_bias, other.feed_forward_bias, other.score_scale) == (False, False, 0.5)


def test_a_dumped_config_loads_again():
    config = GPTConfig(
        sliding_window=7, sliding_layers=[1], rope_local_base=1e4, rope_scaling=YARN, attention_bias="qkv"
    )
    assert GPTConfig.model_validate(config.model_dump()) == config
    assert GPTConfig.model_validate_json(config.model_dump_json()) == config


def test_plain_attention_takes_large_heads():
    assert GPTConfig(hidden_size=600, num_heads=2).head_size == 300


def test_odd_head_size_is_fine_without_rotation():
    assert GPTConfig(hidden_size=12, num_heads=4, position="learned").head_size == 3
