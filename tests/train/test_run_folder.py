import fcntl
import os
from pathlib import Path
import re

from forge_mlx.train.checkpoint import CheckpointFormatError, RunState, save_checkpoint
from forge_mlx.train.folder import RunFolder, RunFolderError
from forge_mlx.train.load import load_config
from forge_mlx.train.metrics import replace_file
import mlx.core as mx
import pytest
from tiny_run import tiny_config, tree


def _started(path: Path, config_folder: Path) -> RunFolder:
    """A folder as a run leaves it that has just begun."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.metrics_file.touch()
    folder.write_config(tiny_config(config_folder))
    return folder


def _checkpoint(folder: RunFolder, step: int) -> Path:
    state = RunState(step, 0, 0.0, {}, {})
    return save_checkpoint(folder.checkpoints, {"w": mx.ones((2,))}, {"m": mx.ones((2,))}, state, keep=9)


def test_new_folder_is_usable_and_is_made_by_the_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs/new")
    folder.check_usable(tiny_config(tmp_path))
    with folder.locked():
        folder.check_usable(tiny_config(tmp_path))
        folder.metrics_file.touch()
        assert not folder.started
        folder.write_config(tiny_config(tmp_path))
        assert folder.started
    assert (folder.path / ".lock").is_file()


def test_folder_where_no_run_begins_is_left_as_it_was_found(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "new").locked():
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine", encoding="utf-8")
    with RunFolder(tmp_path / "mine").locked():
        pass
    assert tree(tmp_path / "mine") == {"notes.txt": b"mine"}


def test_run_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    with (
        pytest.raises(RunFolderError, match=r"run\.dir must be a folder but .*file is a file"),
        RunFolder(tmp_path / "file").locked(),
    ):
        pass


@pytest.mark.parametrize("name", ["below-a-file", "no-permission"])
def test_run_dir_that_cannot_be_written(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder"
    if name == "below-a-file":
        path.write_text("text", encoding="utf-8")
        path = path / "run"
    else:
        # Not chmod: the superuser, who runs tests in many containers, may write anywhere.
        monkeypatch.setattr(Path, "mkdir", _no_permission)
    with (
        pytest.raises(RunFolderError, match=r"run\.dir must be a folder that can be written: .*folder"),
        RunFolder(path).locked(),
    ):
        pass


def _no_permission(path: Path, **_options: object) -> None:
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize("name", ["thesis.tex", "config.yaml"])
def test_folder_with_other_files_is_refused(tmp_path: Path, name: str) -> None:
    """A config.yaml that its user wrote is such a file: the run's own would overwrite it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("mine", encoding="utf-8")
    with pytest.raises(RunFolderError, match=rf"holds other files, such as {name}\. Choose another folder"):
        RunFolder(tmp_path / "mine").check_usable(tiny_config(tmp_path))


def test_leftovers_of_a_start_that_was_killed_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for name in (".DS_Store", ".lock", ".unfinished-config.yaml", "metrics.jsonl"):
        (folder.path / name).touch()
    folder.check_usable(tiny_config(tmp_path))


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    config = tiny_config(tmp_path, run__resume="must")
    with pytest.raises(RunFolderError, match=r"run\.resume is must, but .*checkpoints holds no checkpoint"):
        folder.check_usable(config)
    _checkpoint(folder, 1)
    folder.check_usable(config)


def test_locked_folder_names_the_process_that_holds_it(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    with folder.locked():
        with (
            pytest.raises(RunFolderError, match=rf"another process \({os.getpid()}\) is training here.*run\.dir"),
            RunFolder(tmp_path / "run").locked(),
        ):
            pass
        assert (folder.path / ".lock").read_text(encoding="utf-8") == str(os.getpid())
    with folder.locked():
        pass


def test_lock_that_was_moved_away_with_its_folder_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    original = fcntl.flock

    def move_first(file: object, operation: int) -> None:
        folder.set_aside()
        original(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", move_first)
    with pytest.raises(RunFolderError, match="another process is training here"), folder.locked():
        pass


def test_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunFolderError, match=r"cannot be locked: .*No locks available.*local disk"):
        RunFolder(tmp_path / "run").locked().__enter__()


def test_set_aside_takes_everything_and_counts_on(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = _started(tmp_path / "run", tmp_path) if number == 1 else _again(tmp_path / "run", tmp_path)
        _checkpoint(folder, 5)
        before = tree(folder.path)
        assert folder.set_aside() == tmp_path / f"run-before-{number}"
        assert tree(tmp_path / f"run-before-{number}") == before
        assert tree(folder.path) == {}
    assert RunFolder(tmp_path / "run").set_aside() is None


def _again(path: Path, config_folder: Path) -> RunFolder:
    path.rmdir()
    return _started(path, config_folder)


def test_set_aside_of_a_link_leaves_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    _started(tmp_path / "disk/run", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "disk/run")
    assert RunFolder(tmp_path / "link").set_aside() == tmp_path / "disk/run-before-1"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk/run").is_dir()
    assert RunFolder(tmp_path / "disk/run-before-1").started


@pytest.mark.parametrize(
    "changes",
    [
        {"model__hidden_size": 32},
        {"model__dropout": 0.0},
        {"data__valid_fraction": 0.1},
        {"run__seed": 4},
        {"train__batch_size": 3},
        {"train__seq_len": 8},
        {"train__accumulate": 1},
        {"optim__name": "muon"},
    ],
    ids=lambda changes: next(iter(changes)).replace("__", "."),
)
def test_keys_that_decide_what_a_checkpoint_means_are_fixed(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    key, new = next((name.replace("__", "."), value) for name, value in changes.items())
    section, field = key.split(".")
    old = getattr(getattr(tiny_config(tmp_path), section), field)
    with pytest.raises(RunFolderError) as caught:
        folder.changed_keys(tiny_config(tmp_path, **changes))
    assert f"{key}: {old!r} -> {new!r}" in str(caught.value)


FIRST, THEN = {"*": {"bits": 8}}, {"*.up_proj": {"bits": 2}}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (FIRST | THEN, THEN | FIRST, "qat.overrides (in this order): ['*', '*.up_proj'] -> ['*.up_proj', '*']"),
        ({}, {"lm_head": None}, "qat.overrides (in this order): null -> ['lm_head']"),
        (FIRST | {"lm_head": None}, FIRST, "qat.overrides (in this order): ['*', 'lm_head'] -> ['*']"),
        ({"*": None}, {"*": {}}, "qat.overrides.*: null -> {}"),
        (FIRST, {"*": {"bits": 4}}, "qat.overrides.*: {'bits': 8} -> {'bits': 4}"),
    ],
    ids=["order", "a first null", "no null any more", "null and empty", "a value"],
)
def test_overrides_of_quantisation_are_fixed_with_their_order(
    tmp_path: Path, old: dict[str, object], new: dict[str, object], said: str
) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    folder.write_config(tiny_config(tmp_path, qat__overrides=old))
    with pytest.raises(RunFolderError) as caught:
        folder.changed_keys(tiny_config(tmp_path, qat__overrides=new))
    assert str(caught.value).splitlines()[1:-1] == [f"  {said}"]
    assert folder.changed_keys(tiny_config(tmp_path, qat__overrides=old)) == []


def test_other_keys_may_change(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    changes = {"optim__lr": 0.5, "train__steps": 20, "train__sample_prompt": "x", "run__dtype": "bfloat16"}
    assert folder.changed_keys(tiny_config(tmp_path, **changes)) == [
        "optim.lr: 0.003 -> 0.5",
        "run.dtype: 'auto' -> 'bfloat16'",
        "train.sample_prompt: '' -> 'x'",
        "train.steps: 9 -> 20",
    ]
    assert folder.changed_keys(tiny_config(tmp_path, run__resume="must", run__dir="elsewhere")) == []


def test_values_that_the_trainer_fills_in_are_no_change(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    folder.write_config(tiny_config(tmp_path, model__vocab_size=320, run__dtype="float32"))
    assert folder.changed_keys(tiny_config(tmp_path)) == []
    with pytest.raises(RunFolderError, match=r"model\.vocab_size: 320 -> 400"):
        folder.changed_keys(tiny_config(tmp_path, model__vocab_size=400, data__tokenizer={"vocab_size": 400}))


def test_written_config_lets_the_next_start_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for resume in ("never", "must", "auto"):
        folder.write_config(tiny_config(tmp_path, run__resume=resume))
        assert load_config(folder.config_file).run.resume == "auto"


def test_results_are_a_checkpoint_or_a_final_model(tmp_path: Path) -> None:
    for name, result in (("checkpoint", "checkpoints/step-00000001"), ("model", "final")):
        folder = _started(tmp_path / name, tmp_path)
        assert not folder.has_results
        (folder.path / result).mkdir(parents=True)
        assert folder.has_results


def test_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    assert folder.latest() == (None, [])
    for step in (1, 2):
        _checkpoint(folder, step)
    found, damaged = folder.latest()
    assert found is not None
    assert (found.state.step, damaged) == (2, [])


def test_damaged_newer_ones_are_named_and_put_aside(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    for step in (1, 2, 3):
        _checkpoint(folder, step)
    for step in (2, 3):
        (folder.checkpoints / f"step-0000000{step}/model.safetensors").write_bytes(b"")
    before = tree(folder.path)
    found, damaged = folder.latest()
    assert found is not None
    assert found.state.step == 1
    assert tree(folder.path) == before
    (folder.checkpoints / "damaged-step-00000002").mkdir()
    lines = [checkpoint.set_aside() for checkpoint in damaged]
    assert "step-00000003: damaged: model.safetensors" in lines[0]
    assert "called damaged-step-00000003 now, and the checkpoint before it is used" in lines[0]
    assert "called damaged-step-00000002-2 now" in lines[1]
    assert folder.latest()[1] == []


def test_all_checkpoints_damaged_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    for step in (1, 2):
        (_checkpoint(folder, step) / "state.json").unlink()
    before = tree(folder.path)
    with pytest.raises(RunFolderError) as caught:
        folder.latest()
    message = str(caught.value)
    assert f"{folder.checkpoints}: none of the 2 checkpoints can be read" in message
    assert "step-00000001: damaged" in message
    assert "step-00000002: damaged" in message
    assert "run.resume=never" in message
    assert tree(folder.path) == before


def test_checkpoint_of_another_version_is_not_passed_over(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    _checkpoint(folder, 1)
    (_checkpoint(folder, 2) / "state.json").write_text('{"format": 2}', encoding="utf-8")
    with pytest.raises(CheckpointFormatError, match="format must be 1 but got 2"):
        folder.latest()


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    _checkpoint(folder, 1)
    before = tree(folder.path)
    for name in (".unfinished-final", "checkpoints/.unfinished-step-00000002"):
        (folder.path / name).mkdir()
        (folder.path / name / "model.safetensors").touch()
    # The names that a process killed right before it renames a file leaves.
    left: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, _target: left.append(Path(source)))
        folder.write_config(tiny_config(tmp_path))
        replace_file(folder.metrics_file, b"")
    for path in left:
        path.touch()
    assert len(left) == 2
    folder.remove_unfinished()
    assert tree(folder.path) == before


def test_config_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    before = folder.config_file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("forge_mlx.train.folder.dump_config", _half_a_dump)
        with pytest.raises(OSError, match="No space"):
            folder.write_config(tiny_config(tmp_path, optim__lr=0.5))
    assert folder.config_file.read_bytes() == before


def _half_a_dump(_config: object, path: Path, _note: str) -> None:
    path.write_text("run:\n", encoding="utf-8")
    raise OSError(28, "No space left on device")


def test_paths_are_those_that_readme_names(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    folder = RunFolder(tmp_path)
    for path in (folder.config_file, folder.metrics_file, folder.checkpoints, folder.final):
        assert path.parent == tmp_path
        assert re.search(rf"^  {re.escape(path.name)}/? ", readme, re.MULTILINE), path.name


def test_final_model_without_a_checkpoint_is_not_trained_over(tmp_path: Path) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    folder.require_way_on()
    folder.final.mkdir()
    with pytest.raises(RunFolderError, match=r"holds a final model but no checkpoint .*run\.resume=never keeps"):
        folder.require_way_on()
    _checkpoint(folder, 1)
    folder.require_way_on()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_checkpoints_of_a_run_whose_files_are_missing_are_not_called_other_files(tmp_path: Path, name: str) -> None:
    folder = _started(tmp_path / "run", tmp_path)
    _checkpoint(folder, 1)
    (folder.path / name).unlink()
    with pytest.raises(RunFolderError, match=rf"holds checkpoints, but {name} is missing, .* Put it back"):
        folder.check_usable(tiny_config(tmp_path))
