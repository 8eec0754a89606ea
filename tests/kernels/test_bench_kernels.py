"""The benchmark of the kernels: what it prints, and that it prints no time for wrong results."""

import sys

from forge_mlx.kernels.rms_norm import cases, op
from forge_mlx.kernels.rms_norm.cases import RMSNormCase
import mlx.core as mx
import pytest

from scripts.bench import bench_kernels


@pytest.fixture
def run(monkeypatch, capsys):
    """The lines that the script prints for two small cases."""
    monkeypatch.setattr(cases, "TIMED", (RMSNormCase((16, 40)), RMSNormCase((16, 264), mx.bfloat16, mx.bfloat16)))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
        bench_kernels.main()
        return capsys.readouterr().out.splitlines()

    return call


def test_times_of_every_case_and_pass(run):
    lines = run("--turns", "1", "--chain", "2")
    assert lines[0].startswith("rms_norm on reference against mx.fast, Device(cpu, 0), chains of 2")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert [row[:2] for row in rows] == [
        [name, label] for name in ("16x40-float32", "16x264-bfloat16") for label in ("forward", "forward and backward")
    ]
    assert all(float(row[4]) > 0 for row in rows)


def test_counts_of_every_launch(run):
    lines = run("rms_norm", "--counts")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[5:]]
    assert [row[1] for row in rows] == 2 * ["rms_norm_forward", "rms_norm_backward", "rms_norm_sum_dw"]
    assert [row[5] for row in rows] == 6 * ["1.000"]


def test_wrong_results_are_not_timed(run, monkeypatch):
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda *given: (2 * forward(*given)[0], forward(*given)[1]))
    with pytest.raises(SystemExit, match="results are wrong, so no time is reported: 16x40-float32: y must be within"):
        run("--engine", "emulator")


def test_unknown_room_is_an_error(run, capsys):
    with pytest.raises(SystemExit):
        run("softmax")
    assert "ROOM must be among rms_norm but got softmax" in capsys.readouterr().err
