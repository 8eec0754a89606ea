"""A run of an MoE: penalties in the gradient, biases outside it, what is logged, exact resume."""

from pathlib import Path
import signal
from typing import Any

from forge_mlx.data.batch import Batch
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.nn.routing_record import aux_loss, routing_records, z_loss
from forge_mlx.optim import OptimConfig, build_optimizer
from forge_mlx.train.checkpoint import load_checkpoint
from forge_mlx.train.loop import train
from forge_mlx.train.objective import batch_arrays, summed_loss
from forge_mlx.train.report import load_run, write_report
from forge_mlx.train.step import TrainStep
import mlx.core as mx
from mlx.utils import tree_flatten
import numpy as np
import pytest
from tiny_run import arrays, records, run_command, tiny_config, trainer_of, write_config

EXPERTS: dict[str, Any] = {
    "model__arch": "moe",
    "model__num_experts": 4,
    "model__experts_per_token": 2,
    "model__expert_intermediate_size": 8,
    "model__mlp": "relu2",
    "model__dense_layers": 1,
    "model__num_layers": 3,
    "model__selection_bias": True,
    "model__bias_rate": 0.01,
    "model__aux_loss_weight": 0.05,
    "model__router_z_loss_weight": 0.01,
}
SHAPE = MoEConfig(
    vocab_size=17,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=8,
    selection_bias=True,
    bias_rate=0.01,
    aux_loss_weight=0.3,
    router_z_loss_weight=0.1,
)


def _batch(seed: int, rows: int = 2, kept: int | None = None) -> Batch:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 17, (rows, 7)).astype(np.int32)
    weights = segments = positions = None
    if kept is not None:
        weights = np.tile(np.arange(6) < kept, (rows, 1)).astype(np.float32)
        segments = np.where(weights > 0, 0, -1).astype(np.int32)
        positions = np.tile(np.arange(6), (rows, 1)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, segments, positions)


def _step(config: MoEConfig = SHAPE) -> TrainStep:
    return TrainStep(MoE(config, seed=2), build_optimizer(OptimConfig()), mx.float32, None)


def test_penalties_are_in_the_gradient_and_not_in_the_loss_that_is_reported() -> None:
    step, batches = _step(), [_batch(0), _batch(1, rows=3)]
    loss, _, grads, count = step.gradients(batches, 0)
    model = MoE(SHAPE, seed=2)

    def total(params: dict[str, Any]) -> mx.array:
        model.update(params)
        result = mx.array(0.0)
        for batch in batches:
            with routing_records() as found:
                nats = summed_loss(model, *batch_arrays(batch)[:5])
            penalties = sum(0.3 * aux_loss(record) + 0.1 * z_loss(record) for record in found)
            result = result + nats + batch.targets.size * penalties
        return result

    want = dict(tree_flatten(mx.grad(total)(model.trainable_parameters())))
    for name, grad in tree_flatten(grads):
        np.testing.assert_allclose(np.array(grad), np.array(want[name]), rtol=2e-4, atol=1e-5, err_msg=name)
    plain = sum(float(summed_loss(step.model, *batch_arrays(batch)[:5])) for batch in batches) / count
    assert loss == pytest.approx(plain, rel=1e-6)
    still = _step(SHAPE.model_copy(update={"aux_loss_weight": 0.0, "router_z_loss_weight": 0.0}))
    router = "layers.0.mlp.router.weight"
    without = dict(tree_flatten(still.gradients(batches, 0)[2]))[router]
    assert mx.abs(without - dict(tree_flatten(grads))[router]).max().item() > 1e-3


def test_routing_is_summed_over_passes_and_padding_is_no_load() -> None:
    step = _step()
    step.gradients([_batch(0), _batch(1, rows=3)], 0)
    assert [int(record.load.sum()) for record in step.routing] == [5 * 6 * 2] * 2
    assert [float(record.tokens) for record in step.routing] == [30.0] * 2
    step.recompile()
    step.gradients([_batch(0, kept=4)], 0)
    assert [int(record.load.sum()) for record in step.routing] == [2 * 4 * 2] * 2


def test_a_new_bias_reaches_the_compiled_step() -> None:
    step = _step()
    step.gradients([_batch(0)], 0)
    step.model.layers[0].mlp.router.selection_bias = mx.array([0.0, 0.0, 9.0, 9.0])
    step.gradients([_batch(0)], 0)
    assert step.routing[0].load.tolist() == [0, 0, 12, 12]
    assert step.model.layers[0].mlp.router.selection_bias.tolist() == [0.0, 0.0, 9.0, 9.0]


def test_bias_follows_the_load_of_the_whole_step(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, **EXPERTS))
    trainer.train_step()
    model = trainer.model
    assert isinstance(model, MoE)
    for record, bias in zip(trainer.step_function.routing, model.selection_biases, strict=True):
        load = np.array(record.load, np.float64)
        assert load.sum() == 2 * 2 * 16 * 2
        np.testing.assert_allclose(np.array(bias), 0.01 * np.sign(load.mean() - load), atol=1e-7)
    # Dropout takes nothing from the load, and the evaluation adds nothing to it.
    trainer.evaluate(64)
    assert trainer.window.routing.steps == 1


def test_log_has_every_number_of_every_layer_and_the_report_shows_them(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, **EXPERTS), log=lambda _: None)
    found = [record["moe"] for record in records(tmp_path / "run", "train")]
    assert [len(each["load"]) for each in found] == [2] * 5
    # Windows of 2, 2, 2, 2 and 1 steps, of 2 passes of 2 rows of 16 tokens that take 2 experts each.
    assert [[sum(layer) for layer in each["load"]] for each in found] == [[256, 256]] * 4 + [[128, 128]]
    for each in found:
        assert each["layers"] == [1, 2]
        assert each["dropped"] == 0
        for load, ratio in zip(each["load"], each["max_over_mean"], strict=True):
            assert ratio == pytest.approx(max(load) / (sum(load) / 4))
        assert all(0 < entropy <= np.log(4) + 1e-6 for entropy in each["entropy"])
        assert all(value >= 0.9 for value in each["aux_loss"])
        assert all(value > 0 for value in each["z_loss"])
    # Nine steps of 0.01, each up, down or none.
    assert all(-0.0901 <= low < high <= 0.0901 for low, high in found[-1]["bias_range"])
    assert "Experts" in write_report(load_run(tmp_path / "run")).read_text(encoding="utf-8")


def test_run_without_bias_or_experts_says_so(tmp_path: Path) -> None:
    plain = EXPERTS | {"model__selection_bias": False, "model__bias_rate": 0.0}
    train(tiny_config(tmp_path, **plain, train__steps=3), log=lambda _: None)
    assert records(tmp_path / "run", "train")[0]["moe"]["bias_range"] is None
    train(tiny_config(tmp_path, run__dir=str(tmp_path / "gpt"), train__steps=3), log=lambda _: None)
    assert "moe" not in records(tmp_path / "gpt", "train")[0]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_killed_run_of_an_moe_ends_like_one_that_never_was(tmp_path: Path, optimizer: str) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = write_config(tmp_path / "whole", **EXPERTS, optim__name=optimizer)
    assert run_command(whole, cache=cache)[0] == 0
    config = write_config(tmp_path / "broken", **EXPERTS, optim__name=optimizer)
    stop = "SIGKILL,forge_mlx.train.step:TrainStep.update,5"
    assert run_command(config, cache=cache, stop=stop)[0] == -signal.SIGKILL
    assert run_command(config, cache=cache)[0] == 0
    one, other = tmp_path / "whole/run", tmp_path / "broken/run"
    assert arrays(one / "final/model.safetensors") == arrays(other / "final/model.safetensors")
    assert records(one, "train", "eval", "sample") == records(other, "train", "eval", "sample")
    saved = load_checkpoint(other / "checkpoints/step-00000009").weights
    assert mx.abs(saved["layers.1.mlp.router.selection_bias"]).max().item() > 0
