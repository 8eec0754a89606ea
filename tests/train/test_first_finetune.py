"""What a first fine-tuning run has: few examples, defaults, adapters wider than the model; and what it is told."""

import json

from forge_mlx.data.config import DataConfig
from forge_mlx.train import __main__ as train_command
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
import mlx.core as mx
import pytest
from ruamel.yaml import YAML
from tiny_checkpoint import finetune_config, finetune_values
from tiny_run import records

LORA = {"adapter": {"rank": 2}}


@pytest.fixture(autouse=True)
def uncompiled():
    """A few steps are not worth the compiler's seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_fewer_examples_than_a_batch_has_rows_train_and_go_on(tmp_path):
    few = {
        "data__max_examples": 4,
        "data__valid_fraction": 0.05,
        "data__packing": False,
        "train__batch_size": 8,
        "train__steps": 4,
        "optim": {"lr": 1e-2, "schedule": "constant"},
        **LORA,
    }
    said = []
    straight = finetune_config(tmp_path, **few, run__dir=str(tmp_path / "straight"))
    train(straight, log=said.append)
    assert "data.valid_fraction 0.05 of 4 examples is less than one; the last is held out to validate on" in " ".join(
        said
    )
    assert "3 rows to train on, fewer than train.batch_size, 8: a batch takes those of several epochs" in said
    for steps in (2, 4):
        train(finetune_config(tmp_path, **{**few, "train__steps": steps}), log=lambda _: None)
    losses = [[each["loss"] for each in records(tmp_path / run, "train")] for run in ("straight", "run")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_samples_of_examples_are_greedy_by_default(tmp_path):
    config = finetune_config(tmp_path, **LORA, train__sample_temperature=None, train__steps=1)
    assert config.sample_temperature == 0
    assert finetune_config(tmp_path, **LORA, train__sample_temperature=0.3).sample_temperature == 0.3
    corpus = config.model_copy(update={"data": DataConfig(source=["stdlib"])})
    assert corpus.sample_temperature == 0.7
    train(config, log=lambda _: None)
    written = YAML(typ="safe", pure=True).load((tmp_path / "run" / "config.yaml").read_text())
    assert written["train"]["sample_temperature"] == 0.0


@pytest.mark.parametrize("in_chat", [True, False])
def test_pairs_of_chats_are_talked_to_and_their_loss_is_no_unit(tmp_path, call_main, in_chat):
    said = [{"role": "user", "content": "hi"}] if in_chat else "hi"
    answers = {name: [{"role": "assistant", "content": name}] if in_chat else name for name in ("chosen", "rejected")}
    values = finetune_values(tmp_path, "preference", **LORA, preference={"loss": "orpo"}, train__steps=1)
    (tmp_path / "preference.jsonl").write_text(f"{json.dumps({'prompt': said, **answers})}\n" * 3)
    (tmp_path / "c.yaml").write_text(json.dumps(values))
    # The second time the run has finished.
    for _ in range(2):
        status, out, err = call_main(train_command.main, str(tmp_path / "c.yaml"))
        assert status == 0, err
        (following,) = [line for line in out.splitlines() if line.startswith("next:")]
        assert following.endswith(" --chat") == in_chat
        assert (" --prompt " in following) != in_chat
        (measured,) = [line for line in out.splitlines() if line.startswith("validation:")]
        assert " a pair, the chosen answer preferred in " in measured
        assert measured.startswith("validation: loss ")
        assert "nats" not in measured


def test_adapters_wider_than_a_layer_are_said(tmp_path):
    said = []
    train(finetune_config(tmp_path, adapter={"rank": 65}, train__steps=1), log=said.append)
    (line,) = [line for line in said if "adapter.rank" in line]
    assert line.startswith("WARNING: adapter.rank 65 is above the width of 14 layers, layers.0.mlp.down_proj first: ")
    said.clear()
    config = finetune_config(tmp_path, adapter={"rank": 64}, train__steps=1, run__dir=str(tmp_path / "narrow"))
    train(config, log=said.append)
    assert not any("adapter.rank" in line for line in said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.format=chatt", "Did you mean chat? (What an example is)"),
        ("model.num_layers=3", "With model.path the checkpoint says the model's shape. Leave the key out."),
        ("model.revison=main", "Did you mean model.revision?"),
    ],
)
def test_what_is_wrong_with_a_key_is_short(tmp_path, override, said):
    finetune_config(tmp_path)
    with pytest.raises(ValueError, match="command line") as caught:
        load_config(tmp_path / "finetune.yaml", [override])
    assert str(caught.value).endswith(said)
    assert len(str(caught.value)) < 200
