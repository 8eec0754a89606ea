"""The config: defaults that follow from other fields, and every combination that is refused."""

from forge_mlx.models.gpt import GPTConfig
from pydantic import ValidationError
import pytest


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


def test_plain_attention_takes_large_heads():
    assert GPTConfig(hidden_size=600, num_heads=2).head_size == 300


def test_odd_head_size_is_fine_without_rotation():
    assert GPTConfig(hidden_size=12, num_heads=4, position="learned").head_size == 3
