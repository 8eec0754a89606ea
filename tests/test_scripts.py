"""Every script explains itself, and those that CI runs find what they look for."""

import json
from pathlib import Path
import subprocess
import sys
from zipfile import ZipFile

from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.train.load import load_config
import mlx.core as mx
import numpy as np
import pytest
import torch

from scripts import check_run, check_wheel, readme_command
from scripts.bench.torch_gpt import TorchGPT

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    file.relative_to(ROOT).as_posix()
    for file in (ROOT / "scripts").rglob("*.py")
    if "__main__" in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_does(script):
    command = [sys.executable, str(ROOT / script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")
    assert len(result.stdout.splitlines()) > 3


def shipped_gpts():
    paths = sorted((ROOT / "models" / "configs").glob("*.yaml"))
    shapes = {path.stem: load_config(path).model for path in paths}
    return {name: shape for name, shape in shapes.items() if isinstance(shape, GPTConfig)}


@pytest.mark.parametrize("config", shipped_gpts())
def test_peer_of_the_benchmark_is_the_model_of_every_shipped_gpt(config):
    small = {"vocab_size": 50, "num_layers": 2, "hidden_size": 64, "intermediate_size": 64, "zero_init_residual": False}
    # Heads of the size that divides the small width.
    small |= {"num_heads": 2, "num_kv_heads": None, "head_dim": None}
    check_peer(shipped_gpts()[config].model_copy(update=small))


def test_peer_of_the_benchmark_has_every_option_of_attention():
    options = {"num_kv_heads": 2, "sliding_window": 4, "attention_softcap": 0.5, "attention_sinks": True}
    check_peer(GPTConfig(vocab_size=50, num_layers=2, hidden_size=64, **options))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MoEConfig(vocab_size=50), "config must be a GPTConfig but got a MoEConfig"),
        (GPTConfig(vocab_size=50, qk_norm="joint"), "qk_norm must be true or false but got joint"),
    ],
    ids=["experts", "joint norm"],
)
def test_peer_of_the_benchmark_refuses_what_it_does_not_compute(shape, message):
    with pytest.raises(ValueError, match=message):
        TorchGPT(shape)


def check_peer(shape):
    model, peer = GPT(shape).eval(), TorchGPT(shape)
    if shape.attention_sinks:
        for index, layer in enumerate(model.layers):
            layer.self_attn.sinks = mx.arange(shape.num_heads) * 1.0 - index
    peer.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in named_arrays(model.parameters())})
    tokens = np.random.default_rng(0).integers(0, 50, (2, 9))
    want = np.array(model(mx.array(tokens)))
    assert np.abs(peer(torch.from_numpy(tokens)).detach().numpy() - want).max() <= 1e-5 * np.abs(want).max()


def test_bash_blocks_are_found_in_their_order():
    text = "# x\n```bash\none\ntwo\n```\n```python\nno\n```\n    ```bash\n```bash\nthree\n```\n"
    assert readme_command.bash_blocks(text) == ["one\ntwo\n", "three\n"]


@pytest.mark.parametrize("number", ["0", "3"])
def test_readme_command_refuses_a_block_that_is_not_there(monkeypatch, capsys, tmp_path, number):
    (tmp_path / "README.md").write_text("```bash\na\n```\n```bash\nb\n```\n")
    monkeypatch.setattr(readme_command, "README", tmp_path / "README.md")
    monkeypatch.setattr(sys, "argv", ["readme_command.py", number])
    assert readme_command.main() == 1
    assert f"the number must be from 1 to 2, the bash blocks in {tmp_path}/README.md" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["readme_command.py", "2"])
    assert readme_command.main() == 0
    assert capsys.readouterr().out == "b\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has finished with 1.5 bits per byte."""
    for name in check_run.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    write_metrics(tmp_path, {"final": False, "bits_per_byte": 9.0}, {"final": True, "bits_per_byte": 1.5})
    return tmp_path


def write_metrics(run: Path, *evaluations: dict) -> None:
    records = [{"kind": "train", "loss": 1.0}, *({"kind": "eval"} | values for values in evaluations)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def check(run: Path, limit: float, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["check_run.py", str(run), "--bits-per-byte", str(limit)])
    return check_run.main()


def test_finished_run_passes_up_to_the_limit(run, monkeypatch, capsys):
    assert check(run, 1.5, monkeypatch) == 0
    assert "1.5000 bits per byte" in capsys.readouterr().out
    assert check(run, 1.49, monkeypatch) == 1
    assert "the final bits per byte must be at most 1.49 but got 1.5" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan", None], ids=repr)
def test_run_without_a_finite_figure_fails(run, monkeypatch, capsys, value):
    write_metrics(run, {"final": True, "bits_per_byte": value})
    assert check(run, 2.0, monkeypatch) == 1
    assert "must be at most 2.0" in capsys.readouterr().err


def test_run_that_has_not_finished_fails(run, monkeypatch, capsys):
    write_metrics(run, {"final": False, "bits_per_byte": 1.0})
    assert check(run, 2.0, monkeypatch) == 1
    (run / "metrics.jsonl").unlink()
    assert check(run, 2.0, monkeypatch) == 1
    assert capsys.readouterr().err.count("the run has not finished") == 2


@pytest.mark.parametrize("name", check_run.FILES)
def test_run_without_one_of_its_files_fails(run, monkeypatch, capsys, name):
    (run / name).write_text("")
    assert check(run, 2.0, monkeypatch) == 1
    assert f"{run / name} is missing or empty" in capsys.readouterr().err


def test_wheel_check_names_each_difference(tmp_path):
    (tmp_path / "kernels" / "room" / "__pycache__").mkdir(parents=True)
    (tmp_path / "forge_mlx").mkdir()
    (tmp_path / "forge_mlx" / "kernels").symlink_to("../kernels")
    for name in ("a.py", "room/forward.metal", "room/README.md", "room/__pycache__/a.pyc"):
        (tmp_path / "kernels" / name).touch()
    wheel = tmp_path / "x.whl"
    with ZipFile(wheel, "w") as archive:
        for name in ("forge_mlx/kernels/a.py", "kernels/a.py", "forge_mlx-0.1.dist-info/METADATA"):
            archive.writestr(name, "")
    assert check_wheel.difference(tmp_path, wheel) == [
        "not in the wheel: forge_mlx/kernels/room/forward.metal",
        "in the wheel only: kernels/a.py",
    ]
