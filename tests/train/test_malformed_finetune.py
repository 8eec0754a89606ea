"""What a person gets wrong when fine-tuning: each ends a command with status 2, one line, and nothing written."""

from collections.abc import Callable
import gzip
import json
from pathlib import Path
import re
import shutil

from forge_mlx import evaluate, export, generate
from forge_mlx.data import __main__ as data_command
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.gguf_write import write_gguf
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.train import __main__ as train_command
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
import mlx.core as mx
import numpy as np
import pytest
from tiny_checkpoint import SHAPE, finetune_values, write_checkpoint, write_examples
from tiny_run import tree

Spoil = Callable[[Path], object]
WEIGHTS = "base/model.safetensors"
Q_PROJ = "layers.1.self_attn.q_proj.weight"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes!"}]
PAIR = {"prompt": "hi", "chosen": "yes!", "rejected": "no"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A base as a folder and as a GGUF file, examples of every format, a config, and a finished run of it."""
    folder = tmp_path_factory.mktemp("sound")
    write_checkpoint(folder / "base")
    base = load_pretrained(folder / "base")
    tokenizer = Tokenizer.train([f"{number} is a number\n" for number in range(500)], kind="bpe", vocab_size=288)
    write_gguf(folder / "base.gguf", base.model, tokenizer, kind="f16")
    other = GPT(GPTConfig(**SHAPE | {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64}), seed=2)
    save_pretrained(folder / "other", other, base.tokenizer)
    for kind in ("chat", "preference", "prompt_completion", "text"):
        write_examples(folder, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        values = finetune_values(folder, adapter={"rank": 2}, train__steps=1)
        shutil.rmtree(folder / "checkpoint-None")
        values |= {"run": {"dir": "run", "device": "cpu"}, "model": {"path": "base"}}
        values["data"] |= {"source": "chat.jsonl"}
        (folder / "lora.yaml").write_text(json.dumps(values))
        mx.disable_compile()
        train(load_config(folder / "lora.yaml"), log=lambda _: None)
        mx.enable_compile()
    return folder


@pytest.fixture
def here(sound, tmp_path, monkeypatch):
    """A copy of it as the current folder, where the hub is not asked."""
    folder = tmp_path / "here"
    shutil.copytree(sound, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def lines(*examples: object, name: str = "chat.jsonl", at: int = 2) -> Spoil:
    """Put examples, or what is none, behind the first ones of a file."""

    def spoil(folder: Path) -> None:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in examples]
        known = (folder / name).read_text().splitlines()
        (folder / name).write_text("\n".join([*known[:at], *texts, *known[at:]]) + "\n")

    return spoil


def chat(*messages: object) -> Spoil:
    """The third example is a conversation of these messages."""
    return lines({"messages": list(messages)})


def file(name: str, content: bytes) -> Spoil:
    """Write a file, or write over one."""
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, keep: int) -> Spoil:
    """Keep the beginning of a file."""
    return lambda folder: file(name, (folder / name).read_bytes()[:keep])(folder)


def gone(*names: str) -> Spoil:
    """Remove files."""
    return lambda folder: [(folder / name).unlink() for name in names]


def keys(name: str, **changes: object) -> Spoil:
    """Change keys of a JSON file of the base; None removes one."""

    def spoil(folder: Path) -> None:
        values = json.loads((folder / "base" / name).read_text()) | changes
        values = {key: value for key, value in values.items() if value is not None}
        (folder / "base" / name).write_text(json.dumps(values))

    return spoil


def tensors(**changes: mx.array | None) -> Spoil:
    """Change tensors of the base; None removes one."""

    def spoil(folder: Path) -> None:
        found = {name: mx.array(np.array(array)) for name, array in mx.load(str(folder / WEIGHTS)).items()} | changes
        mx.save_safetensors(str(folder / WEIGHTS), {name: each for name, each in found.items() if each is not None})

    return spoil


def pickle_alone(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "base" / "pytorch_model.bin")


def index_that_leaves(folder: Path) -> None:
    names = list(mx.load(str(folder / WEIGHTS)))
    (folder / WEIGHTS).rename(folder / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "base" / "model.safetensors.index.json").write_text(json.dumps(index))


def few_rows(count: int) -> Spoil:
    """The base has a table of so many tokens. The tokenizer has 256 characters and then three special ones."""

    def spoil(folder: Path) -> None:
        keys("config.json", vocab_size=count)(folder)
        tensors(**{"model.embed_tokens.weight": mx.zeros((count, 64))})(folder)

    return spoil


def nothing(_folder: Path) -> None:
    pass


PREFERENCE = ("data.format=preference", "data.source=preference.jsonl")
COMPLETION = ("data.format=prompt_completion", "data.source=prompt_completion.jsonl")
TEXT = ("data.format=text", "data.source=text.jsonl")
GGUF = ("model.path=base.gguf",)

# What is wrong -> what is done to the files, the overrides, and what the one line must say.
TRAINING: dict[str, tuple[Spoil, tuple[str, ...], str]] = {
    # The examples.
    "a line that is no JSON": (lines('{"messages": ['), (), r"chat\.jsonl:3: .*JSON"),
    "a line that is a list": (lines("[1, 2]"), (), r"chat\.jsonl:3: .*object"),
    "two lines that are wrong": (lines("{", "{"), (), r"chat\.jsonl:3: .*1 more is malformed \(.*chat\.jsonl:4\)"),
    "a field that is missing": (
        lines({"mesages": TALK}),
        (),
        r"chat\.jsonl:3: .*'messages'.*messages_field: mesages\?",
    ),
    "messages that are a text": (lines({"messages": "hi"}), (), r"chat\.jsonl:3: .*'messages' must be a list"),
    "no message": (chat(), (), r"chat\.jsonl:3: .*'messages' must hold at least one message"),
    "no turn of the assistant": (chat(TALK[0]), (), r"chat\.jsonl:3: .*assistant"),
    "a role that nobody has": (chat(TALK[0], {"role": "asistant", "content": "hi"}), (), r"chat\.jsonl:3: .*asistant"),
    "a message without a role": (chat({"content": "hi"}, TALK[1]), (), r"chat\.jsonl:3: .*role"),
    "a message without content": (chat(TALK[0], {"role": "assistant"}), (), r"chat\.jsonl:3: .*content"),
    "content that is a number": (chat(TALK[0], {"role": "assistant", "content": 3}), (), r"chat\.jsonl:3: .*content"),
    "half a surrogate pair": (lines(r'{"messages": "\ud800"}'), (), r"chat\.jsonl:3: .*lone surrogate"),
    "an empty file": (file("chat.jsonl", b""), (), r"source must hold examples but its 1 file \(chat\.jsonl\)"),
    "a file of blank lines": (file("chat.jsonl", b"\n\n \n"), (), r"source must hold examples but its 1 file"),
    "one example": (file("chat.jsonl", json.dumps({"messages": TALK}).encode()), (), r"at least 2 examples.*holds 1"),
    "a binary file": (file("chat.jsonl", bytes(range(256)) * 4), (), r"chat\.jsonl:1: .*4 more are malformed"),
    "a damaged gzip file": (
        file("chat.jsonl.gz", gzip.compress(b'{"messages": []}\n' * 99)[:40]),
        ("data.source=chat.jsonl.gz",),
        r"chat\.jsonl\.gz",
    ),
    "a damaged Parquet file": (file("chat.parquet", b"PAR1" + b"x" * 99), ("data.source=chat.parquet",), r"\.parquet"),
    "a file of another kind": (file("chat.csv", b"a,b\n"), ("data.source=chat.csv",), r"end in .*but got chat\.csv"),
    "no such file": (nothing, ("data.source=chats.jsonl",), r"chats\.jsonl"),
    "a pattern that fits no file": (nothing, ("data.source=*.ndjson",), r"\*\.ndjson"),
    "validation on some of what is trained on": (
        nothing,
        ("data.valid_paths=[chat.jsonl,prompt_completion.jsonl]",),
        r"valid_paths .*1 are in both",
    ),
    "an example that is too long": (
        chat(TALK[0], {"role": "assistant", "content": "y" * 200}),
        (),
        r"train\.seq_len, 96, but 1 of 13 do not.*chat\.jsonl:3.*Raise train\.seq_len to",
    ),
    "a pair whose answers are the same": (
        lines(PAIR | {"rejected": "yes!"}, name="preference.jsonl"),
        PREFERENCE,
        r"preference\.jsonl:3: .*'chosen' and 'rejected' must differ",
    ),
    "a pair without a worse answer": (
        lines({"prompt": "hi", "chosen": "yes!"}, name="preference.jsonl"),
        PREFERENCE,
        r"preference\.jsonl:3: .*'rejected'",
    ),
    "a pair of other prompts": (
        lines(
            {"chosen": TALK, "rejected": [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "no"}]},
            name="preference.jsonl",
        ),
        PREFERENCE,
        r"preference\.jsonl:3: .*\[0\] differs",
    ),
    "a completion that is empty": (
        lines({"prompt": "hi", "completion": ""}, name="prompt_completion.jsonl"),
        COMPLETION,
        r"prompt_completion\.jsonl:3: .*'completion' must not be empty",
    ),
    "a text that is a number": (lines({"text": 3}, name="text.jsonl"), TEXT, r"text\.jsonl:3: .*'text' must be text"),
    # The base.
    "no such base": (nothing, ("model.path=/nowhere/model",), r"/nowhere/model: there is no such"),
    "a model of the hub that is not here": (
        nothing,
        ("model.path=owner/model",),
        r"owner/model: .*HF_HUB_OFFLINE is 1",
    ),
    "a folder that is no model": (nothing, ("model.path=run",), r"run: must hold config\.json"),
    "a GGUF file cut short": (cut("base.gguf", 40_000), GGUF, r"base\.gguf: is cut short: token_embd"),
    "a GGUF file that is none": (file("base.gguf", b"PK\3\4" + bytes(99)), GGUF, r"base\.gguf: .*GGUF"),
    "weights cut short": (cut(WEIGHTS, 20_000), (), r"base/model\.safetensors: must end with"),
    "a tensor that is missing": (tensors(**{f"model.{Q_PROJ}": None}), (), rf"base: .*1 missing: {re.escape(Q_PROJ)}"),
    "a tensor too many": (tensors(**{"model.extra.weight": mx.ones(3)}), (), r"base: .*extra\.weight"),
    "a tensor that is not finite": (
        tensors(**{f"model.{Q_PROJ}": mx.full((64, 64), float("nan"))}),
        (),
        rf"model\.path must be .* finite weights but {re.escape(Q_PROJ)} of base has NaN or infinity\. Take an intact",
    ),
    "a tensor that float16 does not hold": (
        tensors(**{f"model.{Q_PROJ}": mx.full((64, 64), 7e4), "model.norm.weight": mx.full((64,), float("inf"))}),
        ("run.dtype=float16",),
        r"proj\.weight and 1 more tensor .*or another run\.dtype: float16 ends at 65,504",
    ),
    "a tensor of another shape": (
        tensors(**{f"model.{Q_PROJ}": mx.ones((64, 32))}),
        (),
        rf"base: .*{re.escape(Q_PROJ)}.*64",
    ),
    "a family that is not known": (keys("config.json", model_type="mamba"), (), r"model_type must be among .*'mamba'"),
    "a config that is no JSON": (cut("base/config.json", 30), (), r"base/config\.json: must be JSON"),
    "a pickle alone": (pickle_alone, (), r"pytorch_model\.bin, a pickle"),
    "an index that leaves the folder": (index_that_leaves, (), r"\.\./outside\.safetensors"),
    "no weights": (gone(WEIGHTS), (), r"base: must hold model\.safetensors"),
    "no tokenizer": (gone("base/tokenizer.json"), (), r"base.*tokenizer\.json"),
    "a tokenizer cut short": (cut("base/tokenizer.json", 200), (), r"tokenizer\.json of .*base"),
    "a table smaller than the vocabulary": (few_rows(100), (), r"base: vocab_size must be at least 256.*says 100"),
    "a special token without a row": (
        few_rows(258),
        (),
        r"examples must have tokens of the model alone, which has 258, but one is <\|im_end\|>, token 258",
    ),
    "a base of codes without adapter": (
        lambda folder: write_checkpoint(folder / "codes", bits=4),
        ("model.path=codes", "adapter=null"),
        r"model\.path must be a checkpoint of floats without adapter.* codes are quantised",
    ),
    # The template.
    "no chat template": (
        gone("base/chat_template.jinja"),
        (),
        r"^error: \[chat\] the tokenizer must have a chat template but base has none",
    ),
    "a template that is no Jinja": (
        file("base/chat_template.jinja", b"{% for %}"),
        (),
        r"^error: \[chat_template\] the chat template must be Jinja but line 1 is not",
    ),
    "a template that fails": (
        file("base/chat_template.jinja", b"{{ messages[9].x.y }}"),
        (),
        r"chat\.jsonl:1: the chat template cannot render the conversation in line 1.*11 more",
    ),
    "a template without the answers": (
        file("base/chat_template.jinja", b"hello"),
        (),
        r"chat\.jsonl:1: messages\[0\] must be in what the chat template writes",
    ),
    "no such template": (nothing, ("data.chat_template=mine.jinja",), r"chat_template must be a file .*mine\.jinja"),
    # The config.
    "no such config": (gone("lora.yaml"), (), r"lora\.yaml: there is no such file"),
    "a config that is no YAML": (file("lora.yaml", b"model: {path: base\n"), (), r"lora\.yaml:2: not valid YAML"),
    "a key that is not there": (nothing, ("adapter.rnk=4",), r"adapter\.rnk: there is no such key.*adapter\.rank"),
    "a value of another type": (
        nothing,
        ("adapter.rank=many",),
        r"adapter\.rank: must be a whole number, at least 1, but got",
    ),
    "a value out of range": (nothing, ("adapter.dropout=1.5",), r"adapter\.dropout: must be"),
    "a method that is none": (nothing, ("adapter.method=lora2",), r"adapter\.method: must be lora, dora or rslora"),
    "a pattern that fits no layer": (nothing, ("adapter.targets=[q_prj]",), r"q_prj"),
    "adapters with Muon": (nothing, ("optim.name=muon",), r"optim\.name must be adamw with adapter but got muon"),
    "codes without adapters": (
        nothing,
        ("adapter=null", "model.quantize={bits: 4}"),
        r"model\.quantize must be null without adapter",
    ),
    "preferences without pairs": (nothing, ("preference.loss=orpo",), r"preference must be null without data\.format"),
    "rows longer than the model reads": (nothing, ("train.seq_len=512",), r"train\.seq_len must be at most .*256.*512"),
    "a prompt longer than the model reads": (nothing, (f"train.sample_prompt={'x' * 300}",), r"train\.sample_prompt"),
    "a revision of a folder": (nothing, ("model.revision=main",), r"base: a revision must be left out"),
    "floats that are to be made floats": (nothing, ("model.dequantize=true",), r"model\.dequantize must be false with"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_run_does_not_begin(name, here, call_main):
    spoil, overrides, message = TRAINING[name]
    spoil(here)
    before = tree(here)
    for where in (["run.dir=new"], ["run.resume=never"]):
        status, out, err = call_main(train_command.main, "lora.yaml", *overrides, *where)
        assert status == 2, out + err
        (line,) = err.splitlines()
        assert re.search(message, line), line
        assert line.startswith("error: ")
    assert tree(here) == before


def other_shape(folder: Path) -> None:
    """Another model under the base's name."""
    shutil.rmtree(folder / "base")
    (folder / "other").rename(folder / "base")


# A finished run that more steps would go on with -> what came between, the overrides, and what the one line must say.
RESUMING: dict[str, tuple[Spoil, tuple[str, ...], str]] = {
    "another base": (other_shape, (), r"does not fit: the weights of base are not those that this run began from"),
    "another rank": (nothing, ("adapter.rank=4",), r"adapter\.rank: 2 -> 4"),
    "another method": (nothing, ("adapter=null",), r"adapter\.rank: 2 -> null"),
    "other examples": (lines({"messages": TALK}), (), r"text or its tokenizer is not that of this run"),
    "a checkpoint cut short": (
        cut("run/checkpoints/step-00000001/model.safetensors", 500),
        (),
        r"run/checkpoints: none of the 1 checkpoints can be read",
    ),
    "a lost base": (lambda folder: shutil.rmtree(folder / "base"), (), r"^error: base: there is no such"),
}


@pytest.mark.parametrize("name", RESUMING)
def test_a_run_that_would_go_on_with_something_else_is_left_alone(name, here, call_main):
    spoil, overrides, message = RESUMING[name]
    spoil(here)
    before = tree(here)
    status, out, err = call_main(train_command.main, "lora.yaml", "train.steps=3", *overrides)
    assert status == 2, out + err
    assert re.search(message, err), err
    assert tree(here) == before


def adapters(folder: Path) -> None:
    """The final adapters of the run as a folder of their own."""
    shutil.copytree(folder / "run" / "final", folder / "adapters")


def adapters_cut(folder: Path) -> None:
    adapters(folder)
    cut("adapters/adapters.safetensors", 300)(folder)


def adapters_without_config(folder: Path) -> None:
    adapters(folder)
    gone("adapters/adapter_config.json")(folder)


def base_moved(folder: Path) -> None:
    """The run's config names the base by its whole path."""
    config = folder / "run" / "config.yaml"
    text = re.sub(r"path: \S+/base\n", f"path: {folder / 'base'}\n", config.read_text())
    assert str(folder) in text
    config.write_text(text)
    shutil.rmtree(folder / "base")


ADAPTER = ("--adapter", "adapters")

# What is wrong -> the command, what is done to the files, its arguments, and what the one line must say.
COMMANDS: dict[str, tuple[Callable[[list[str]], int], Spoil, tuple[str, ...], str]] = {
    "adapters of another model": (evaluate.main, adapters, ("other", "text.jsonl", *ADAPTER), r"adapters.*layers\.1\."),
    "adapters cut short": (evaluate.main, adapters_cut, ("base", "text.jsonl", *ADAPTER), r"adapters\.safetensors: "),
    "adapters without a config": (
        generate.main,
        adapters_without_config,
        ("base", "--prompt", "hi", *ADAPTER),
        r"adapters: must be a folder of adapters but has no adapter_config\.json",
    ),
    "a run in place of its adapters": (
        generate.main,
        nothing,
        ("base", "--prompt", "hi", "--adapter", "run"),
        r"run: must be a folder of adapters .* Those of this run are in run/final\.",
    ),
    "adapters without their base": (
        generate.main,
        adapters,
        ("adapters", "--prompt", "hi"),
        r"adapters: holds adapters and not the model that they are for",
    ),
    "a run whose base is gone": (
        generate.main,
        base_moved,
        ("run", "--prompt", "hi"),
        r"base: there is no such",
    ),
    "a chat without a template": (
        generate.main,
        gone("base/chat_template.jinja"),
        ("base", "--chat", "--prompt", "hi"),
        r"must have a chat template but base has none",
    ),
    "an export over a folder": (export.main, nothing, ("run", "base"), r"folder must be new or empty but got base"),
    "an export of 9 bits": (export.main, nothing, ("run", "out", "--quantize", "9"), r"bits must be"),
    "an export of nothing": (export.main, nothing, ("none", "out"), r"none: there is no such"),
    "an evaluation on nothing": (evaluate.main, nothing, ("base", "none.jsonl"), r"none\.jsonl"),
    "an evaluation on a broken line": (evaluate.main, lines("{", name="text.jsonl"), ("base", "text.jsonl"), r"l:3: "),
    "a preview of a broken line": (
        data_command.main,
        lines("{", at=0),
        ("preview", "chat.jsonl", "--tokenizer", "base"),
        r"chat\.jsonl:1: each line must be one JSON object",
    ),
    "a preview without a tokenizer": (data_command.main, nothing, ("preview", "chat.jsonl"), r"--tokenizer"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_in_one_line_what_is_wrong(name, here, call_main):
    main, spoil, arguments, message = COMMANDS[name]
    spoil(here)
    before = tree(here)
    status, out, err = call_main(main, *arguments)
    assert status == 2, out + err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line == err.splitlines()[-1]
    assert re.search(message, line), line
    assert tree(here) == before
