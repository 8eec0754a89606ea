import dataclasses
import gzip
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import threading

from forge_mlx.data import DataConfig, TokenizerConfig, prepare
from forge_mlx.data import corpus as corpus_module
from forge_mlx.data.corpus import Piece
from forge_mlx.data.sources import sample_text
import numpy as np
import pytest

TOKENIZER = TokenizerConfig(vocab_size=300)


@pytest.fixture(autouse=True)
def own_folder_and_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_MLX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def text_of(i):
    return f"def function_{i}(self):\n    return self.value[{i}]\n\n" * 4


def write_documents(count, folder="docs"):
    for i in range(count):
        path = Path(folder) / f"{i:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text_of(i))


def run(source="docs", **changes):
    log = []
    config = DataConfig(source=source, **{"tokenizer": TOKENIZER, **changes})
    return prepare(config, log=log.append), log


def documents(data, split):
    tokens = getattr(data, split).tokens.tolist()
    text, out = [], []
    for token in tokens:
        if token == data.tokenizer.end_id:
            out.append(data.tokenizer.decode(text))
            text = []
        else:
            text.append(token)
    assert not text
    return out


def cached(kind):
    (folder,) = (Path(os.environ["FORGE_MLX_CACHE"]) / "data").glob(f"{kind}-*")
    return folder


def test_tokens_are_the_documents():
    write_documents(40)
    data, log = run(valid_fraction=0.1)
    held_out = [9, 19, 29, 39]
    assert documents(data, "valid") == [text_of(i) for i in held_out]
    assert documents(data, "train") == [text_of(i) for i in range(40) if i not in held_out]
    assert data.valid.num_bytes == sum(len(text_of(i)) for i in held_out)
    assert data.train.num_bytes == data.tokenizer.token_bytes[data.train.tokens].sum()
    assert data.train.tokenizer == data.tokenizer.fingerprint
    assert data.train.fingerprint != data.valid.fingerprint
    assert "36 documents" in log[-1]


def test_facts_are_plain_and_exact():
    write_documents(40)
    Path("docs/latin.txt").write_bytes(b"caf\xe9")
    Path("docs/empty.txt").write_text("")
    Path("docs/picture.png").write_text("")
    data, log = run(valid_fraction=0.1)
    facts = json.loads(json.dumps(dataclasses.asdict(data.facts)))
    valid = "".join(documents(data, "valid"))
    packed = len(gzip.compress(valid.encode(), 9))
    assert facts.pop("seconds") >= 0
    assert facts == {
        "source": ["docs"],
        "files": 41,
        "files_not_utf8": 1,
        "names_not_utf8": ["docs/latin.txt"],
        "empty_documents": 1,
        "split_by": "documents",
        "train_documents": 36,
        "valid_documents": 4,
        "train_bytes": data.train.num_bytes,
        "valid_bytes": len(valid),
        "train_tokens": data.train.num_tokens,
        "valid_tokens": data.valid.num_tokens,
        "bytes_per_token": pytest.approx(len(valid) / (data.valid.num_tokens - 4)),
        "gzip_bits_per_byte": pytest.approx(8 * packed / len(valid)),
        "vocab_size": 300,
        "from_cache": False,
    }
    assert log.count("left out as not UTF-8: 1 file (docs/latin.txt)") == 1
    assert "left out as empty: 1 document" in log
    assert "source: 42 files, 1 others left out (1 .png)" in log


def test_only_the_first_names_are_given_but_all_are_counted():
    write_documents(40)
    for i in range(7):
        Path(f"docs/latin{i}.txt").write_bytes(b"caf\xe9")
    data, log = run()
    assert data.facts.files_not_utf8 == 7
    names = ", ".join(f"docs/latin{i}.txt" for i in range(5))
    assert f"left out as not UTF-8: 7 files ({names}, ...)" in log


def test_second_run_takes_the_cache_and_says_the_same(monkeypatch):
    write_documents(40)
    Path("docs/latin.txt").write_bytes(b"caf\xe9")
    first, _ = run()
    monkeypatch.setattr(corpus_module, "read_text", None)
    second, log = run()
    assert second.facts.from_cache
    assert not first.facts.from_cache
    assert dataclasses.replace(second.facts, from_cache=False, seconds=0) == dataclasses.replace(first.facts, seconds=0)
    assert second.train.fingerprint == first.train.fingerprint
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert "left out as not UTF-8: 1 file (docs/latin.txt)" in log
    os.rename("docs", "elsewhere")
    moved, log = run("elsewhere")
    assert moved.facts.from_cache
    assert "left out as not UTF-8: 1 file (elsewhere/latin.txt)" in log


def change_file():
    Path("docs/003.txt").write_text(text_of(77))


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (change_file, {}),
        (lambda: os.rename("docs/003.txt", "docs/999.txt"), {}),
        (lambda: os.remove("docs/003.txt"), {}),
        (lambda: None, {"valid_fraction": 0.2}),
        (lambda: None, {"tokenizer": TokenizerConfig(vocab_size=301)}),
        (lambda: None, {"tokenizer": TokenizerConfig(kind="unigram", vocab_size=300)}),
        (lambda: None, {"valid_paths": ["held"]}),
    ],
    ids=["content", "order", "fewer files", "fraction", "vocab_size", "kind", "valid_paths"],
)
def test_a_change_builds_anew(change, settings):
    write_documents(40)
    write_documents(3, "held")
    first, _ = run()
    change()
    second, _ = run(**settings)
    assert not second.facts.from_cache
    assert second.train.fingerprint != first.train.fingerprint


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("tokens", "train.bin", b"half"),
        ("tokens", "valid.json", b'{"form'),
        ("tokens", "facts.json", b"{}"),
        ("tokens", "facts.json", None),
        ("tokenizer", "tokenizer.model", b"half"),
        ("tokenizer", "tokenizer.model", None),
        ("tokenizer", "tokenizer.json", b"{}"),
    ],
)
def test_damaged_cache_is_said_and_built_again(kind, name, content):
    write_documents(40)
    first, _ = run()
    expected = first.train.tokens.tolist()
    path = cached(kind) / name
    path.unlink() if content is None else path.write_bytes(content)
    second, log = run()
    assert sum(f"{kind}-" in line and "damaged" in line for line in log) == 1
    assert second.train.tokens.tolist() == expected
    third, log = run()
    assert third.facts.from_cache
    assert not any("damaged" in line for line in log)


def test_interrupted_build_leaves_no_cache(monkeypatch):
    write_documents(40)
    data, _ = run()
    change_file()

    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("forge_mlx.data.cache.TokenWriter.end_document", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run()
    folder = Path(os.environ["FORGE_MLX_CACHE"]) / "data"
    assert len(list(folder.glob("tokens-*"))) == 1
    assert not list(folder.glob("*.tmp"))
    monkeypatch.undo()
    assert data.facts.train_documents == 38


def test_builds_at_the_same_time_agree():
    write_documents(40)
    results = []
    threads = [threading.Thread(target=lambda: results.append(run()[0])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({data.train.fingerprint for data in results}) == 1
    assert len({data.train.tokens.tobytes() for data in results}) == 1
    assert len(results) == 6
    assert not list((Path(os.environ["FORGE_MLX_CACHE"]) / "data").glob("*.tmp"))


@pytest.mark.parametrize("trains", [True, False], ids=["while the tokenizer is trained", "while it is tokenised"])
def test_file_that_changes_meanwhile_is_not_cached(tmp_path, monkeypatch, trains):
    write_documents(40)
    settings = {}
    if not trains:
        run()[0].tokenizer.save(tmp_path / "mine.model")
        settings = {"tokenizer": TokenizerConfig(path=str(tmp_path / "mine.model"))}
        change_file()
        shutil.rmtree(tmp_path / "cache")
    read_text = corpus_module.read_text

    def grow(file):
        yield from read_text(file)
        if file.name == "docs/005.txt":
            with file.path.open("a") as stream:
                stream.write("more\n")

    monkeypatch.setattr(corpus_module, "read_text", grow)
    with pytest.raises(ValueError, match=r"must stay as they are .* 1 changed \(docs/005.txt\)"):
        run(**settings)
    assert not list((Path(os.environ["FORGE_MLX_CACHE"]) / "data").iterdir())


def test_one_file_is_split_by_its_tail():
    Path("one.txt").write_text("".join(text_of(i) for i in range(60)))
    data, _ = run("one.txt", valid_fraction=0.1)
    (train,), (valid,) = documents(data, "train"), documents(data, "valid")
    assert train + valid == Path("one.txt").read_text()
    assert data.facts.split_by == "document tails"
    assert len(valid) / len(train + valid) == pytest.approx(0.1, abs=0.01)


def test_mixed_sources_in_their_order():
    write_documents(3)
    with gzip.open("b.jsonl.gz", "wt") as stream:
        for i in range(3, 40):
            stream.write(json.dumps({"body": text_of(i)}) + "\n")
    data, _ = run(["docs", "*.gz"], text_field="body", valid_fraction=0.1)
    assert documents(data, "valid") == [text_of(i) for i in (9, 19, 29, 39)]
    assert documents(data, "train")[:4] == [text_of(i) for i in range(4)]


def test_valid_paths():
    write_documents(5)
    write_documents(2, "held")
    data, _ = run(valid_paths=["held"])
    assert documents(data, "train") == [text_of(i) for i in range(5)]
    assert documents(data, "valid") == [text_of(i) for i in range(2)]
    assert data.facts.split_by == "valid_paths"
    Path("held/latin.txt").write_bytes(b"\xe9")
    assert run(valid_paths=["held"])[0].facts.names_not_utf8 == ["held/latin.txt"]
    with pytest.raises(ValueError, match=r"must not name files of the source but 1 are in both \(docs/001.txt\)"):
        run(valid_paths=["docs/001.txt"])


def test_tokenizer_never_sees_validation_text():
    write_documents(5)
    write_documents(2, "docs2")
    data, _ = run(valid_paths=["docs2"])
    Path("docs2/000.txt").write_text("entirely different words here\n" * 50)
    other, _ = run(valid_paths=["docs2"])
    assert other.tokenizer.fingerprint == data.tokenizer.fingerprint


def test_existing_tokenizer(tmp_path):
    write_documents(40)
    data, _ = run()
    data.tokenizer.save(tmp_path / "mine.model")
    Path("docs/000.txt").write_text("other\n")
    again, log = run(tokenizer=TokenizerConfig(path=str(tmp_path / "mine.model")))
    assert again.tokenizer.fingerprint == data.tokenizer.fingerprint
    assert any("mine.model, 300 pieces" in line and "do not apply" in line for line in log)
    with pytest.raises(ValueError, match=r"but got 'none.model': No such file"):
        run(tokenizer=TokenizerConfig(path="none.model"))


@pytest.mark.parametrize(("text", "empty"), [("é", "valid"), ("a", "train")])
def test_text_too_small_to_split(tmp_path, text, empty):
    write_documents(40)
    run()[0].tokenizer.save(tmp_path / "mine.model")
    Path("a.txt").write_text(text)
    with pytest.raises(ValueError, match=f"the {empty} split must hold some text but is empty"):
        run("a.txt", tokenizer=TokenizerConfig(path=str(tmp_path / "mine.model")))


@pytest.mark.parametrize(
    ("contents", "settings", "message"),
    [
        (
            {"a.txt": b"", "b.txt": b""},
            {},
            r"source must hold some text but has 2 files that are empty\. Check data\.source\.",
        ),
        ({"a.txt": b"\xff"}, {}, r"has 1 file that is not UTF-8 \(docs/a.txt\)\. Check"),
        ({"a.jsonl": b"\n \n"}, {}, r"source must hold some text"),
        (
            {"a.txt": b"text\n" * 9, "v.md": b""},
            {"valid_paths": ["docs/v.md"]},
            "valid_paths must hold some text",
        ),
        ({"a.txt": b"x"}, {}, "must hold some text|must not be empty"),
        (
            {"a.txt": b"text\n" * 99},
            {"tokenizer": TokenizerConfig(vocab_size=5000)},
            r"at most \d+ for this text",
        ),
        ({"a.png": b"x"}, {}, "must hold a file with one of the suffixes"),
    ],
    ids=[
        "empty",
        "not UTF-8",
        "blank lines",
        "valid empty",
        "one character",
        "vocabulary too large",
        "other files",
    ],
)
def test_corpora_that_cannot_be_used(contents, settings, message):
    Path("docs").mkdir()
    for name, content in contents.items():
        Path("docs", name).write_bytes(content)
    source = "docs/a.txt" if "valid_paths" in settings else "docs"
    with pytest.raises(ValueError, match=message):
        run(source, **settings)
    folder = Path(os.environ["FORGE_MLX_CACHE"]) / "data"
    assert not folder.exists() or not list(folder.glob("*.tmp")) + list(folder.glob("tokens-*"))


def test_a_parquet_file_is_no_corpus():
    Path("mine.parquet").write_bytes(b"PAR1\xff")
    Path("a.txt").touch()
    with pytest.raises(
        ValueError,
        match=r"^\[data\] source must hold some text but has 1 file that is not UTF-8 \(mine\.parquet\) and 1 file "
        r"that is empty\. Parquet files hold examples: set data\.format to what one is, text for plain texts\.$",
    ):
        run(["mine.parquet", "a.txt"])


def test_missing_path():
    with pytest.raises(ValueError, match="every source must exist but 'nowhere' does not exist"):
        run("nowhere")


def test_sample_is_spread_evenly_and_bounded():
    lines = [f"{i:07}\n" for i in range(100_000)]
    text = "".join(lines)
    pieces = [
        Piece("train", text[:400_000], False),
        Piece("valid", "no\n", True),
        Piece("train", text[400_000:], True),
    ]
    sample = "".join(sample_text(pieces, 800_000, 80_000))
    assert abs(len(sample) - 80_000) < 5000
    numbers = [int(line) for line in sample.splitlines()]
    counts = np.histogram(numbers, bins=10, range=(0, 100_000))[0]
    assert counts.min() > 0.7 * counts.max()
    assert "".join(sample_text(pieces, 800_000, 800_000)) == text


@pytest.mark.slow
def test_corpus_larger_than_memory_allows(tmp_path):
    """40 MB of text in one file, tokenised by a process that must not grow by half of that."""
    path = tmp_path / "large.txt"
    with path.open("w") as stream:
        for i in range(500_000):
            stream.write(f"def function_{i % 977}(self, key_{i % 31}):\n    return self.values[{i}] * {i % 7} + 1\n\n")
    code = f"""
import resource, sys
from forge_mlx.data import DataConfig, TokenizerConfig, prepare
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config = DataConfig(source={str(path)!r}, tokenizer=TokenizerConfig(vocab_size=512, sample_bytes=100_000))
small = DataConfig(source={str(tmp_path / "small.txt")!r}, tokenizer=config.tokenizer)
prepare(small, log=lambda line: None)
before = peak()
data = prepare(config, log=lambda line: None)
print(peak() - before, data.train.num_bytes + data.valid.num_bytes)
"""
    with path.open() as stream:
        (tmp_path / "small.txt").write_text(stream.read(5_000_000))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    growth, num_bytes = map(int, done.stdout.split())
    growth *= 1 if sys.platform == "darwin" else 1024
    assert num_bytes == path.stat().st_size > 35_000_000
    assert growth < num_bytes / 2


def test_cache_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch):
    write_documents(40)
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("FORGE_MLX_CACHE", str(blocked))
    with pytest.raises(
        OSError, match=r"\[data\] the cache folder must be writable .* FORGE_MLX_CACHE=/path names another"
    ):
        run()
