import random
import subprocess
import sys

from forge_mlx.data import StreamDecoder, Tokenizer
from forge_mlx.data import tokenizer as tokenizer_module
import numpy as np
import pytest
import sentencepiece

SAMPLE = "".join(
    f"class Name{i % 7}:\n    def get_{i}(self, key):\n\t\treturn self._value[{i}]\r\n\n\n" for i in range(150)
)
AWKWARD = {
    "empty": "",
    "space": " ",
    "spaces at the ends": "   a  b    ",
    "U+2581": "a\u2581b \u2581\u2581",
    "NUL": "\0a\0\0b",
    "U+2585": "a\u2585b",
    "tabs": "\t\ta\t",
    "newlines": "\n\n\na\n\n",
    "carriage returns": "a\r\nb\r\rc\r",
    "specials": "<s></s><unk><pad><0x0A>\u2047 ",
    "stand-ins": "\U0010fff0\U0010fff1\U0010fff2",
    "emoji": "👩‍👩‍👧‍👦🇩🇪",
    "combining": "e\u0301 \u0301 \u1100\u1161",
    "compatibility": "ﬁ Å \u212b ½ \u00a0\u3000\u200b",
    "separators": "\u0085\u2028\u2029\x0b\x0c\x1c",
    "byte order mark": "\ufeffa\ufeff",
    "highest": "\U0010ffff\uffff\ue000",
    "a line longer than a block": "ab " * 20_000,
    "newlines longer than a block": "\n" * 40_000,
}


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request):
    return Tokenizer.train([SAMPLE], kind=request.param, vocab_size=320)


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_round_trip_of_awkward_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert sum(tokenizer.token_bytes[ids]) == len(text.encode())
    assert tokenizer.end_id not in ids


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "sample", ["abcabdabe\n" * 50, "abcabdabe" * 2000 + " b"], ids=["no space", "one in 18,000 characters"]
)
def test_spaces_come_back_where_the_sample_has_next_to_none(kind, sample):
    tokenizer = Tokenizer.train([sample], kind=kind, vocab_size=265)
    for text in AWKWARD.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.token_to_bytes(token) for token in tokenizer.encode("  ")] == [b" ", b" "]


def test_round_trip_of_random_text(tokenizer):
    rng = random.Random(7)
    alphabets = [
        "ab \n\t\r",
        "\u2581 \0\u2585<s>/",
        "".join(map(chr, range(256))),
        [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000],
        SAMPLE,
    ]
    texts = ["".join(rng.choices(rng.choice(alphabets), k=rng.randrange(40))) for _ in range(3000)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert ids.dtype == np.int32
    assert [tokenizer.encode(text) for text in texts[:200]] == [
        ids.tolist() for ids in tokenizer.encode_batch(texts[:200])
    ]


def test_pieces_hold_indentation_newlines_and_tabs():
    tokenizer = Tokenizer.train([SAMPLE], kind="bpe", vocab_size=370)
    pieces = [tokenizer.token_to_bytes(token) for token in range(258, tokenizer.vocab_size)]
    assert any(b"\t\tr" in piece for piece in pieces)
    assert any(b"\r\n\n\n" in piece for piece in pieces)
    assert any(piece.endswith(b":\n") for piece in pieces)
    assert any(b"    def " in piece for piece in pieces)
    assert not any(char.encode() in piece for char in tokenizer_module._STAND_INS.values() for piece in pieces)


def test_parts_that_end_behind_newlines_encode_apart_as_together(monkeypatch):
    tokenizer = Tokenizer.train([SAMPLE], kind="bpe", vocab_size=370)
    whole = tokenizer.encode(SAMPLE)
    monkeypatch.setattr(tokenizer_module, "_BLOCK", 100)
    assert tokenizer.encode(SAMPLE) == whole
    cut = SAMPLE.index("\n\n\n") + 3
    assert tokenizer.encode(SAMPLE[:cut]) + tokenizer.encode(SAMPLE[cut:]) == whole


def test_lone_surrogate_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        Tokenizer.train(["\udfff"], kind="bpe", vocab_size=300)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_same_text_trains_the_same_model(kind):
    first, again = (Tokenizer.train(iter([SAMPLE]), kind=kind, vocab_size=320) for _ in range(2))
    assert again.model == first.model
    assert again.fingerprint == first.fingerprint
    assert Tokenizer.train([SAMPLE], kind=kind, vocab_size=321).fingerprint != first.fingerprint


def test_saved_model_is_plain_sentencepiece(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.model"
    tokenizer.save(path)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert plain.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert plain.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert (loaded.vocab_size, loaded.end_id) == (320, tokenizer.end_id)


def test_end_token_has_no_bytes(tokenizer):
    assert tokenizer.token_bytes[tokenizer.end_id] == 0
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_id, *tokenizer.encode("b")]) == "ab"
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)


def test_stream_decoder_holds_back_incomplete_characters(tokenizer):
    text = "aé👩\u2581\n"
    decoder = StreamDecoder(tokenizer)
    out = [decoder.push(token) for token in tokenizer.encode(text)]
    assert "".join(out) == text
    assert "" in out
    assert decoder.finish() == ""
    assert [part for part in out if part] == list(text)


def test_invalid_utf8_becomes_replacement_characters(tokenizer):
    ids = tokenizer.encode("👩")[:2]
    assert tokenizer.decode(ids) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode("é")[1:] + tokenizer.encode("a")) == "\ufffda"
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(token) for token in ids] == ["", ""]
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


@pytest.mark.parametrize("token", [-1, 320])
def test_id_outside_the_vocabulary(tokenizer, token):
    with pytest.raises(ValueError, match=rf"token id must be in 0 \.\.\. 319 but got {token}"):
        tokenizer.decode([token])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_vocabulary_that_the_text_cannot_fill(kind):
    text = "abc abd abe\n" * 3
    with pytest.raises(ValueError, match=r"at most (\d+) for this text but got 5000") as caught:
        Tokenizer.train([text], kind=kind, vocab_size=5000)
    largest = int(str(caught.value).split("at most ")[1].split()[0])
    assert Tokenizer.train([text], kind=kind, vocab_size=largest).vocab_size == largest
    with pytest.raises(ValueError, match="at most"):
        Tokenizer.train([text], kind=kind, vocab_size=largest + 1)


def test_vocabulary_too_small_for_the_characters():
    text = "abcdefghijklmnopqrstuvwxyz"
    with pytest.raises(ValueError, match=r"vocab_size must be at least (\d+) to hold .* but got 260"):
        Tokenizer.train([text], kind="bpe", vocab_size=260)


@pytest.mark.parametrize("text", ["", "\0\u2581\u2585"], ids=["empty", "nothing that can be trained on"])
def test_nothing_to_train_on(text):
    with pytest.raises(ValueError, match="must not be empty"):
        Tokenizer.train([text], kind="bpe", vocab_size=300)


def test_long_lines_are_trained_on():
    text = "".join(f"key{i % 10}=value " for i in range(3000))
    tokenizer = Tokenizer.train([text], kind="bpe", vocab_size=300)
    assert len(tokenizer.encode(text)) < len(text) / 3


def foreign_model(tmp_path, **changes):
    options = {
        "sentence_iterator": iter(SAMPLE.replace("\t", " ").splitlines()),
        "vocab_size": 320,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "bos_id": -1,
        "eos_id": 1,
        "unk_id": 0,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    prefix = tmp_path / "foreign"
    sentencepiece.SentencePieceTrainer.train(model_prefix=str(prefix), **{**options, **changes})
    return prefix.with_suffix(".model")


def test_foreign_model_that_keeps_text_is_taken(tmp_path):
    tokenizer = Tokenizer.load(foreign_model(tmp_path, user_defined_symbols=["<sys> x"]))
    for text in [*AWKWARD.values(), "a <sys> x b", SAMPLE]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "normaliser 'nmt_nfkc' changes characters"),
        ({"add_dummy_prefix": True}, "add_dummy_prefix"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"byte_fallback": False}, "byte_fallback"),
        ({"eos_id": -1}, "eos_id"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_foreign_model_that_changes_text_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(foreign_model(tmp_path, **changes))


@pytest.mark.parametrize("words", ["abc abd", "abc"], ids=["in longer pieces only", "in none"])
def test_foreign_model_without_a_piece_for_a_space_is_refused(tmp_path, words):
    # The character that is left out is the rarest.
    rare = {"sentence_iterator": iter([words] + ["ab"] * 9000), "user_defined_symbols": ["b\u2581"]}
    with pytest.raises(ValueError, match=r"foreign\.model it has no piece for a space\. Train one"):
        Tokenizer.load(foreign_model(tmp_path, **rare, model_type="bpe"))


@pytest.mark.parametrize("content", [b"", b"no model", b"\n\xff\xff\xff"], ids=["empty", "text", "cut off"])
def test_file_that_is_no_model(tmp_path, content):
    path = tmp_path / "x.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x.model must be a SentencePiece model"):
        Tokenizer.load(path)


def test_missing_model(tmp_path):
    with pytest.raises(ValueError, match=r"readable SentencePiece model but got '.*none.model': No such file"):
        Tokenizer.load(tmp_path / "none.model")


def test_training_prints_nothing():
    train = "Tokenizer.train(['abc abd\\n'] * 9, kind='bpe', vocab_size=264)"
    code = f"from forge_mlx.data import Tokenizer; {train}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
