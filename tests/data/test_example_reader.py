"""Files of examples: every kind and spelling that is read, and one clear line for each that is malformed."""

import gzip
import json

from example_tokenizer import character_tokenizer, shown
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_reader import read_examples, with_template
from forge_mlx.data.parquet import read_parquet
import pyarrow
from pyarrow import parquet
import pytest

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}]
CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHey<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines(*records):
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in records) + "\n"


def read(tokenizer, path, content, log=lambda _: None, **values):
    """What a file's examples become, as texts with `[` and `]` around what is learnt."""
    if content is not None:
        (path.write_bytes if isinstance(content, bytes) else path.write_text)(content)
    config = ExampleConfig.model_validate({"format": "chat", "source": path.name, **values})
    found = read_examples(config, with_template(config, tokenizer), log=log, hold_out=False)
    return [tuple(masked(tokenizer, text) for text in item.texts) for item in found.train]


def masked(tokenizer, encoded):
    text = "".join(
        f"[{shown(tokenizer, [token])}]" if target else shown(tokenizer, [token])
        for token, target in zip(encoded.ids.tolist(), encoded.is_target.tolist(), strict=True)
    )
    return text.replace("][", "")


HEY = CHATML.replace("Hey<|im_end|>", "[Hey<|im_end|>]")


def gzipped(text):
    # No time in the header: the bytes are in the tests' names, which must be the same in each of pytest's workers.
    return gzip.compress(text.encode(), mtime=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines({"messages": TURNS, "id": 3}, "", {"messages": TURNS})),
        ("a.ndjson", lines({"messages": TURNS}, {"messages": TURNS})),
        ("a.json", json.dumps([{"messages": TURNS}] * 2, indent=2)),
        ("list-on-a-line.json", json.dumps([{"messages": TURNS}] * 2)),
        ("lines.json", lines({"messages": TURNS}, {"messages": TURNS})),
        ("bom.jsonl", "\ufeff" + lines({"messages": TURNS}, {"messages": TURNS})),
        ("bom.json", "\ufeff" + json.dumps([{"messages": TURNS}] * 2)),
        ("a.jsonl.gz", gzipped(lines({"messages": TURNS}, {"messages": TURNS}))),
        ("a.JSON.gz", gzipped(json.dumps([{"messages": TURNS}] * 2))),
    ],
)
def test_kinds_of_files(tokenizer, tmp_path, name, content):
    assert read(tokenizer, tmp_path / name, content) == [(HEY,)] * 2


def test_parquet(tokenizer, tmp_path):
    # The second example has no system message, whose `name` key Parquet then fills with nulls.
    rows = [{"messages": [{"role": "system", "content": "S", "name": "x"}, *TURNS]}, {"messages": TURNS}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tokenizer, tmp_path / "a.parquet", None)[1] == (HEY,)
    assert list(read_parquet(tmp_path / "a.parquet", "a")) == rows
    with pytest.raises(
        ValueError, match=r"\[data\] a.parquet:row 1: an example must have the field 'text' but has 'mes"
    ):
        read(tokenizer, tmp_path / "a.parquet", None, format="text")


def test_parquet_without_pyarrow(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match=r"a.parquet is a Parquet file, which needs pyarrow. pip install 'forge-mlx\[hf\]'"
    ):
        read(tokenizer, tmp_path / "a.parquet", b"PAR1")


def test_folders_give_files_of_examples_alone(tokenizer, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "b.jsonl").write_text(lines({"messages": TURNS}))
    (folder / "a.json").write_text(json.dumps([{"messages": TURNS}]))
    (folder / "notes.md").write_text("no example")
    said = []
    assert len(read(tokenizer, folder, None, said.append)) == 2
    assert said == ["source: 2 files, 1 others left out (1 .md)"]


def test_whole_texts(tokenizer, tmp_path):
    assert read(tokenizer, tmp_path / "a.md", "One.\n\nTwo.", format="text") == [("O[ne.\n\nTwo.<|endoftext|>]",)]
    assert read(tokenizer, tmp_path / "a.jsonl", lines({"text": "Hi"}), format="text") == [("H[i<|endoftext|>]",)]


@pytest.mark.parametrize(
    ("record", "values", "wanted"),
    [
        ({"dialogue": TURNS}, {"messages_field": "dialogue"}, HEY),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hey"}]}, {}, HEY),
        ({"conversations": TURNS}, {}, HEY),
        (
            {"prompt": "Hi ", "completion": "Hey"},
            {"format": "prompt_completion"},
            "Hi [Hey<|endoftext|>]",
        ),
        (
            {"prompt": "Hi ", "completion": "Hey"},
            {"format": "prompt_completion", "train_on": "all"},
            "H[i Hey<|endoftext|>]",
        ),
        ({"prompt": "Hi", "completion": "Hey"}, {"format": "prompt_completion", "prompt_as": "chat"}, HEY),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {"format": "prompt_completion"}, HEY),
        ({"prompt": TURNS[:1], "completion": "Hey"}, {"format": "prompt_completion"}, HEY),
        (
            {"question": "Hi ", "answer": "Hey"},
            {"format": "prompt_completion", "prompt_field": "question", "completion_field": "answer"},
            "Hi [Hey<|endoftext|>]",
        ),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            {"format": "prompt_completion"},
            "Add.\n\n1 2\n\n[3<|endoftext|>]",
        ),
        (
            {"instruction": "Hi", "input": "", "output": "Hey"},
            {"format": "prompt_completion", "prompt_as": "chat"},
            HEY,
        ),
    ],
)
def test_spellings(tokenizer, tmp_path, record, values, wanted):
    assert read(tokenizer, tmp_path / "a.jsonl", lines(record), **values) == [(wanted,)]


def test_a_completion_alone_is_learnt_of_a_conversation(tokenizer, tmp_path):
    record = {"prompt": [*TURNS, TURNS[0]], "completion": TURNS[1:]}
    [(text,)] = read(tokenizer, tmp_path / "a.jsonl", lines(record), format="prompt_completion")
    assert text == CHATML + HEY


NO = {"role": "assistant", "content": "No"}
PAIR = (HEY, HEY.replace("Hey", "No"))


@pytest.mark.parametrize(
    ("record", "values", "wanted"),
    [
        ({"prompt": "Hi", "chosen": "Hey", "rejected": "No"}, {"prompt_as": "chat"}, PAIR),
        (
            {"prompt": "Hi ", "chosen": "Hey", "rejected": "No"},
            {},
            ("Hi [Hey<|endoftext|>]", "Hi [No<|endoftext|>]"),
        ),
        ({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [NO]}, {}, PAIR),
        ({"prompt": "Hi", "chosen": TURNS[1:], "rejected": [NO]}, {}, PAIR),
        ({"chosen": TURNS, "rejected": [TURNS[0], NO]}, {}, PAIR),
        ({"prompt": "Hi", "chosen": TURNS, "rejected": [TURNS[0], NO]}, {}, PAIR),
        (
            {"chosen": [*TURNS, *TURNS], "rejected": [*TURNS, TURNS[0], NO]},
            {},
            (CHATML + PAIR[0], CHATML + PAIR[1]),
        ),
    ],
)
def test_preference_pairs(tokenizer, tmp_path, record, values, wanted):
    assert read(tokenizer, tmp_path / "a.jsonl", lines(record), format="preference", **values) == [wanted]


def test_other_spellings_are_counted(tokenizer, tmp_path):
    said = []
    record = {"instruction": "Hi", "output": "Hey"}
    read(
        tokenizer,
        tmp_path / "a.jsonl",
        lines(record, record),
        said.append,
        format="prompt_completion",
        prompt_as="chat",
    )
    assert said == ["2 examples read as Alpaca's `instruction`, `input` and `output`"]


GOOD = {"messages": TURNS}
MALFORMED = {
    "broken JSON": (
        lines(GOOD, '{"messages": [}'),
        {},
        r"a.jsonl:2: each line must be one JSON object but got '{\"mes",
    ),
    "no object": (lines(GOOD, "[1, 2]"), {}, r"a.jsonl:2: each line must be a JSON object but got a list: '\[1, 2\]'"),
    "not UTF-8": (
        lines(GOOD).encode() + b'{"messages": "\xff"}\n',
        {},
        "a.jsonl:2: a JSON line must be UTF-8 but is not",
    ),
    "lone surrogate": (
        lines(GOOD, '{"messages": "\\ud83d"}'),
        {},
        "a.jsonl:2: texts must be valid Unicode but one has",
    ),
    "missing field": (
        lines(GOOD, {"message": TURNS, "id": 3}),
        {},
        "a.jsonl:2: an example must have the field 'messages' but has 'message', 'id'. Did you mean "
        "data.messages_field: message?",
    ),
    "missing field, none near": (
        lines({"q": "a"}),
        {"format": "prompt_completion"},
        "a.jsonl:1: an example must have the field 'prompt' but has 'q'. Name it with data.prompt_field.",
    ),
    "of another format": (
        lines({"prompt": "a", "completion": "b"}),
        {},
        "a.jsonl:1: an example must have the field 'messages' but has 'prompt', 'completion'. Set data.format to "
        "prompt_completion, whose fields are 'completion' and 'prompt'.",
    ),
    "of an evaluation": (
        lines({"question": "a", "choices": ["b"], "answer": 0}),
        {},
        "a.jsonl:1: an example must have the field 'messages' but has 'question', 'choices', 'answer'. Questions with "
        "choices are for forge_mlx.evaluate.",
    ),
    "null field": (lines({"text": None}), {"format": "text"}, "a.jsonl:1: the field 'text' must be text but is null."),
    "messages as text": (
        lines({"messages": "Hi"}),
        {},
        "a.jsonl:1: the field 'messages' must be a list of messages but is \"Hi\".",
    ),
    "no messages": (lines({"messages": []}), {}, "a.jsonl:1: the field 'messages' must hold at least one message"),
    "message as text": (
        lines({"messages": ["Hi"]}),
        {},
        'a.jsonl:1: messages\\[0\\] must be an object with role and content but is "Hi".',
    ),
    "unknown speaker": (
        lines({"conversations": [{"from": "bard", "value": "Hi"}]}),
        {},
        'a.jsonl:1: conversations\\[0\\] must be from human, user, .* but is from "bard".',
    ),
    "speaker without a value": (
        lines({"conversations": [{"from": "human", "content": "Hi"}]}),
        {},
        "a.jsonl:1: conversations\\[0\\] must have a value but has 'from', 'content'.",
    ),
    "no role": (
        lines({"messages": [{"content": "Hi"}, TURNS[1]]}),
        {},
        "a.jsonl:1: messages\\[0\\].role must be one .* is missing",
    ),
    "unknown role": (
        lines({"messages": [{"role": "bot", "content": "Hi"}, TURNS[1]]}),
        {},
        "a.jsonl:1: messages\\[0\\].role must be one .* but got .bot",
    ),
    "no content": (
        lines({"messages": [{"role": "user"}, TURNS[1]]}),
        {},
        "a.jsonl:1: messages\\[0\\].content must be a text but is missing",
    ),
    "no assistant": (lines({"messages": TURNS[:1]}), {}, "a.jsonl:1: .*assistant"),
    "tools as text": (
        lines({**GOOD, "tools": "[{"}),
        {},
        "a.jsonl:1: the field 'tools' must be a list, or one as JSON te",
    ),
    "tools as a number": (lines({**GOOD, "tools": 3}), {}, "a.jsonl:1: the field 'tools' must be a list but is 3."),
    "empty completion": (
        lines({"prompt": "Hi", "completion": " \n"}),
        {"format": "prompt_completion"},
        "a.jsonl:1: the field 'completion' must not be empty: there would be nothing to learn.",
    ),
    "number as a prompt": (
        lines({"prompt": 3, "completion": "Hey"}),
        {"format": "prompt_completion"},
        "a.jsonl:1: the field 'prompt' must be text or a list of messages but is 3.",
    ),
    "completion of two messages": (
        lines({"prompt": "Hi", "completion": [*TURNS]}),
        {"format": "prompt_completion"},
        "a.jsonl:1: the field 'completion' must be one message but holds 2. format: chat learns several turns.",
    ),
    "instruction without an output": (
        lines({"instruction": "Hi", "response": "Hey"}),
        {"format": "prompt_completion"},
        "a.jsonl:1: an example with an 'instruction' must have an 'output' but has 'instruction', 'response'.",
    ),
    "empty text": (lines({"text": ""}), {"format": "text"}, "a.jsonl:1: the field 'text' must not be empty"),
    "same answers": (
        lines({"prompt": "Hi", "chosen": "Hey", "rejected": "Hey"}),
        {"format": "preference"},
        "a.jsonl:1: the fields 'chosen' and 'rejected' must differ but are the same: \"Hey\".",
    ),
    "answers of two kinds": (
        lines({"prompt": "Hi", "chosen": "Hey", "rejected": TURNS}),
        {"format": "preference"},
        "a.jsonl:1: the fields 'chosen' and 'rejected' must be of one kind but are \"Hey\" and",
    ),
    "answers to other prompts": (
        lines({"chosen": TURNS, "rejected": [{"role": "user", "content": "Ho"}, NO]}),
        {"format": "preference"},
        "a.jsonl:1: the conversations 'chosen' and 'rejected' must be the same but for their last message, but .0. d",
    ),
    "answer without a prompt": (
        lines({"chosen": "Hey", "rejected": "No"}),
        {"format": "preference"},
        "a.jsonl:1: an example must have the field 'prompt' but has 'chosen', 'rejected'.",
    ),
    "empty file": ("", {}, r"\[data\] source must hold examples but its 1 file \(a.jsonl\) hold none"),
    "blank lines": ("\n  \n", {}, r"\[data\] source must hold examples but its 1 file \(a.jsonl\) hold none"),
    "no such file": ("", {"source": "b.jsonl"}, "every source must exist but 'b.jsonl' does not exist"),
    "no such template": (
        lines(GOOD),
        {"chat_template": "chatlm"},
        r"chat_template must be a file or a built-in name \(chatml\) but reading chatlm failed: No such file",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_gives_one_line(tokenizer, tmp_path, name):
    content, values, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message) as caught:
        read(tokenizer, tmp_path / "a.jsonl", content, **values)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("[data] ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "1"},\n 3]', "a.json:2: must hold one JSON list of objects: .* but got int"),
        (
            "b.json",
            '[\n{"text": "1"}\n{"text": "1"}]',
            "b.json:2: must hold one JSON list .* commas between them",
        ),
        ("c.json", '[{"text": "1"},\n', "c.json:2: must hold one JSON list of objects: Expecting value"),
        (
            "d.json",
            '[{"text": "1"}',
            "d.json:1: must hold one JSON list of objects: .* the end of the file behind it",
        ),
        ("e.json", '[{"text": "\\udfff"}]', "e.json:1: texts must be valid Unicode"),
        ("f.json", '[{"text": "1"}]\n3', "f.json:1: must end with the list of examples but goes on"),
        ("g.json", "{", "g.json:1: each line must be one JSON object"),
        ("h.json", b'[{"messages": "\xff"}]', "h.json: must be UTF-8 but is not"),
        ("i.parquet", b"PAR1", "i.parquet must be an intact Parquet file but reading it failed"),
        ("j.jsonl.gz", gzipped("{}" * 99)[:20], "j.jsonl.gz must be an intact gzip file"),
        ("k.parquet.gz", b"", "must not be in gzip but got k.parquet.gz"),
        ("l.csv", "a,b", "a file of examples must end in .jsonl, .ndjson, .json, .parquet .* but got l.csv"),
    ],
)
def test_broken_files_give_one_line(tokenizer, tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(tokenizer, tmp_path / name, content, **({} if name == "l.csv" else {"format": "text"}))
    text = str(caught.value)
    assert "\n" not in text
    assert text.count("[data]") == 1


def test_the_others_are_counted_and_named(tokenizer, tmp_path):
    content = lines({"messages": []}, GOOD, "{", {"messages": 3}, GOOD)
    with pytest.raises(ValueError, match=r"a.jsonl:1: .* is empty. 2 more are malformed \(a.jsonl:3, a.jsonl:4\)\.$"):
        read(tokenizer, tmp_path / "a.jsonl", content)


def test_the_first_examples_alone(tokenizer, tmp_path):
    content = lines(*[{"text": f"{number}"} for number in range(9)], "{")
    found = read(tokenizer, tmp_path / "a.jsonl", content, format="text", max_examples=9)
    assert found == [(f"{number}[<|endoftext|>]",) for number in range(9)]
