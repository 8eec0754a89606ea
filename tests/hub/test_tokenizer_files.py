"""Ids and texts of the written tokenizer, read by the tokenizers library, are those of ours."""

from dataclasses import replace
import json
from pathlib import Path
import random

from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub import tokenizer_files as module
from forge_mlx.hub.tokenizer_files import tokenizer_files
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="it comes with mlx-lm, which needs Python 3.11")

CODE = "".join(
    f'def größe_{i}(self, *args, **kwargs):\n\treturn "text: {i}"  # the test, text\r\n    if extent <= {i}.5:\n\n\n'
    for i in range(300)
)
TEXTS = {
    "empty": "",
    "a space": " ",
    "spaces": "  a   b          c ",
    "newlines": "\n\n a\n\n\nb \n",
    "tabs": "\t\ta\tb\t",
    "carriage returns": "a\r\nb\r\r\n",
    "code": CODE[:3000],
    "accents": "naïve größe é e\u0301 \u212b",
    "emoji": "🙂🙃 👩‍👩‍👧‍👦 🇩🇪 ✂️",
    "scripts": "日本語 العربية हिन्दी \u202e",
    "the space's stand-in": "a\u2581b \u2581 \u2581\u2581",
    "names of tokens": "</s><unk> <s> <0x41> <0x0A></s>",
    "controls": "\0\x01\x7f\x85\ufeff\ufffd\uffff\U0010ffff",
    "stand-ins of training": "\U0010fff0\U0010fff1\U0010fff2\u2585",
    "several blocks": CODE * 5,
}


def train(texts, vocab_size):
    return Tokenizer.train(texts, kind="bpe", vocab_size=vocab_size)


def random_text(choose, alphabet, length):
    return "".join(choose.choice(alphabet) for _ in range(length))


@pytest.fixture(scope="module")
def code():
    return train([CODE], 560)


@pytest.fixture(scope="module")
def dense():
    """Three characters: nearly every string of a few is a piece, and has many ways to be merged."""
    choose = random.Random(1)
    return train([random_text(choose, "ab ", 200) + "\n" for _ in range(400)], 600)


def read(tokenizer, **options):
    content = tokenizer_files(tokenizer, max_seq_len=64, **options)["tokenizer.json"]
    found = tokenizers.Tokenizer.from_str(json.dumps(content))
    found.encode_special_tokens = True
    return found


def ids(found, text):
    return found.encode(text, add_special_tokens=False).ids


def assert_same(found, tokenizer, text):
    expected = tokenizer.encode(text)
    assert ids(found, text) == expected, repr(text[:200])
    assert found.decode(expected) == tokenizer.decode(expected) == text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_ids_and_text(code, text):
    assert_same(read(code), code, text)


def test_random_unicode(code):
    found, choose = read(code), random.Random(2)
    planes = [(0, 0x7F), (0, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    for _ in range(300):
        text = "".join(chr(choose.randint(*choose.choice(planes))) for _ in range(choose.randint(1, 30)))
        assert_same(found, code, text)


@pytest.mark.parametrize("name", ["code", "dense"])
def test_random_pieces(name, request):
    # Pieces side by side, and their parts: where merges compete.
    tokenizer, choose = request.getfixturevalue(name), random.Random(3)
    found = read(tokenizer)
    pieces = [text for text in map(tokenizer.decode, ([each] for each in range(tokenizer.vocab_size))) if len(text) > 1]
    for _ in range(600):
        assert_same(found, tokenizer, random_text(choose, pieces, choose.randint(1, 12)))
        piece = choose.choice(pieces)
        parts = [piece, piece[1:], piece[:-1], piece[:2], piece[-2:], piece[:1]]
        assert_same(found, tokenizer, random_text(choose, parts, 9))


def test_random_texts_of_few_characters(dense):
    found, choose = read(dense), random.Random(4)
    for _ in range(3000):
        assert_same(found, dense, random_text(choose, choose.choice(["ab ", "ab", "a", "a "]), choose.randint(0, 60)))


@pytest.mark.slow
def test_a_vocabulary_of_the_standard_library():
    sources = sorted(Path(json.__file__).parents[1].glob("*.py"))
    texts = [source.read_text(encoding="utf-8") for source in sources]
    tokenizer = train(texts, 16000)
    found, choose = read(tokenizer), random.Random(5)
    for text in texts:
        # Shorter than what the tokenizer cuts into blocks by itself.
        assert ids(found, text[:30000]) == tokenizer.encode(text[:30000])
    pieces = [text for text in map(tokenizer.decode, ([each] for each in range(tokenizer.vocab_size))) if len(text) > 1]
    for _ in range(20000):
        assert_same(found, tokenizer, random_text(choose, pieces, choose.randint(1, 20)))
        piece = choose.choice(pieces)
        assert_same(found, tokenizer, random_text(choose, [piece, piece[1:], piece[:-1], piece[:2], piece[-2:]], 9))


def test_each_piece_is_made_in_one_way(dense):
    model = tokenizer_files(dense, max_seq_len=64)["tokenizer.json"]["model"]
    made = [left + right for left, right in model["merges"]]
    assert len(set(made)) == len(made)
    several = [
        text
        for text in made
        if sum(text[:at] in model["vocab"] and text[at:] in model["vocab"] for at in range(1, len(text))) > 1
    ]
    assert len(several) > 100


def test_the_way_a_piece_is_made_is_that_of_its_text_alone():
    def merges(*ranked):
        return list(module._merges([*"abcd", *ranked]))

    assert merges("ab", "bc", "abc") == [("a", "b"), ("b", "c"), ("ab", "c")]
    assert merges("bc", "ab", "abc") == [("b", "c"), ("a", "b"), ("a", "bc")]
    # "bc" comes first: "ab" and "cd" are never side by side, and "abcd" is made of "abc".
    assert merges("bc", "ab", "cd", "abc", "abcd")[-1] == ("abc", "d")
    # a, bc, dd, where nothing fits: "abcdd" is never made, though two pairs spell it.
    assert ("abcd", "d") not in merges("bc", "ab", "cd", "dd", "cdd", "abcd", "abcdd")
    assert ("ab", "cdd") not in merges("bc", "ab", "cd", "dd", "cdd", "abcd", "abcdd")


def test_without_beginning_nothing_is_added(code):
    assert read(code).encode("def").ids == code.encode("def")
    assert tokenizer_files(code, max_seq_len=64)["tokenizer_config.json"] == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 64,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }


def test_the_end_token_begins_texts(code):
    found = read(code, texts_begin_with_end=True)
    end, text, other = code.end_id, code.encode("def x"), code.encode(" y")
    assert found.encode("def x").ids == [end, *text]
    assert found.encode("").ids == [end]
    assert found.encode("def x", " y").ids == [end, *text, end, *other]
    assert ids(found, "def x") == text
    assert found.decode([end, *text]) == "def x"
    assert (
        tokenizer_files(code, max_seq_len=64, texts_begin_with_end=True)["tokenizer_config.json"]["bos_token"] == "</s>"
    )


def test_a_unigram_model_is_refused():
    tokenizer = Tokenizer.train([CODE[:5000]], kind="unigram", vocab_size=320)
    with pytest.raises(
        ValueError, match=r"must be a bpe model, .* but got unigram\. Train with data.tokenizer.kind: bpe"
    ):
        tokenizer_files(tokenizer, max_seq_len=64)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"role": "user-defined"}, "pieces that are user-defined"),
        ({"role": "unused"}, "pieces that are unused"),
        ({"text": "a b"}, "spaces beside U"),
        ({"text": "zzÿ"}, "characters that only longer pieces have"),
        ({"score": -1.0}, "two pieces of one score"),
        ({"text": "<unk>"}, "two pieces of one text"),
    ],
    ids=["user-defined", "unused", "space", "character", "score", "text"],
)
def test_what_merges_cannot_say_is_refused(code, monkeypatch, change, fault):
    pieces = module.read_pieces(code.model)
    last = next(at for at, piece in enumerate(pieces) if piece.score == -20.0)
    changed = [replace(piece, **change) if at == last else piece for at, piece in enumerate(pieces)]
    monkeypatch.setattr(module, "read_pieces", lambda _model: changed)
    with pytest.raises(ValueError, match=f"but the model has .*{fault}.* Use a tokenizer that forge_mlx trained"):
        tokenizer_files(code, max_seq_len=64)
