"""What a fine-tuning run leaves for the next start, and for whoever opens it elsewhere."""

import json
from pathlib import Path
import re
import shutil

from forge_mlx.adapter import main as merge
from forge_mlx.data.chat import render_prompt
from forge_mlx.hub.adapter_files import load_adapters
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.fingerprint import weights_fingerprint
from forge_mlx.hub.native import ModelFolderError
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.opened_model import open_model
from forge_mlx.train.dry_run import describe_run
from forge_mlx.train.folder import RunFolder, RunFolderError
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
from forge_mlx.train.trainer import Trainer
import mlx.core as mx
import pytest
from tiny_checkpoint import SHAPE, finetune_config, finetune_values, write_checkpoint
from tiny_run import arrays, records, trainer_of

LORA = {"adapter": {"rank": 2}}
MESSAGES = [{"role": "user", "content": "is it so?"}]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _ignore(_line: str) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    """A few steps are not worth the compiler's seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _other_base(folder: Path) -> Path:
    """A checkpoint of the same shape with other weights, in the place of what is there."""
    tokenizer = load_pretrained(folder).tokenizer
    shutil.rmtree(folder)
    save_pretrained(folder, GPT(GPTConfig(**SHAPE), seed=2), tokenizer, log=_ignore)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a base, a template, and a run of two steps that names both from there."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.jinja").write_text(TEMPLATE, encoding="utf-8")
    values = finetune_values(folder, **LORA, data__chat_template="mine.jinja", train__steps=2)
    values["model"]["path"] = "checkpoint-None"
    (folder / "relative.yaml").write_text(json.dumps(values), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(load_config(folder / "relative.yaml"), log=_ignore)
    return folder


@pytest.fixture
def copied(finished, tmp_path, monkeypatch):
    """A copy of it as the current folder."""
    folder = tmp_path / "copied"
    shutil.copytree(finished, folder)
    monkeypatch.chdir(folder)
    return folder


def _says(opened) -> str:
    return opened.tokenizer.decode(render_prompt(opened.tokenizer, MESSAGES))


def test_a_run_opens_from_any_folder_with_the_template_that_is_gone(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    template = (finished / "mine.jinja").rename(finished / "gone.jinja")
    try:
        run, base = finished / "run", finished / "checkpoint-None"
        for opened in (
            open_model(run),
            open_model(run / "final"),
            open_model(max((run / "checkpoints").iterdir())),
            open_model(base, adapter=run / "final"),
        ):
            assert _says(opened) == "<user>is it so?<assistant>"
        assert _says(open_model(base)) != "<user>is it so?<assistant>"
    finally:
        template.rename(finished / "mine.jinja")


def test_merged_adapters_have_the_template_that_they_were_trained_in(finished, tmp_path):
    assert merge(["merge", str(finished / "run" / "final"), str(tmp_path / "merged")]) == 0
    assert _says(open_model(tmp_path / "merged")) == "<user>is it so?<assistant>"


def test_a_base_is_named_by_its_whole_path_and_may_be_found_elsewhere(copied, finished):
    base = str(finished / "checkpoint-None")
    assert load_config(copied / "run" / "config.yaml").model.path == base
    noted = json.loads((copied / "run" / "final" / "adapter_config.json").read_text())
    assert noted["model"] == base
    # The same weights in another place; in their old one nothing has changed at all.
    for changes, said in ([f"model.path={base}"], "resumed at step 2"), ([], "changed model.path: "):
        lines: list[str] = []
        config = load_config(copied / "relative.yaml", [f"run.dir={copied / 'run'}", "train.steps=3", *changes])
        train(config, log=lines.append)
        (resumed,) = [line for line in lines if line.startswith("resumed at step")]
        assert said in resumed
        assert ("model.path" in resumed) == (not changes)
        shutil.rmtree(copied / "run")
        shutil.copytree(finished / "run", copied / "run")


def test_the_same_base_spelt_otherwise_is_no_change(finished, monkeypatch):
    monkeypatch.chdir(finished)
    run = RunFolder(finished / "run")
    for path in ("checkpoint-None", "./checkpoint-None/", str(finished / "run" / ".." / "checkpoint-None")):
        config = load_config(finished / "relative.yaml", [f"model.path={path}"])
        assert run.changed_keys(config) == []


def test_a_run_does_not_go_on_from_another_base(copied):
    _other_base(copied / "checkpoint-None")
    config = load_config(copied / "relative.yaml", [f"run.dir={copied / 'run'}", "train.steps=3"])
    said = r"does not fit: the weights of checkpoint-None are not those that this run began from"
    with pytest.raises(RunFolderError, match=said):
        train(config, log=_ignore)


def test_a_dry_run_refuses_of_a_folder_what_a_start_does_and_leaves_it_as_it_is(copied):
    run = copied / "run"
    shutil.rmtree(run / "checkpoints")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    overrides = [f"run.dir={run}", f"model.path={copied / 'checkpoint-None'}"]
    config = load_config(copied / "relative.yaml", [*overrides, "train.steps=3"])
    for start in (describe_run, train):
        with pytest.raises(RunFolderError, match="holds a final model but no checkpoint to go on from"):
            start(config)
    describe_run(load_config(copied / "relative.yaml", overrides))
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != ".lock"} == {
        file: content for file, content in before.items() if file.name != ".lock"
    }


def test_what_is_opened_on_another_base_says_so(copied, finished):
    text = (copied / "run" / "config.yaml").read_text()
    (copied / "run" / "config.yaml").write_text(text.replace(str(finished), str(copied)))
    final, checkpoint = copied / "run" / "final", max((copied / "run" / "checkpoints").iterdir())
    lines: list[str] = []
    for path, adapter in ((copied / "run", None), (checkpoint, None), (copied / "checkpoint-None", final)):
        open_model(path, adapter=adapter, log=lines.append)
    assert lines == []
    _other_base(copied / "checkpoint-None")
    for path, adapter in ((copied / "run", None), (checkpoint, None), (copied / "checkpoint-None", final)):
        open_model(path, adapter=adapter, log=lines.append)
    assert len(lines) == 3
    assert all("these adapters were trained on other weights than those of " in line for line in lines)


def test_adapters_keep_the_revision_of_their_base(tmp_path):
    trainer = trainer_of(finetune_config(tmp_path, **LORA))
    model = trainer.config.model.model_copy(update={"revision": "v1.2"})
    config = trainer.config.model_copy(update={"model": model})
    trainer.work = trainer.work.__class__(**{**vars(trainer.work), "config": config})
    trainer.folder.path.mkdir()
    trainer.save_final()
    noted = json.loads((trainer.folder.final / "adapter_config.json").read_text())["forge_mlx"]
    assert noted["revision"] == "v1.2"
    assert noted["base_fingerprint"] == weights_fingerprint(Path(model.path))


def test_a_fingerprint_is_of_all_content_and_of_no_name(tmp_path):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name)
    found = weights_fingerprint(tmp_path / "a")
    assert weights_fingerprint(tmp_path / "b") == found
    file = tmp_path / "b" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_fingerprint(tmp_path / "b") != found
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"must hold model\.safetensors"):
        weights_fingerprint(tmp_path / "a")


def test_a_checkpoint_from_before_the_fingerprint_is_gone_on_from(copied):
    (checkpoint,) = (copied / "run" / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["state"].pop("base") == weights_fingerprint(copied / "checkpoint-None")
    (checkpoint / "state.json").write_text(json.dumps(state))
    lines: list[str] = []
    train(load_config(copied / "relative.yaml", [f"run.dir={copied / 'run'}", "train.steps=3"]), log=lines.append)
    assert any(line.startswith("resumed at step 2") for line in lines)


def _on_a_gpu(run: Path) -> None:
    """Say in a run's config that it was made on a GPU, which here is none."""
    text = (run / "config.yaml").read_text()
    assert "device: cpu" in text
    (run / "config.yaml").write_text(text.replace("device: cpu", "device: gpu"))


@pytest.mark.parametrize("changes", [LORA, {"qat": {"bits": 4, "group_size": 32}}], ids=["lora", "qat"])
def test_a_run_of_a_gpu_opens_on_a_cpu_in_float32(changes, tmp_path):
    config = finetune_config(tmp_path, **changes, run__dtype="bfloat16", train__steps=1, train__sample_tokens=1)
    run = train(config, log=_ignore).folder
    _on_a_gpu(run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    tokens = mx.array([[1, 2, 3, 40]])
    logits = {path: open_model(path).model(tokens) for path in (run, checkpoint)}
    assert {each.dtype for each in logits.values()} == {mx.float32}
    assert mx.array_equal(*logits.values()).item()
    if "qat" in changes:
        # The codes are those of the 16-bit weights that training saw.
        own = dict(named_arrays(open_model(checkpoint, keep_dtype=True).model.parameters()))
        theirs = dict(named_arrays(load_pretrained(run / "final").model.parameters()))
        assert own.keys() == theirs.keys()
        assert all(own[name].dtype == array.dtype for name, array in theirs.items())
        assert all(mx.array_equal(own[name], array).item() for name, array in theirs.items())
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("dtype: bfloat16", "dtype: auto"))
    with pytest.raises(ModelFolderError, match=r"config\.yaml: run\.dtype must be what the run was trained in"):
        open_model(checkpoint)


def test_a_checkpoint_of_another_rank_is_named(copied):
    file = copied / "run" / "config.yaml"
    text = file.read_text()
    assert text.count("rank: 2") == 1
    file.write_text(text.replace("rank: 2", "rank: 3"))
    (checkpoint,) = (copied / "run" / "checkpoints").iterdir()
    shapes = r"\.lora_[ab] must have the shape \((\d+, 3|3, \d+)\) but has \((\d+, 2|2, \d+)\)\.$"
    with pytest.raises(ValueError, match=rf"^{re.escape(str(checkpoint))}: does not fit \S+config\.yaml: \S+{shapes}"):
        open_model(checkpoint)


def test_adapters_are_loaded_without_a_word_where_nothing_is_known_of_their_base(copied):
    file = copied / "run" / "final" / "adapter_config.json"
    values = json.loads(file.read_text())
    del values["forge_mlx"]
    file.write_text(json.dumps(values))
    lines: list[str] = []
    model = load_pretrained(_other_base(copied / "checkpoint-None")).model
    load_adapters(file.parent, model, base=copied / "checkpoint-None", log=lines.append)
    assert lines == []


def test_the_reference_of_pairs_is_computed_once(tmp_path, monkeypatch):
    config = finetune_config(tmp_path, "preference", **LORA, train__steps=2)
    lines: list[str] = []
    run = train(config, log=lines.append).folder
    begun = "reference: computing the log-probabilities of 12 pairs under the model before training ..."
    assert begun in lines
    longer = finetune_config(tmp_path, "preference", **LORA, train__steps=3)
    kept = arrays(run / "reference.safetensors")
    assert {name: array[1] for name, array in kept.items()} == {"train": (10, 2), "valid": (2, 2)}
    again = trainer_of(longer)
    with monkeypatch.context() as patch:
        patch.setattr("forge_mlx.train.reference.reference_log_probs", None)
        lines.clear()
        found = trainer_of(longer)
        train(longer, log=lines.append)
    assert (again.rows._reference == found.rows._reference).all()
    assert begun not in lines
    assert any(line.startswith("reference: the log-probabilities of 12 pairs") for line in lines)


@pytest.mark.parametrize("spoilt", ["another base", "another dtype", "cut short", "other pairs"])
def test_a_reference_of_something_else_is_not_used(spoilt, tmp_path):
    changes = {**LORA, "train__steps": 1}
    run = train(finetune_config(tmp_path, "preference", **changes), log=_ignore).folder
    kept = (run / "reference.safetensors").read_bytes()
    shutil.rmtree(run)
    run.mkdir()
    (run / "reference.safetensors").write_bytes(kept[:-8] if spoilt == "cut short" else kept)
    config = finetune_config(tmp_path, "preference", **changes)
    assert not trainer_of(config).work.reference.is_new or spoilt == "cut short"
    if spoilt == "another base":
        _other_base(tmp_path / "checkpoint-None")
    elif spoilt == "another dtype":
        config = finetune_config(tmp_path, "preference", **changes, run__dtype="bfloat16")
    elif spoilt == "other pairs":
        file = tmp_path / "preference.jsonl"
        file.write_text(file.read_text().replace("never", "nevar"))
    assert trainer_of(config).work.reference.is_new


def test_samples_of_a_start_without_a_checkpoint_are_not_there_twice(tmp_path, monkeypatch):
    config = finetune_config(tmp_path, **LORA, train__steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config, log=_ignore)
    before = records(config.run.dir, "sample")
    assert {record["step"] for record in before} == {0}
    train(config, log=_ignore)
    assert [record for record in records(config.run.dir, "sample") if record["step"] == 0] == before
