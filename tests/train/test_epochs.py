"""Runs whose length is given in epochs: how many steps they take, and on what rows."""

from collections import Counter
import io
from pathlib import Path
import re
from typing import Any

from forge_mlx.train.banner import log_model
from forge_mlx.train.dry_run import describe_run
from forge_mlx.train.duration import least_epochs_beyond, steps_of_epochs
from forge_mlx.train.folder import RunFolderError
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
from forge_mlx.train.trainer import Trainer
import mlx.core as mx
import pytest
from rich.console import Console
from tiny_checkpoint import QUESTIONS, finetune_config
from tiny_run import arrays, events, records, tiny_config, trainer_of, tree

LORA: dict[str, Any] = {"adapter": {"rank": 2}}
ONE_A_ROW: dict[str, Any] = {**LORA, "data__packing": False}


def _ignore(_line: str) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    """A few steps are not worth the compiler's seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _described(config) -> str:
    """What a dry run prints, its lines joined."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    describe_run(config, console)
    return " ".join(console.file.getvalue().split())


def _break_off(config, step: int, monkeypatch) -> None:
    """Train until a step is done, and fail in the next one."""
    train_step = Trainer.train_step

    def fails(trainer):
        if trainer.step == step:
            raise RuntimeError("broken off")
        return train_step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", fails)
        with pytest.raises(RuntimeError, match="broken off"):
            train(config, log=_ignore)


def _epochs(folder: Path, epochs: float, kind: str = "chat", **changes: Any):
    """A run of the ten examples that are not held out, a row each unless they are packed."""
    return finetune_config(folder, kind, train__steps=None, train__epochs=epochs, **changes)


@pytest.mark.parametrize(
    ("epochs", "num_rows", "batch_size", "accumulate", "steps", "said"),
    [
        (1, 10, 2, 1, 5, "1 epoch of 10 rows, 2 a step: 5 steps"),
        (3, 10, 2, 2, 8, "3 epochs of 10 rows, 4 a step: 8 steps, the last filled up with 2 more rows"),
        (0.5, 10, 4, 1, 2, "0.5 epochs of 10 rows, 4 a step: 2 steps, the last filled up with 3 more rows"),
        (2.5, 7, 3, 1, 6, "2.5 epochs of 7 rows, 3 a step: 6 steps"),
        (1, 3, 16, 1, 1, "1 epoch of 3 rows, 16 a step: 1 step, the last filled up with 13 more rows"),
        (1000, 1234, 1, 1, 1_234_000, "1,000 epochs of 1,234 rows, 1 a step: 1,234,000 steps"),
        # As floats the products are just above 7 and 11.
        (0.07, 100, 1, 1, 7, "0.07 epochs of 100 rows, 1 a step: 7 steps"),
        (1.1, 10, 1, 1, 11, "1.1 epochs of 10 rows, 1 a step: 11 steps"),
    ],
)
def test_steps_are_those_of_whole_updates(epochs, num_rows, batch_size, accumulate, steps, said, tmp_path):
    sizes = {"train__batch_size": batch_size, "train__accumulate": accumulate}
    config = tiny_config(tmp_path, train__steps=None, train__epochs=epochs, optim__warmup_steps=0, **sizes)
    assert config.total_steps(num_rows) == steps
    assert config.describe_epochs(num_rows) == said


def test_steps_that_are_given_hold_for_any_number_of_rows(tmp_path):
    config = tiny_config(tmp_path)
    assert (config.total_steps(1), config.total_steps(10**6), config.describe_epochs(10)) == (9, 9, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__steps": 6, "train__epochs": 2.5},
            "train.steps: must be null with train.epochs, 2.5, but got 6: one of the two says how long a run is. Set "
            "the other to null: train.epochs=null train.steps=6, or train.steps=null.",
        ),
        (
            {"train__steps": None},
            "train.steps: is required but missing, and train.epochs too: one of the two says how long a run is.",
        ),
        (
            {"train__steps": None, "train__epochs": 0},
            "train.epochs: must be a number, greater than 0 and at most 1000000, or null, but got 0. (how often a run "
            "goes through its training rows, each of which comes once an epoch; 0.5 is half of them. null: "
            "train.steps says how long it is)",
        ),
    ],
    ids=["both", "neither", "none at all"],
)
def test_one_of_the_two_says_how_long_a_run_is(changes, message, tmp_path):
    with pytest.raises(ValueError, match=r"finetune\.yaml:") as caught:
        finetune_config(tmp_path, **changes)
    assert str(caught.value).partition(": ")[2] == message


def test_on_the_command_line_the_other_is_set_to_null(tmp_path):
    _epochs(tmp_path, 3)
    config = load_config(tmp_path / "finetune.yaml", ["train.epochs=null", "train.steps=4"])
    assert (config.train.epochs, config.train.steps) == (None, 4)
    with pytest.raises(ValueError, match=r"^command line: train\.steps: must be null with train\.epochs, 3, but got 4"):
        load_config(tmp_path / "finetune.yaml", ["train.steps=4"])


def _run_of_no_updates(config, monkeypatch) -> tuple[list[str], list[float]]:
    """The words that are asked for in the rows of all steps, in their order, and the learning rate of each step."""
    trainer, seen = trainer_of(config), []

    def recorded(batches, _seed):
        for batch in batches:
            seen.extend(trainer.tokenizer.decode(row.tolist()) for row in batch.inputs)
        return 1.0, 1.0, {}, 1

    monkeypatch.setattr(trainer.step_function, "gradients", recorded)
    monkeypatch.setattr(trainer.step_function, "update", lambda *_: None)
    rates = [trainer.train_step()[1] for _ in range(trainer.total_steps)]
    assert trainer.stream.epoch == pytest.approx(len(seen) / trainer.rows.num_rows)
    return [word for text in seen for word in QUESTIONS if f"is it {word}?" in text], rates


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "a row each"])
@pytest.mark.parametrize(("epochs", "accumulate"), [(1, 1), (2, 2)])
def test_each_example_comes_once_an_epoch(kind, packing, epochs, accumulate, tmp_path, monkeypatch):
    """The words are those of the file, without the two examples that are held out."""
    sizes = {"train__batch_size": 1, "train__accumulate": accumulate}
    config = _epochs(tmp_path, epochs, kind, **LORA, data__packing=packing, **sizes)
    found = Counter(_run_of_no_updates(config, monkeypatch)[0])
    assert len(found) == 10
    assert set(found.values()) == {epochs}


def test_a_last_update_that_is_not_full_goes_on_with_the_next_epoch_and_says_so(tmp_path, monkeypatch):
    config = _epochs(tmp_path, 1, **ONE_A_ROW, train__batch_size=4)
    words, _ = _run_of_no_updates(config, monkeypatch)
    assert len(words) == 12
    assert sorted(Counter(words[:10]).values()) == [1] * 10
    assert len(set(words[10:])) == 2
    lines: list[str] = []
    train(config, log=lines.append)
    assert "epochs: 1 epoch of 10 rows, 4 a step: 3 steps, the last filled up with 2 more rows" in lines
    (training,) = [line for line in lines if line.startswith("training: 3 steps of ")]
    assert training.endswith("1.2 times over the training text")


def test_an_epoch_of_a_corpus_ends_where_its_rows_do(tmp_path):
    trainer = trainer_of(tiny_config(tmp_path, train__steps=None, train__epochs=2, train__accumulate=1))
    rows = trainer.rows.tokens.num_tokens // 16
    assert trainer.total_steps == -(-2 * rows // 2)
    for _ in range(trainer.total_steps):
        next(trainer.stream)
    assert trainer.stream.epoch == 2


def test_the_schedule_ends_with_the_last_epoch(tmp_path, monkeypatch):
    """By hand: 2 epochs of 10 rows, 4 a step, are 5 steps, one of warmup and a straight line to 0."""
    optim = {"optim__warmup_steps": 1, "optim__schedule": "wsd", "optim__decay_fraction": 1.0, "optim__final_lr": 0}
    _, rates = _run_of_no_updates(_epochs(tmp_path, 2, **ONE_A_ROW, **optim, train__batch_size=4), monkeypatch)
    assert rates == pytest.approx([0.01, 0.01, 0.02 / 3, 0.01 / 3, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optim__warmup_steps": 5},
            "optim.warmup_steps must be less than the 5 steps that 1 epoch of 10 rows take, but got 5.",
        ),
        (
            {"optim__warmup_steps": 5000},
            "optim.warmup_steps must be less than the 5 steps that 1 epoch of 10 rows take, but got 5,000.",
        ),
        (
            {"qat": {"bits": 4, "group_size": 32, "start_step": 7}},
            "qat.start_step must be less than the 5 steps that 1 epoch of 10 rows take, but got 7.",
        ),
    ],
    ids=["warmup", "long warmup", "qat"],
)
def test_what_does_not_end_before_the_epochs_do_is_refused(changes, message, tmp_path):
    config = _epochs(tmp_path, 1, **ONE_A_ROW, **changes)
    with pytest.raises(ValueError, match=r"must be less than the 5 steps") as caught:
        trainer_of(config)
    assert str(caught.value) == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("chat", {}),
        pytest.param("preference", {}, marks=pytest.mark.slow),
        pytest.param("preference", {"preference": {"loss": "orpo"}}, marks=pytest.mark.slow),
        pytest.param("text", {"data__packing": False}, marks=pytest.mark.slow),
    ],
    ids=["packed", "dpo", "orpo", "a row each"],
)
def test_a_run_that_broke_off_ends_as_one_that_did_not(kind, changes, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    configs = []
    for folder in (whole, broken):
        folder.mkdir()
        configs.append(_epochs(folder, 1.5, kind, **LORA, **changes, optim__warmup_steps=1))
    train(configs[0], log=_ignore)
    _break_off(configs[1], 2, monkeypatch)
    # As the run's own folder has it.
    train(load_config(broken / "run" / "config.yaml"), log=_ignore)
    assert "resumed at step 2" in events(broken / "run")
    left, right = (arrays(folder / "run" / "final" / "adapters.safetensors") for folder in (whole, broken))
    assert left == right
    kinds = ("train", "eval")
    assert records(whole / "run", *kinds) == records(broken / "run", *kinds)
    unit = "pair" if kind == "preference" else "row"
    first = (broken / "run" / "config.yaml").read_text(encoding="utf-8").splitlines()[1]
    assert first.startswith("# 1.5 epochs of ")
    assert f"{unit}s, 2 a step: " in first


@pytest.mark.slow
def test_more_epochs_end_where_a_run_of_so_many_does(tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for folder, each in ((parts, (1, 1.5, 3)), (whole, (3,))):
        folder.mkdir()
        for epochs in each:
            train(_epochs(folder, epochs, **ONE_A_ROW, optim__schedule="constant"), log=_ignore)
    setups = [(record["total_steps"], record["epochs"]) for record in records(parts / "run", "setup")]
    assert setups == [(5, 1.0), (8, 1.5), (15, 3.0)]
    left, right = (arrays(folder / "run" / "final" / "adapters.safetensors") for folder in (parts, whole))
    assert left == right


def test_a_finished_run_goes_on_for_more_epochs_alone(tmp_path):
    run = train(_epochs(tmp_path, 1, **LORA), log=_ignore).folder
    lines: list[str] = []
    for epochs in (1, 0.5):
        train(_epochs(tmp_path, epochs, **LORA), log=lines.append)
    again = (
        "this run has already finished at step 3; train.epochs of at least 1.21 goes on, run.resume=never starts anew."
    )
    assert lines == [
        f"{run}: {again}",
        f"{run}: {again}",
        "without effect, as there is nothing left to do: train.epochs: 1.0 -> 0.5",
    ]
    assert "(finished at step 3; train.epochs of at least 1.21 goes on)" in _described(_epochs(tmp_path, 1, **LORA))
    assert "(goes on from step 3)" in _described(_epochs(tmp_path, 1.21, **LORA))
    train(_epochs(tmp_path, 2, **LORA), log=_ignore)
    assert "resumed at step 3; changed train.epochs: 1.0 -> 2.0" in events(run)
    assert [record["step"] for record in records(run, "eval") if record["final"]] == [3, 5]
    assert "of 5, 2 epochs" in (run / "report.html").read_text(encoding="utf-8")
    file = run / "config.yaml"
    assert "# 2 epochs of 5 rows, 2 a step: 5 steps\n" in file.read_text(encoding="utf-8")
    assert (load_config(file).train.epochs, load_config(file).train.steps) == (2, None)


@pytest.mark.slow
def test_a_finished_run_that_broke_off_further_on_says_where_each_is(tmp_path, monkeypatch):
    each = {**LORA, "train__checkpoint_every": 1}
    run = train(finetune_config(tmp_path, **each, train__steps=2), log=_ignore).folder
    _break_off(finetune_config(tmp_path, **each, train__steps=6), 4, monkeypatch)
    lines: list[str] = []
    train(finetune_config(tmp_path, **each, train__steps=2), log=lines.append)
    finished = "finished at step 2, with a checkpoint of step 4; train.steps of at least 5 goes on"
    assert lines[0] == f"{run}: this run has already {finished}, run.resume=never starts anew."


@pytest.mark.slow
def test_a_run_of_epochs_may_go_on_in_steps(tmp_path):
    run = train(_epochs(tmp_path, 1, **LORA), log=_ignore).folder
    train(finetune_config(tmp_path, **LORA, train__steps=4), log=_ignore)
    assert "resumed at step 3; changed train.epochs: 1.0 -> null; changed train.steps: null -> 4" in events(run)
    assert [record["epochs"] for record in records(run, "setup")] == [1.0, None]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "of 4" in page
    assert "of 4, 1 epoch" not in page
    assert (run / "config.yaml").read_text(encoding="utf-8").count("#") == 1


def test_a_run_that_broke_off_does_not_end_before_where_it_is(tmp_path, monkeypatch):
    step = Trainer.train_step

    def fourth_fails(trainer):
        if trainer.step == 3:
            raise RuntimeError("broken off")
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", fourth_fails)
        with pytest.raises(RuntimeError, match="broken off"):
            train(_epochs(tmp_path, 1, **ONE_A_ROW, train__checkpoint_every=1), log=_ignore)
    before = tree(tmp_path / "run")
    way_out = (
        r" goes on\. Or choose a new folder \(run\.dir=\.\.\.\), or start anew \(run\.resume=never keeps the old run "
        r"under another name\)\.$"
    )
    # Of 10 rows, 2 a step.
    for config, least in (
        (_epochs(tmp_path, 0.4, **ONE_A_ROW), r"epochs of at least 0\.61"),
        (finetune_config(tmp_path, **ONE_A_ROW, train__steps=2), "steps of at least 4"),
    ):
        said = rf"this run is at step 3, 0\.6 epochs, and past the 2 steps asked for; train\.{least}{way_out}"
        for start in (lambda config: train(config, log=_ignore), _described):
            with pytest.raises(RunFolderError, match=said):
                start(config)
    assert tree(tmp_path / "run") == before
    assert "(goes on from step 3)" in _described(_epochs(tmp_path, 0.61, **ONE_A_ROW))
    anew = _epochs(tmp_path, 0.4, **ONE_A_ROW, run__resume="never")
    assert "(at step 3; is kept under another name)" in _described(anew)
    train(_epochs(tmp_path, 0.61, **ONE_A_ROW), log=_ignore)
    assert [record["step"] for record in records(tmp_path / "run", "eval") if record["final"]] == [4]


@pytest.mark.parametrize(("steps", "num_rows", "rows_per_step"), [(48, 22, 4), (3, 10, 2), (5, 7, 3), (1, 3, 16)])
def test_the_least_epochs_beyond_take_a_step_more(steps, num_rows, rows_per_step):
    least = least_epochs_beyond(steps, num_rows, rows_per_step)
    assert steps_of_epochs(least, num_rows, rows_per_step) > steps
    assert steps_of_epochs(round(least - 0.01, 2), num_rows, rows_per_step) <= steps


def test_times_over_the_text_are_those_of_rows(tmp_path):
    """Whose lengths differ, so that a step's tokens are no whole number on average."""
    lines: list[str] = []
    trainer = trainer_of(_epochs(tmp_path, 1, "text", **ONE_A_ROW))
    log_model(trainer, lines.append)
    assert trainer.rows.num_targets % trainer.total_steps
    (training,) = [line for line in lines if line.startswith("training: ")]
    assert training.endswith(", 1 times over the training text")


def test_a_corpus_shorter_than_a_batch_is_refused_alike_in_epochs_and_steps(tmp_path):
    (tmp_path / "corpus.txt").write_text("ab\n" * 99, encoding="utf-8")
    length = {"train__seq_len": 32, "train__batch_size": 64, "data__tokenizer": {"vocab_size": 264}}
    for changes in ({"train__steps": None, "train__epochs": 2}, {"train__steps": 3}):
        with pytest.raises(ValueError, match=r"^\[batch_stream\] the training text must fill one batch, 64 rows of 32"):
            trainer_of(tiny_config(tmp_path, **changes, **length))


def test_other_examples_than_those_it_began_with_are_refused(tmp_path):
    config = _epochs(tmp_path, 1, **LORA)
    train(config, log=_ignore)
    file = tmp_path / "chat.jsonl"
    file.write_text(file.read_text(encoding="utf-8") * 2, encoding="utf-8")
    longer = load_config(tmp_path / "finetune.yaml", ["train.epochs=2"])
    with pytest.raises(RunFolderError, match=r"the training text or its tokenizer is not that of this run"):
        train(longer, log=_ignore)


def test_a_dry_run_says_how_many_steps_the_epochs_of_examples_take(tmp_path):
    lines = _described(_epochs(tmp_path, 3, **ONE_A_ROW, train__batch_size=4))
    assert "epochs: 3 epochs of 10 rows, 4 a step: 8 steps, the last filled up with 2 more rows" in lines
    assert re.search(r"tokens in all: .* in 8 steps, about \d+ learnt FLOPs", lines)
    pairs = _described(_epochs(tmp_path, 1, "preference", **LORA))
    assert "epochs: 1 epoch of 10 pairs, 2 a step: 5 steps" in pairs
    refused = _epochs(tmp_path, 1, **ONE_A_ROW, optim__warmup_steps=5)
    with pytest.raises(ValueError, match=r"^optim\.warmup_steps must be less than the 5 steps that 1 epoch of 10 rows"):
        _described(refused)


def test_a_dry_run_reads_no_corpus_and_says_that_its_steps_are_not_known(tmp_path):
    lines = _described(tiny_config(tmp_path, train__steps=None, train__epochs=2.5))
    assert "tokens in all: those of 2.5 epochs, which only the data say" in lines
