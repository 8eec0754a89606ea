"""From a config to rows: splits, what is too long, and the counts that a person is told."""

from dataclasses import asdict
import itertools
import json

from example_tokenizer import character_tokenizer, learnt, shown
from forge_mlx.data import BatchStream, eval_batches, example_reader
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_rows import ExampleRows, PaddedRows
from forge_mlx.data.preference_rows import PreferenceRows
from forge_mlx.data.prepare_examples import prepare_examples
import numpy as np
import pytest


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def prepare(tokenizer, records, seq_len=64, log=lambda _: None, **values):
    with open("a.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    config = ExampleConfig.model_validate({"format": "prompt_completion", "source": "a.jsonl", **values})
    prepared = prepare_examples(config, tokenizer, seq_len=seq_len, log=log)
    for line in prepared.lines:
        log(line)
    return prepared


def numbered(count, length=3):
    """Prompt `i:` and completion `xxx`, 3 + length tokens with the end token and two digits."""
    return [{"prompt": f"{number:02}:", "completion": "x" * length} for number in range(10, 10 + count)]


def test_a_chat_in_rows_token_by_token(tokenizer):
    """Two examples of two turns in one row; every special token and every character is one token."""
    turns = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    prepared = prepare(tokenizer, [record] * 4, seq_len=100, format="chat", valid_fraction=0.25)
    # Of 47 tokens the first one, <|im_start|>, is no target.
    example = (
        "user\na<|im_end|>\n<|im_start|>assistant\n[bc<|im_end|>]\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n[e<|im_end|>]\n"
    )
    padding = shown(tokenizer, [0]) * 8
    batch = prepared.train.batch(np.array([0]))
    assert learnt(tokenizer, batch) == example + example + padding
    plain = "<|im_start|>" + example.replace("[", "").replace("]", "")
    assert shown(tokenizer, batch.inputs[0]) == 2 * plain.removesuffix("\n") + padding
    assert batch.segment_ids[0].tolist() == [0] * 46 + [1] * 46 + [-1] * 8
    assert batch.positions[0].tolist() == [*range(46), *range(46), *[0] * 8]


def test_examples_are_held_out_evenly(tokenizer):
    said = []
    prepared = prepare(tokenizer, numbered(40), seq_len=8, log=said.append, valid_fraction=0.1, packing=False)
    prompts = [learnt(tokenizer, prepared.valid.batch(np.array([row]))) for row in range(4)]
    assert [prompt[:5] for prompt in prompts] == ["9:[xx", "9:[xx", "9:[xx", "9:[xx"]
    assert [prepared.valid.batch(np.array([row])).inputs[0, 0] for row in range(4)] == [
        tokenizer.encode(digit)[0] for digit in "1234"
    ]
    facts = prepared.facts
    assert (facts.examples, facts.train_examples, facts.valid_examples) == (40, 36, 4)
    assert (facts.train_tokens, facts.train_targets, facts.valid_targets) == (36 * 7, 36 * 4, 4 * 4)
    assert (facts.mean_tokens, facts.longest_tokens, facts.row_length, facts.train_rows) == (7.0, 7, 8, 36)
    assert facts.fill == 6 / 8
    assert json.loads(json.dumps(asdict(facts))) == asdict(facts)
    assert said[-1].startswith(
        "data: 36 examples to train on (144 of their 252 tokens are learnt), 4 to validate; 7 tokens each on average, "
        "7 the longest; 36 rows of 8, 75 % full; read in"
    )


def test_validation_files_of_their_own(tokenizer):
    with open("valid.jsonl", "w") as file:
        file.write(json.dumps(numbered(1)[0]))
    facts = prepare(tokenizer, numbered(3), valid_paths="valid.jsonl").facts
    assert (facts.train_examples, facts.valid_examples, facts.files) == (3, 1, 2)


@pytest.mark.parametrize(
    ("values", "count", "said_of"),
    [
        ({}, 12, "0.05 of 12 examples"),
        ({"valid_fraction": 0}, 40, "0 of 40 examples"),
        ({"max_examples": 5}, 40, "0.05 of 5 examples"),
        ({}, 2, "0.05 of 2 examples"),
    ],
)
def test_one_example_is_held_out_of_few(tokenizer, values, count, said_of):
    said = []
    prepared = prepare(tokenizer, numbered(count), log=said.append, **values)
    read = min(count, values.get("max_examples", count))
    assert (prepared.facts.train_examples, prepared.facts.valid_examples) == (read - 1, 1)
    assert tokenizer.decode(prepared.valid.tokens.tokens[:3]) == f"{9 + read}:"
    assert (
        f"data.valid_fraction {said_of} is less than one; the last is held out to validate on, a.jsonl:{read}" in said
    )


def test_one_example_alone_is_too_few(tokenizer):
    with pytest.raises(ValueError, match="source must hold at least 2 examples, one of them to validate on"):
        prepare(tokenizer, numbered(1), valid_fraction=0.9)


def test_validation_on_what_is_trained_on_is_said(tokenizer):
    said = []
    facts = prepare(tokenizer, numbered(3), log=said.append, valid_paths="a.jsonl").facts
    assert (facts.train_examples, facts.valid_examples) == (3, 3)
    assert said[0].startswith("WARNING: valid_paths are files of the source")
    with open("b.jsonl", "w") as file:
        file.write(json.dumps(numbered(1)[0]))
    with pytest.raises(ValueError, match=r"but 1 are in both \(a.jsonl\)"):
        prepare(tokenizer, numbered(3), valid_paths=["a.jsonl", "b.jsonl"])


LONG = [*numbered(18), {"prompt": "10:", "completion": "y" * 20}, {"prompt": "z" * 30, "completion": "y"}]


def test_too_long_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="error all examples must fit") as caught:
        prepare(tokenizer, LONG, seq_len=8)
    assert str(caught.value) == (
        "[data] with truncate: error all examples must fit into train.seq_len, 8, but 2 of 20 do not, the longest 32 "
        "tokens at a.jsonl:20. Raise train.seq_len to 31, or set data.truncate to drop or split."
    )
    assert prepare(tokenizer, LONG, seq_len=31).facts.too_long == 0
    with pytest.raises(ValueError, match="30, but 1 of 20 do not"):
        prepare(tokenizer, LONG, seq_len=30)


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (31, "Raise train.seq_len to 31, or set data.truncate to drop or split."),
        (
            24,
            "Raise train.seq_len to the model's longest sequence, 24, and set data.truncate to drop or split for what",
        ),
        (8, "The model takes no longer ones: set data.truncate to drop or split."),
    ],
)
def test_advice_keeps_to_what_the_model_takes(tokenizer, limit, advice):
    prepare(tokenizer, LONG)
    config = ExampleConfig.model_validate({"format": "prompt_completion", "source": "a.jsonl"})
    with pytest.raises(ValueError, match=f"a.jsonl:20. {advice}"):
        prepare_examples(config, tokenizer, seq_len=8, log=lambda _: None, limit=limit)


def test_too_long_is_dropped(tokenizer):
    said = []
    facts = prepare(tokenizer, LONG, seq_len=8, log=said.append, truncate="drop", valid_fraction=0.1).facts
    assert (facts.examples, facts.train_examples, facts.valid_examples) == (20, 17, 1)
    assert (facts.too_long, facts.dropped, facts.split, facts.pieces) == (2, 2, 0, 0)
    assert (facts.mean_tokens, facts.longest_tokens, facts.train_tokens, facts.valid_tokens) == (7.0, 7, 17 * 7, 7)
    assert "left out as longer than a row of 8: 2 of 20 examples, the longest 32 tokens at a.jsonl:20" in said
    # The last example, which is too long, is not the one that is held out.
    facts = prepare(tokenizer, LONG, seq_len=8, truncate="drop", valid_fraction=0.05).facts
    assert (facts.train_examples, facts.valid_examples, facts.dropped) == (17, 1, 2)
    with pytest.raises(ValueError, match=r"drop must leave examples but all 20 of data\.source are longer"):
        prepare(tokenizer, LONG, seq_len=4, truncate="drop")
    with pytest.raises(ValueError, match=r"but holds 1 that fits train\.seq_len, beside 1 that do not\. Give"):
        prepare(tokenizer, LONG[-3:-1], seq_len=8, truncate="drop")


def test_what_is_held_out_without_drops_stays_so(tokenizer):
    """By hand: examples 10 and 20 of 20, whether or not a longer one would have been dropped."""
    for truncate in ("error", "drop", "split"):
        valid = prepare(tokenizer, numbered(20), seq_len=8, truncate=truncate, valid_fraction=0.1, packing=False).valid
        shown_prompts = [shown(tokenizer, valid.batch(np.array([row])).inputs[0])[:2] for row in range(2)]
        assert shown_prompts == ["19", "29"]


@pytest.mark.parametrize("packing", [True, False])
def test_too_long_is_split(tokenizer, packing):
    said = []
    prepared = prepare(tokenizer, LONG, seq_len=8, log=said.append, truncate="split", packing=packing)
    facts = prepared.facts
    # 23 inputs in 3 pieces, each with a target; 31 in 4, of which the last has both targets.
    assert (facts.too_long, facts.dropped, facts.split, facts.pieces, facts.left_out_pieces) == (2, 0, 2, 4, 3)
    assert (
        "split as longer than a row of 8: 2 examples into 4 pieces, each a text of its own, the longest 32 tokens at "
        "a.jsonl:20; 3 pieces without a token to learn left out, 24 tokens"
    ) in said
    # 18 texts of 7 tokens, and pieces of 9, 9 and 8, whose first tokens are the last ones before; one of 8 held out.
    assert (facts.train_tokens, facts.valid_tokens, facts.left_out_tokens) == (18 * 7 + 24, 8, 24)
    assert (facts.mean_tokens, facts.longest_tokens) == (7.3, 9)
    assert said[-1].startswith(
        "data: 19 examples to train on (93 of their 150 tokens are learnt), 1 to validate; 7 tokens a piece on "
        "average, 9 the longest; "
    )
    other = prepare(tokenizer, LONG[::-1], seq_len=8, truncate="split", packing=packing).facts
    assert (other.train_tokens, other.valid_tokens, other.left_out_tokens) == (8 + 24 + 17 * 7, 7, 24)
    batches = list(itertools.islice(BatchStream(prepared.train, 1, seed=0), prepared.train.num_rows))
    found = np.concatenate([batch.counted_targets() for batch in batches])
    assert sorted(tokenizer.decode(found)) == sorted("xxx" * 18 + "y" * 20)
    assert (found == tokenizer.end_id).sum() == 19
    [valid] = eval_batches(prepared.valid, 1)
    assert learnt(tokenizer, valid).endswith("zz[y<|endoftext|>]" + "!") or "[y<|endoftext|>]" in learnt(
        tokenizer, valid
    )


@pytest.mark.parametrize(
    ("values", "kind"),
    [({}, ExampleRows), ({"packing": False}, PaddedRows), ({"format": "preference"}, PreferenceRows)],
)
def test_layouts(tokenizer, values, kind):
    records = [{**record, "chosen": "good", "rejected": "bad"} for record in numbered(30)]
    prepared = prepare(tokenizer, records, valid_fraction=0.1, **values)
    assert type(prepared.train) is type(prepared.valid) is kind
    assert prepared.train.tokens.num_documents == 27 * kind.group_size


def test_pairs_that_are_too_long(tokenizer):
    records = [{"prompt": "p", "chosen": "a" * (1 + (number % 2) * 30), "rejected": "b"} for number in range(41)]
    with pytest.raises(
        ValueError, match=r"20 of 41 do not, the longest 33 tokens at a.jsonl:2. .* data.truncate to drop\.$"
    ):
        prepare(tokenizer, records, seq_len=16, format="preference")
    facts = prepare(tokenizer, records, seq_len=16, format="preference", truncate="drop", valid_fraction=1 / 3).facts
    assert (facts.dropped, facts.train_examples + facts.valid_examples) == (20, 21)


def test_the_template_of_the_config_is_the_tokenizer_s(tokenizer):
    with open("mine.jinja", "w") as file:
        file.write(
            "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content }}<|endoftext|>"
            "{% else %}Q:{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
        )
    record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}]}
    prepared = prepare(tokenizer, [record] * 20, format="chat", chat_template="mine.jinja", seq_len=16, packing=False)
    assert learnt(tokenizer, prepared.train.batch(np.array([0]))).startswith(":Hi\nA:[Hey<|endoftext|>]")
    assert prepared.tokenizer.chat_template.startswith("{% for m")
    assert tokenizer.chat_template != prepared.tokenizer.chat_template


def test_a_hint_that_prompts_stay_plain(tokenizer):
    said = []
    prepare(tokenizer, numbered(20), log=said.append)
    assert any("; prompt_as: chat puts them into it" in line for line in said)
    said.clear()
    prepare(tokenizer, numbered(20), log=said.append, prompt_as="chat")
    assert not any("prompt_as" in line for line in said)


ROLES = ("user", "assistant")
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}]}


def test_tokens_come_from_the_cache(tokenizer):
    first = prepare(tokenizer, [CHAT] * 21, format="chat")
    # Neither the split nor the layout changes what is cached.
    again = prepare(tokenizer, [CHAT] * 21, format="chat", valid_fraction=0.1, packing=False)
    assert (first.facts.from_cache, again.facts.from_cache) == (False, True)
    same = prepare(tokenizer, [CHAT] * 21, format="chat")
    assert same.train.tokens.fingerprint == first.train.tokens.fingerprint
    assert same.facts.from_cache
    for changed in ({"train_on": "all"}, {"max_examples": 20}, {"chat_template": "mine.jinja"}):
        with open("mine.jinja", "w") as file:
            file.write(tokenizer.chat_template.replace("im_start", "endoftext"))
        assert not prepare(tokenizer, [CHAT] * 21, format="chat", **changed).facts.from_cache
    assert not prepare(tokenizer, [CHAT] * 22, format="chat").facts.from_cache
    other = character_tokenizer(tokenizer.chat_template.replace("im_start", "endoftext"))
    assert not prepare(other, [CHAT] * 21, format="chat").facts.from_cache


def test_special_tokens_that_are_named_in_messages(tokenizer):
    def chat(*contents):
        return {"messages": [{"role": role, "content": content} for role, content in zip(ROLES, contents, strict=True)]}

    parts = [{"type": "text", "text": "what is <|im_end|>?"}]
    records = [chat("Hi", "Hey"), chat("<|endoftext|><|im_end|>", "a <|im_end|>!"), chat(parts, "<|im_en|>")]
    line = (
        "special tokens named in messages: <|im_end|> in 2 examples, <|endoftext|> in 1 example; each name becomes "
        "that token, not text"
    )
    for _ in ("read", "from the cache"):
        said = []
        prepare(tokenizer, records, seq_len=200, log=said.append, format="chat")
        assert [each for each in said if each.startswith("special")] == [line]
    pairs = [{"prompt": "<|im_end|>", "chosen": "a", "rejected": "b"}] * 2
    said = []
    prepare(tokenizer, pairs, log=said.append, format="preference")
    assert not any(each.startswith("special") for each in said)
    prepare(tokenizer, pairs, log=said.append, format="preference", prompt_as="chat")
    assert "special tokens named in messages: <|im_end|> in 2 examples; each name becomes that token, not text" in said


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
# ChatML that writes tools and calls.
WITH_TOOLS = (
    "{{ tools or '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_tools_that_the_template_leaves_out_are_named(tokenizer):
    called = [CHAT["messages"][0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    records = [CHAT, {"messages": called}, {"messages": called, "tools": [CALL]}, CHAT | {"tools": []}]
    begin, end = "the chat template leaves out: tool_calls in 2 examples", "; the model neither reads nor learns them"
    for _ in ("read", "from the cache"):
        said = []
        prepare(tokenizer, records, seq_len=200, log=said.append, format="chat")
        assert [each for each in said if "leaves out" in each] == [f"{begin}, tools in 1 example{end}"]
    said = []
    pairs = [{"chosen": called, "rejected": CHAT["messages"]}] * 2
    prepare(tokenizer, pairs, seq_len=200, log=said.append, format="preference")
    assert f"{begin}{end}" in said
    said = []
    prepare(character_tokenizer(WITH_TOOLS), records, seq_len=300, log=said.append, format="chat")
    assert not any("leaves out" in each for each in said)


def test_what_is_said_of_examples_is_said_from_the_cache_too(tokenizer):
    records = [{"instruction": "Hi", "output": f"Hey {number}"} for number in range(20)]
    said = [[], []]
    for lines in said:
        prepare(tokenizer, records, log=lines.append)
    assert said[0][:-1] == said[1][:-1] != []
    assert "from the cache in" in said[1][-1]
    with pytest.raises(ValueError, match=r"20 of 20 do not, the longest 11 tokens at a.jsonl:11\."):
        prepare(tokenizer, records, seq_len=4)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "facts"])
def test_damaged_tokens_are_made_again(tokenizer, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("FORGE_MLX_CACHE", str(tmp_path / "cache"))
    good = prepare(tokenizer, numbered(20))
    [tokens] = (tmp_path / "cache").rglob("tokens.npy")
    content = tokens.read_bytes()
    if damage == "gone":
        tokens.unlink()
    elif damage == "facts":
        (tokens.parent / "facts.json").write_text("{}")
    else:
        tokens.write_bytes(content[:-4] + (b"" if damage == "cut" else b"\0\0\0\0"))
    said = []
    again = prepare(tokenizer, numbered(20), log=said.append)
    assert again.train.tokens.fingerprint == good.train.tokens.fingerprint
    assert not again.facts.from_cache
    assert [line for line in said if "damaged" in line]
    assert prepare(tokenizer, numbered(20)).facts.from_cache


def test_a_cache_that_cannot_be_written_is_said(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORGE_MLX_CACHE", str(tmp_path / "file"))
    said = []
    assert prepare(tokenizer, numbered(20), log=said.append).facts.train_examples == 19
    assert [line for line in said if line.startswith("the tokens of the examples are not kept")]


def test_a_file_that_changes_while_it_is_read(tokenizer, monkeypatch):
    def growing(self, record):
        with open("a.jsonl", "a") as file:
            file.write("\n")
        return real(self, record)

    real = example_reader._Reader._item
    monkeypatch.setattr(example_reader._Reader, "_item", growing)
    with pytest.raises(ValueError, match=r"must stay as they are while they are read but 1 changed \(a.jsonl\)"):
        prepare(tokenizer, [{"prompt": "grow", "completion": "ing"}] * 20)


def test_long_reading_says_how_far_it_is(tokenizer, monkeypatch):
    monkeypatch.setattr(example_reader, "_SILENCE", 0.0)
    said = []
    prepare(tokenizer, [{"prompt": "say", "completion": "so"}] * 20, log=said.append)
    assert "reading examples: 7 so far, at a.jsonl:8" in said
