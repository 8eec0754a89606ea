import json
import os
import time

from forge_mlx.data.cache import DamagedCacheError, TokenFile, TokenWriter, build_folder
import numpy as np
import pytest


def write(path, ids=(5, 6, 7), vocab_size=300):
    writer = TokenWriter(path, vocab_size=vocab_size, tokenizer="t", fingerprint="f")
    writer.add(np.array(ids, np.int32), 9)
    writer.end_document(1)
    writer.close()
    return path


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_written_tokens_are_read_back(tmp_path, vocab_size, dtype):
    ids = [0, 1, vocab_size - 1]
    tokens = TokenFile(write(tmp_path / "train.bin", ids, vocab_size))
    assert tokens.tokens.tolist() == [*ids, 1]
    assert tokens.tokens.dtype == dtype
    assert isinstance(tokens.tokens, np.memmap)
    assert (tokens.num_tokens, tokens.num_bytes, tokens.num_documents) == (4, 9, 1)
    assert (tokens.tokenizer, tokens.fingerprint) == ("t", "f")


def damage_sidecar(path, **changes):
    sidecar = path.with_suffix(".json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "should have 8 bytes but has 6"),
        (lambda path: path.write_bytes(path.read_bytes() + b"xx"), "should have 8 bytes but has 10"),
        (lambda path: path.unlink(), "should have 8 bytes but has None"),
        (lambda path: path.with_suffix(".json").unlink(), "train.json is missing"),
        (lambda path: path.with_suffix(".json").write_text('{"format": 1'), "train.json is no JSON"),
        (lambda path: path.with_suffix(".json").write_bytes(b"\xff\xfe"), "train.json is no JSON"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "no JSON object"),
        (lambda path: path.with_suffix(".json").write_text("{}"), "other fields"),
        (lambda path: damage_sidecar(path, num_tokens="4"), "wrong type"),
        (lambda path: damage_sidecar(path, dtype="float64"), "wrong type"),
        (lambda path: damage_sidecar(path, format=0), "format 0 instead of 1"),
    ],
)
def test_damage_is_seen(tmp_path, damage, message):
    path = write(tmp_path / "train.bin")
    damage(path)
    with pytest.raises(DamagedCacheError, match=message):
        TokenFile(path)


def complete(folder):
    return (folder / "done").exists()


def test_folder_appears_only_when_complete(tmp_path):
    target = tmp_path / "new" / "cache"
    with build_folder(target, complete) as temporary:
        (temporary / "done").write_text("1")
        assert not target.exists()
    assert (target / "done").read_text() == "1"
    assert os.listdir(target.parent) == ["cache"]


def fail_to_build(target):
    with build_folder(target, complete) as temporary:
        (temporary / "half").write_text("1")
        raise KeyboardInterrupt


def test_failed_build_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fail_to_build(tmp_path / "cache")
    assert os.listdir(tmp_path) == []


def test_first_of_two_builds_wins(tmp_path):
    target = tmp_path / "cache"
    with build_folder(target, complete) as slow:
        (slow / "done").write_text("slow")
        with build_folder(target, complete) as fast:
            (fast / "done").write_text("fast")
    assert (target / "done").read_text() == "fast"
    assert os.listdir(tmp_path) == ["cache"]


def test_incomplete_folder_is_replaced(tmp_path):
    target = tmp_path / "cache"
    target.mkdir()
    (target / "half").write_text("1")
    with build_folder(target, complete) as temporary:
        (temporary / "done").write_text("1")
    assert os.listdir(target) == ["done"]
    assert os.listdir(tmp_path) == ["cache"]


def test_leftovers_of_killed_builds_go_after_a_day(tmp_path):
    for name, age in (("old.1.tmp", 90_000), ("young.2.tmp", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with build_folder(tmp_path / "cache", complete) as temporary:
        (temporary / "done").write_text("1")
    assert sorted(os.listdir(tmp_path)) == ["cache", "young.2.tmp"]
