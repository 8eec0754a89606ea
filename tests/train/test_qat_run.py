"""A run with quantisation-aware training: when it begins and ends, what is deployed, exact resume."""

from collections.abc import Iterator
import json
from pathlib import Path
import signal
from typing import Any

from forge_mlx.data.batch import Batch
from forge_mlx.data.stream import eval_batches
from forge_mlx.hub.native import load_model
from forge_mlx.train.deploy import summed_logits_loss
from forge_mlx.train.load import ConfigError, load_config
from forge_mlx.train.loop import train
from forge_mlx.train.trainer import Trainer
import mlx.core as mx
import numpy as np
import pytest
from tiny_run import arrays, events, records, run_command, tiny_config, trainer_of, write_config

QAT: dict[str, Any] = {
    "model__hidden_size": 32,
    "model__intermediate_size": 64,
    "model__mlp": "relu2",
    "qat__weights": "affine",
    "qat__bits": 4,
    "qat__group_size": 32,
    "qat__start_step": 4,
}


def _ignore(_: str) -> None:
    pass


def test_fake_quantisation_begins_at_its_step_and_the_codes_are_deployed(tmp_path: Path) -> None:
    said: list[str] = []
    train(tiny_config(tmp_path, **QAT), log=said.append)
    run = tmp_path / "run"
    assert events(run) == ["fake quantisation begins after step 4"]
    evaluations = records(run, "eval")
    assert [(r["step"], r["fake_quant"]) for r in evaluations] == [(3, False), (6, True), (9, True)]
    deployed = evaluations[-1]["deployed"]
    assert deployed["loss"] == pytest.approx(deployed["trained_loss"], abs=2e-6)
    assert any("deployed: the codes in final/" in line for line in said)
    weights = mx.load(str(run / "final/model.safetensors"))
    assert weights["layers.0.mlp.up_proj.weight"].dtype == mx.uint32
    model, _ = load_model(run / "final")
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])))).all()
    # The checkpoint keeps the weights that training goes on with.
    kept = mx.load(str(run / "checkpoints/step-00000009/model.safetensors"))
    assert kept["layers.0.mlp.up_proj.weight"].dtype == mx.float32


def test_until_it_begins_the_run_is_that_of_a_float_model(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, **QAT), log=_ignore)
    plain = {key: value for key, value in QAT.items() if not key.startswith("qat")}
    train(tiny_config(tmp_path, **plain, run__dir=str(tmp_path / "plain")), log=_ignore)
    quantised, unquantised = (records(tmp_path / name, "train") for name in ("run", "plain"))
    assert quantised[:2] == unquantised[:2]
    assert quantised[2]["loss"] != unquantised[2]["loss"]


def test_it_ends_where_the_config_says_and_the_final_model_is_float(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, **QAT, qat__end_step=7), log=_ignore)
    run = tmp_path / "run"
    assert events(run) == ["fake quantisation begins after step 4", "fake quantisation ends after step 7"]
    assert "deployed" not in records(run, "eval")[-1]
    assert mx.load(str(run / "final/model.safetensors"))["layers.0.mlp.up_proj.weight"].dtype == mx.float32


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """A few steps are not worth the compiler's seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _quantised(folder: Path, **changes: Any) -> Trainer:
    """A trainer of a run that is quantised from its first step on."""
    config = tiny_config(folder, **(QAT | {"qat__start_step": 0} | changes))
    trainer = trainer_of(config)
    trainer.enter_phase()
    trainer.folder.path.mkdir()
    return trainer


def _first_batch(trainer: Trainer) -> Batch:
    return next(iter(eval_batches(trainer.valid_rows, 2, 2 * 16)))


@pytest.mark.usefixtures("uncompiled")
def test_padding_is_left_out_of_the_loss_as_deployed(tmp_path: Path) -> None:
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": "one two three"[:size]}) + "\n" for size in (13, 4, 9) * 30))
    packed = {"data__source": [str(source)], "data__packing": "documents", "data__tokenizer": {"vocab_size": 270}}
    trainer = _quantised(tmp_path, **packed, data__valid_fraction=0.3)
    batch = _first_batch(trainer)
    assert 0 < batch.counted_targets().size < batch.targets.size
    deployed = trainer.deployed_evaluation()
    assert deployed is not None
    assert deployed["tokens"] == batch.counted_targets().size
    assert deployed["loss"] == pytest.approx(deployed["trained_loss"], abs=2e-6)


@pytest.mark.usefixtures("uncompiled")
def test_the_loss_as_deployed_is_that_of_the_codes_in_final(tmp_path: Path) -> None:
    """In 16 bits: codes of the float32 weights would be others."""
    trainer = _quantised(tmp_path, run__dtype="bfloat16")
    deployed = trainer.deployed_evaluation()
    trainer.save_final()
    model, _ = load_model(trainer.folder.final)
    assert deployed is not None
    assert deployed["loss"] == summed_logits_loss(model.eval(), _first_batch(trainer)) / deployed["tokens"]


@pytest.mark.usefixtures("uncompiled")
def test_codes_that_cannot_be_computed_with_here_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_trainer: Trainer) -> None:
        raise RuntimeError("[quantized_matmul] NYI")

    monkeypatch.setattr(Trainer, "deployed_evaluation", fail)
    said: list[str] = []
    train(tiny_config(tmp_path, **QAT | {"qat__start_step": 1}, train__steps=3), log=said.append)
    message = "deployed: final/ holds the codes, but MLX cannot compute with them here: [quantized_matmul] NYI"
    assert message in said
    assert events(tmp_path / "run")[-1] == message
    (last,) = [record for record in records(tmp_path / "run", "eval") if record["final"]]
    assert "deployed" not in last
    assert mx.load(str(tmp_path / "run/final/model.safetensors"))["embed_tokens.weight"].dtype == mx.uint32


@pytest.mark.slow
@pytest.mark.parametrize("call", [3, 6, 8])
def test_killed_run_ends_like_one_that_never_was(tmp_path: Path, call: int) -> None:
    cache = tmp_path / "cache"
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    # A checkpoint at the very step where it begins, and others on both sides of it.
    changes = QAT | {"train__checkpoint_every": 2}
    assert run_command(write_config(tmp_path / "whole", **changes), cache=cache)[0] == 0
    config = write_config(tmp_path / "broken", **changes)
    stop = f"SIGKILL,forge_mlx.train.step:TrainStep.update,{call}"
    assert run_command(config, cache=cache, stop=stop)[0] == -signal.SIGKILL
    assert run_command(config, cache=cache)[0] == 0
    one, other = tmp_path / "whole/run", tmp_path / "broken/run"
    assert arrays(one / "final/model.safetensors") == arrays(other / "final/model.safetensors")
    assert records(one, "train", "eval", "sample") == records(other, "train", "eval", "sample")
    begun = [message for message in events(other) if "begins" in message]
    assert begun == ["fake quantisation begins after step 4"]


@pytest.mark.slow
def test_experts_and_a_tied_table_are_quantised_in_a_run(tmp_path: Path) -> None:
    experts = {
        "model__arch": "moe",
        "model__intermediate_size": None,
        "model__num_experts": 4,
        "model__experts_per_token": 2,
        "model__expert_intermediate_size": 32,
        "model__selection_bias": True,
        "model__bias_rate": 0.01,
    }
    train(tiny_config(tmp_path, **(QAT | experts)), log=_ignore)
    run = tmp_path / "run"
    deployed = records(run, "eval")[-1]["deployed"]
    assert deployed["loss"] == pytest.approx(deployed["trained_loss"], abs=2e-6)
    weights = mx.load(str(run / "final/model.safetensors"))
    assert weights["layers.1.mlp.experts.up_proj.weight"].dtype == mx.uint32
    assert weights["layers.1.mlp.experts.up_proj.scales"].shape[0] == 4
    assert weights["layers.1.mlp.router.weight"].dtype == mx.float32
    assert weights["embed_tokens.weight"].dtype == mx.uint32


def test_a_start_beyond_the_last_step_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, **QAT | {"qat__start_step": 9})
    with pytest.raises(ConfigError, match=r"qat\.start_step must be less than train\.steps, 9, but got 9"):
        load_config(config)


def test_another_format_does_not_go_on_with_a_run(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, **QAT, train__steps=6), log=_ignore)
    changed = tiny_config(tmp_path, **QAT | {"qat__bits": 2})
    with pytest.raises(ValueError, match=r"qat\.bits: 4 -> 2"):
        train(changed, log=_ignore)
    saved = json.loads((tmp_path / "run/final/config.json").read_text(encoding="utf-8"))
    assert "quantization" in saved
