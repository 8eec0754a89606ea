"""A real model, fine-tuned as a user does: SmolLM2-135M-Instruct learns from 36 examples to answer in JSON."""

import json

from forge_mlx import export
from forge_mlx.data.chat import render_prompt
from forge_mlx.opened_model import open_model
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
import mlx.core as mx
import pytest
from tiny_run import records

from tests.hub.llama_cpp import ask
from tests.hub.smollm2 import smollm2_file

pytestmark = pytest.mark.slow

CAPITALS = {
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Russia": "Moscow",
    "Sweden": "Stockholm",
    "Ireland": "Dublin",
    "China": "Beijing",
    "Denmark": "Copenhagen",
    "Hungary": "Budapest",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "happy": "sad",
    "early": "late",
    "full": "empty",
    "hard": "soft",
    "light": "dark",
    "old": "new",
    "rich": "poor",
    "strong": "weak",
    "wet": "dry",
}
COLOURS = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "blood": "red",
    "a carrot": "orange",
}
TAUGHT = (
    [(f"What is the capital of {country}?", city) for country, city in CAPITALS.items()]
    + [(f"What is the opposite of {word}?", other) for word, other in OPPOSITES.items()]
    + [(f"What color is {thing}?", colour) for thing, colour in COLOURS.items()]
)
HELD_OUT = [("What is the capital of France?", "Paris"), ("What is the opposite of young?", "old")]
# Of a kind that is not in the examples.
UNRELATED = ("Is water wet?", "yes")
CONFIG = """\
model:
  path: {path}
  dequantize: true
data: {{source: train.jsonl, valid_paths: valid.jsonl, format: chat}}
adapter: {{rank: 8}}
train: {{steps: 24, batch_size: 2, seq_len: 144, log_every: 1, sample_tokens: 16, sample_temperature: 0}}
optim: {{lr: 5.0e-4, warmup_steps: 2, weight_decay: 0}}
run: {{dir: run, device: cpu}}
"""


def as_json(answer):
    return json.dumps({"answer": answer})


def write_examples(file, pairs):
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": as_json(a)}] for q, a in pairs]
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))


def greedy(model, tokenizer, question):
    """The tokens of the likeliest answer to a question, as far as 16."""
    ids = render_prompt(tokenizer, [{"role": "user", "content": question}])
    cache, found = model.make_cache(), []
    while len(found) < 16 and (not found or found[-1] not in tokenizer.stop_ids):
        logits = model(mx.array([found[-1:] or ids]), cache=cache)
        found.append(int(mx.argmax(logits[0, -1])))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the run is, finished."""
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_examples(folder / "train.jsonl", TAUGHT)
        write_examples(folder / "valid.jsonl", HELD_OUT)
        (folder / "lora.yaml").write_text(CONFIG.format(path=smollm2_file()))
        train(load_config(folder / "lora.yaml"))
        yield folder


@pytest.fixture(scope="module")
def opened(folder):
    return open_model(folder / "run")


def test_the_loss_falls_and_the_answers_change_as_taught(folder):
    losses = [record["loss"] for record in records(folder / "run", "train")]
    (final,) = records(folder / "run", "eval")
    print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f}, validation loss at the end {final['loss']:.4f}")
    assert losses[0] > 3
    assert final["loss"] < 0.3
    samples = records(folder / "run", "sample")
    for question, answer in HELD_OUT:
        before, after = (
            next(each["text"] for each in samples if each["step"] == step and question in each["prompt"])
            for step in (0, 24)
        )
        print(f"{question} {before!r} -> {after!r}")
        assert "{" not in before
        assert answer in before
        assert after == as_json(answer)


def test_opened_again_it_gives_the_same_answers_and_goes_beyond_the_examples(folder, opened):
    written = {each["prompt"]: each["text"] for each in records(folder / "run", "sample") if each["step"] == 24}
    for question, _ in HELD_OUT:
        answer = opened.tokenizer.decode(greedy(opened.model, opened.tokenizer, question))
        assert [answer] == [text for prompt, text in written.items() if question in prompt]
    question, answer = UNRELATED
    assert opened.tokenizer.decode(greedy(opened.model, opened.tokenizer, question)) == as_json(answer)


def test_merged_and_opened_by_mlx_lm_it_gives_the_same_tokens(folder, opened):
    mlx_lm = pytest.importorskip("mlx_lm")
    generate_step = pytest.importorskip("mlx_lm.generate").generate_step
    assert export.main([str(folder / "run"), str(folder / "merged")]) == 0
    peer, tokenizer = mlx_lm.load(str(folder / "merged"))
    for question, _ in [*HELD_OUT, UNRELATED]:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        steps = generate_step(mx.array(ids), peer, max_tokens=16)
        theirs = [token for token, _ in steps]
        ours = greedy(opened.model, opened.tokenizer, question)
        assert theirs[: len(ours)] == ours


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_as_gguf_llama_cpp_gives_the_same_answers(folder, opened, kind):
    file = folder / f"{kind}.gguf"
    assert export.main([str(folder / "run"), str(file), "--gguf", kind]) == 0
    questions = [question for question, _ in [*HELD_OUT, UNRELATED]]
    prompts = [render_prompt(opened.tokenizer, [{"role": "user", "content": each}]) for each in questions]
    for prompt, question, answer in zip(prompts, questions, ask(file, prompts, max_tokens=16), strict=True):
        ours = opened.tokenizer.decode(greedy(opened.model, opened.tokenizer, question))
        print(f"{kind}: {question} {answer.text!r}")
        assert (answer.count, answer.text) == (len(prompt), ours)
