"""The command `python -m forge_mlx.data preview`: what it prints of examples, masks and rows."""

import io
import json
import re

from example_tokenizer import character_tokenizer
from forge_mlx.data.__main__ import main
from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_cache import Item
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.preview import Preview, token_runs
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.gguf_write import write_gguf
from forge_mlx.models.gpt import GPT, GPTConfig
import numpy as np
import pytest
from rich.console import Console

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey\nyou"}]

SHAPE = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 600,
}
CONFIG = """\
run: {dir: run}
model: {path: model}
data: {format: chat, source: a.jsonl}
train: {steps: 6, batch_size: 2, seq_len: 64}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model's shape and tokenizer in `model`, and no weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    character_tokenizer().save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_plain_text_has_marks(folder, call_main):
    write(folder / "a.jsonl", *[{"messages": TURNS}] * 3)
    status, out, err = call_main(main, "preview", "a.jsonl", "--tokenizer", "model", "-n", 2)
    assert (status, err) == (0, "")
    assert "[[learnt]]  context only  <special token>" in out
    assert re.findall(r"example \d of 3 . a.jsonl:\d . 30 tokens, 8 learnt", out) == [
        "example 1 of 3 · a.jsonl:1 · 30 tokens, 8 learnt",
        "example 2 of 3 · a.jsonl:2 · 30 tokens, 8 learnt",
    ]
    shown = "<|im_start|>user↵\nHi<|im_end|>↵\n<|im_start|>assistant↵\n[[Hey↵\nyou<|im_end|>]]↵\n"
    assert out.count(shown) == 2
    assert "3 examples, 90 tokens, 24 learnt (27 %)" in out
    assert "tokens of a text: 30 in the middle, 95 % up to 30, the longest 30" in out
    assert "1 row of 512, 17 % full (whole texts side by side; none sees another)" in out
    assert re.search(r"1 \|[░█ ]+\| 3 texts, 87 filled, 24 learnt", out)
    assert "\x1b" not in out


def test_of_a_model_of_the_hub_no_weights_are_downloaded(folder, call_main, monkeypatch):
    asked = []
    (folder / "model").rename(folder / "snapshot")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda _name, *, allow_patterns, **_options: asked.extend(allow_patterns) or str(folder / "snapshot"),
    )
    write(folder / "a.jsonl", *[{"messages": TURNS}] * 3)
    status, out, err = call_main(main, "preview", "a.jsonl", "--tokenizer", "owner/model", "train.epochs=3")
    assert (status, err) == (0, "")
    assert "would not start" not in out
    assert "tokenizer.json" in {pattern.replace("*", "tokenizer") for pattern in asked}
    assert not any("safetensors" in pattern for pattern in asked)


def test_of_a_bare_file_no_setting_needs_more_steps_than_nobody_gave(folder, call_main):
    write(folder / "a.jsonl", *[{"messages": TURNS}] * 3)
    bare = ("preview", "a.jsonl", "--tokenizer", "model", "optim.warmup_steps=100")
    status, out, err = call_main(main, *bare)
    assert (status, err) == (0, "")
    assert "would not start" not in out
    assert "epochs:" not in out
    status, _, err = call_main(main, *bare, "train.steps=100")
    assert status == 2
    assert "optim.warmup_steps must be less than train.steps, 100, but got 100" in err


def test_the_tokenizer_of_a_gguf_file(folder, call_main):
    pieces = Tokenizer.train([f"{number} is a number\n" for number in range(500)], kind="bpe", vocab_size=288)
    shape = {"num_layers": 1, "hidden_size": 32, "num_heads": 1, "intermediate_size": 64, "max_seq_len": 100}
    write_gguf(folder / "m.gguf", GPT(GPTConfig(vocab_size=288, **shape), seed=1), pieces, kind="f16")
    write(folder / "a.jsonl", *[{"prompt": "1 is ", "completion": "a number"}] * 2)
    status, out, err = call_main(main, "preview", "a.jsonl", "--tokenizer", "m.gguf")
    assert (status, err) == (0, "")
    assert re.search(r"1 is ?\[\[ ?a number<.*>\]\]", out)
    assert "rows of at most 100" in out


def test_rows_with_their_texts(folder, call_main):
    write(folder / "a.jsonl", *[{"prompt": "ab", "completion": "cde"}] * 4)
    arguments = ("preview", "a.jsonl", "--tokenizer", "model", "--seq-len", 16, "--packed", "-n", 1)
    _, out, _ = call_main(main, *arguments)
    assert "2 rows of 16, 62 % full" in out
    # 5 inputs each: the first is context for the second, then three and the end token are learnt.
    assert "1 |░████░████░████ | 3 texts, 15 filled, 12 learnt" in out
    assert out.count("ab[[cde<|endoftext|>]]") == 3
    assert "row 1, text 2 · 6 tokens" in out


def test_pairs(folder, call_main):
    write(folder / "a.jsonl", {"prompt": "ab", "chosen": "yes", "rejected": "n"})
    _, out, _ = call_main(main, "preview", "a.jsonl", "--tokenizer", "model")
    assert out.index("chosen") < out.index("ab[[yes<|endoftext|>]]") < out.index("rejected") < out.index("ab[[n<|end")
    assert "1 pair, 10 tokens, 6 learnt" in out
    assert "2 rows of 64, 6 % full (two for each pair)" in out


def test_a_config_says_all(folder, call_main):
    write(folder / "a.jsonl", *[{"dialogue": TURNS}] * 3)
    (folder / "c.yaml").write_text(CONFIG)
    overrides = ("data.messages_field=dialogue", "data.truncate=split", "train.seq_len=16")
    status, out, err = call_main(main, "preview", "c.yaml", overrides[0], "-n", 1, *overrides[1:])
    assert (status, err) == (0, "")
    assert "3 examples longer than a row: cut into pieces" in out
    assert "3 rows of 16, 81 % full" in out
    # As training has it, which holds one out.
    assert "split as longer than a row of 16: 3 examples into 3 pieces" in out
    assert "epochs: 6 in 6 steps; one takes 1, as there are 2 rows, 2 a step" in out
    _, out, _ = call_main(main, "preview", "c.yaml", *overrides, "train.steps=null", "train.epochs=1.5")
    assert "epochs: 1.5 epochs of 2 rows, 2 a step: 2 steps" in out
    assert "would not start" not in out


def test_too_long_examples_are_shown_all_the_same(folder, call_main):
    write(folder / "a.jsonl", {"messages": TURNS}, {"messages": [TURNS[0], {"role": "assistant", "content": "x" * 80}]})
    status, out, _ = call_main(main, "preview", "a.jsonl", "--tokenizer", "model", "--seq-len", 64, "--tokens", 20)
    assert status == 2
    assert (
        "would not start: [data] with truncate: error all examples must fit into train.seq_len, 64, but 1 of 2 do not, "
        "the longest 103 tokens at a.jsonl:2. Raise train.seq_len to 102, or set data.truncate to drop or split."
    ) in " ".join(out.split())
    assert "1 example longer than a row: left out here" in out
    assert "... 83 tokens not shown (--tokens) ..." in out


def talks(*answers):
    return [{"messages": [TURNS[0], {"role": "assistant", "content": answer}]} for answer in answers]


@pytest.mark.parametrize(
    ("records", "overrides", "reason"),
    [
        (
            talks("a", "b"),
            ("train.seq_len=601",),
            "train.seq_len must be at most the model's longest sequence, 600, but got 601. Lower it.",
        ),
        (talks("a"), (), "[data] source must hold at least 2 examples, one of them to validate on, but holds 1."),
        (
            talks("a", "x" * 80),
            ("data.truncate=drop",),
            "one of them to validate on, but holds 1 that fits train.seq_len, beside 1 that do not. Give more,",
        ),
        (
            talks("a", "x" * 700),
            (),
            "Raise train.seq_len to the model's longest sequence, 600, and set data.truncate to drop or split for",
        ),
        (
            talks("a", "b"),
            ("train.sample_prompt=" + "x" * 600,),
            "train.sample_prompt must be shorter than the model's longest sequence, 600 tokens,",
        ),
    ],
)
def test_says_what_training_would_refuse(folder, call_main, monkeypatch, records, overrides, reason):
    monkeypatch.setenv("COLUMNS", "1000")
    write(folder / "a.jsonl", *records)
    (folder / "c.yaml").write_text(CONFIG)
    status, out, err = call_main(main, "preview", "c.yaml", *overrides)
    assert (status, err) == (2, "")
    [said] = re.findall("^would not start: (.*)$", out, re.MULTILINE)
    assert reason in said
    assert "example 1 of" in out


def test_a_special_token_that_the_model_lacks(folder, call_main):
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 258}))
    write(folder / "a.jsonl", *talks("a", "b"))
    _, out, _ = call_main(main, "preview", "a.jsonl", "--tokenizer", "model")
    text = " ".join(out.split())
    assert "1 special token has no embedding, and no text may have it: <|im_end|>" in text
    assert "would not start: the examples must have tokens of the model alone, which has 258, but one is <|im" in text


def test_a_row_is_no_longer_than_the_model_takes(folder, call_main):
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 100}))
    write(folder / "a.jsonl", *talks("a", "b"))
    _, out, _ = call_main(main, "preview", "a.jsonl", "--tokenizer", "model")
    assert "rows of at most 100" in out
    assert "would not start" not in out
    _, out, _ = call_main(main, "preview", "a.jsonl", "--tokenizer", "model", "--seq-len", 200)
    assert "would not start: train.seq_len must be at most the model's longest sequence, 100" in out


def preview(stream, **options):
    console = Console(file=stream, force_terminal=True, width=80, highlight=False, **options)
    return Preview(console, character_tokenizer(), ExampleConfig(format="chat", source=["a.jsonl"]), 8, 100)


def colours(items, **options):
    stream = io.StringIO()
    preview(stream, **options).examples(items, 1)
    return stream.getvalue()


def test_texts_of_a_row_have_colours_in_turn():
    stream = io.StringIO()
    example = Item("a.jsonl:1", (Encoded(np.arange(4, dtype=np.int32), np.array([0, 0, 1, 1], bool)),))
    preview(stream, color_system="standard").rows([example] * 2, 1, contents=False)
    cells = re.findall("\x1b\\[(3[0-9])m(.)\x1b", stream.getvalue())
    assert cells == [("36", "░"), ("36", "█"), ("36", "█"), ("35", "░"), ("35", "█"), ("35", "█")]


def test_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    tokenizer = character_tokenizer()
    ids = np.array([*tokenizer.encode("ab"), tokenizer.end_id], np.int32)
    item = Item("a.jsonl:1", (Encoded(ids, np.array([True, True, True])),))
    out = colours([item], color_system="standard")
    # Nothing predicts the first token; what is learnt is green and bold.
    assert "\x1b[2ma\x1b[0m\x1b[1;32mb\x1b[0m\x1b[1;4;32m<|endoftext|>\x1b[0m" in out
    assert "a[[b<|endoftext|>]]\n" in colours([item], color_system="standard", no_color=True)


def test_escape_sequences_of_the_data_do_nothing(folder, call_main):
    write(folder / "a.jsonl", {"text": "a\x1b[31mb\x9b1m [bold]c[/bold]"})
    _, out, _ = call_main(main, "preview", "a.jsonl", "--tokenizer", "model")
    assert "a[[␛[31mb�1m [bold]c[/bold]<|endoftext|>]]" in out


def test_a_character_in_several_tokens_belongs_to_the_last():
    tokenizer = character_tokenizer()
    ids = np.array([*tokenizer.encode("aé🙂"), tokenizer.end_id, tokenizer.encode("é")[0]], np.int32)
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], bool)
    assert list(token_runs(tokenizer, ids, mask)) == [
        ("a", False, False),
        ("é", True, False),
        ("🙂", False, False),
        ("<|endoftext|>", True, True),
        ("�", True, False),
    ]


@pytest.mark.parametrize(
    ("file", "content", "arguments", "message"),
    [
        ("a.jsonl", '{"text": "Hi"}', (), "a tokenizer is needed. Name the model whose it is with --tokenizer."),
        (
            "a.jsonl",
            '{"q": 1}',
            ("--tokenizer", "model"),
            "a.jsonl:1: what the example is does not show in its fields, q.",
        ),
        (
            "a.jsonl",
            '{"question": "q", "choices": ["a", "b"], "answer": 0}',
            ("--tokenizer", "model"),
            "a.jsonl:1: what the example is does not show in its fields, question, choices, answer.",
        ),
        ("a.jsonl", "", ("--tokenizer", "model"), "a.jsonl must hold examples but is empty"),
        ("a.jsonl", "{", ("--tokenizer", "model"), "a.jsonl:1: each line must be one JSON object"),
        ("a.jsonl", '{"text": "Hi"}', ("--tokenizer", "none/at/all"), "none/at/all"),
        ("a.jsonl", '{"text": "Hi"}', ("--tokenizer", "model", "data.trunc=drop"), "Did you mean data.truncate?"),
        ("a.jsonl", '{"text": "Hi"}', ("--tokenizer", "model", "drop"), "an override is written section.key=value"),
        ("a.jsonl", '{"text": "Hi"}', ("--tokenizer", "."), ".: must hold config.json but does not."),
        ("a.yaml", "data: [", (), "a.yaml:1: not valid YAML"),
        ("a.yaml", "[1]", (), "a.yaml: must hold the sections run, model, data"),
        (
            "a.yaml",
            "run: {dir: run}\ndata: {source: stdlib}\nmodel: {}\ntrain: {steps: 1, batch_size: 1, seq_len: 8}",
            (),
            "a.yaml: data.format must say what an example is: chat, prompt_",
        ),
        (
            "a.yaml",
            CONFIG.replace("format: chat, source: a.jsonl", "format: chat"),
            (),
            "a.yaml:3: data.source: is req",
        ),
        ("a.yaml", CONFIG, ("data.source=b",), "'b' does not exist"),
        ("a.yaml", CONFIG, ("train.seq_len=0",), "command line: train.seq_len: must be a whole number, greater than 0"),
    ],
)
def test_bad_input_gives_one_line(folder, call_main, file, content, arguments, message):
    (folder / file).write_text(content)
    status, _, err = call_main(main, "preview", file, *arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_option_out_of_its_range(capsys):
    with pytest.raises(SystemExit):
        main(["preview", "a.jsonl", "-n", "0"])
    assert "argument -n: must be a whole number of at least 1 but got '0'" in capsys.readouterr().err


def test_an_option_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        main(["preview", "a.yaml", "data.truncate=drop", "--tokens", "5", "--packing"])
    assert "unrecognized arguments: --packing" in capsys.readouterr().err
