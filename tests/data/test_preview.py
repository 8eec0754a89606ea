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
import numpy as np
import pytest
from rich.console import Console

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey\nyou"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model's tokenizer in `model`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    character_tokenizer().save(tmp_path / "model")
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
    (folder / "c.yaml").write_text(
        "model: {path: model}\ndata: {format: chat, source: a.jsonl, messages_field: dialogue, truncate: split}\n"
        "train: {seq_len: 16}\n"
    )
    status, out, err = call_main(main, "preview", "c.yaml")
    assert (status, err) == (0, "")
    assert "3 examples longer than a row: cut into pieces" in out
    assert "3 rows of 16, 81 % full" in out


def test_too_long_examples_are_shown_all_the_same(folder, call_main):
    write(folder / "a.jsonl", {"messages": TURNS}, {"messages": [TURNS[0], {"role": "assistant", "content": "x" * 80}]})
    status, out, _ = call_main(main, "preview", "a.jsonl", "--tokenizer", "model", "--seq-len", 64, "--tokens", 20)
    assert status == 0
    text = " ".join(out.split())
    assert (
        "would not start: [data] with truncate: error all examples must fit into train.seq_len, 64, but 1 of 2" in text
    )
    assert "1 example longer than a row: left out here" in out
    assert "... 83 tokens not shown (--tokens) ..." in out


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
        ("a.yaml", "data: [", ("--tokenizer", "model"), "a.yaml: must be a readable YAML file but: while parsing"),
        ("a.yaml", "[1]", ("--tokenizer", "model"), "a.yaml: must hold a config with a section `data`"),
        ("a.yaml", "data: {source: stdlib}", (), "a.yaml: data.format must say what an example is: chat, prompt_"),
        ("a.yaml", "data: {format: chat}", (), "a.yaml: data.source: Field required"),
        ("a.yaml", "data: {format: chat, source: b}\nmodel: {path: model}", (), "'b' does not exist"),
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
