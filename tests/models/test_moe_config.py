"""The MoE's config: defaults, every combination that is refused, and the union of all architectures' configs."""

from forge_mlx._config import Section
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.models.registry import ARCHITECTURES, ModelConfig, build_model
from pydantic import ValidationError
import pytest

GROUPS = {"num_experts": 8, "expert_groups": 4, "groups_per_token": 2}


def test_experts_are_as_wide_as_dense_layers_unless_told():
    assert MoEConfig(hidden_size=256).expert_size == 704
    assert MoEConfig(hidden_size=256, mlp="relu2").expert_size == 1024
    assert MoEConfig(intermediate_size=100).expert_size == 100
    both = MoEConfig(intermediate_size=100, expert_intermediate_size=10, dense_layers=1)
    assert (both.mlp_size, both.expert_size) == (100, 10)


def test_every_field_has_a_help_text():
    assert all(field.description for field in MoEConfig.model_fields.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 1}, "experts_per_token must be 1 to num_experts, 1, but got 2"),
        ({"num_experts": 1025}, "num_experts"),
        ({"experts_per_token": 0}, "experts_per_token"),
        ({"experts_per_token": 9}, "experts_per_token must be 1 to num_experts, 8, but got 9"),
        ({"expert_intermediate_size": 0}, "expert_intermediate_size"),
        ({"router_scores": "tanh"}, "router_scores"),
        ({"normalize_gates": 1}, "normalize_gates"),
        ({"routed_scaling": 0.0}, "routed_scaling"),
        ({"routed_scaling": float("inf")}, "routed_scaling"),
        ({"shared_experts": -1}, "shared_experts"),
        ({"dense_layers": -1}, "dense_layers"),
        ({"dense_layers": 4}, "dense_layers must be less than num_layers, 4, but got 4: no layer would have experts"),
        ({"expert_groups": 3}, "expert_groups must divide num_experts, 8, but got 3"),
        ({"expert_groups": 0}, "expert_groups"),
        ({"expert_groups": 8, "groups_per_token": 4}, "expert_groups must leave 2 or more experts in a group"),
        ({"groups_per_token": 2}, "groups_per_token must be 1 to expert_groups, 1, but got 2"),
        ({"groups_per_token": 0}, "groups_per_token"),
        ({**GROUPS, "experts_per_token": 5}, "experts_per_token must be at most the experts in .*, 4, but got 5"),
        ({"bias_rate": 0.001}, "bias_rate must be 0 without selection_bias but got 0.001"),
        ({"bias_rate": -0.001, "selection_bias": True}, "bias_rate"),
        ({"selection_bias": None}, "selection_bias"),
        ({"aux_loss_weight": -1.0}, "aux_loss_weight"),
        ({"router_z_loss_weight": -1.0}, "router_z_loss_weight"),
        ({"bias": True}, "bias must be false with arch: moe but got true"),
        ({"mlp_bias": True}, "mlp_bias must be false with arch: moe but got true"),
        (
            {"intermediate_size": 9, "expert_intermediate_size": 9},
            "intermediate_size must be null with expert_intermediate_size and no dense_layers but got 9",
        ),
        ({"arch": "gpt"}, "arch"),
        ({"top_k": 2}, "top_k"),
        ({"hidden_size": 100, "num_heads": 3}, "hidden_size must be a multiple of num_heads, 3, but got 100"),
        ({"qk_norm": "both"}, "qk_norm"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        MoEConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"experts_per_token": 1, "normalize_gates": False},
        {"experts_per_token": 1},
        {"experts_per_token": 1, "num_experts": 1},
        {"experts_per_token": 8},
        {**GROUPS, "experts_per_token": 4},
        {"num_experts": 8, "expert_groups": 4, "groups_per_token": 4, "experts_per_token": 8},
        {"selection_bias": True},
        {"selection_bias": True, "bias_rate": 0.001},
        {"num_experts": 1024, "experts_per_token": 8, "num_layers": 2, "dense_layers": 1},
        {"qk_norm": "joint"},
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_allowed_and_a_dump_loads_again(settings):
    config = MoEConfig(**settings)
    assert MoEConfig.model_validate_json(config.model_dump_json()) == config
    assert next(iter(config.model_dump())) == "arch"


class Holder(Section):
    model: ModelConfig


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ('{"num_layers": 2}', GPTConfig),
        ('{"arch": "gpt", "num_layers": 2}', GPTConfig),
        ('{"arch": "moe", "num_layers": 2, "num_experts": 4}', MoEConfig),
        ("{}", GPTConfig),
    ],
)
def test_arch_names_the_config_and_without_it_it_is_a_gpt(model, kind):
    config = Holder.model_validate_json(f'{{"model": {model}}}').model
    assert type(config) is kind
    assert Holder(model=config).model is config
    assert type(Holder.model_validate(Holder(model=config).model_dump()).model) is kind


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('{"arch": "mow"}', "'mow' found using .* does not match any of the expected tags: 'gpt', 'moe'"),
        ('{"arch": null}', "model"),
        ('{"arch": ["moe"]}', "model"),
        ('{"num_experts": 4}', "num_experts"),
        ('{"arch": "moe", "num_expert": 4}', "num_expert"),
        ("3", "model"),
    ],
)
def test_what_fits_no_architecture_is_refused(model, message):
    with pytest.raises(ValidationError, match=message):
        Holder.model_validate_json(f'{{"model": {model}}}')


def test_every_architecture_has_its_model():
    shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "num_heads": 2}
    assert type(build_model(GPTConfig(**shape), seed=3)) is GPT
    assert type(build_model(MoEConfig(**shape), seed=3)) is MoE
    for name, architecture in ARCHITECTURES.items():
        assert architecture.config().arch == name
        assert architecture.model.config_type is architecture.config


def test_a_config_of_no_architecture_is_refused():
    config = GPTConfig(vocab_size=5).model_copy(update={"arch": "mow"})
    with pytest.raises(ValueError, match=r"\[build_model\] config.arch must be one of \['gpt', 'moe'\] but got 'mow'"):
        build_model(config)
