"""Runs with `data.packing: documents`: what they count, say and log, and that they go on where they stopped."""

from collections.abc import Callable
import itertools
import json
import math
from pathlib import Path
import random
import re
from typing import Any

from forge_mlx.data.prepare import prepare
from forge_mlx.hub.native import begins_with_end
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.train.banner import log_model
from forge_mlx.train.checkpoint import load_checkpoint
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.dry_run import describe_run
from forge_mlx.train.folder import RunFolderError
from forge_mlx.train.loop import NonFiniteLoss, train
from forge_mlx.train.trainer import Trainer
import mlx.core as mx
import numpy as np
import pytest
from rich.console import Console
from tiny_run import records, tiny_config, trainer_of

_FEATURES: dict[str, Any] = {"model__token_shift": True, "model__sliding_window": 5, "model__attention_sinks": True}


def _ignore(_line: str) -> None:
    pass


def _config(folder: Path, **changes: Any) -> TrainConfig:
    """A tiny run on 90 documents of 1 to 30 words."""
    source = folder / "documents.jsonl"
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinsh", k=draw.randint(2, 6))) for _ in range(60)]
    texts = [" ".join(draw.choices(words, k=draw.choice((1, 2, 3, 5, 30)))) for _ in range(90)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    values = {"data__source": [str(source)], "data__packing": "documents", "data__tokenizer": {"vocab_size": 300}}
    return tiny_config(folder, **{**values, "data__valid_fraction": 0.2, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a finished run, and what it said."""
    folder = tmp_path_factory.mktemp("packed")
    lines: list[str] = []
    train(_config(folder, **_FEATURES), log=lines.append)
    return folder, lines


def test_a_run_counts_the_targets_alone(finished: tuple[Path, list[str]]) -> None:
    trainer = trainer_of(_config(finished[0]))
    counts = [
        sum(batch.counted_targets().size for batch in itertools.islice(trainer.stream, trainer.config.train.accumulate))
        for _ in range(9)
    ]
    assert len(set(counts)) > 1
    run = finished[0] / "run"
    assert [r["tokens"] for r in records(run, "train")] == [sum(counts[:step]) for step in (2, 4, 6, 8, 9)]
    assert records(run, "eval")[-1]["tokens"] == trainer.valid_rows.tokens.num_tokens
    assert records(run, "eval")[-1]["loss"] < math.log(300)


def test_a_run_says_and_logs_how_full_its_rows_are(finished: tuple[Path, list[str]]) -> None:
    folder, lines = finished
    rows = trainer_of(_config(folder)).rows
    fill = rows.num_targets / (16 * rows.num_rows)
    text = "\n".join(lines)
    for part in (
        r"^attention: causal, documents, a window of 5, sinks: blocks of queries in plain MLX operations, engine ref",
        r"^packing: documents \(whole documents in a row.*none sees another\)$",
        rf"^rows: the training text's 72 documents in {rows.num_rows} rows; [1-9]\d* documents longer than a row, cut "
        r"into \d+ pieces, each a text of its own; of the validation text's 18 documents [1-9]\d* cut$",
        rf"^training: 9 steps of about {round(64 * fill)} tokens \(2 rows x 16 x 2 passes, {fill:.2%} of them targets",
    ):
        assert re.search(part, text, re.MULTILINE), part
    (setup,) = records(folder / "run", "setup")
    assert setup["packing"].keys() == {"kind", "rows", "fill", "cut_documents", "cut_pieces"}
    assert (setup["packing"]["kind"], setup["packing"]["fill"]) == ("documents", fill)
    assert setup["tokens_per_step"] == round(64 * fill)
    assert "packing / cut pieces" in (folder / "run/report.html").read_text(encoding="utf-8")


def test_rows_without_cut_documents_say_so(tmp_path: Path) -> None:
    lines: list[str] = []
    changes = {"train__seq_len": 256, "model__max_seq_len": 256, "train__batch_size": 1}
    log_model(trainer_of(_config(tmp_path, **changes)), lines.append)
    assert any(
        re.fullmatch(r"rows: the training text's 72 documents in \d rows, each document whole", line) for line in lines
    )


def test_a_resumed_run_takes_the_steps_of_an_unbroken_one(tmp_path: Path) -> None:
    config = _config(tmp_path, **_FEATURES)
    unbroken, stopped = trainer_of(config), trainer_of(config)
    for _ in range(9):
        unbroken.train_step()
    for _ in range(4):
        stopped.train_step()
    assert stopped.stream.epoch % 1 > 0
    checkpoint = load_checkpoint(stopped.save())
    resumed = trainer_of(config)
    resumed.restore(checkpoint)
    for _ in range(5):
        resumed.train_step()
    assert resumed.stream.state_dict() == unbroken.stream.state_dict()
    assert (resumed.tokens, resumed.window.nats) == (unbroken.tokens, unbroken.window.nats)
    for (name, one), (_, other) in zip(*_arrays(resumed, unbroken), strict=True):
        assert np.array_equal(one, other), name
    assert resumed.evaluate(None) == unbroken.evaluate(None)


def _arrays(*trainers: Trainer) -> list[list[tuple[str, np.ndarray]]]:
    trees = [[each.model.parameters(), each.step_function.optimizer.state] for each in trainers]
    return [[(name, np.array(array)) for name, array in named_arrays(tree)] for tree in trees]


def test_another_packing_does_not_go_on(finished: tuple[Path, list[str]]) -> None:
    with pytest.raises(RunFolderError, match=r"data\.packing: 'documents' -> 'concat'"):
        train(_config(finished[0], data__packing="concat", train__steps=12, **_FEATURES), log=_ignore)


def test_evaluation_is_the_mean_over_documents_alone(tmp_path: Path) -> None:
    """Against the model on each document by itself, in NumPy and float64, with its bytes counted from the text."""
    trainer = trainer_of(_config(tmp_path, **_FEATURES))
    trainer.train_step()
    result = trainer.evaluate(None)
    trainer.model.eval()
    text = np.array(trainer.valid_rows.tokens.tokens).astype(np.int64)
    end = trainer.tokenizer.end_id
    nats = 0.0
    for document in np.split(text, np.flatnonzero(text == end)[:-1] + 1):
        shifted = np.array([end, *document[:-1]])
        for start in range(0, len(document), 16):
            part = document[start : start + 16]
            logits = np.array(trainer.model(mx.array(shifted[None, start : start + 16]))[0]).astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            nats -= (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(part)), part].sum()
    assert result["tokens"] == len(text)
    assert result["loss"] == pytest.approx(nats / len(text), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / trainer.valid_rows.tokens.num_bytes, rel=1e-5)


def test_a_bad_layer_is_named_in_packed_rows(tmp_path: Path) -> None:
    trainer = trainer_of(_config(tmp_path))
    trainer.model.layers[1].mlp.up_proj.weight = mx.full(trainer.model.layers[1].mlp.up_proj.weight.shape, 1e38)
    with pytest.raises(NonFiniteLoss, match=r"all parameters are finite; the first bad output is that of layers\.1"):
        trainer.train_step()


def test_a_dry_run_says_that_padding_is_not_counted_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe_run(_config(tmp_path), Console(highlight=False, width=100))
    out = capsys.readouterr().out
    assert re.search(r"^tokens a step: at most 64 = 2 rows x 16 tokens x 2 passes$", out, re.MULTILINE)
    assert re.search(r"^tokens in all: at most 576 in 9 steps$", out, re.MULTILINE)
    assert re.search(r"^FLOPs: +at most ", out, re.MULTILINE)
    assert re.search(r"^attention: +causal, documents: blocks of queries in plain", out, re.MULTILINE)
    assert re.search(r"^packing: +documents \(whole documents in a row", out, re.MULTILINE)


def test_both_packings_read_the_same_token_files(tmp_path: Path) -> None:
    said: list[str] = []
    log: Callable[[str], None] = said.append
    files = [prepare(_config(tmp_path, data__packing=each).data, log=log) for each in ("concat", "documents")]
    assert files[0].train.path == files[1].train.path
    assert files[1].facts.from_cache


def test_samples_begin_as_documents_do(finished: tuple[Path, list[str]], tmp_path: Path) -> None:
    """With the end token, also where the start of the validation text stands in for a prompt: of one document alone."""
    trainer = trainer_of(_config(tmp_path))
    end, text = trainer.tokenizer.end_id, trainer.valid_rows.tokens.tokens
    first = text[: text.tolist().index(end)].tolist()
    assert trainer.work.prompts[0].tokens == [end, *first[:16]]
    assert trainer.work.prompts[0].text == trainer.tokenizer.decode(first[:16])
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "to"}\n{"text": "be"}\n', encoding="utf-8")
    of_two = trainer_of(_config(tmp_path, data__valid_paths=[str(short)]))
    assert of_two.work.prompts[0].tokens == [end, *of_two.tokenizer.encode("to")]
    asked = trainer_of(_config(tmp_path, train__sample_prompt="to be"))
    assert asked.work.prompts[0].tokens == [end, *asked.tokenizer.encode("to be")]
    with pytest.raises(
        ValueError, match=r"must be shorter than model\.max_seq_len, 32 tokens, but has \d+ with the end"
    ):
        trainer_of(_config(tmp_path, train__sample_prompt="zzzz " * 20))
    assert begins_with_end(finished[0] / "run/final")


def _half_full(folder: Path, **changes: Any) -> TrainConfig:
    """A run whose rows hold one document each, which fills more than a half."""
    source = folder / "half.jsonl"
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=23)) for _ in range(80)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return _config(folder, data__source=[str(source)], train__seq_len=32, data__valid_fraction=0.5, **changes)


def test_evaluations_have_as_many_targets_as_asked_for(tmp_path: Path) -> None:
    trainer = trainer_of(_half_full(tmp_path))
    total = trainer.valid_rows.tokens.num_tokens
    assert trainer.valid_rows.num_targets < 0.8 * 32 * trainer.valid_rows.num_rows
    assert abs(trainer.evaluate(total // 2)["tokens"] - total / 2) <= 40
    assert trainer.evaluate(total)["tokens"] == trainer.evaluate(10**6)["tokens"] == total


def test_rows_that_are_not_full_get_advice(finished: tuple[Path, list[str]], tmp_path: Path) -> None:
    assert not any("raise train.seq_len" in line for line in finished[1])
    lines: list[str] = []
    log_model(trainer_of(_half_full(tmp_path)), lines.append)
    assert any(re.match(r"rows are only [678]\d % full: .* raise train\.seq_len", line) for line in lines), lines
