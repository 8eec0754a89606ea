"""Ids, texts and special tokens are those that transformers has from the same folder."""

import json

from chat_templates import CHATML, GEMMA, byte_level, sentencepiece_like, tokenizer_files
from forge_mlx.data import StreamDecoder, Tokenizer
from forge_mlx.data.chat import template_of
from forge_mlx.data.hub_tokenizer import HubTokenizer
import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="it comes with mlx-lm, which needs Python 3.11")
transformers = pytest.importorskip("transformers", reason="it comes with mlx-lm, which needs Python 3.11")

TEXTS = {
    "empty": "",
    "space": " ",
    "words": "Hello user, yes a Hello",
    "spaces": "  a   b          c ",
    "newlines": "\n\n a\n\n\nb \n",
    "tabs": "\t\ta\tb\r\n",
    "accents": "naïve é e\u0301 \u212b",
    "emoji": "🙂🙃 👩‍👩‍👧‍👦 🇩🇪",
    "scripts": "日本語 العربية हिन्दी \u202e",
    "names of tokens": "<s>a</s> <unk> <s></s> <0x41><tool>x</tool>",
    "controls": "\0\x01\x7f\x85\ufeff\uffff\U0010ffff",
}
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
KINDS = {
    "byte-level": byte_level(["<s>", "</s>"], ENDS, added=["<tool>", "</tool>"]),
    "sentencepiece-like": sentencepiece_like(["<s>", "</s>"], ENDS),
}


def written(folder, files):
    HubTokenizer(files, "t").save(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def with_json(files, name, **changes):
    return {**files, name: json.dumps({**json.loads(files.get(name, b"{}")), **changes}).encode()}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def ours(kind):
    return HubTokenizer(KINDS[kind], kind)


@pytest.fixture(scope="module")
def theirs(kind, tmp_path_factory):
    return written(tmp_path_factory.mktemp("t"), KINDS[kind])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_ids_and_texts_as_in_transformers(ours, theirs, text, kind):
    plain, parsed = ours.encode(text), ours.encode(text, specials=True)
    assert plain == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert parsed == theirs(text, add_special_tokens=False).input_ids
    assert not ours.special_ids & set(plain)
    for ids in (plain, parsed):
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(plain) == text
    # A space before the text is the tokenizer's own.
    own_space = kind == "sentencepiece-like" and text != ""
    assert ours.token_bytes[plain].sum() == len(text.encode()) + own_space


def test_a_metaspace_tokenizer_as_in_transformers(tmp_path):
    backend = tokenizers.Tokenizer.from_buffer(KINDS["sentencepiece-like"]["tokenizer.json"])
    backend.normalizer = None
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    decoders = [tokenizers.decoders.Metaspace(), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(decoders)
    files = tokenizer_files(backend, ENDS)
    ours, theirs = HubTokenizer(files, "t"), written(tmp_path, files)
    for text in TEXTS.values():
        ids = ours.encode(text, specials=True)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_batch_is_encoded_as_its_texts_are(ours):
    batch = ours.encode_batch(list(TEXTS.values()))
    assert [ids.tolist() for ids in batch] == [ours.encode(text) for text in TEXTS.values()]
    assert {ids.dtype for ids in batch} == {np.dtype(np.int32)}


def test_every_token_stands_for_what_the_library_decodes(ours, theirs):
    plain = [token for token in range(ours.vocab_size) if ours.token_to_bytes(token).isascii()]
    first = ours.encode("a")
    for token in plain:
        text = theirs.decode([*first, token], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert text == ours.decode(first) + ours.token_to_bytes(token).decode()
    assert len(plain) > 150
    assert ours.vocab_size == len(theirs)
    for token in ours.special_ids:
        assert ours.token_bytes[token] == 0


def test_a_stream_of_tokens_prints_whole_characters(ours):
    text = "yes 日本🙂 é"
    decoder = StreamDecoder(ours)
    parts = [decoder.push(token) for token in ours.encode(text)]
    assert "".join(parts).removeprefix(" ") == text
    assert "" in parts
    assert decoder.finish() == ""


def test_offsets_are_those_of_the_text(ours):
    text = " Hello\n\nyes é🙂</s> a "
    encoding = ours.encode_with_offsets(text, specials=True)
    # Bytes of one character share its place; the text is covered from end to end.
    reached = 0
    for start, end in encoding.offsets:
        assert start <= reached <= end
        assert end > start
        reached = end
    assert reached == len(text)


BEGINNINGS = {
    "nothing": (False, {}, []),
    "nothing, whatever the settings say": (False, {"add_bos_token": True}, []),
    "a token": (True, {}, ["<s>"]),
    "a token, whatever the settings say": (True, {"add_bos_token": False}, ["<s>"]),
}


@pytest.mark.parametrize(("adds", "config", "expected"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_begins_a_text_as_transformers_does(tmp_path, adds, config, expected):
    backend = tokenizers.Tokenizer.from_buffer(KINDS["byte-level"]["tokenizer.json"])
    if adds:
        bos = ("<s>", backend.token_to_id("<s>"))
        begin = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
        backend.post_processor = tokenizers.processors.Sequence([backend.post_processor, begin])
    files = tokenizer_files(backend, {**ENDS, **config})
    ours, theirs = HubTokenizer(files, "t"), written(tmp_path, files)
    assert ours.begin_ids == [ours.token_id(name) for name in expected]
    assert [*ours.begin_ids, *ours.encode("a")] == theirs("a").input_ids
    assert ours.bos_id == theirs.bos_token_id


def test_end_and_stop_tokens():
    files = byte_level(["<a>", "<b>", "<|im_start|>", "<|im_end|>"], {})
    base = HubTokenizer(with_json(files, "tokenizer_config.json", eos_token="<a>"), "t")
    a, b, turn = (base.token_id(name) for name in ("<a>", "<b>", "<|im_end|>"))
    assert (base.end_id, base.stop_ids) == (a, {a})
    for settings in ("tokenizer_config.json", "special_tokens_map.json"):
        named = HubTokenizer(with_json(files, settings, eos_token={"content": "<b>", "special": True}), "t")
        assert (named.end_id, named.stop_ids) == (b, {b})
    listed = with_json(files, "generation_config.json", eos_token_id=[a, turn])
    assert HubTokenizer(listed, "t").end_id == a
    both = HubTokenizer(with_json(listed, "tokenizer_config.json", eos_token="<b>"), "t")
    assert (both.end_id, both.stop_ids) == (b, {a, b, turn})
    assert base.with_chat_template("chatml").stop_ids == {a, turn}
    assert base.with_chat_template("{{ raise_exception('no') }}").stop_ids == {a}
    assert Tokenizer.train(["ab" * 99], kind="bpe", vocab_size=262).stop_ids == {1}


def test_end_of_turn_of_a_template_that_needs_more_than_its_end_token():
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": GEMMA}
    gemma = HubTokenizer(byte_level(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], names), "t")
    assert gemma.stop_ids == {gemma.token_id("<eos>"), gemma.token_id("<end_of_turn>")}


def test_tokens_that_only_the_settings_know(tmp_path):
    first = HubTokenizer(KINDS["byte-level"], "t").vocab_size
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    late = {
        first + 1: {"content": "<y>", "special": False, **flags},
        first: {"content": "<x>", "special": True, **flags},
    }
    # `yes` is a word of the vocabulary, which is special by its role alone.
    changes = {"added_tokens_decoder": late, "pad_token": "yes"}
    files = with_json(KINDS["byte-level"], "tokenizer_config.json", **changes)
    ours, theirs = HubTokenizer(files, "t"), written(tmp_path, files)
    ids = ours.encode("a<x><y>yes", specials=True)
    assert ids == theirs("a<x><y>yes", add_special_tokens=False).input_ids
    assert ids[1:3] == [first, first + 1]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<y>"
    assert ours.special_ids == set(theirs.all_special_ids) | {first}


def test_truncation_and_padding_of_the_file_are_off():
    backend = tokenizers.Tokenizer.from_buffer(KINDS["byte-level"]["tokenizer.json"])
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = HubTokenizer(tokenizer_files(backend, ENDS), "t")
    assert len(tokenizer.encode("a")) == 1
    assert [len(ids) for ids in tokenizer.encode_batch(["b" * 50, "b"])] == [50, 1]
    assert len(tokenizer.encode("b" * 50, specials=True)) == 50


def test_files_come_back_unchanged(tmp_path):
    files = {**KINDS["byte-level"], "generation_config.json": b'{"eos_token_id":  [1]}', "vocab.json": b"{ }"}
    HubTokenizer(files, "t").save(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "config.json").write_text("not the tokenizer's")
    loaded = HubTokenizer.load(tmp_path / "a" / "b")
    assert loaded.files == files
    assert loaded.name == str(tmp_path / "a" / "b")


def test_chat_template_that_is_found(tmp_path):
    files = KINDS["byte-level"]
    assert HubTokenizer(files, "t").chat_template is None
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    found = {
        "a": with_json(files, "tokenizer_config.json", chat_template="a"),
        "y": with_json(files, "tokenizer_config.json", chat_template=several),
        "b": with_json(files, "chat_template.json", chat_template="b"),
    }
    for template, given in found.items():
        assert HubTokenizer(given, "t").chat_template == template
        assert HubTokenizer({**given, "chat_template.jinja": b"\xc3\xa9"}, "t").chat_template == "é"
    other = HubTokenizer(found["a"], "t").with_chat_template(CHATML)
    assert other.chat_template == CHATML
    assert written(tmp_path, other.files).chat_template == CHATML


def test_chat_template_of_several_places(tmp_path):
    processors = with_json(KINDS["byte-level"], "chat_template.json", chat_template="b")
    both = with_json(processors, "tokenizer_config.json", chat_template="a")
    assert HubTokenizer(both, "t").chat_template == written(tmp_path, both).chat_template == "a"
    by_name = with_json(KINDS["byte-level"], "chat_template.json", chat_template={"rag": "x", "default": "y"})
    assert HubTokenizer(by_name, "t").chat_template == "y"


def test_chat_templates_without_a_default_are_named():
    several = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}]
    tokenizer = HubTokenizer(with_json(KINDS["byte-level"], "tokenizer_config.json", chat_template=several), "here")
    with pytest.raises(ValueError, match="here has only those named rag and tool_use, none of them default"):
        template_of(tokenizer)


def test_tiktoken_files_are_read_for_the_error_alone(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"has only tiktoken\.model"):
        HubTokenizer.load(tmp_path)
    HubTokenizer(KINDS["byte-level"], "t").save(tmp_path)
    assert "tiktoken.model" not in HubTokenizer.load(tmp_path).files


def test_fingerprint_is_of_all_that_decides_ids():
    files = KINDS["byte-level"]
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    last = HubTokenizer(files, "t").vocab_size
    changed = [
        files,
        with_json(files, "tokenizer_config.json", chat_template="a"),
        with_json(files, "tokenizer_config.json", eos_token="<s>"),
        with_json(files, "tokenizer_config.json", added_tokens_decoder={last: {"content": "<x>", **flags}}),
        byte_level(["</s>", "<s>"], ENDS),
    ]
    assert len({HubTokenizer(each, "t").fingerprint for each in changed}) == len(changed)
    harmless = with_json(files, "tokenizer_config.json", model_max_length=5)
    assert HubTokenizer(harmless, "u").fingerprint == HubTokenizer(files, "t").fingerprint


def broken_decoder():
    backend = tokenizers.Tokenizer.from_buffer(KINDS["byte-level"]["tokenizer.json"])
    backend.decoder = tokenizers.decoders.WordPiece()
    return tokenizer_files(backend, ENDS)


def added_behind_a_gap():
    content = json.loads(KINDS["byte-level"]["tokenizer.json"])
    content["added_tokens"][-1]["id"] += 5
    return {**KINDS["byte-level"], "tokenizer.json": json.dumps(content).encode()}


def no_decoder():
    return with_json(KINDS["byte-level"], "tokenizer.json", decoder=None)


MALFORMED = {
    "nothing": ({}, r"here must have a tokenizer\.json but has none\. Write one with transformers"),
    "SentencePiece alone": ({"tokenizer.model": b"x"}, r"must have a tokenizer\.json but has only tokenizer\.model"),
    "tiktoken's alone": (
        {"tiktoken.model": b"x"},
        r"has only tiktoken\.model, which code of the model's own reads, and transformers writes none of it\. Take the",
    ),
    "cut off": (
        {"tokenizer.json": b'{"model": {'},
        r"tokenizer\.json of here must be JSON but got: Expecting property",
    ),
    "not an object": ({"tokenizer.json": b"[]"}, r"tokenizer\.json of here must be a JSON object but got list"),
    "not UTF-8": ({"tokenizer.json": b'{"a": "\xff"}'}, r"tokenizer\.json of here must be JSON but got: 'utf-8' codec"),
    "no tokenizer": (
        {"tokenizer.json": b"{}"},
        r"tokenizer\.json of here must be a tokenizer but got: .*Model missing",
    ),
    "settings cut off": (
        {**KINDS["byte-level"], "tokenizer_config.json": b"{"},
        r"tokenizer_config\.json of here must be",
    ),
    "no end": (byte_level(["<s>"], {}), r"here must name its end token but got no eos_token\. Set eos_token in"),
    "unknown end": (byte_level([], ENDS), r"must name its end token but got eos_token '</s>', which is no token\. Set"),
    "end outside": (
        with_json(byte_level([]), "generation_config.json", eos_token_id=999),
        r"must name its end token but got no eos_token and eos_token_id 999, which is none\.",
    ),
    "another decoder": (broken_decoder(), r"the decoder in .* must be ByteLevel, Metaspace, .* but got .*WordPiece"),
    "no decoder": (no_decoder(), r"the decoder in the tokenizer\.json of here must be ByteLevel, .* but got none"),
    "a gap": (
        added_behind_a_gap(),
        r"the added token '</tool>' of here must get the id \d+ that its files say but gets",
    ),
    "added tokens without ids": (
        with_json(KINDS["byte-level"], "tokenizer_config.json", added_tokens_decoder={"x": {"content": "y"}}),
        r"added_tokens_decoder in tokenizer_config\.json of here must map ids to tokens but got: invalid literal",
    ),
    "template in another encoding": (
        {**KINDS["byte-level"], "chat_template.jinja": b"\xff"},
        r"chat_template\.jinja of here must be UTF-8 but is not",
    ),
}


@pytest.mark.parametrize(("files", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_named(files, message):
    with pytest.raises(ValueError, match=message) as caught:
        HubTokenizer(files, "here")
    assert str(caught.value).startswith("[hub_tokenizer] ")
    assert "\n" not in str(caught.value)


def test_wrong_arguments(ours):
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at character 1"):
        ours.encode("a\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        ours.encode_batch(["a", "\udfff"])
    for token in (-1, ours.vocab_size):
        with pytest.raises(ValueError, match=rf"a token id must be in 0 \.\.\. {ours.vocab_size - 1} but got {token}"):
            ours.decode([token])
    with pytest.raises(
        ValueError, match=r"lacks <\|im_start\|> and <\|im_end\|> of chatml\. Write a template .* </s>\."
    ):
        ours.with_chat_template("chatml")
