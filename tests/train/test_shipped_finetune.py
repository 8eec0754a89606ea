"""Each shipped config of fine-tuning is trained with for a few steps, on its own examples."""

import json
import math

from forge_mlx.data.chat import render_prompt
from forge_mlx.opened_model import open_model
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
import mlx.core as mx
import pytest
from shipped_configs import FINETUNING, ROOT, on_tiny_checkpoint
from tiny_run import records

EXAMPLES = ROOT / "models" / "configs" / "examples"
# The others take as long; with these all kinds of data and of results are there.
FAST = ("lora", "dpo")
STEPS = ["train.steps=8", "train.batch_size=2", "train.log_every=1", "train.sample_tokens=4", "run.device=cpu"]
# A checkpoint of random weights needs larger steps than one that knows a language.
RATE = ["optim.lr=3e-3", "optim.warmup_steps=0", "optim.schedule=constant"]


@pytest.fixture(autouse=True)
def _at_the_root_and_uncompiled(monkeypatch):
    """The configs name their examples from there; a few steps are not worth the compiler's seconds."""
    monkeypatch.chdir(ROOT)
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in FAST else [pytest.mark.slow]) for path in FINETUNING],
)
def test_a_shipped_config_trains_on_its_examples(path, tmp_path):
    base = on_tiny_checkpoint(path, tmp_path)
    config = load_config(path, [*base, *STEPS, *RATE, f"run.dir={tmp_path / 'run'}"])
    lines = []
    outcome = train(config, log=lines.append)
    losses = [record["loss"] for record in records(outcome.folder, "train")]
    assert len(losses) == 8
    assert losses[-1] < 0.98 * losses[0]
    assert math.isfinite(outcome.loss)
    (facts,) = [record["corpus"] for record in records(outcome.folder, "setup")]
    assert (facts["examples"], facts["dropped"], facts["split"]) == (64, 0, 0)
    final = outcome.folder / "final"
    is_adapter = config.adapter is not None and config.qat is None
    assert (final / "adapters.safetensors").is_file() == is_adapter
    assert (final / "model.safetensors").is_file() != is_adapter
    opened = open_model(outcome.folder)
    prompt = render_prompt(opened.tokenizer, [{"role": "user", "content": "What is 1 + 1?"}])
    assert mx.isfinite(opened.model(mx.array([prompt]))).all().item()
    assert {record["step"] for record in records(outcome.folder, "sample")} == {0, 8}


def test_the_two_files_of_examples_ask_the_same_and_prefer_what_is_taught():
    chats, pairs = (
        [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]
        for name in ("chat.jsonl", "pairs.jsonl")
    )
    taught = [(each["messages"][0]["content"], each["messages"][1]["content"]) for each in chats]
    assert taught == [(each["prompt"], each["chosen"]) for each in pairs]
    assert len({question for question, _ in taught}) == len(taught) == 64
    answers = [each["content"] for chat in chats for each in chat["messages"][1::2]]
    assert all(list(json.loads(answer)) == ["answer"] for answer in answers)
    for pair, (_, answer) in zip(pairs, taught, strict=True):
        assert json.loads(answer)["answer"].lower() in pair["rejected"].lower()
