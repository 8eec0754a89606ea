"""Fine-tuning runs from a checkpoint to a folder that others open, by every method."""

import importlib
import json
from pathlib import Path
import shutil
from typing import Any

from forge_mlx.export import main as export
from forge_mlx.hub.pretrained import load_pretrained
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.opened_model import open_model
from forge_mlx.train.loop import train
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny_checkpoint import finetune_config
from tiny_run import arrays, records, trainer_of

LORA: dict[str, Any] = {"adapter": {"rank": 4, "alpha": 8}}
QAT: dict[str, Any] = {"qat": {"bits": 4, "group_size": 32}}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "rslora": {"adapter": {"method": "rslora", "rank": 4, "alpha": 8}},
    "dora": {"adapter": {"method": "dora", "rank": 4, "alpha": 8}},
    "dropout": {"adapter": {"rank": 4, "alpha": 8, "dropout": 0.1}},
    "qlora": {**LORA, "model__quantize": {"bits": 4, "group_size": 32}},
    "qlora-on-codes": {**LORA, "bits": 4},
    "dequantized": {"bits": 4, "model__dequantize": True},
    "qat": QAT,
    "qat-lora": {**LORA, **QAT},
    "qat-lora-on-codes": {**LORA, **QAT, "bits": 4},
    "recomputed": {**LORA, "train__grad_checkpoint": True},
}


def _ignore(_line: str) -> None:
    pass


@pytest.fixture
def uncompiled():
    """A few steps are not worth the compiler's seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "train")]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", METHODS)
def test_a_run_learns_and_leaves_what_mlx_lm_opens(name, tmp_path):
    """mlx-lm's logits of what the run leaves are those of the run's own model."""
    mlx_lm = pytest.importorskip("mlx_lm")
    config = finetune_config(tmp_path, **METHODS[name])
    outcome = train(config, log=_ignore)
    losses = _losses(outcome.folder)
    assert losses[-1] < 0.95 * losses[0]
    final = outcome.folder / "final"
    base = config.model.path
    is_adapter = (final / "adapters.safetensors").exists()
    assert is_adapter == (config.adapter is not None and config.qat is None)
    if is_adapter and config.model.quantize is not None:
        # mlx-lm has no such base in a folder, and makes the same codes of the float one itself.
        peer, _ = mlx_lm.load(base)
        nn.quantize(peer, **config.model.quantize.model_dump(include={"group_size", "bits"}))
        peer = importlib.import_module("mlx_lm.tuner.utils").load_adapters(peer, str(final))
    else:
        peer, _ = mlx_lm.load(base, adapter_path=str(final)) if is_adapter else mlx_lm.load(str(final))
    peer.eval()
    tokens = mx.array([[1, 2, 3, 40, 50, 6]])
    theirs = peer(tokens).astype(mx.float32)
    ours = open_model(outcome.folder).model(tokens).astype(mx.float32)
    assert mx.abs(ours - theirs).max().item() <= 1e-4 * mx.abs(theirs).max().item()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["lora", "dora", "qlora", "qlora-on-codes", "qat-lora"])
def test_what_is_exported_has_its_adapters_merged(name, tmp_path):
    mlx_lm = pytest.importorskip("mlx_lm")
    run = train(finetune_config(tmp_path, **METHODS[name]), log=_ignore).folder
    assert export([str(run), str(tmp_path / "out")]) == 0
    peer, _ = mlx_lm.load(str(tmp_path / "out"))
    peer.eval()
    tokens = mx.array([[1, 2, 3, 40, 50, 6]])
    theirs, ours = peer(tokens).astype(mx.float32), open_model(run).model(tokens).astype(mx.float32)
    # Codes are made anew of a merged weight, but where they were trained for it.
    tolerance = 0.2 if name in ("qlora", "qlora-on-codes") else 1e-4
    assert mx.abs(ours - theirs).max().item() <= tolerance * mx.abs(theirs).max().item()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", ["chat", "prompt_completion", "text", "preference"])
def test_each_format_is_trained_on(kind, tmp_path):
    config = finetune_config(tmp_path, kind, train__steps=10, **LORA)
    outcome = train(config, log=_ignore)
    losses = _losses(outcome.folder)
    assert losses[-1] < losses[0]
    (final,) = [record for record in records(outcome.folder, "eval") if record["final"]]
    if kind == "preference":
        assert losses[0] == pytest.approx(np.log(2), rel=1e-4)
        assert final["accuracy"] == 1
        assert final["margin"] == pytest.approx(final["chosen_reward"] - final["rejected_reward"])
        assert "bits_per_byte" not in final
        assert outcome.bits_per_byte is None
    else:
        assert final["bits_per_byte"] > 0


@pytest.mark.usefixtures("uncompiled")
def test_orpo_needs_no_reference(tmp_path, monkeypatch):
    monkeypatch.setattr("forge_mlx.train.work.find_reference", None)
    config = finetune_config(tmp_path, "preference", train__steps=10, preference={"loss": "orpo"}, **LORA)
    losses = _losses(train(config, log=_ignore).folder)
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("uncompiled")
def test_only_adapters_are_in_checkpoints_and_the_base_stays(tmp_path):
    config = finetune_config(tmp_path, **LORA)
    outcome = train(config, log=_ignore)
    newest = max((outcome.folder / "checkpoints").iterdir())
    names = arrays(newest / "model.safetensors").keys()
    assert names
    assert all(name.endswith(("lora_a", "lora_b")) for name in names)
    before = dict(named_arrays(load_pretrained(config.model.path).model.parameters()))
    trainer = trainer_of(config)
    for _ in range(2):
        trainer.train_step()
    after = dict(named_arrays(trainer.model.parameters()))
    frozen = [name for name in after if name.replace(".linear.", ".") in before]
    assert len(frozen) == len(before)
    assert all(mx.array_equal(after[name], before[name.replace(".linear.", ".")]).item() for name in frozen)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("chat", {"adapter": {"rank": 4, "dropout": 0.1}}),
        ("chat", {}),
        ("preference", LORA),
        ("chat", {**LORA, **QAT, "qat__start_step": 1}),
    ],
    ids=["lora", "full", "dpo", "qat-lora"],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(kind, changes, tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    for steps in (2, 6):
        shorter = finetune_config(parts, kind, **changes, train__steps=steps, optim__schedule="constant")
        train(shorter, log=_ignore)
    constant = tmp_path / "constant"
    constant.mkdir()
    train(finetune_config(constant, kind, **changes, optim__schedule="constant"), log=_ignore)
    for folder in (parts, constant):
        assert (folder / "run" / "final").is_dir()
    left, right = (arrays(next((f / "run" / "final").glob("*.safetensors"))) for f in (parts, constant))
    assert left == right


@pytest.mark.usefixtures("uncompiled")
def test_the_report_has_answers_from_before_and_after(tmp_path):
    outcome = train(finetune_config(tmp_path, **LORA, train__steps=20), log=_ignore)
    samples = records(outcome.folder, "sample")
    prompts = [record["prompt"] for record in samples if record["step"] == 0]
    assert len(prompts) == 2
    assert [record["prompt"] for record in samples if record["step"] == 20] == prompts
    assert {record["expected"] for record in samples} == {"yes!"}
    page = (outcome.folder / "report.html").read_text(encoding="utf-8")
    assert page.count("before training") == page.count("after training") == len(prompts)
    assert samples[0]["text"] != samples[-1]["text"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 4}, r"model\.path must be a checkpoint of floats without adapter, but .* are quantised"),
        ({"bits": 4, **LORA, "model__quantize": {"bits": 4}}, r"model\.quantize must be null with a quantised checkp"),
        ({"train__seq_len": 512}, r"train\.seq_len must be at most the model's longest sequence, 256, but got 512"),
        ({"model__dequantize": True}, r"model\.dequantize must be false with .*, which is not quantised"),
        ({"adapter": {"targets": ["q_prj"]}}, r"q_prj"),
        ({"model__path": "/nowhere/at/all"}, r"/nowhere/at/all"),
        ({"train__sample_prompt": "x" * 300}, r"train\.sample_prompt must be shorter than the model's longest"),
        ({"train__seq_len": 16}, r"all examples must fit into train\.seq_len, 16, but 12 of 12 do not"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_one_clear_line(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        trainer_of(finetune_config(tmp_path, **changes))
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**LORA, "optim__name": "muon"}, r"optim\.name must be adamw with adapter but got muon"),
        ({"model__quantize": {"bits": 4}}, r"model\.quantize must be null without adapter"),
        ({"model__quantize": {"bits": 7}}, r"bits"),
        ({"preference": {"loss": "dpo"}}, r"preference must be null without data\.format: preference"),
        ({"model": {"num_layers": 2}}, r"data\.format must be left out with a new model but got chat"),
        ({"adapter": {"rnk": 4}}, r"adapter\.rnk: there is no such key\. Did you mean adapter\.rank\?"),
        ({"adapter": {"method": "lora2"}}, r"adapter\.method: must be lora, dora or rslora"),
        ({"data__formt": "chat"}, r"data\.formt: there is no such key\. Did you mean data\.format\?"),
        ({"data__format": "chats"}, r"data\.format: must be chat, prompt_completion, text or preference"),
    ],
)
def test_sections_that_do_not_go_together_are_errors_of_the_config(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune_config(tmp_path, **changes)


def test_a_base_that_is_gone_names_its_folder(tmp_path):
    config = finetune_config(tmp_path, **LORA)
    shutil.rmtree(config.model.path)
    with pytest.raises(ValueError, match=r"checkpoint-None"):
        trainer_of(config)


def test_the_config_of_a_run_says_what_it_went_on_from(tmp_path):
    config = finetune_config(tmp_path, **LORA)
    assert json.loads(config.model_dump_json())["model"]["path"] == config.model.path
