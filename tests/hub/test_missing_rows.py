"""A model whose table is smaller or larger than its tokenizer's vocabulary.

Gemma 3's text models have no row for the token of images; Qwen's have rows that no token has.
"""

import json
import re

from forge_mlx import evaluate
from forge_mlx.chat import Conversation
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.generate import stream_text
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.opened_model import open_model
from forge_mlx.sampling import Sampler
import mlx.core as mx
import pytest

from tests.data.example_tokenizer import character_tokenizer

CHARACTERS = 256
SHAPE = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "max_seq_len": 32}


def quiet(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture
def folder(tmp_path):
    """The tokenizer's 256 characters have rows, and the first two of its three special tokens."""
    tokenizer = character_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.plain_vocab_size) == (CHARACTERS + 3, CHARACTERS)
    model = GPT(GPTConfig(vocab_size=CHARACTERS + 2, **SHAPE), seed=1)
    save_pretrained(tmp_path / "model", model, tokenizer, log=quiet)
    return tmp_path / "model"


def test_it_opens_and_says_which_tokens_no_text_may_have(folder, tmp_path):
    lines = []
    opened = load_pretrained(folder, log=lines.append)
    assert lines == [f"{folder}: 1 special token has no embedding, and no text may have it: <|im_end|>"]
    assert opened.tokenizer.vocab_size == CHARACTERS + 3
    save_pretrained(tmp_path / "again", opened.model, opened.tokenizer, source=opened.config, log=quiet)
    again = load_pretrained(tmp_path / "again", log=lines.append)
    tokens = mx.array([[1, 2, CHARACTERS + 1]])
    assert mx.array_equal(again.model(tokens), opened.model(tokens))


def test_a_chat_whose_template_has_such_a_token_is_refused(folder, tmp_path, call_main):
    opened = open_model(folder)
    refused = "must have tokens of the model alone, which has 258, but one is <|im_end|>, token 258. Take it out of"
    with pytest.raises(ValueError, match=re.escape(f"the messages {refused}")):
        Conversation(opened.model, opened.tokenizer, Sampler(), max_tokens=9).answer("hi")
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat))
    status, out, err = call_main(evaluate.main, folder, tmp_path / "chat.jsonl")
    assert (status, out) == (2, "")
    assert f"[evaluate] the examples {refused}" in err.splitlines()[-1]


def test_a_table_without_rows_for_plain_text_is_another_model_s(folder, tmp_path):
    model = GPT(GPTConfig(vocab_size=CHARACTERS - 1, **SHAPE), seed=1)
    with pytest.raises(HubError, match=r"must be the model's, of at most 255 tokens, but has 256"):
        save_pretrained(tmp_path / "small", model, HubTokenizer.load(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": CHARACTERS - 1}))
    with pytest.raises(HubError, match=r"vocab_size must be at least 256"):
        load_pretrained(folder)


def test_rows_that_no_token_has_are_never_drawn(tmp_path):
    save_pretrained(
        tmp_path / "large", GPT(GPTConfig(vocab_size=4 * CHARACTERS, **SHAPE)), character_tokenizer(), log=quiet
    )
    opened = open_model(tmp_path / "large")
    # A token beyond the vocabulary is an error of the tokenizer.
    pieces = list(stream_text(opened, "hi", Sampler(temperature=1.0), 20, 0, warn=quiet))
    assert len(pieces) > 1
