"""A run that is killed, stopped or started again: what it ends with, and what the next start does."""

from collections.abc import Callable
import functools
import json
from pathlib import Path
import shutil
import signal
import time

from forge_mlx.train.folder import RunFolder, RunFolderError
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
from forge_mlx.train.metrics import read_metrics
from forge_mlx.train.trainer import Trainer
import pytest
from tiny_run import arrays, command, events, records, run_command, tiny_config, tree, write_config, write_corpus

_TRAINER = "forge_mlx.train.trainer:Trainer"
_CHECKPOINT = "forge_mlx.train.checkpoint"
# Where a run is killed. Steps 3, 6 and 9 are checkpoints, 9 is the last; 3 and 6 evaluate, 4 and 8 sample.
_KILLS = {
    "in-the-first-step": "forge_mlx.train.step:TrainStep.update,1",
    "in-a-step": "forge_mlx.train.step:TrainStep.update,5",
    "in-an-accumulation": "forge_mlx.data.stream:BatchStream.__next__,8",
    "in-an-evaluation": f"{_TRAINER}.evaluate,2",
    "after-an-evaluation": f"{_TRAINER}.evaluate,2,after",
    "in-a-sample": f"{_TRAINER}.samples,2",
    "between-weights-and-moments": f"{_CHECKPOINT}:mx.save_safetensors,3,after",
    "before-a-checkpoint-has-its-name": f"{_CHECKPOINT}:install_folder,2",
    "before-an-old-checkpoint-goes": f"{_CHECKPOINT}:_remove,1",
    "after-the-last-step": f"{_TRAINER}.save,3,after",
    "in-the-last-evaluation": f"{_TRAINER}.evaluate,3",
    "in-the-final-model": "forge_mlx.train.trainer:write_final,1,after",
    "before-the-final-model-has-its-name": "forge_mlx.train.trainer:install_folder,1",
    "after-the-final-model": f"{_TRAINER}.save_final,1,after",
    "between-the-last-two-records": "forge_mlx.train.loop:MetricsLog.log,11,after",
    "in-the-report": "forge_mlx.train.loop:write_report,1",
}
# One run is killed at all of these, start after start, so each counts the calls since the one before.
_CHAIN = (
    "in-a-step",  # goes on from 3
    "forge_mlx.train.trainer:Trainer.evaluate,1,after",  # 6
    "forge_mlx.train.checkpoint:mx.save_safetensors,1,after",  # 6
    "after-the-last-step-of-two",
    "in-the-final-model",
    # After the notes on the setup and the resume: the sample's record, and not yet the evaluation's.
    "forge_mlx.train.loop:MetricsLog.log,3,after",
)
_CHAINED = {**_KILLS, "after-the-last-step-of-two": f"{_TRAINER}.save,2,after"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume-cache")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[[str], Path]:
    """From an optimizer's name to the folder of a run that was never stopped, made when first asked for."""

    @functools.cache
    def run(optimizer: str) -> Path:
        folder = tmp_path_factory.mktemp(f"unbroken-{optimizer}")
        status, _, errors = run_command(write_config(folder, optim__name=optimizer), cache=cache)
        assert (status, errors) == (0, "")
        return folder / "run"

    return run


def _require_same(run: Path, unbroken: Path) -> None:
    """Weights, moments, position and records of two finished runs are the same to the bit."""
    for file in ("final/model.safetensors", "checkpoints/step-00000009/optimizer.safetensors"):
        assert arrays(run / file) == arrays(unbroken / file), file
    assert _state(run) == _state(unbroken)
    assert records(run, "train", "eval", "sample") == records(unbroken, "train", "eval", "sample")
    assert (run / "tokenizer.model").read_bytes() == (unbroken / "tokenizer.model").read_bytes()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000006", "step-00000009"]
    assert not list(run.rglob("*unfinished*"))
    assert (run / "report.html").is_file()
    assert (run / "loss.png").is_file()


def _state(run: Path) -> dict[str, object]:
    state = json.loads((run / "checkpoints/step-00000009/state.json").read_text(encoding="utf-8"))["state"]
    return {key: value for key, value in state.items() if key != "seconds"}


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_run_killed_again_and_again_ends_like_one_that_never_was(
    unbroken: Callable[[str], Path], cache: Path, tmp_path: Path, optimizer: str
) -> None:
    config = write_config(tmp_path, optim__name=optimizer)
    for place in _CHAIN:
        status, _, _ = run_command(config, cache=cache, stop=f"SIGKILL,{_CHAINED.get(place, place)}")
        assert status == -signal.SIGKILL, place
    assert run_command(config, cache=cache)[0] == 0
    _require_same(tmp_path / "run", unbroken(optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("place", _KILLS)
def test_run_killed_once_ends_like_one_that_never_was(
    unbroken: Callable[[str], Path], cache: Path, tmp_path: Path, place: str, optimizer: str
) -> None:
    config = write_config(tmp_path, optim__name=optimizer)
    assert run_command(config, cache=cache, stop=f"SIGKILL,{_KILLS[place]}")[0] == -signal.SIGKILL
    assert run_command(config, cache=cache)[0] == 0
    _require_same(tmp_path / "run", unbroken(optimizer))


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_finishes_the_step_saves_and_says_how_to_go_on(
    unbroken: Callable[[str], Path], cache: Path, tmp_path: Path, name: str, status: int
) -> None:
    reference = unbroken("adamw")
    config = write_config(tmp_path)
    code, _, errors = run_command(config, cache=cache, stop=f"{name},forge_mlx.train.step:TrainStep.update,5")
    run = tmp_path / "run"
    assert code == status
    assert f"stopped by {name} after step 5 of 9. All of it is saved: the same command goes on from here." in errors
    assert "once more stops at once" in errors
    assert (run / "checkpoints/step-00000005").is_dir()
    assert f"stopped by {name} after step 5" in (run / "report.html").read_text(encoding="utf-8")
    assert run_command(config, cache=cache)[0] == 0
    assert any("resumed at step 5" in event for event in events(run))
    assert arrays(run / "final/model.safetensors") == arrays(reference / "final/model.safetensors")
    assert records(run, "train", "eval", "sample") == records(reference, "train", "eval", "sample")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("forge_mlx.train.work:prepare,1,after", "stopped by SIGTERM before training began; nothing is lost"),
        (
            "forge_mlx.train.trainer:Trainer.evaluate,3",
            "stopped at once by SIGTERM. The last good checkpoint is that of step 9; the same command goes on from "
            "there.",
        ),
        (
            "forge_mlx.train.trainer:Trainer.evaluate,1",
            "stopped by SIGTERM after step 3 of 9. All of it is saved: the same command goes on from here.",
        ),
        (
            "forge_mlx.train.trainer:Trainer.save,3,after",
            "stopped by SIGTERM after step 9 of 9; the last evaluation is still to come. All of it is saved",
        ),
    ],
    ids=["preparing-data", "last-evaluation", "evaluation", "after-the-last-step"],
)
def test_signal_outside_a_step_loses_nothing(
    unbroken: Callable[[str], Path], cache: Path, tmp_path: Path, place: str, message: str
) -> None:
    config = write_config(tmp_path)
    status, _, errors = run_command(config, cache=cache, stop=f"SIGTERM,{place}")
    assert status == 143
    assert message in errors
    assert run_command(config, cache=cache)[0] == 0
    reference = unbroken("adamw")
    assert arrays(tmp_path / "run/final/model.safetensors") == arrays(reference / "final/model.safetensors")
    assert records(tmp_path / "run", "train", "eval", "sample") == records(reference, "train", "eval", "sample")


def test_same_command_again_says_it_has_finished_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path)
    first = train(config, log=_ignore)
    before = tree(tmp_path / "run")
    monkeypatch.setattr(Trainer, "train_step", _fail)
    monkeypatch.setattr("forge_mlx.train.work.prepare", _fail)
    lines: list[str] = []
    assert train(config, log=lines.append) == first
    assert "already finished" in lines[0]
    assert len(lines) == 1
    # The lock's file names the process, which is the same here.
    assert tree(tmp_path / "run") == before


def test_finished_run_with_other_keys_says_that_they_have_no_effect(tmp_path: Path) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    lines: list[str] = []
    train(tiny_config(tmp_path, optim__lr=1e-4), log=lines.append)
    assert "without effect, as there is nothing left to do: optim.lr: 0.003 -> 0.0001" in lines


def test_missing_report_of_a_finished_run_is_written(tmp_path: Path) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    (tmp_path / "run/report.html").unlink()
    train(tiny_config(tmp_path), log=_ignore)
    assert (tmp_path / "run/report.html").is_file()


def test_finished_run_with_more_steps_goes_on(tmp_path: Path) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    lines: list[str] = []
    train(tiny_config(tmp_path, train__steps=12), log=lines.append)
    assert "resumed at step 9; changed train.steps: 9 -> 12" in lines
    run = tmp_path / "run"
    assert "resumed at step 9; changed train.steps: 9 -> 12" in events(run)
    assert [r["step"] for r in records(run, "train")] == [2, 4, 6, 8, 9, 10, 12]
    assert [r["step"] for r in records(run, "eval") if r["final"]] == [9, 12]
    log = read_metrics(run / "metrics.jsonl")
    trained = next(r["time"] for r in log if r["kind"] == "train" and r["step"] == 9)
    assert [r["time"] for r in log if r["kind"] == "setup"][-1] >= trained
    assert load_config(run / "config.yaml").train.steps == 12
    assert arrays(run / "final/model.safetensors") == arrays(run / "checkpoints/step-00000012/model.safetensors")


def test_finished_run_without_its_final_model_makes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    final = tmp_path / "run/final"
    before = tree(final)
    final.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(Trainer, "train_step", _fail)
    train(tiny_config(tmp_path), log=_ignore)
    assert tree(final) == before


def test_never_keeps_the_earlier_run_under_another_name(tmp_path: Path) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    run = tmp_path / "run"
    before = tree(run)
    lines: list[str] = []
    train(tiny_config(tmp_path, run__resume="never", optim__lr=1e-4), log=lines.append)
    assert f"the earlier run was moved to {run}-before-1" in lines
    assert tree(tmp_path / "run-before-1") == before
    assert arrays(run / "final/model.safetensors") != arrays(tmp_path / "run-before-1/final/model.safetensors")
    assert not events(run)
    # Only the first start was told to begin anew: the next one goes on.
    assert load_config(run / "config.yaml").run.resume == "auto"


def test_never_moves_nothing_when_the_new_run_cannot_start(tmp_path: Path) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    before = tree(tmp_path / "run")
    (tmp_path / "corpus.txt").write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match="vocab"):
        train(tiny_config(tmp_path, run__resume="never"), log=_ignore)
    assert tree(tmp_path / "run") == before
    assert not (tmp_path / "run-before-1").exists()


def test_must_goes_on_or_fails(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"run\.resume is must, but .*checkpoints holds no checkpoint"):
        train(tiny_config(tmp_path, run__resume="must"), log=_ignore)
    assert not (tmp_path / "run").exists()
    train(tiny_config(tmp_path, train__steps=3), log=_ignore)
    train(tiny_config(tmp_path, run__resume="must", train__steps=4), log=_ignore)
    assert "resumed at step 3; changed train.steps: 3 -> 4" in events(tmp_path / "run")


def test_changed_free_keys_are_accepted_logged_and_written(tmp_path: Path) -> None:
    _stopped_run(tmp_path)
    train(tiny_config(tmp_path, optim__lr=1e-4, train__eval_every=4), log=_ignore)
    run = tmp_path / "run"
    assert "resumed at step 3; changed optim.lr: 0.003 -> 0.0001; changed train.eval_every: 3 -> 4" in events(run)
    assert load_config(run / "config.yaml").optim.lr == 1e-4
    assert [r["step"] for r in records(run, "eval")] == [3, 4, 8, 9]


def test_changed_fixed_keys_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    _stopped_run(tmp_path)
    before = tree(tmp_path / "run")
    with pytest.raises(RunFolderError) as caught:
        train(tiny_config(tmp_path, run__seed=4, model__num_layers=3, optim__lr=1e-4), log=_ignore)
    message = str(caught.value)
    assert "model.num_layers: 2 -> 3" in message
    assert "run.seed: 3 -> 4" in message
    assert "optim.lr" not in message
    for way_out in ("Put the old values back", "run.dir=...", "run.resume=never"):
        assert way_out in message
    assert tree(tmp_path / "run") == before


def test_run_that_ended_before_its_first_checkpoint_may_change_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was out of memory in its first step does with a smaller batch."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", _fail)
        with pytest.raises(_NotExpectedError):
            train(tiny_config(tmp_path), log=_ignore)
    train(tiny_config(tmp_path, train__batch_size=1, model__num_layers=1, train__steps=3), log=_ignore)
    run = tmp_path / "run"
    config = load_config(run / "config.yaml")
    assert (config.train.batch_size, config.model.num_layers) == (1, 1)
    assert [r["step"] for r in records(run, "train")] == [2, 3]


def test_finished_run_whose_checkpoints_were_deleted_refuses_another_model(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, train__steps=3), log=_ignore)
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(RunFolderError, match=r"model\.num_layers: 2 -> 1"):
        train(tiny_config(tmp_path, train__steps=3, model__num_layers=1), log=_ignore)


def test_changed_corpus_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    _stopped_run(tmp_path)
    before = tree(tmp_path / "run")
    write_corpus(tmp_path / "corpus.txt", seed=1)
    with pytest.raises(RunFolderError) as caught:
        train(tiny_config(tmp_path), log=_ignore)
    assert "the training text or its tokenizer is not that of this run" in str(caught.value)
    assert "run.resume=never" in str(caught.value)
    assert tree(tmp_path / "run") == before


def test_second_trainer_in_a_folder_is_told_which_process_is_there(tmp_path: Path, cache: Path) -> None:
    config = write_config(tmp_path, train__steps=100000, train__checkpoint_every=0, train__eval_every=0)
    with command(config, cache=cache) as process:
        try:
            _wait_for(tmp_path / "run/metrics.jsonl")
            with pytest.raises(RunFolderError, match=rf"another process \({process.pid}\) is training here"):
                train(tiny_config(tmp_path), log=_ignore)
        finally:
            process.kill()
            process.communicate()
    # What a killed process held is free.
    with RunFolder(tmp_path / "run").locked():
        pass


def _stopped_run(folder: Path) -> None:
    """A run of nine steps that was killed after the checkpoint of step 3."""
    with pytest.MonkeyPatch.context() as patch:
        original, steps = Trainer.train_step, iter(range(4))
        patch.setattr(Trainer, "train_step", lambda self: original(self) if next(steps) < 3 else _fail())
        with pytest.raises(_NotExpectedError):
            train(tiny_config(folder), log=_ignore)
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step-00000003"]


class _NotExpectedError(Exception):
    pass


def _fail(*_arguments: object, **_options: object) -> tuple[float, float]:
    raise _NotExpectedError


def _ignore(_line: str) -> None:
    pass


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
