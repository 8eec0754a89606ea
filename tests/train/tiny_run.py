"""A training run of a second, for tests: corpus, config, the command in a process of its own, what it left."""

import json
import os
from pathlib import Path
import random
import subprocess
import sys
from typing import Any

from forge_mlx.train.config import TrainConfig
from forge_mlx.train.device import choose_placement
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.trainer import Trainer
from forge_mlx.train.work import begin_work
import mlx.core as mx
import numpy as np

_DRIVER = Path(__file__).with_name("stop_driver.py")
_ROOT = Path(__file__).parents[2]


def write_corpus(path: Path, words: int = 4000, seed: int = 0) -> Path:
    """A text file of made-up sentences: ASCII, and a few letters and signs of two to four bytes."""
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(120)]
    vocabulary += ["größe", "naïve", "→", "🙂", "x = 1"]
    lines = [" ".join(draw.choices(vocabulary, k=10)) + "." for _ in range(words // 10)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tiny_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """Config values of a tiny run on ``folder/corpus.txt``; ``changes`` are named like ``optim__lr``."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "seed": 3, "device": "cpu"},
        "data": {"source": [str(corpus)], "tokenizer": {"vocab_size": 320}},
        "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_seq_len": 32, "dropout": 0.2},
        "train": {
            "steps": 9,
            "batch_size": 2,
            "seq_len": 16,
            "accumulate": 2,
            "log_every": 2,
            "eval_every": 3,
            "eval_tokens": 64,
            "sample_every": 4,
            "sample_tokens": 6,
            "checkpoint_every": 3,
        },
        "optim": {"lr": 3e-3, "warmup_steps": 2},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return values


def tiny_config(folder: Path, **changes: Any) -> TrainConfig:
    """The config of a tiny run; see `tiny_values`."""
    return TrainConfig.model_validate_json(json.dumps(tiny_values(folder, **changes)))


def trainer_of(config: TrainConfig) -> Trainer:
    """A run in memory, at its start; nothing is written."""
    placement = choose_placement(config.run)
    return Trainer(begin_work(config, placement, lambda _: None), placement, RunFolder(config.run.dir))


def write_config(folder: Path, **changes: Any) -> Path:
    """The same as a file, ``folder/config.yaml`` (JSON is YAML)."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(tiny_values(folder, **changes)), encoding="utf-8")
    return file


def command(config: Path, *arguments: str, cache: Path, stop: str | None = None) -> subprocess.Popen[str]:
    """Start the training command; with ``stop`` under stop_driver.py, which says what it means."""
    # The package beside these tests, not one that is installed: a script's own folder alone would be on the path.
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = ["-m", "forge_mlx.train"] if stop is None else [str(_DRIVER), stop]
    return subprocess.Popen(
        [sys.executable, *start, str(config), *arguments],
        env=os.environ | {"FORGE_MLX_CACHE": str(cache), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_command(config: Path, *arguments: str, cache: Path, stop: str | None = None) -> tuple[int, str, str]:
    """Run the training command to its end. Returns exit status (minus the signal that killed it), stdout, stderr."""
    with command(config, *arguments, cache=cache, stop=stop) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of some kinds, without what differs from one start to the next."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    machine = ("time", "tokens_per_second", "peak_memory")
    return [
        {key: value for key, value in record.items() if key not in machine}
        for record in found
        if record["kind"] in kinds
    ]


def events(run: Path) -> list[str]:
    """The messages of all events."""
    return [record["message"] for record in records(run, "event")]


def arrays(file: Path) -> dict[str, tuple[Any, ...]]:
    """Dtype, shape and bytes of every array of a safetensors file."""
    loaded = mx.load(str(file))
    assert isinstance(loaded, dict)
    assert loaded
    return {name: (str(a.dtype), a.shape, np.array(a).tobytes()) for name, a in loaded.items()}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder: the bytes of each file, None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
