"""What a run in this process leaves, says and measures, and how it ends when something goes wrong."""

import math
import os
from pathlib import Path
import re
import shutil
import signal
import time
from typing import Any

from forge_mlx.blas import BlasChoice
from forge_mlx.data.prepare import prepare
from forge_mlx.hub.native import load_model
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.train.banner import log_device
from forge_mlx.train.checkpoint import load_checkpoint, save_checkpoint
from forge_mlx.train.device import choose_placement
from forge_mlx.train.folder import RunFolderError
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import Interrupted, NonFiniteLoss, TrainingStopped, train
from forge_mlx.train.metrics import MetricsLog, read_metrics
from forge_mlx.train.progress import Progress
from forge_mlx.train.trainer import Trainer
import mlx.core as mx
import numpy as np
import pytest
from tiny_run import arrays, events, records, tiny_config, trainer_of, tree


def _ignore(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a finished run, and what it said."""
    folder = tmp_path_factory.mktemp("finished")
    lines: list[str] = []
    train(tiny_config(folder), log=lines.append)
    return folder / "run", lines


def test_run_folder_holds_all_that_a_run_leaves(finished: tuple[Path, list[str]]) -> None:
    run, _ = finished
    assert sorted(path.name for path in run.iterdir() if path.name != ".lock") == [
        "checkpoints",
        "config.yaml",
        "final",
        "loss.png",
        "metrics.jsonl",
        "report.html",
        "tokenizer.model",
    ]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    model, tokenizer = load_model(run / "final")
    assert model.config.vocab_size == tokenizer.vocab_size == 320
    assert arrays(run / "final/model.safetensors") == arrays(run / "checkpoints/step-00000009/model.safetensors")


def test_written_config_is_resolved_and_starts_the_same_run(finished: tuple[Path, list[str]]) -> None:
    config = load_config(finished[0] / "config.yaml")
    assert config.model.vocab_size == 320
    assert (config.run.device, config.run.dtype, config.run.resume) == ("cpu", "float32", "auto")
    lines: list[str] = []
    train(config, log=lines.append)
    assert "already finished" in lines[0]


def test_records_come_when_they_are_due(finished: tuple[Path, list[str]]) -> None:
    run, _ = finished
    assert [r["step"] for r in records(run, "train")] == [2, 4, 6, 8, 9]
    assert [(r["step"], r["final"]) for r in records(run, "eval")] == [(3, False), (6, False), (9, True)]
    assert [r["step"] for r in records(run, "sample")] == [4, 8, 9]
    assert [r["tokens"] for r in records(run, "train")] == [64 * step for step in (2, 4, 6, 8, 9)]
    (setup,) = records(run, "setup")
    assert setup["total_steps"] == 9
    assert "blas" in setup
    assert setup["corpus"]["vocab_size"] == 320


def test_first_lines_say_which_path_runs_and_why(finished: tuple[Path, list[str]]) -> None:
    text = "\n".join(finished[1])
    for part in (
        r"^device: cpu, float32 \(.+\)$",
        r"^BLAS: \S.* \(.+\)$",
        r"^attention: causal: mx\.fast\.scaled_dot_product_attention, engine reference \(.+ is a CPU\)$",
        r"^packing: concat \(",
        r"^model: [\d,]+ parameters",
        r"^loss: linear_cross_entropy, engine reference \(.+\); the logits of 32 of a pass's 32 tokens exist at once$",
        r"^optimizer: adamw, lr 0\.003; cosine after 2 warmup steps$",
        r"^training: 9 steps of 64 tokens \(2 rows x 16 x 2 passes\)",
        r"^folder: .*run; Ctrl-C stops",
    ):
        assert re.search(part, text, re.MULTILINE), part
    assert re.search(
        r"^step 9: validation loss \d\.\d{4}, \d\.\d{4} bits per byte \([\d,]+ tokens\)$", text, re.MULTILINE
    )


def test_slow_blas_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_mlx.train.banner.blas_choice", lambda: BlasChoice("mlx", None, "no other was found"))
    config, lines = tiny_config(tmp_path), list[str]()
    log_device(choose_placement(config.run), lines.append)
    assert lines[1] == "BLAS: mlx (no other was found)"
    assert lines[2].startswith("WARNING: MLX's own BLAS")
    assert 'pip install "forge-mlx[cpu]"' in lines[2]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("tokens", [None, 100], ids=["all", "some"])
def test_evaluation_is_the_mean_over_its_targets_and_their_bytes(tmp_path: Path, tokens: int | None) -> None:
    """Against NumPy in float64, row by row, with bytes counted by decoding."""
    trainer = trainer_of(tiny_config(tmp_path))
    trainer.train_step()
    result = trainer.evaluate(tokens)
    text = np.array(trainer.valid_rows.tokens.tokens).astype(np.int64)
    starts = list(range(0, len(text) - 1, 16))
    if tokens is not None:
        taken = math.ceil(tokens / 16)
        starts = [starts[i * len(starts) // taken] for i in range(taken)]
    trainer.model.eval()
    nats, count, size = 0.0, 0, 0
    for start in starts:
        row = text[start : start + 17]
        logits = np.array(trainer.model(mx.array(row[None, :-1]))[0]).astype(np.float64)
        nats -= _log_softmax(logits)[np.arange(len(row) - 1), row[1:]].sum()
        count += len(row) - 1
        size += sum(_bytes_of(trainer, int(token)) for token in row[1:])
    assert result["tokens"] == count
    if tokens is None:
        # Every token but the first is a target: their bytes are the validation text's, but for the first token's.
        assert count == len(text) - 1
        assert size == trainer.valid_rows.tokens.num_bytes - _bytes_of(trainer, int(text[0]))
    assert result["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def _bytes_of(trainer: Trainer, token: int) -> int:
    """UTF-8 bytes that a token adds to a text: itself for a single byte, none for the end of a document."""
    tokenizer = trainer.tokenizer
    if token == tokenizer.end_id:
        return 0
    before = tokenizer.encode("a")
    decoded = tokenizer.decode([*before, token])
    if "\ufffd" in decoded:
        return 1
    return len(decoded.encode()) - len(tokenizer.decode(before).encode())


@pytest.mark.parametrize(("setting", "expected"), [(None, None), (48, 48)], ids=["all", "some"])
def test_last_evaluation_uses_the_tokens_that_the_config_says(
    tmp_path: Path, setting: int | None, expected: int | None
) -> None:
    config = tiny_config(tmp_path, train__final_eval_tokens=setting, train__steps=1, optim__warmup_steps=0)
    train(config, log=_ignore)
    (final,) = records(tmp_path / "run", "eval")
    assert final["tokens"] == (expected or prepare(config.data, log=_ignore).valid.num_tokens - 1)


def test_training_record_is_the_mean_over_all_tokens_since_the_last(tmp_path: Path) -> None:
    """Two passes of two rows are one update of four: the mean over their tokens, and over both steps."""
    config = tiny_config(tmp_path, model__dropout=0.0, train__steps=2, optim__warmup_steps=0, train__eval_every=0)
    trainer = trainer_of(config)
    nats, size = 0.0, 0
    for _ in range(2):
        position = trainer.stream.state_dict()
        for _ in range(2):
            batch = next(trainer.stream)
            logits = np.array(trainer.model(mx.array(batch.inputs))).astype(np.float64)
            nats -= np.take_along_axis(_log_softmax(logits), batch.targets[..., None].astype(np.int64), -1).sum()
            size += sum(_bytes_of(trainer, int(token)) for token in batch.targets.ravel())
        trainer.stream.load_state_dict(position)
        trainer.train_step()
    train(config, log=_ignore)
    (record,) = records(tmp_path / "run", "train")
    assert record["tokens"] == 2 * 2 * 2 * 16
    assert record["loss"] == pytest.approx(nats / 128, rel=1e-5)
    assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_speed_leaves_out_evaluations_samples_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("evaluate", "samples", "save"):
        monkeypatch.setattr(Trainer, name, _slowly(getattr(Trainer, name)))
    changes = {"train__eval_every": 1, "train__sample_every": 1, "train__checkpoint_every": 1, "train__log_every": 2}
    train(tiny_config(tmp_path, train__steps=4, **changes), log=_ignore)
    last = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"][-1]
    # What is left out would take two steps of 64 tokens 1.2 s.
    assert last["tokens_per_second"] > 5 * 2 * 64 / 1.2
    assert last["time"] > 3 * 0.6


def test_bar_shows_the_speed_of_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []
    monkeypatch.setattr(Progress, "update", lambda _bar, _step, **figures: shown.append(figures["tokens_per_second"]))
    train(tiny_config(tmp_path, train__log_every=9), log=_ignore)
    (record,) = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"]
    # Nine steps are fewer than the bar remembers, so both are over the same ones.
    assert shown[-1] == pytest.approx(record["tokens_per_second"])


def _slowly(method: Any) -> Any:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.2)
        return method(*arguments)

    return slow


def test_dropout_is_off_in_evaluations_and_samples_and_on_again_after(tmp_path: Path) -> None:
    # Large weights, so that what dropout does to the logits decides which tokens are drawn.
    changes = {"model__init_std": 0.5, "train__sample_tokens": 20}
    trainer = trainer_of(tiny_config(tmp_path, model__dropout=0.5, **changes))
    tokens = mx.array(next(trainer.stream).inputs)

    def same_twice() -> bool:
        return bool(mx.array_equal(trainer.model(tokens), trainer.model(tokens)).item())

    assert not same_twice()
    assert trainer.evaluate(64) == trainer.evaluate(64)
    assert not same_twice()
    losses = [trainer.step_function.gradients([next(trainer.stream)], seed)[0] for seed in (1, 2)]
    assert losses[0] != losses[1]
    assert trainer.samples() == trainer.samples()
    assert not same_twice()
    # Off, and not only drawn alike: the same as a model without any.
    plain = trainer_of(tiny_config(tmp_path, model__dropout=0.0, **changes))
    assert plain.evaluate(None) == trainer.evaluate(None)
    assert plain.samples() == trainer.samples()


def test_dropout_of_a_step_follows_from_seed_and_step_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, model__dropout=0.5))
    batch = [next(trainer.stream)]
    first = trainer.step_function.gradients(batch, 7)
    mx.random.normal((5,))
    trainer.evaluate(64)
    trainer.samples()
    again = trainer.step_function.gradients(batch, 7)
    assert first[:2] == again[:2]
    assert trainer.step_function.gradients(batch, 8)[0] != first[0]


def test_every_step_draws_its_own_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    for seed in (0, 1):
        trainer = trainer_of(tiny_config(tmp_path, run__seed=seed))
        original = trainer.step_function.gradients
        monkeypatch.setattr(trainer.step_function, "gradients", lambda b, s, f=original: (seeds.append(s), f(b, s))[1])
        for _ in range(3):
            trainer.train_step()
    assert len(set(seeds)) == 6


def test_huge_learning_rate_stops_before_a_checkpoint_is_spoilt(tmp_path: Path) -> None:
    """Weights that an update made infinite are found before they replace a checkpoint, even the only one."""
    changes: dict[str, Any] = {"train__checkpoint_every": 1, "train__keep_checkpoints": 1, "optim__clip_norm": None}
    train(tiny_config(tmp_path, train__steps=3, **changes), log=_ignore)
    with pytest.raises(NonFiniteLoss) as caught:
        train(tiny_config(tmp_path, optim__lr=1e39, optim__weight_decay=0.0, **changes), log=_ignore)
    run = tmp_path / "run"
    message = str(caught.value)
    assert re.match(r"step 4: the update left (?!states\.)\S+ with values that are not finite", message)
    assert "The last good checkpoint is that of step 3" in message
    assert "lower learning rate" in message
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert message in events(run)
    assert "the update left" in (run / "report.html").read_text(encoding="utf-8")


def test_huge_learning_rate_names_the_first_bad_parameter(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss) as caught:
        train(tiny_config(tmp_path, optim__lr=1e39, optim__warmup_steps=0, optim__weight_decay=0.0), log=_ignore)
    run = tmp_path / "run"
    message = str(caught.value)
    assert re.match(
        r"step 2: the loss is nan, its gradient norm nan: the first bad parameter is \S+\. Nothing was", message
    )
    assert "There is no checkpoint yet" in message
    assert message in events(run)
    assert (run / "report.html").is_file()
    assert (run / "loss.png").is_file()


def test_weight_that_is_infinite_in_the_checkpoint_is_named(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, train__steps=3), log=_ignore)
    run = tmp_path / "run"
    checkpoint = load_checkpoint(run / "checkpoints/step-00000003")
    name = "layers.1.mlp.up_proj.weight"
    checkpoint.weights[name][2, 3] = mx.inf
    save_checkpoint(run / "checkpoints", checkpoint.weights, checkpoint.optimizer, checkpoint.state, keep=2)
    before = tree(run / "checkpoints")
    with pytest.raises(NonFiniteLoss, match=rf"^step 4: .*: the first bad parameter is {name}\. Nothing was updated"):
        train(tiny_config(tmp_path), log=_ignore)
    assert tree(run / "checkpoints") == before


def test_step_that_fails_updates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tiny_config(tmp_path))
    trainer.train_step()
    original = trainer.step_function.gradients

    def infinite(batches: Any, seed: int) -> Any:
        _, norm, grads, count = original(batches, seed)
        return math.inf, norm, grads, count

    monkeypatch.setattr(trainer.step_function, "gradients", infinite)
    before = [np.array(a) for _, a in named_arrays([trainer.model.parameters(), trainer.step_function.optimizer.state])]
    with pytest.raises(NonFiniteLoss):
        trainer.train_step()
    after = [np.array(a) for _, a in named_arrays([trainer.model.parameters(), trainer.step_function.optimizer.state])]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert (trainer.step, trainer.window.tokens) == (1, 64)


def test_full_disk_while_saving_a_checkpoint_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = mx.save_safetensors

    def full(file: Any, *arguments: Any) -> None:
        if "step-00000006" in file.name:
            raise OSError(28, "No space left on device")
        original(file, *arguments)

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(TrainingStopped) as caught:
        train(tiny_config(tmp_path), log=_ignore)
    message = str(caught.value)
    assert message == (
        "step 6: the checkpoint could not be written: [Errno 28] No space left on device. The last good checkpoint is "
        "that of step 3; the same command goes on from there."
    )
    run = tmp_path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert message in events(run)
    assert (run / "report.html").is_file()
    monkeypatch.undo()
    train(tiny_config(tmp_path), log=_ignore)
    assert [r["step"] for r in records(run, "train")] == [2, 4, 6, 8, 9]


@pytest.mark.parametrize("kind", ["train", "setup"])
def test_full_disk_while_logging_is_told_with_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    original = MetricsLog.log

    def full(self: MetricsLog, what: Any, step: int, **fields: Any) -> None:
        if what == kind and step in (0, 4):
            raise OSError(28, "No space left on device")
        original(self, what, step, **fields)

    monkeypatch.setattr(MetricsLog, "log", full)
    kept = "The last good checkpoint is that of step 3" if kind == "train" else "There is no checkpoint yet"
    with pytest.raises(TrainingStopped, match=rf"files could not be written: .*No space left on device\. {kept}"):
        train(tiny_config(tmp_path), log=_ignore)


def test_full_disk_while_writing_the_final_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("[write] Unable to write 1000 bytes to file.")

    monkeypatch.setattr("forge_mlx.train.trainer.write_final", full)
    with pytest.raises(TrainingStopped, match=r"the final model could not be written: .*is that of step 9"):
        train(tiny_config(tmp_path), log=_ignore)
    monkeypatch.undo()
    assert not (tmp_path / "run/final").exists()
    train(tiny_config(tmp_path), log=_ignore)
    load_model(tmp_path / "run/final")


def test_report_that_fails_does_not_hide_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_run: Any) -> None:
        raise ValueError("no fonts")

    monkeypatch.setattr("forge_mlx.train.loop.write_report", fail)
    lines: list[str] = []
    outcome = train(tiny_config(tmp_path), log=lines.append)
    assert outcome.loss > 0
    assert any(
        "the report could not be written: ValueError: no fonts; python -m forge_mlx.train.report" in x for x in lines
    )


def test_damaged_newest_checkpoint_is_named_and_the_one_before_used(tmp_path: Path) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    run = tmp_path / "run"
    expected = arrays(run / "final/model.safetensors")
    (run / "checkpoints/step-00000009/model.safetensors").write_bytes(b"")
    (run / "final").rename(tmp_path / "final-before")
    lines: list[str] = []
    train(tiny_config(tmp_path), log=lines.append)
    assert any("step-00000009: damaged: model.safetensors" in line for line in lines)
    assert any("step-00000009: damaged: model.safetensors" in event for event in events(run))
    assert any("resumed at step 6" in event for event in events(run))
    assert (run / "checkpoints/damaged-step-00000009").is_dir()
    assert arrays(run / "final/model.safetensors") == expected


def test_leftovers_of_a_killed_start_are_removed_by_the_next(tmp_path: Path) -> None:
    train(tiny_config(tmp_path), log=_ignore)
    run = tmp_path / "run"
    (run / "final").rename(run / ".unfinished-final")
    (run / ".unfinished-metrics.jsonl.1234").touch()
    (run / "checkpoints/.unfinished-step-00000012").mkdir()
    train(tiny_config(tmp_path), log=_ignore)
    assert not [path for path in run.rglob(".*") if path.name != ".lock"]
    load_model(run / "final")


def test_log_without_a_reader_does_not_end_the_run(tmp_path: Path) -> None:
    calls = 0

    def broken_pipe(_line: str) -> None:
        nonlocal calls
        calls += 1
        raise BrokenPipeError

    assert train(tiny_config(tmp_path), log=broken_pipe).loss > 0
    assert calls == 1


def test_second_signal_stops_in_the_middle_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.train_step

    def signalled(self: Trainer) -> tuple[float, float]:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", signalled)
    with pytest.raises(Interrupted) as caught:
        train(tiny_config(tmp_path), log=_ignore)
    assert str(caught.value).startswith("stopped at once by SIGINT. The last good checkpoint is that of step 3")
    assert caught.value.signal is signal.SIGINT
    run = tmp_path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert "stopped at once by SIGINT" in (run / "report.html").read_text(encoding="utf-8")
    monkeypatch.undo()
    train(tiny_config(tmp_path), log=_ignore)
    assert [r["step"] for r in records(run, "train")] == [2, 4, 6, 8, 9]


def test_signal_while_the_report_is_written_loses_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_mlx.train.loop.write_report", lambda _run: os.kill(os.getpid(), signal.SIGINT))
    lines: list[str] = []
    assert train(tiny_config(tmp_path), log=lines.append).loss > 0
    assert any("the report could not be written: StopRequested: SIGINT" in line for line in lines)


def test_prompt_without_room_for_a_sample_is_refused_at_the_start(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train__sample_prompt="zzzz " * 20)
    with pytest.raises(ValueError, match=r"train\.sample_prompt must be shorter than model\.max_seq_len, 32 tokens"):
        train(config, log=_ignore)
    assert not (tmp_path / "run").exists()


def test_corpus_shorter_than_a_batch_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must fill one batch"):
        train(tiny_config(tmp_path, train__batch_size=5000), log=_ignore)
    assert not (tmp_path / "run").exists()


def test_records_go_on_in_the_middle_of_their_window(tmp_path: Path) -> None:
    """A checkpoint between two training records carries the sums since the last."""
    changes = {"train__log_every": 9, "train__checkpoint_every": 4}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    train(tiny_config(tmp_path / "whole", **changes), log=_ignore)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", _interrupted_in(5, Trainer.train_step))
        with pytest.raises(Interrupted, match="stopped by SIGTERM after step 5"):
            train(tiny_config(tmp_path / "parts", **changes), log=_ignore)
    train(tiny_config(tmp_path / "parts", **changes), log=_ignore)
    whole = records(tmp_path / "whole/run", "train")
    assert [record["step"] for record in whole] == [9]
    assert records(tmp_path / "parts/run", "train") == whole


def _interrupted_in(step: int, train_step: Any) -> Any:
    def interrupted(self: Trainer) -> tuple[float, float]:
        if self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        norm_and_rate: tuple[float, float] = train_step(self)
        return norm_and_rate

    return interrupted


def test_longer_run_without_its_checkpoints_keeps_the_final_model(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, train__steps=3), log=_ignore)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = tree(tmp_path / "run")
    with pytest.raises(RunFolderError, match="no checkpoint to go on from"):
        train(tiny_config(tmp_path, train__steps=6), log=_ignore)
    assert tree(tmp_path / "run") == before


def test_sample_of_a_text_without_document_starts_continues_the_validation_text(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path))
    assert trainer.work.facts.train_documents == 1
    start = trainer.tokenizer.decode(int(token) for token in trainer.valid_rows.tokens.tokens[:16])
    assert trainer.work.prompts[0].text == start != ""


def test_sample_of_many_documents_starts_one(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for i in range(120):
        (folder / f"{i}.txt").write_text(f"document {i} says {i * i} and {i + 7}\n" * 3)
    config = tiny_config(tmp_path, data__source=[str(folder)], data__tokenizer={"vocab_size": 300})
    trainer = trainer_of(config)
    assert trainer.work.prompts[0].text == ""
    assert trainer.work.prompts[0].tokens == [trainer.tokenizer.end_id]


def test_busy_machine_is_hinted_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for load, threads, hinted in ((3.9, None, False), (4.1, None, True), (4.1, "1", False)):
        if threads:
            monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        lines = list[str]()
        log_device(choose_placement(config.run), lines.append)
        assert any(line.startswith("load: ") and "4.1 of 8 cores" in line for line in lines) == hinted
