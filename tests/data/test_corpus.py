import gzip
import json
import tracemalloc

from forge_mlx.data import corpus as corpus_module
from forge_mlx.data.corpus import Corpus
from forge_mlx.data.files import SourceFile
import pytest


def write(tmp_path, **contents):
    files = []
    for name, content in contents.items():
        path = tmp_path / name.replace("__", ".")
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        files.append(SourceFile(path, path.name))
    return files


def documents(corpus, split):
    out, parts = [], []
    for piece in corpus.pieces():
        assert piece.text
        if piece.split == split:
            parts.append(piece.text)
            if piece.last:
                out.append("".join(parts))
                parts = []
    assert not parts
    return out


def test_text_keeps_every_byte(tmp_path):
    texts = {"a__txt": "one\r\ntwo\r\x00\x85\u2028\ufeff\n\n", "b__txt__gz": "é\n\t👩‍👧 \n"}
    corpus = Corpus(write(tmp_path, **texts), "text", "train")
    assert documents(corpus, "train") == list(texts.values())
    assert corpus.scan.documents == 2
    assert sum(corpus.scan.file_bytes) == sum(len(text.encode()) for text in texts.values())


def test_a_byte_order_mark_is_no_text(tmp_path):
    texts = {"a__txt": "\ufeffone \ufeff", "b__jsonl": '\ufeff{"text": "two"}\n{"text": "\ufeff"}'}
    corpus = Corpus(write(tmp_path, **texts), "text", "train")
    assert documents(corpus, "train") == ["one \ufeff", "two", "\ufeff"]
    assert corpus.scan.file_bytes == [len("one \ufeff".encode()), len("two\ufeff".encode())]


def test_large_text_is_streamed_in_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_CHUNK", 7)
    text = "".join(f"line é {i}\n" + "\n" * (i % 4) for i in range(50)) + "end"
    corpus = Corpus(write(tmp_path, a__txt=text), "text", "train")
    pieces = [piece.text for piece in corpus.pieces()]
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert not any(piece.startswith("\n") for piece in pieces)


def test_a_line_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_CHUNK", 10)
    monkeypatch.setattr(corpus_module, "_LONGEST_LINE", 25)
    corpus = Corpus(write(tmp_path, a__txt="é" * 100), "text", "train")
    pieces = [piece.text for piece in corpus.pieces()]
    assert "".join(pieces) == "é" * 100
    assert max(map(len, pieces)) < 40


def test_json_lines(tmp_path):
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("a\nb", "", "ü")) + "  \n"
    files = write(tmp_path, a__jsonl=lines, b__ndjson__gz=lines.replace("text", "body"))
    corpus = Corpus(files[:1], "text", "train")
    assert documents(corpus, "train") == ["a\nb", "ü"]
    assert corpus.scan.empty == 1
    assert documents(Corpus(files[1:], "body", "train"), "train") == ["a\nb", "ü"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a.jsonl:2: each line must be one JSON object but got '\{\"text\": \"a\"'"),
        ("[1]", r"a.jsonl:2: each line must be a JSON object but got a list"),
        ('{"body": "a"}', r"a.jsonl:2: a line must have the field 'text' but has \['body'\]"),
        ('{"text": 3}', r"a.jsonl:2: the field 'text' must be a string but got a int"),
        (r'{"text": "x\ud800"}', r"a.jsonl:2: the text must be valid Unicode .* surrogate at character 1"),
        (b'{"text": "\xff"}', r"a.jsonl:2: a JSON line must be UTF-8"),
        ("[" * 100_000, r"a.jsonl:2: each line must be one JSON object"),
    ],
    ids=["cut off", "list", "no field", "number", "surrogate", "not utf-8", "too deep"],
)
def test_bad_json_line_names_file_and_line(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(ValueError, match=message):
        Corpus(write(tmp_path, a__jsonl=b'{"text": "ok"}\n' + line + b"\n"), "text", "train")


def test_files_that_are_not_utf8_are_left_out_and_known(tmp_path):
    files = write(tmp_path, a__txt="ok", b__txt=b"ok\xff", c__txt=b"cut \xc3", d__txt="", e__txt="yes")
    corpus = Corpus(files, "text", "train")
    assert corpus.scan.not_utf8 == [1, 2]
    assert corpus.scan.empty == 1
    assert documents(corpus, "train") == ["ok", "yes"]


@pytest.mark.parametrize("content", [b"plain text", gzip.compress(b"x" * 1000)[:-12]], ids=["not gzip", "cut off"])
def test_damaged_gzip(tmp_path, content):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.txt.gz must be an intact gzip file but reading it failed"):
        Corpus([SourceFile(path, path.name)], "text", "train")


def test_documents_are_held_out_evenly(tmp_path):
    lines = "".join(json.dumps({"text": str(i)}) + "\n" for i in range(40))
    corpus = Corpus(write(tmp_path, a__jsonl=lines), "text", 0.1)
    assert documents(corpus, "valid") == ["9", "19", "29", "39"]
    assert len(documents(corpus, "train")) == 36
    assert not corpus.splits_documents
    odd = Corpus(corpus.files, "text", 0.29)
    assert len(documents(odd, "valid")) == 11  # floor(40 * 0.29)


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_one_text_is_split_at_a_line_near_its_end(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(corpus_module, "_CHUNK", chunk)
    text = "".join(f"line é {i}\n" for i in range(500))
    corpus = Corpus(write(tmp_path, a__txt=text), "text", 0.1)
    (train,), (valid,) = documents(corpus, "train"), documents(corpus, "valid")
    assert train + valid == text
    assert train.endswith("\n")
    assert abs(len(valid.encode()) / len(text.encode()) - 0.1) < 0.01
    assert corpus.splits_documents


@pytest.mark.parametrize(
    ("text", "train", "valid"),
    [
        ("é" * 10, "é" * 5, "é" * 5),
        ("ab\ncdefghijkl", "ab\ncde", "fghijkl"),
        ("abcdefgh\nij", "abcdefgh\n", "ij"),
        ("aaaa\n\n\nbb", "aaaa\n\n\n", "bb"),
    ],
    ids=["no newline", "newline only before", "newline behind", "in a run of newlines"],
)
def test_where_one_text_is_cut(tmp_path, text, train, valid):
    corpus = Corpus(write(tmp_path, a__txt=text), "text", 0.5)
    assert documents(corpus, "train") == [train]
    assert documents(corpus, "valid") == [valid]


def test_every_cut_of_small_texts_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_CHUNK", 3)
    for text in ("a", "é", "\n", "\n\n\n", "a\nb", "é\né\n\né", "\n" * 5 + "a" * 5 + "\n"):
        for fraction in (0.01, 0.3, 0.5, 0.9):
            corpus = Corpus(write(tmp_path, a__txt=text), "text", fraction)
            assert "".join(documents(corpus, "train") + documents(corpus, "valid")) == text


def test_large_corpus_is_never_in_memory(tmp_path):
    line = b"def function(argument):  # about sixty characters in a line\n"
    path = tmp_path / "a.txt"
    with path.open("wb") as stream:
        for _ in range(24):
            stream.write(line * (1_000_000 // len(line)))
    tracemalloc.start()
    corpus = Corpus([SourceFile(path, "a.txt")], "text", 0.05)
    total = sum(len(piece.text) for piece in corpus.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == path.stat().st_size > 20_000_000
    assert peak < 8_000_000
