"""What a start says and logs of experts, quantisation and the optimizer."""

from pathlib import Path
from typing import Any

from forge_mlx.models.moe import MoEConfig
from forge_mlx.optim import OptimConfig
from forge_mlx.train.banner import describe_experts, log_model, setup_facts
from forge_mlx.train.trainer import Trainer
import pytest
from tiny_run import tiny_config, trainer_of

EXPERTS: dict[str, Any] = {
    "model__arch": "moe",
    "model__num_experts": 4,
    "model__experts_per_token": 1,
    "model__normalize_gates": False,
    "model__expert_intermediate_size": 8,
    "model__mlp": "relu2",
}


def _trainer(folder: Path, **changes: Any) -> Trainer:
    return trainer_of(tiny_config(folder, **changes))


def _line(trainer: Trainer, name: str) -> str:
    lines: list[str] = []
    log_model(trainer, lines.append)
    (found,) = [line for line in lines if line.startswith(f"{name}: ")]
    return found.removeprefix(f"{name}: ")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "2 of 8 for each token by softmax scores in float32; nothing balances their load"),
        (
            {"selection_bias": True, "bias_rate": 0.002, "aux_loss_weight": 0.03, "router_scores": "sigmoid"},
            "2 of 8 for each token by sigmoid scores in float32; balanced by a selection bias that moves by "
            "0.002 a step and an auxiliary loss of weight 0.03",
        ),
        (
            {"selection_bias": True, "aux_loss_weight": 0.03},
            "2 of 8 for each token by softmax scores in float32; balanced by an auxiliary loss of weight 0.03",
        ),
        (
            {"expert_groups": 4, "groups_per_token": 2, "shared_experts": 1, "dense_layers": 2},
            "2 of 8 from 2 of 4 groups for each token by softmax scores in float32, 1 shared expert, the first "
            "2 layers dense; nothing balances their load",
        ),
    ],
)
def test_experts_in_words(changes: dict[str, Any], text: str) -> None:
    found = describe_experts(MoEConfig(num_experts=8, experts_per_token=2, **changes))
    assert found.replace("2 of 8 from", "2 of 8 from").replace("2 of 8 for", "2 of 8 for") == text


def test_a_start_of_an_moe_says_what_a_token_meets(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, **EXPERTS)
    # Of each of two layers three experts of two matrices of 16 x 8 stay idle.
    active = trainer.model.num_parameters() - 2 * 3 * 2 * 16 * 8
    assert _line(trainer, "experts").endswith(f"nothing balances their load; a token meets {active:,} parameters")
    facts = setup_facts(trainer)
    assert facts["active_parameters"] == active
    assert "qat" not in facts
    assert "active_parameters" not in setup_facts(_trainer(tmp_path))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "15 layers affine of 4 bits in groups of 64; from the first step"),
        (
            {
                "qat__weights": "int8",
                "qat__activations": "int8",
                "qat__start_step": 3,
                "qat__end_step": 7,
                "qat__overrides": {"embed_tokens": {"weights": "mxfp8"}, "*.o_proj": None},
            },
            "12 layers int8 by row with int8 inputs, 1 layer mxfp8 in groups of 32; from step 4 to step 7, then float "
            "again",
        ),
    ],
)
def test_a_start_says_what_is_quantised_and_when(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    values = {"model__hidden_size": 64, "model__mlp": "swiglu", "qat__weights": "affine"}
    assert _line(_trainer(tmp_path, **(values | changes)), "quantisation") == text


def test_the_log_has_the_format_with_its_defaults(tmp_path: Path) -> None:
    shape = {"model__hidden_size": 64, "model__mlp": "swiglu"}
    same = {"start_step": 0, "end_step": None, "modules": 15}
    assert setup_facts(_trainer(tmp_path, **shape, qat__weights="affine"))["qat"] == {
        "mode": "affine",
        "bits": 4,
        "group_size": 64,
        "granularity": None,
        "activations": None,
        **same,
    }
    assert setup_facts(_trainer(tmp_path, **shape, qat__weights="ternary", qat__activations="int8"))["qat"] == {
        "mode": "ternary",
        "bits": 2,
        "group_size": None,
        "granularity": "tensor",
        "activations": "int8",
        **same,
    }


@pytest.mark.parametrize(
    ("optim", "text"),
    [
        (OptimConfig(lr=2e-3, schedule="constant"), "adamw, lr 0.002; constant"),
        (
            OptimConfig(name="muon", lr=2e-3, muon_lr=0.01, warmup_steps=2),
            "muon (lr 0.01) on the layers' matrices, adamw (lr 0.002) on the rest; cosine after 2 warmup steps",
        ),
        (
            OptimConfig(name="muon", muon_expert_lr=5e-3),
            "muon (lr 0.02, 0.005 for experts) on the layers' matrices, adamw (lr 0.001) on the rest; cosine",
        ),
    ],
)
def test_a_start_says_how_each_part_is_updated(tmp_path: Path, optim: OptimConfig, text: str) -> None:
    trainer = _trainer(tmp_path, **EXPERTS)
    trainer.config = trainer.config.model_copy(update={"optim": optim})
    assert _line(trainer, "optimizer") == text
