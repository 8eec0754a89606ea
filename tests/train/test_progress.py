import io
import os
import re
import subprocess
import sys
import unicodedata

from forge_mlx._text import visible_controls
from forge_mlx.train.progress import Progress, format_duration
import pytest
from rich.console import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr("forge_mlx.train.progress.time.monotonic", lambda: Clock.now)
    return Clock


def _update(progress, step):
    progress.update(step, loss=2.34567, bits_per_byte=1.98765, tokens_per_second=12345.6, lr=3e-4)


def _lines(total, start, steps, **options):
    stream = io.StringIO()
    with Progress(total, start, stream, **options) as progress:
        for step in steps:
            _update(progress, step)
    return stream.getvalue().splitlines()


def _drawn(progress, width):
    console = Console(file=io.StringIO(), width=width, height=10, force_terminal=True, no_color=True)
    with console.capture() as capture:
        console.print(progress._bar)
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).rstrip("\n")


def test_piped_lines_hold_every_figure_and_no_control_character():
    lines = _lines(20, 0, range(1, 21), log_every=10)
    assert [line[:10] for line in lines] == ["step  1/20", "step 10/20", "step 20/20"]
    assert "loss 2.3457  1.988 bits/byte  12,346 tok/s  lr 3.00e-04  " in lines[0]
    assert not any(unicodedata.category(character) == "Cc" for line in lines for character in line)


def test_piped_lines_follow_log_every_when_steps_jump_and_end_with_the_last():
    lines = _lines(25, 0, (4, 8, 12, 16, 20, 24, 25), log_every=10)
    assert [line.split()[1] for line in lines] == ["4/25", "12/25", "20/25", "25/25"]


def test_eta_counts_only_this_process_and_forgets_the_first_step(clock):
    stream = io.StringIO()
    with Progress(1000, 900, stream, log_every=1) as progress:
        clock.now += 100
        _update(progress, 901)
        for step in range(902, 905):
            clock.now += 2
            _update(progress, step)
    etas = [line.split("  ")[-1] for line in stream.getvalue().splitlines()]
    assert etas == ["ETA --:--", "ETA 3:16", "ETA 3:14", "ETA 3:12"]


def test_eta_is_smoothed_but_follows_a_new_speed(clock):
    progress = Progress(10_000, 0, io.StringIO(), log_every=1)
    for step in range(1, 101):
        clock.now += 1
        _update(progress, step)
    clock.now += 10
    _update(progress, 101)
    assert 9899 < _seconds(progress) < 9899 * 1.4
    for step in range(102, 202):
        clock.now += 4
        _update(progress, step)
    assert 9799 * 3.8 < _seconds(progress) < 9799 * 4.2


def test_eta_falls_between_two_steps_and_never_under_zero(clock):
    progress = Progress(10, 0, io.StringIO(), log_every=1)
    for step in (1, 2):
        clock.now += 5
        _update(progress, step)
    assert progress._bar.eta() == "ETA 0:40"
    clock.now += 15
    assert progress._bar.eta() == "ETA 0:25"
    clock.now += 1000
    assert progress._bar.eta() == "ETA 0:00"


def test_the_last_step_says_how_long_it_took(clock):
    stream = io.StringIO()
    with Progress(5, 0, stream, log_every=1) as progress:
        clock.now += 125
        _update(progress, 5)
    assert stream.getvalue().endswith("took 2:05\n")


def _seconds(progress):
    seconds = 0
    for part in progress._bar.eta().removeprefix("ETA ").split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120])
def test_the_live_line_fits_one_line_of_any_width(width):
    progress = Progress(200_000, 99_900, io.StringIO())
    assert re.fullmatch(r" 99900/200000 .*━.* starting *", _drawn(progress, 80))
    _update(progress, 99_999)
    text = _drawn(progress, width)
    assert "\n" not in text
    assert len(text.rstrip()) < width
    assert "99999/200000" in text
    shown = {
        "loss 2.3457": 40,
        "ETA --:--": 40,
        "━": 60,
        "1.988 bits/byte": 80,
        "12,346 tok/s": 80,
        "lr": 100,
    }
    assert [name in text for name in shown] == [width >= needed for needed in shown.values()]


def test_a_terminal_gets_a_bar_and_its_cursor_back():
    stream = Terminal()

    def run():
        with Progress(10, 0, stream, interactive=True) as progress:
            _update(progress, 5)
            progress.line("evaluated [bold]x[/bold] :smile:")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    text = stream.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "evaluated [bold]x[/bold] :smile:" in text
    assert "━" in text


@pytest.mark.parametrize(
    ("stream", "term", "live"),
    [(Terminal, "xterm-256color", True), (Terminal, "dumb", False), (io.StringIO, "xterm-256color", False)],
    ids=["terminal", "dumb terminal", "pipe"],
)
def test_the_kind_of_output_is_found(monkeypatch, stream, term, live):
    monkeypatch.setenv("TERM", term)
    output = stream()
    with Progress(2, 0, output) as progress:
        _update(progress, 1)
    assert ("\x1b[" in output.getvalue()) is live
    assert output.getvalue().startswith("step 1/2") is not live


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    outputs = []
    for value in (None, "1"):
        if value:
            monkeypatch.setenv("NO_COLOR", value)
        else:
            monkeypatch.delenv("NO_COLOR", raising=False)
        stream = Terminal()
        with Progress(2, 0, stream) as progress:
            _update(progress, 1)
        outputs.append(bool(re.search(r"\x1b\[[0-9;]*3[1-7]m", stream.getvalue())))
    assert outputs == [True, False]


def test_a_sample_cannot_drive_the_terminal():
    stream = io.StringIO()
    with Progress(2, 0, stream) as progress:
        progress.line("a\x1b[31mb\tc\nd\x07\x7f\x9b")
    assert stream.getvalue() == "a␛[31mb\tc\nd␇␡�\n"
    assert visible_controls("é\r") == "é␍"


def test_text_that_the_stream_cannot_encode_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(2, 0, stream) as progress:
        progress.line("é \udc80")
    assert raw.getvalue() == b"\\xe9 \\udc80\n"


def test_a_closed_pipe_does_not_end_the_run(tmp_path):
    finished = tmp_path / "finished"
    script = f"""
from forge_mlx.train.progress import Progress
with Progress(20000, 0, log_every=1) as progress:
    for step in range(1, 20001):
        progress.update(step, loss=1.0, bits_per_byte=1.0, tokens_per_second=1.0, lr=1.0)
print("more")
open({str(finished)!r}, "w").close()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0
    assert finished.exists()


def test_other_prints_go_where_they_were_sent(tmp_path):
    script = """
import sys
from forge_mlx.train.progress import Progress
with Progress(2, 0) as progress:
    print("to the file", file=sys.stderr)
    progress.update(1, loss=1.0, bits_per_byte=1.0, tokens_per_second=1.0, lr=1.0)
"""
    master, slave = os.openpty()
    with (tmp_path / "errors").open("wb") as errors:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
        subprocess.run([sys.executable, "-c", script], stdout=slave, stderr=errors, env=environment, check=True)
    os.close(slave)
    shown = os.read(master, 100_000)
    os.close(master)
    assert b"\x1b[" in shown
    assert b"to the file" not in shown
    assert (tmp_path / "errors").read_bytes() == b"to the file\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": -1}, "total_steps=-1"),
        ({"total_steps": 1, "start_step": -2}, "start_step=-2"),
        ({"total_steps": 1, "log_every": 0}, "log_every must be at least 1 but got 0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Progress(**options)


def test_durations():
    assert [format_duration(seconds) for seconds in (-3, 0, 59.6, 3725)] == [
        "0:00",
        "0:00",
        "1:00",
        "1:02:05",
    ]
