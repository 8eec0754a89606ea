import json
import math

from forge_mlx.train.metrics import MetricsLog, read_metrics
import numpy as np
import pytest


def _strict_json(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def _steps(path):
    return [(record["kind"], record["step"]) for record in read_metrics(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_records_come_back_as_written(path):
    facts = {
        "corpus": {"bytes": 10, "gzip_bits_per_byte": 2.5},
        "versions": {"mlx": "0.32.4"},
        "names": ["a", None],
    }
    with MetricsLog(path) as log:
        log.log("setup", 0, time=0.0, **facts)
        log.log("train", 1, time=3.14159, loss=np.float32(2.5), tokens=np.int64(7), final=False)
        log.log("sample", 1, time=0.0, prompt="def ", text="f():\n\u2028 \udc80 é")
    setup, train, sample = read_metrics(path)
    assert isinstance(train["tokens"], int)
    assert {key: setup[key] for key in facts} == facts
    assert train == {"kind": "train", "step": 1, "time": 3.142, "loss": 2.5, "tokens": 7, "final": False}
    assert sample["text"] == "f():\n\u2028 \udc80 é"
    assert len(path.read_text("ascii").splitlines()) == 3


def test_each_record_is_on_disk_at_once(path):
    log = MetricsLog(path)
    log.log("train", 1, time=0.0, loss=1.0)
    assert _steps(path) == [("train", 1)]
    log.close()


def test_nonfinite_values_are_strict_json_and_come_back(path):
    with MetricsLog(path) as log:
        log.log("train", 3, time=0.0, loss=math.nan, grad_norm=math.inf, lr=0.1, **{"a/b~": -math.inf})
        log.log("setup", 3, time=0.0, corpus={"sizes": [1, math.nan]})
    lines = path.read_text().splitlines()
    first = _strict_json(lines[0])
    assert first["loss"] is None
    assert first["grad_norm"] is None
    assert first["nonfinite"]["loss"] == "nan"
    assert _strict_json(lines[1])["corpus"] == {"sizes": [1, None]}
    train, setup = read_metrics(path)
    assert math.isnan(train["loss"])
    assert train["grad_norm"] == math.inf
    assert train["a/b~"] == -math.inf
    assert train["lr"] == 0.1
    assert "nonfinite" not in train
    assert math.isnan(setup["corpus"]["sizes"][1])


@pytest.mark.parametrize(
    ("kind", "step", "fields", "error", "message"),
    [
        ("trian", 1, {}, ValueError, r"kind must be one of .*eval.* but got 'trian'"),
        ("train", -1, {}, ValueError, "step must be a whole number of 0 or more but got -1"),
        ("train", True, {}, ValueError, "but got True"),
        ("train", 1.0, {}, ValueError, "but got 1.0"),
        ("train", 1, {"nonfinite": 3}, ValueError, "must not be named 'nonfinite'"),
        ("train", 1, {"time": math.nan}, ValueError, "time must be finite and 0 or more but got nan"),
        ("train", 1, {"time": -1.0}, ValueError, "time must be finite and 0 or more but got -1.0"),
        ("train", 1, {"loss": object()}, TypeError, "the field loss must be .* but got object"),
        ("setup", 1, {"facts": {"a": {1: 2}}}, TypeError, "the field facts/a must be"),
    ],
)
def test_a_bad_record_is_refused_and_nothing_written(path, kind, step, fields, error, message):
    with MetricsLog(path) as log:
        with pytest.raises(error, match=message):
            log.log(kind, step, **{"time": 0.0, "good": 1, **fields})
        log.log("train", 2, time=0.0)
    assert _steps(path) == [("train", 2)]


def test_truncate_after_leaves_each_step_once(path):
    with MetricsLog(path) as log:
        for step in range(1, 7):
            log.log("train", step, time=0.0, loss=1.0)
        log.log("eval", 4, time=0.0, loss=1.0)
    before = path.read_bytes().splitlines()
    with MetricsLog(path) as log:
        assert log.truncate_after(4) == 2
        assert path.read_bytes().splitlines() == before[:4] + before[6:]
        log.log("train", 5, time=0.0, loss=2.0)
        assert log.truncate_after(5) == 0
    assert _steps(path) == [("train", 1), ("train", 2), ("train", 3), ("train", 4), ("eval", 4), ("train", 5)]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_failed_truncation_leaves_the_old_log(path, monkeypatch):
    with MetricsLog(path) as log:
        log.log("train", 1, time=0.0)
        log.log("train", 2, time=0.0)

    def full(*_):
        raise OSError("no space left")

    before = path.read_bytes()
    log = MetricsLog(path)
    with monkeypatch.context() as patch:
        patch.setattr("forge_mlx.train.metrics.os.replace", full)
        with pytest.raises(OSError, match="no space left"):
            log.truncate_after(1)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", [1, 20, -1], ids=["one byte", "half a record", "all but the brace"])
def test_a_torn_last_line_is_dropped_with_a_notice(path, cut):
    with MetricsLog(path) as log:
        log.log("train", 1, time=0.0, loss=1.0)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.rstrip(b"\n")[:cut])
    notices = []
    assert len(read_metrics(path, notices.append)) == 1
    assert "left out the last line" in notices.pop()
    with MetricsLog(path, notices.append) as log:
        log.log("train", 2, time=0.0, loss=1.0)
    assert "removed the last line" in notices.pop()
    assert _steps(path) == [("train", 1), ("train", 2)]


def test_a_torn_line_inside_a_character_is_dropped(path):
    path.write_bytes(b'{"kind": "train", "step": 1, "time": 0}\n{"kind": "sample", "text": "\xc3')
    with pytest.warns(UserWarning, match="not written to its end"):
        assert len(read_metrics(path)) == 1


def test_a_whole_last_line_without_its_newline_is_kept(path):
    path.write_bytes(b'{"kind": "train", "step": 1, "time": 5.0}')
    assert _steps(path) == [("train", 1)]
    with MetricsLog(path) as log:
        log.log("train", 2, time=0.0)
    assert _steps(path) == [("train", 1), ("train", 2)]


def test_broken_lines_inside_are_counted(path):
    good = b'{"kind": "train", "step": 1, "time": 0}\n'
    path.write_bytes(good + b"\0\0\0\n[1]\n" + good)
    with pytest.warns(UserWarning, match=r"left out 2 line\(s\).*first line 2"):
        assert len(read_metrics(path)) == 2
    notices = []
    with MetricsLog(path, notices.append) as log:
        assert log.truncate_after(1) == 0
    assert "removed 2 line(s)" in notices[0]
    assert path.read_bytes() == good + good


def test_a_missing_log_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"no file .*metrics\.jsonl"):
        read_metrics(path)
