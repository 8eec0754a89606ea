from html.parser import HTMLParser
import math
import re
import subprocess
import sys

from forge_mlx.train import charts
from forge_mlx.train.figures import fact_text
from forge_mlx.train.metrics import MetricsLog
from forge_mlx.train.report import load_run, main, write_loss_plot, write_report
from matplotlib.image import imread
import numpy as np
import pytest

NASTY = "x = \"</script><b>bold</b> & 'q' {{ 7 * 7 }}\"\n\tpass"


def _write_run(folder, steps=100, final=True, start_loss=9.0):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model:\n  dim: 256  # <i>comment</i>\n")
    with MetricsLog(folder / "metrics.jsonl") as log:
        corpus = {"bytes": 1_234_567, "gzip_bits_per_byte": 2.5}
        facts = {
            "parameters": 4_213_760,
            "total_steps": 100,
            "blas": "openblas",
            "versions": {"mlx": "0.32.4"},
        }
        log.log("setup", 0, time=0.0, corpus=corpus, **facts)
        for step in range(1, steps + 1):
            loss = 2 + (start_loss - 2) * math.exp(-step / 2) + 0.1 * (step % 2)
            log.log(
                "train",
                step,
                time=float(step),
                loss=loss,
                bits_per_byte=loss / 2,
                lr=0.001 * step,
                grad_norm=1.0 + step % 3,
                tokens_per_second=15_000.0 + step,
                tokens=1024 * step,
                peak_memory=(1 << 30) + step,
            )
            if step % 50 == 0:
                log.log("eval", step, time=0.0, loss=2.25, bits_per_byte=2.0, tokens=500, final=final and step == steps)
                log.log("sample", step, time=0.0, prompt="def f", text=f"def f{step}(): {NASTY}")
        log.log("event", 50, time=125.0, message="resumed at step 50 from <checkpoint>")
    return folder


class _Page(HTMLParser):
    """The page's tags and its visible text, whitespace folded."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.pre, self._inside = [], "", [], []
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside.append(tag)
        if tag == "pre":
            self.pre.append("")

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._inside):
            self.text += data + " "
        if "pre" in self._inside:
            self.pre[-1] += data


def _page(folder):
    return _Page(write_report(load_run(folder)).read_text("utf-8"))


@pytest.fixture
def run_dir(tmp_path):
    return _write_run(tmp_path / "run")


def test_the_headline_figures_are_the_run_s(run_dir):
    text = _page(run_dir).text
    for figure in (
        "finished after 100 steps",
        "validation loss 2.2500 final",
        "bits per byte 2.000 gzip: 2.500",
        "steps 100 of 100",
        "tokens 102k trained on",
        "tokens/s 15.1k median",
        "peak memory 1.00 GiB",
        "parameters 4.21M 4,213,760",
        "needs 2.000 bits, 20 % fewer bits than gzip's 2.500",
        "corpus / bytes 1,234,567",
        "versions / mlx 0.32.4",
        "blas openblas",
        "wall time 2:05 without pauses",
        "step 50 2:05 resumed at step 50 from <checkpoint>",
    ):
        assert figure in text


def test_a_model_worse_than_gzip_is_called_that(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.log("setup", 0, time=0.0, facts={"corpus": {"gzip_bits_per_byte": 2.0}})
        log.log("eval", 1, time=0.0, loss=9.0, bits_per_byte=3.0, final=False)
    text = _page(folder).text
    assert "50 % more bits than gzip's 2.000" in text
    assert "validation loss 9.0000 so far, at step 1" in text
    assert "not finished, 1 steps so far" in text


def test_text_of_the_run_is_shown_literally(run_dir):
    page = _page(run_dir)
    assert page.pre[0] == f"def f100(): {NASTY}"
    assert page.pre[1] == f"def f50(): {NASTY}"
    assert page.pre[2].rstrip("\n") == "model:\n  dim: 256  # <i>comment</i>"
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1
    assert "i" not in tags[tags.index("pre") :]


def test_samples_with_odd_characters_do_not_break_the_page(run_dir):
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.log("sample", 101, time=0.0, prompt="", text="\n\n \x1b[31m \udc80 é")
    assert _page(run_dir).pre[0] == "\n\n ␛[31m \\udc80 é"


def test_the_page_asks_for_no_other_file(run_dir):
    text = write_report(load_run(run_dir)).read_text("utf-8")
    page = _Page(text)
    loading = ("src", "href", "srcset", "action", "poster", "data", "xlink:href")
    asked = [value for _, attributes in page.tags for name, value in attributes.items() if name in loading]
    assert asked == ["data:,"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|import\(", text)
    policy = next(item["content"] for tag, item in page.tags if tag == "meta" and "http-equiv" in item)
    assert policy.startswith("default-src 'none'")


def test_every_curve_is_drawn(run_dir):
    page = _page(run_dir)
    titles = [item["aria-label"].removesuffix(" over the steps") for tag, item in page.tags if tag == "svg"]
    assert titles[:3] == ["loss, nats a token", "bits per byte", "learning rate"]
    assert titles[3:] == ["gradient norm", "tokens/s", "peak memory, GiB"]
    looks = [item["class"] for tag, item in page.tags if tag == "path"]
    smoothed, measured = ["mark", "faint", "line"], ["mark", "line"]
    validated = [*smoothed, "dots", "points"]
    assert looks == [*validated, *validated, *measured, *smoothed, *smoothed, *measured]
    assert [item.get("class") for tag, item in page.tags if tag == "u"].count("rule") == 1
    assert page.text.count("the highest value, ") == 2


def test_a_value_that_is_not_finite_spoils_no_figure(run_dir):
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.log("train", 100, time=0.0, loss=math.inf, peak_memory=math.nan, tokens_per_second=math.nan)
    text = _page(run_dir).text
    assert "peak memory 1.00 GiB" in text
    assert "tokens/s 15.1k median" in text
    assert "the highest value, 6.346, lies above" in text
    assert "values not finite: 1 of training, first at step 100" in text


def test_dark_mode_and_narrow_screens_are_served(run_dir):
    text = write_report(load_run(run_dir)).read_text("utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    names = re.compile(r"--(\w+):")
    assert "prefers-color-scheme: dark" in text
    assert names.findall(light) == names.findall(dark)
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(names.findall(light))
    assert 'name="viewport"' in text


@pytest.mark.parametrize("state", ["empty log", "setup only", "one step", "all NaN", "torn line", "cut off"])
def test_a_run_in_any_state_has_a_report(tmp_path, state):
    folder = tmp_path / "run"
    folder.mkdir()
    with MetricsLog(folder / "metrics.jsonl") as log:
        if state != "empty log":
            log.log("setup", 0, time=0.0, parameters=10)
        if state == "one step":
            log.log("train", 1, time=0.0, loss=2.0, bits_per_byte=1.0, lr=0.0, grad_norm=0.0, peak_memory=0)
        if state == "all NaN":
            names = ("loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_second", "peak_memory")
            log.log("train", 1, time=0.0, **dict.fromkeys(names, math.nan))
            log.log("eval", 1, time=0.0, loss=math.nan, bits_per_byte=math.inf, final=True)
        if state == "cut off":
            log.log("train", 7, time=0.0)
            log.log("sample", 7, time=0.0)
            log.log("event", 7, time=0.0)
            log.log("eval", 7, time=0.0)
    if state == "torn line":
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')
    page = _page(folder)
    assert imread(write_loss_plot(load_run(folder))).shape[:2] == (690, 1650)
    assert "holds no config.yaml" in page.text
    assert ("No sample yet" in page.text) is (state != "cut off")
    assert ("no evaluation yet" in page.text) is (state not in ("all NaN", "cut off"))
    assert ("a record not written to its end" in page.text) is (state == "torn line")
    assert ("values not finite: 1 of training, first at step 1" in page.text) is (state == "all NaN")


def test_files_are_replaced_whole_or_not_at_all(run_dir, monkeypatch):
    for write in (write_report, write_loss_plot):
        write(load_run(run_dir))
    before = {file.name: file.read_bytes() for file in run_dir.iterdir()}
    assert sorted(before) == ["config.yaml", "loss.png", "metrics.jsonl", "report.html"]

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("forge_mlx.train.metrics.os.replace", full)
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.log("eval", 100, time=0.0, loss=1.0, bits_per_byte=1.0, final=True)
    for write in (write_report, write_loss_plot):
        with pytest.raises(OSError, match="no space left"):
            write(load_run(run_dir))
    after = {file.name: file.read_bytes() for file in run_dir.iterdir()}
    del before["metrics.jsonl"], after["metrics.jsonl"]
    assert after == before


def test_the_plot_shows_three_lines_and_takes_any_name(tmp_path):
    folder = _write_run(tmp_path / "a $x_$ 中 run")
    pixels = np.round(255 * imread(write_loss_plot(load_run(folder)))[..., :3]).astype(int).reshape(-1, 3)
    for colour in ((0x1F, 0x5F, 0xD0), (0xC8, 0x50, 0x0A), (0x55, 0x55, 0x55)):
        assert (pixels == colour).all(axis=1).sum() > 400
    assert "a $x_$ 中 run" in _page(folder).text


def test_a_long_run_keeps_a_small_page_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "MAX_POINTS", 20)
    folder = _write_run(tmp_path / "run", steps=300)
    page = _page(folder)
    assert "more than 20 points" in page.text
    path = next(item["d"] for tag, item in page.tags if tag == "path" and item["class"] == "faint")
    assert path.count("M") + path.count("L") <= 20


def test_the_command_writes_both_files(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out.split() == [str(run_dir / "loss.png"), str(run_dir / "report.html")]
    assert (run_dir / "report.html").stat().st_size > 10_000


def test_the_command_names_what_is_missing(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 1
    assert "a run must be a folder that exists but got" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "must hold metrics.jsonl" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_has_help():
    command = [sys.executable, "-W", "error", "-m", "forge_mlx.train.report", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "python -m forge_mlx.train.report" in result.stdout
    assert result.stderr == ""


def test_later_setup_facts_replace_earlier_ones(run_dir):
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.log("setup", 100, time=0.0, blas="mkl")
    run = load_run(run_dir)
    assert run.fact("blas") == "mkl"
    assert run.fact("gzip_bits_per_byte") == 2.5


def test_facts_read_as_text_and_not_as_python():
    assert [fact_text(value) for value in (True, False, ["a.py", "b.py"], [], 12345, 0.123456, None)] == [
        "yes",
        "no",
        "a.py, b.py",
        "",
        "12,345",
        "0.1235",
        "None",
    ]


QAT = {
    "mode": "affine",
    "activations": "int8",
    "bits": 4,
    "group_size": 64,
    "start_step": 40,
    "end_step": None,
    "modules": 72,
}
DEPLOYED = {"loss": 2.250012, "trained_loss": 2.250001, "tokens": 4096}


def _write_qat_run(folder, deployed=DEPLOYED, **changes):
    _write_run(folder)
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.log("setup", 0, time=0.0, qat=QAT | changes)
        log.log("event", 40, time=1.0, message="fake quantisation begins after step 40")
        log.log("eval", 30, time=0.0, loss=2.5, bits_per_byte=2.1, tokens=500, final=False, fake_quant=False)
        fields = {"fake_quant": True} | ({"deployed": deployed} if deployed else {})
        log.log("eval", 100, time=0.0, loss=2.25, bits_per_byte=2.0, tokens=500, final=True, **fields)
    return folder


def test_quantised_run_shows_what_it_reached_float_quantised_and_deployed(tmp_path):
    text = _page(_write_qat_run(tmp_path / "run")).text
    for figure in (
        "finished after 100 steps",
        "validation loss 2.2500 final",
        "fake quantisation affine 4 bits, groups of 64, 72 modules, int8 activations, after step 40",
        "validation loss, float 2.5000 at step 30",
        "validation loss, fake-quantised 2.2500 final",
        "loss as deployed 2.250012 in training 2.250001 (+1.1e-05) on the same text, 4,096 tokens",
        "qat / group size 64",
    ):
        assert figure in text


def test_the_step_where_quantisation_begins_is_marked_in_both_loss_charts(tmp_path):
    folder = _write_qat_run(tmp_path / "run", end_step=80)
    page = _page(folder)
    turns = [item for tag, item in page.tags if tag == "u" and item.get("class", "").startswith("turn")]
    assert [(item["class"], item["style"]) for item in turns] == [
        ("turn", "left: 40.00%"),
        ("turn late", "left: 80.00%"),
    ] * 2
    assert page.text.count("quantised after step 40") == page.text.count("float after step 80") == 2
    # The event's own mark is left in the other four charts only; that of step 50 in all six.
    assert [item["class"] for tag, item in page.tags if tag == "path"].count("mark") == 6 + 4
    pixels = np.round(255 * imread(write_loss_plot(load_run(folder)))[..., :3]).astype(int).reshape(-1, 3)
    assert (pixels == (0x1A, 0x7F, 0x4B)).all(axis=1).sum() > 800


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"start_step": 0}, "from the first step"),
        ({"start_step": 200}, "after step 200"),
        (
            {"start_step": None, "bits": None, "group_size": None, "modules": ["*"]},
            "quantisation affine int8 activations validation loss",
        ),
    ],
)
def test_a_step_that_is_the_first_or_still_to_come_is_no_turn(tmp_path, changes, remark):
    page = _page(_write_qat_run(tmp_path / "run", deployed=None, **changes))
    assert "loss as deployed n/a the model has not been converted" in page.text
    assert remark in page.text
    assert not any(item.get("class", "").startswith("turn") for tag, item in page.tags if tag == "u")


@pytest.mark.parametrize("deployed", [{"loss": math.nan, "trained_loss": 2.0}, {}, {"loss": None}, 3.0])
def test_any_deployed_loss_has_a_report(tmp_path, deployed):
    text = _page(_write_qat_run(tmp_path / "run", deployed=deployed)).text
    assert re.search("loss as deployed (nan the converted model|n/a the)", text)
