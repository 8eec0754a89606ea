from functools import partial
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from forge_mlx._text import visible_controls
from forge_mlx.train import __main__ as command_module
from forge_mlx.train.__main__ import main
from forge_mlx.train.config import of_kinds
from forge_mlx.train.explain import all_keys
from forge_mlx.train.loop import Interrupted, NonFiniteLoss
import pytest
from shipped_configs import ROOT, SHIPPED, on_tiny_checkpoint
from tiny_run import write_config


@pytest.fixture
def command(call_main):
    return partial(call_main, main)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished tiny run: its folder, and what the command said to a pipe."""
    folder = tmp_path_factory.mktemp("a folder")
    config = write_config(folder, train__steps=4, train__checkpoint_every=2)
    done = subprocess.run(
        [sys.executable, "-m", "forge_mlx.train", str(config)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        check=False,
    )
    return folder, done


def test_a_run_ends_with_a_sample_the_result_and_what_to_do_next(finished):
    folder, done = finished
    assert (done.returncode, done.stderr) == (0, "")
    run = folder / "run"
    lines = done.stdout.splitlines()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (final,) = [r for r in records if r["kind"] == "eval" and r["final"]]
    record = [r for r in records if r["kind"] == "sample"][-1]
    sample = visible_controls(record["prompt"] + record["text"])
    assert sample in done.stdout
    prompt = visible_controls(record["prompt"]).strip().splitlines()[-1].strip()
    assert lines[-5:] == [
        f"validation: {final['loss']:.4f} nats a token, {final['bits_per_byte']:.4f} bits per byte",
        f"report:     {run / 'report.html'}",
        f"model:      {run / 'final'}",
        f"next:       {sys.executable} -m forge_mlx.generate '{run}' --prompt {shlex.quote(prompt)}",
        "            or copy the config, set data.source to your own text and train on that",
    ]
    for name in ("report.html", "final/model.safetensors"):
        assert (run / name).is_file()


def test_the_key_that_it_advises_to_set_exists(finished):
    assert "set data.source " in finished[1].stdout
    assert ("data", "source") in all_keys(of_kinds("gpt", pretrained=False, examples=False))


def test_the_same_command_again_says_that_it_is_done(finished, command):
    folder, done = finished
    status, out, err = command(folder / "config.yaml")
    assert (status, err) == (0, "")
    assert "already finished" in out
    assert out.splitlines()[-5:] == done.stdout.splitlines()[-5:]


def test_overrides_may_stand_before_and_after_options(finished, command, tmp_path):
    new = f"run.dir={tmp_path / 'new'}"
    status, out, _ = command(finished[0] / "config.yaml", "train.batch_size=3", "--dry-run", new)
    assert status == 0
    assert "tokens a step: 96 = 3 rows x 16 tokens x 2 passes\n" in out
    assert f"run folder:    {tmp_path / 'new'}\n" in out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_a_dry_run_of_each_shipped_config(path, command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    base = on_tiny_checkpoint(path, tmp_path)
    status, out, err = command(path, "--dry-run", "run.device=cpu", f"run.dir={tmp_path / 'run'}", *base)
    assert (status, err) == (0, "")
    for name in ("parameters:", "tokens a step:", "memory:"):
        assert f"\n{name}" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lrr=1"], "command line: optim.lrr: there is no such key. Did you mean optim.lr?"),
        (
            ["steps=1"],
            "command line: steps=1: an override is written section.key=value, such as optim.lr=1e-3. "
            "Did you mean train.steps?",
        ),
        (["optim.lr=0", "train.steps=x"], None),
    ],
)
def test_a_bad_config_is_status_2_and_all_its_problems(overrides, message, finished, command):
    config = finished[0] / "config.yaml"
    status, out, err = command(config, *overrides)
    assert (status, out) == (2, "")
    if message:
        assert err == f"error: {message}\n"
    else:
        assert [line.split(" must")[0] for line in err.splitlines()] == [
            f"error: {config}: 2 problems",
            "  command line: train.steps:",
            "  command line: optim.lr:",
        ]


def test_what_is_not_there_is_status_2(command, tmp_path):
    missing = tmp_path / "none.yaml"
    assert command(missing) == (2, "", f"error: {missing}: there is no such file.\n")
    config = write_config(tmp_path, data__source=[str(tmp_path / "none.txt")])
    status, _, err = command(config)
    assert status == 2
    assert err.startswith("error: ")
    assert "none.txt" in err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_gpu_that_is_not_there_is_status_2(finished, command, monkeypatch):
    monkeypatch.setattr("forge_mlx.train.device.has_gpu", lambda: False)
    for arguments in ([], ["--dry-run"]):
        status, out, err = command(finished[0] / "config.yaml", "run.device=gpu", *arguments)
        assert (status, out) == (2, "")
        assert err == "error: run.device must be cpu or auto here but got gpu: MLX finds no GPU.\n"


def test_a_folder_of_something_else_is_left_alone(command, tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    status, _, err = command(config)
    assert status == 2
    assert "holds other files" in err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Interrupted("stopped by SIGINT after step 3", 2), 130, "stopped by SIGINT after step 3\n"),
        (Interrupted("stopped by SIGTERM after step 3", 15), 143, "stopped by SIGTERM after step 3\n"),
        (NonFiniteLoss("step 4: the loss is nan"), 1, "error: step 4: the loss is nan\n"),
        (ValueError("[data] nothing there"), 2, "error: [data] nothing there\n"),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device\n"),
        (
            KeyboardInterrupt(),
            130,
            "interrupted; the same command goes on from the last checkpoint, if there is one\n",
        ),
        (
            RuntimeError("[malloc] Unable to allocate 99 bytes."),
            1,
            "error: out of memory: [malloc] Unable to allocate 99 bytes.\nLower train.batch_size (train.accumulate "
            "keeps the tokens a step) or train.seq_len.\n",
        ),
        (
            RuntimeError("[Compile::eval_cpu] Failed to write to /tmp/mlx.\nmore"),
            1,
            "error: MLX could not compile for the CPU: [Compile::eval_cpu] Failed to write to /tmp/mlx.\n"
            "TMPDIR=/path names another folder for it; MLX_DISABLE_COMPILE=1 does without.\n",
        ),
    ],
    ids=["Ctrl-C", "SIGTERM", "not finite", "bad input", "disk full", "early Ctrl-C", "out of memory", "no compiler"],
)
def test_exit_status_and_message_of_every_end(error, status, message, finished, command, monkeypatch):
    def fail(_config):
        raise error

    monkeypatch.setattr(command_module, "train", fail)
    assert command(finished[0] / "config.yaml") == (status, "", message)


def test_a_bug_is_not_called_out_of_memory(finished, command, monkeypatch):
    def fail(_config):
        raise RuntimeError("a bug")

    monkeypatch.setattr(command_module, "train", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        command(finished[0] / "config.yaml")


def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "python -m forge_mlx.train models/configs/quickstart.yaml optim.lr=1e-3" in " ".join(text.split())


def test_a_run_that_overflows_stops_with_status_1_and_keeps_its_checkpoint(finished, command, tmp_path):
    # A learning rate without bounds makes the weights too large for float32 after a few steps.
    shutil.copytree(finished[0], tmp_path / "copy")
    status, out, err = command(
        tmp_path / "copy" / "config.yaml",
        f"run.dir={tmp_path / 'copy' / 'run'}",
        "train.steps=40",
        "optim.lr=1e38",
        "optim.clip_norm=null",
        "optim.warmup_steps=0",
        "train.checkpoint_every=0",
    )
    assert status == 1
    assert "resumed at step 4" in out
    (line,) = err.splitlines()
    assert line.startswith("error: step ")
    assert re.search(r" (parameter is|is that of) (embed_tokens|layers\.|norm|head)", line)
    assert "The last good checkpoint is that of step 4" in line
    assert (tmp_path / "copy/run/checkpoints/step-00000004").is_dir()


def test_without_a_config_one_is_named(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert "name a config, such as models/configs/quickstart.yaml" in capsys.readouterr().err
