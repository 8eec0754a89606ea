from collections.abc import Callable, Iterator
import errno
import io
import json
import os
from pathlib import Path
import resource
import shutil
from typing import Any

from forge_mlx.train.checkpoint import (
    CheckpointError,
    CheckpointFormatError,
    RunState,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
import mlx.core as mx
import pytest
from tiny_run import tree


def _save(folder: Path, step: int, keep: int = 2, value: float | None = None) -> Path:
    """A checkpoint whose arrays hold their step, or another value."""
    value = float(step) if value is None else value
    weights = {"layers.0.weight": mx.full((3, 5), value), "norm.weight": mx.full((4,), value)}
    moments = {"states.0.step": mx.array(step, mx.uint64), "states.0.m": mx.full((3, 5), -value)}
    state = RunState(step, 10 * step, 1.5 * step, {"epoch": 0, "row": step}, {"nats": 0.1 * step})
    return save_checkpoint(folder, weights, moments, state, keep)


def _require_whole(path: Path, step: int, value: float | None = None) -> None:
    checkpoint = load_checkpoint(path)
    value = float(step) if value is None else value
    assert checkpoint.state == RunState(step, 10 * step, 1.5 * step, {"epoch": 0, "row": step}, {"nats": 0.1 * step})
    assert checkpoint.weights["layers.0.weight"].tolist() == [[value] * 5] * 3
    assert checkpoint.weights["norm.weight"].tolist() == [value] * 4
    assert checkpoint.optimizer["states.0.m"].tolist() == [[-value] * 5] * 3
    step_count = checkpoint.optimizer["states.0.step"]
    assert (step_count.dtype, step_count.item()) == (mx.uint64, step)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    path = _save(tmp_path / "checkpoints", 7)
    assert path == tmp_path / "checkpoints/step-00000007"
    _require_whole(path, 7)
    assert _names(path) == ["model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep)
    assert _names(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 3, 4)][-keep:]


def test_checkpoint_of_a_later_step_does_not_count(tmp_path: Path) -> None:
    """Were it counted, a damaged later one would push out the one just written."""
    _save(tmp_path, 9)
    _save(tmp_path, 3, keep=1)
    _save(tmp_path, 4, keep=1)
    assert _names(tmp_path) == ["step-00000004", "step-00000009"]


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        _save(tmp_path, step, keep=9)
    for name in ("step-00000006-backup", ".unfinished-step-00000008", "damaged-step-00000009", "step-7"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000010").touch()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000005", "step-99999999", "step-100000000"]
    assert list_checkpoints(tmp_path / "missing") == []


def test_leftovers_of_killed_writes_are_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in (".unfinished-step-00000003", ".unfinished-old-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    _save(tmp_path, 4)
    assert _names(tmp_path) == ["step-00000004"]


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


_DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "flipped-bit": _flip_a_bit,
    "empty": lambda file: os.truncate(file, 0),
    "missing": lambda file: file.unlink(),
    "other-content": lambda file: file.write_bytes(b"[1, 2]"),
}


@pytest.mark.parametrize("damage", _DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_damaged_file_is_an_error_that_names_the_checkpoint(tmp_path: Path, name: str, damage: str) -> None:
    path = _save(tmp_path, 3)
    _DAMAGES[damage](path / name)
    with pytest.raises(CheckpointError, match="step-00000003: damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_other_format_is_an_error_of_its_own(tmp_path: Path, number: object) -> None:
    path = _save(tmp_path, 3)
    content = json.loads((path / "state.json").read_text(encoding="utf-8"))
    (path / "state.json").write_text(json.dumps(content | {"format": number}), encoding="utf-8")
    with pytest.raises(CheckpointFormatError, match=rf"step-00000003: format must be 1 but got {number!r}"):
        load_checkpoint(path)


class _Dead(BaseException):
    """What a killed process raises here: no handler of the code under test can mean it."""


class _Faults:
    """Counts every call that changes the disk, and lets the one chosen fail.

    Args:
        at: which call fails, from 0; None: none.
        error: what it raises. After a `_Dead` every later call raises it too: a dead process cleans nothing up.
    """

    def __init__(self, at: int | None, error: type[BaseException]) -> None:
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, original: Callable[..., Any], half: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if self.at is not None and (number == self.at or (number > self.at and self.error is _Dead)):
                if half and number == self.at:
                    # As a write that is cut off leaves the file.
                    original(*args, **options)
                    args[0].truncate(20)
                raise _Dead if self.error is _Dead else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **options)

        return call

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("open", "close", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, self(getattr(os, name)))
        patch.setattr(io, "open", self(io.open))
        patch.setattr(mx, "save_safetensors", self(mx.save_safetensors, half=True))


def _save_with_faults(folder: Path, step: int, faults: _Faults, keep: int, value: float | None = None) -> bool:
    """Whether the save went through."""
    with pytest.MonkeyPatch.context() as patch:
        faults.install(patch)
        try:
            _save(folder, step, keep, value)
        except (_Dead, OSError):
            return False
    return True


def _every_fault(error: type[BaseException], prepare: Callable[[], None], folder: Path, keep: int) -> Iterator[int]:
    """For each call that a save of step 2 makes: prepare, save with that call failing."""
    prepare()
    counting = _Faults(None, error)
    assert _save_with_faults(folder, 2, counting, keep)
    assert counting.calls > 15
    for number in range(counting.calls):
        prepare()
        _save_with_faults(folder, 2, _Faults(number, error), keep)
        yield number


@pytest.mark.parametrize("error", [OSError, _Dead], ids=["call-fails", "process-dies"])
def test_whatever_call_fails_the_newest_checkpoint_is_whole(tmp_path: Path, error: type[BaseException]) -> None:
    def prepare() -> None:
        shutil.rmtree(tmp_path, ignore_errors=True)
        _save(tmp_path, 1)

    steps = set()
    # The hardest case: with keep=1 the old one goes as soon as the new one is there.
    for number in _every_fault(error, prepare, tmp_path, keep=1):
        found = list_checkpoints(tmp_path)
        assert found, number
        for path in found:
            _require_whole(path, int(path.name[-8:]))
        steps.add(found[-1].name)
        _save(tmp_path, 3, keep=1)
        assert _names(tmp_path) == ["step-00000003"], number
        _require_whole(tmp_path / "step-00000003", 3)
    assert steps == {"step-00000001", "step-00000002"}


@pytest.mark.parametrize("error", [OSError, _Dead], ids=["call-fails", "process-dies"])
def test_replacing_a_checkpoint_never_leaves_half_of_it(tmp_path: Path, error: type[BaseException]) -> None:
    def prepare() -> None:
        shutil.rmtree(tmp_path, ignore_errors=True)
        _save(tmp_path, 1)
        _save(tmp_path, 2, value=0.5)

    for number in _every_fault(error, prepare, tmp_path, keep=2):
        found = list_checkpoints(tmp_path)
        assert found[0].name == "step-00000001", number
        _require_whole(found[0], 1)
        for path in found[1:]:
            weights = load_checkpoint(path).weights
            _require_whole(path, 2, weights["norm.weight"][0].item())


def test_call_that_fails_leaves_no_half_written_files(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    before = tree(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _full_disk)
        with pytest.raises(OSError, match="No space left"):
            _save(tmp_path, 2)
    assert tree(tmp_path) == before


def test_file_system_that_is_really_full(tmp_path: Path) -> None:
    """The limit on a file's size makes the kernel itself refuse the write, as a full disk does."""
    _save(tmp_path, 1)
    before = tree(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            _save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tree(tmp_path) == before


def test_file_system_that_cannot_flush_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.fsync

    def flush_files_only(descriptor: int) -> None:
        if os.path.isdir(f"/dev/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", flush_files_only)
    _require_whole(_save(tmp_path, 1), 1)


def test_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 1)
    monkeypatch.setattr("forge_mlx.train.checkpoint._remove", _full_disk)
    _require_whole(_save(tmp_path, 2, keep=1), 2)
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]


def _full_disk(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
