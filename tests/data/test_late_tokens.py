"""Tokens that tokenizer.json lacks have the ids that transformers gives them."""

import json

from chat_templates import byte_level
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.gguf_vocabulary import tokenizer_keys
import pytest
from test_hub_tokenizer import ENDS, with_json, written

transformers = pytest.importorskip("transformers", reason="it comes with mlx-lm, which needs Python 3.11")

BASE = byte_level(["<s>", "</s>"], ENDS, added=["<tool>"])
NEXT = HubTokenizer(BASE, "t").vocab_size
TEXT = "Hello<a> <b><c>yes<tool></s><d>"
FLAGS = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
CONFIG = "tokenizer_config.json"


def settings(**changes):
    return with_json(BASE, CONFIG, **changes)


def listed(**changes):
    return {**settings(**changes), "added_tokens.json": json.dumps({"<b>": NEXT + 1, "<a>": NEXT}).encode()}


CASES = {
    "added_tokens.json": listed(),
    "and one of them special": listed(extra_special_tokens=["<b>", "<c>"]),
    "a role of one of them": listed(pad_token="<a>"),
    "extra_special_tokens": settings(extra_special_tokens=["<b>", "<a>"]),
    "by names": settings(extra_special_tokens={"image_token": "<b>", "audio_token": "<a>"}),
    "additional_special_tokens": settings(additional_special_tokens=["<a>", "<tool>", "yes"]),
    "by names, beside the older list": settings(
        extra_special_tokens={"image_token": "<b>"}, additional_special_tokens=["<a>"]
    ),
    "both": settings(additional_special_tokens=["<a>"], extra_special_tokens=["<b>"]),
    "with flags": settings(extra_special_tokens=[{"__type": "AddedToken", "content": "<b>", "special": True, **FLAGS}]),
    "roles first": settings(additional_special_tokens=["<a>"], image_token="<b>", pad_token="<c>", cls_token="<d>"),
    "the older map": with_json(BASE, "special_tokens_map.json", additional_special_tokens=["<b>"], pad_token="<a>"),
    "the older map's newer key": with_json(
        settings(extra_special_tokens=["<c>"]), "special_tokens_map.json", extra_special_tokens=["<b>", "<c>"]
    ),
    "files that are not read": with_json(
        {**listed(added_tokens_decoder={str(NEXT): {"content": "<c>", "special": True, **FLAGS}})},
        "special_tokens_map.json",
        additional_special_tokens=["<b>"],
    ),
    "an id that the vocabulary has otherwise": {**BASE, "added_tokens.json": b'{"Hell": 5}'},
}


@pytest.mark.parametrize("files", CASES.values(), ids=CASES)
def test_as_in_transformers(tmp_path, files):
    ours, theirs = HubTokenizer(files, "t"), written(tmp_path, files)
    ids = ours.encode(TEXT, specials=True)
    assert ids == theirs(TEXT, add_special_tokens=False).input_ids
    assert ids != HubTokenizer(BASE, "t").encode(TEXT, specials=True)
    assert ours.vocab_size == len(theirs)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert "<c>" in ours.decode(ours.encode("<c>"))


def test_gguf_names_them():
    tokens = tokenizer_keys(HubTokenizer(CASES["and one of them special"], "t"), NEXT + 3)
    assert tokens["tokenizer.ggml.tokens"][NEXT:] == ["<a>", "<b>", "<c>"]
    assert tokens["tokenizer.ggml.token_type"][NEXT:] == [4, 3, 3]


def test_gguf_leaves_out_what_has_no_row():
    tokenizer = HubTokenizer(settings(pad_token="<a>"), "t")
    whole, cut = tokenizer_keys(tokenizer, NEXT + 1), tokenizer_keys(tokenizer, NEXT)
    assert whole["tokenizer.ggml.tokens"][NEXT:] == ["<a>"]
    assert whole["tokenizer.ggml.padding_token_id"] == NEXT
    assert cut["tokenizer.ggml.tokens"] == whole["tokenizer.ggml.tokens"][:NEXT]
    assert len(cut["tokenizer.ggml.token_type"]) == NEXT
    assert "tokenizer.ggml.padding_token_id" not in cut
    late = HubTokenizer(settings(bos_token="<a>"), "t")
    with pytest.raises(ValueError, match=rf"bos_token must have an embedding but its id is {NEXT}, and the model has"):
        tokenizer_keys(late, NEXT)


REFUSED = {
    "another id": (
        {**BASE, "added_tokens.json": json.dumps({"<a>": NEXT + 3}).encode()},
        rf"the added token '<a>' of here must get the id {NEXT + 3} that its files say but gets {NEXT}\.",
    ),
    "no id": (
        {**BASE, "added_tokens.json": b'{"<a>": "x"}'},
        r"added_tokens\.json of here must map tokens to ids but '<a>' has 'x'\.",
    ),
    "no list": (
        settings(extra_special_tokens=5),
        r"extra_special_tokens of here must be a list of tokens, or an object of them, but got int\.",
    ),
    "no token": (
        settings(additional_special_tokens=["<a>", None]),
        r"additional_special_tokens of here must name tokens by their texts but got 'None'\.",
    ),
    "half a character": (
        settings(extra_special_tokens=["\ud800"]),
        r"extra_special_tokens of here must name tokens by their texts but got '\\ud800'\.",
    ),
    "behind an end that is none": (
        with_json(settings(eos_token="<e>", pad_token="<a>"), "generation_config.json", eos_token_id=1),
        r"eos_token of here must be a token, as '<a>' gets the id behind it, but is none\. Set eos_token in",
    ),
}


@pytest.mark.parametrize(("files", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(files, message):
    with pytest.raises(ValueError, match=message) as caught:
        HubTokenizer(files, "here")
    assert "\n" not in str(caught.value)
