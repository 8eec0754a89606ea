"""Tokenizers of GGUF files give the ids of the tokenizer that was written, there and back."""

import io
import json

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_container import Outline, write_container
from forge_mlx.hub.gguf_file import read_gguf
from forge_mlx.hub.gguf_tokenizer import read_tokenizer
from forge_mlx.hub.gguf_vocabulary import tokenizer_keys
from forge_mlx.hub.tokenizer_files import tokenizer_files
import gguf
from gguf_oracle import CORPUS, PRE_TOKENIZERS, add_tokenizer, byte_level, write_tokenizer
import numpy as np
import pytest
import sentencepiece
from tokenizers import processors

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces\n\n\ttab \n",
    "1234567 3.14159 ½ ² ٣٤ 1st",
    "don't I'LL we've IT'S 'tis",
    "naïve café 東京 🙂👍🏽 e\u0301 \u00a0 \u3000",
    "a\r\nb\rc",
    "<|begin|>user <think> <|end|>",
    "\x00\x01\x7f\ufeff",
    "".join(map(chr, range(33, 900))),
]


def reread(path, keys):
    """The tokenizer of a file with these keys."""
    tensor = np.zeros(32, np.float32)
    write_container(
        path, {"general.architecture": "llama", **keys}, [Outline("x", "F32", (32,))], [tensor.view(np.uint8)]
    )
    return read_tokenizer(read_gguf(path))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_ids_are_those_of_the_tokenizer_that_was_written(tmp_path, pre):
    theirs = byte_level(pre)
    file = write_tokenizer(tmp_path / "x.gguf", lambda writer: add_tokenizer(writer, theirs, pre, template="{{ 1 }}"))
    ours = read_tokenizer(read_gguf(file))
    for text in TEXTS:
        assert ours.encode(text, specials=True) == theirs.encode(text, add_special_tokens=False).ids, text
        if pre != "qwen2":
            assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_id, ours.end_id, ours.begin_ids) == (1, 2, [])
    assert ours.chat_template == "{{ 1 }}"
    assert ours.special_ids == {0, 1, 2}
    reader = gguf.GGUFReader(file)
    keys = tokenizer_keys(ours, ours.vocab_size)
    for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"):
        assert keys[f"tokenizer.ggml.{key}"] == reader.fields[f"tokenizer.ggml.{key}"].contents(), key
    again = reread(tmp_path / "again.gguf", tokenizer_keys(ours, ours.vocab_size + 3))
    assert again.vocab_size == ours.vocab_size + 3
    for text in TEXTS:
        assert again.encode(text, specials=True) == ours.encode(text, specials=True)


def test_published_tokenizer_files_are_written_under_the_name_of_their_way_to_cut(tmp_path):
    for pre in PRE_TOKENIZERS:
        published = byte_level(pre)
        begin = ("<|begin|>", 1)
        published.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[begin])
        content = published.to_str().encode()
        settings = json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"}).encode()
        theirs = HubTokenizer({"tokenizer.json": content, "tokenizer_config.json": settings}, pre)
        keys = tokenizer_keys(theirs, theirs.vocab_size)
        assert keys["tokenizer.ggml.pre"] == pre
        ours = reread(tmp_path / f"{pre}.gguf", keys)
        assert ours.begin_ids == theirs.begin_ids == [1]
        for text in TEXTS:
            assert ours.encode(text, specials=True) == theirs.encode(text, specials=True), (pre, text)


def sentencepiece_model(**options):
    out = io.BytesIO()
    settings = {
        **{"model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "normalization_rule_name": "identity"},
        **{"remove_extra_whitespaces": False, "user_defined_symbols": ["<think>"], "minloglevel": 2},
    }
    lines = [line for text in CORPUS for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **settings, **options)
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def add_pieces(writer, theirs, prefix):
    kinds = []
    for token in range(theirs.vocab_size()):
        kind = gguf.TokenType.NORMAL
        if theirs.is_unknown(token):
            kind = gguf.TokenType.UNKNOWN
        elif theirs.is_control(token):
            kind = gguf.TokenType.CONTROL
        elif theirs.is_byte(token):
            kind = gguf.TokenType.BYTE
        elif theirs.id_to_piece(token) == "<think>":
            kind = gguf.TokenType.USER_DEFINED
        kinds.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([theirs.id_to_piece(token) for token in range(theirs.vocab_size())])
    writer.add_token_scores([theirs.get_score(token) for token in range(theirs.vocab_size())])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(theirs.bos_id())
    writer.add_eos_token_id(theirs.eos_id())
    writer.add_unk_token_id(theirs.unk_id())
    writer.add_add_space_prefix(prefix)


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no prefix"])
def test_sentencepiece_ids_are_those_of_sentencepiece(tmp_path, prefix):
    theirs = sentencepiece_model(add_dummy_prefix=prefix)
    file = write_tokenizer(tmp_path / "x.gguf", lambda writer: add_pieces(writer, theirs, prefix))
    ours = read_tokenizer(read_gguf(file))
    again = reread(tmp_path / "again.gguf", tokenizer_keys(ours, ours.vocab_size))
    # Behind a word that users defined llama.cpp, and Hugging Face's Llama, put a space again; SentencePiece does not.
    texts = [text for text in TEXTS if "<think>" not in text] + ["not <thinking"]
    for text in texts if prefix else [*texts, "a <think> b"]:
        expected = theirs.encode(text)
        assert ours.encode(text, specials=True) == expected, text
        assert again.encode(text, specials=True) == expected, text
        assert ours.decode(expected) == text
    assert ours.begin_ids == again.begin_ids == [theirs.bos_id()]
    assert (ours.end_id, again.end_id) == (theirs.eos_id(), theirs.eos_id())


def test_our_own_tokenizers_are_written_from_their_pieces_and_from_their_files(tmp_path):
    ours = Tokenizer.train(CORPUS, kind="bpe", vocab_size=400)
    contents = tokenizer_files(ours, max_seq_len=64, texts_begin_with_end=True)
    exported = HubTokenizer({name: json.dumps(content).encode() for name, content in contents.items()}, "exported")
    pieces = reread(tmp_path / "x.gguf", tokenizer_keys(ours, 410, texts_begin_with_end=True))
    files = reread(tmp_path / "y.gguf", tokenizer_keys(exported, 410))
    for text in TEXTS:
        assert pieces.encode(text) == files.encode(text) == ours.encode(text), text
        assert pieces.decode(ours.encode(text)) == text
    assert pieces.begin_ids == files.begin_ids == [ours.end_id]
    assert reread(tmp_path / "z.gguf", tokenizer_keys(ours, 400)).begin_ids == []


KEYS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.pre": "gpt-2",
}
WRONG = {
    "another model": ({"model": "bert"}, r"tokenizer\.ggml\.model must be gpt2 or llama but got 'bert'"),
    "unknown way to cut": ({"pre": "viking"}, r"tokenizer\.ggml\.pre must be one of gpt-2, .* but got 'viking'"),
    "no tokens": ({"tokens": None}, r"tokenizer\.ggml\.tokens must be there but is not"),
    "tokens that are numbers": ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens must be a list of strings"),
    "few kinds": ({"token_type": [1]}, r"token_type must have 4 values, one a token, but has 1"),
    "token twice": ({"tokens": ["a", "b", "a", "</s>"]}, r"tokens must be distinct but 'a' is there twice"),
    "merge of nothing": ({"merges": ["ab"]}, r"must join two tokens to a third but got 'ab'"),
    "merge to nothing": ({"merges": ["b a"]}, r"must join two tokens to a third but got 'b a'"),
    "end outside": ({"eos_token_id": 4}, r"eos_token_id must be in 0 \.\.\. 3 but got 4"),
    "no end": ({"eos_token_id": None}, r"must name its end token"),
    "no scores": ({"model": "llama"}, r"tokenizer\.ggml\.scores must have 4 values, one a token, but has 0"),
    "template of another type": ({"chat_template": 3}, r"tokenizer\.chat_template must be a string but got 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys_give_one_clear_line(tmp_path, name):
    assert reread(tmp_path / "right.gguf", KEYS).encode("abab") == [2, 2]
    changes, said = WRONG[name]
    before = {"chat_template": "tokenizer."}
    keys = KEYS | {before.get(key, "tokenizer.ggml.") + key: value for key, value in changes.items()}
    with pytest.raises(HubError, match=said) as caught:
        reread(tmp_path / "wrong.gguf", {key: value for key, value in keys.items() if value is not None})
    assert str(caught.value).startswith(str(tmp_path / "wrong.gguf"))
    assert "\n" not in str(caught.value)


def changed(**changes):
    content = json.loads(byte_level().to_str())
    content |= {key: value for key, value in changes.items() if key != "model"}
    content["model"] |= changes.get("model", {})
    settings = json.dumps({"eos_token": "<|end|>"}).encode()
    return HubTokenizer({"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": settings}, "tiny")


def test_what_llama_cpp_would_cut_otherwise_is_refused():
    split = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    with pytest.raises(HubError, match=r"a way that llama\.cpp has a name for but tiny has another"):
        tokenizer_keys(changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte]}), 400)
    with pytest.raises(HubError, match=r"a way that llama\.cpp has a name for but tiny has another"):
        tokenizer_keys(changed(normalizer={"type": "Lowercase"}), 400)
    with pytest.raises(HubError, match=r"must have merges, without which llama\.cpp opens no byte-level one, but tiny"):
        tokenizer_keys(changed(model={"merges": []}), 400)
    unigram = Tokenizer.train(CORPUS, kind="unigram", vocab_size=330)
    with pytest.raises(HubError, match="must be a bpe model but got unigram"):
        tokenizer_keys(unigram, 400)


def test_merges_that_sentencepiece_cannot_say_are_refused():
    theirs = {
        "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {token: number for number, token in enumerate(["<unk>", "</s>", "a", "b", "ab", "aba", "ba"])},
            # aba has a place before ba and one behind it.
            "merges": [["a", "b"], ["ab", "a"], ["b", "a"], ["a", "ba"]],
        },
    }
    settings = json.dumps({"eos_token": "</s>"}).encode()
    tokenizer = HubTokenizer({"tokenizer.json": json.dumps(theirs).encode(), "tokenizer_config.json": settings}, "tiny")
    with pytest.raises(HubError, match="those of 'aba' in tiny are not beside each other"):
        tokenizer_keys(tokenizer, 7)
