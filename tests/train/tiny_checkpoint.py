"""A checkpoint of a second, for tests of fine-tuning: a tiny Llama with a chat template, examples, and a config."""

import json
from pathlib import Path
from typing import Any

from forge_mlx.hub.pretrained import save_pretrained
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.load import load_config

from tests.data.example_tokenizer import character_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 288,
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "max_seq_len": 256,
}
QUESTIONS = ("north", "south", "east", "west", "up", "down", "left", "right", "in", "out", "on", "off")


def write_checkpoint(folder: Path, *, bits: int | None = None) -> Path:
    """A Hugging Face folder with random weights; with bits a quantised one."""
    tokenizer = character_tokenizer()
    model = GPT(GPTConfig(**SHAPE), seed=1)
    if bits is not None:
        convert_qat(prepare_qat(model, QATConfig(bits=bits, group_size=32)))
    save_pretrained(folder, model, tokenizer, log=lambda _: None)
    return folder


def write_examples(folder: Path, kind: str) -> Path:
    """A JSON lines file of one format: every answer is `yes!`, and of pairs the worse one `never`."""
    lines: list[dict[str, Any]] = []
    for word in QUESTIONS:
        question = f"is it {word}?"
        if kind == "chat":
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "yes!"}]
            lines.append({"messages": turns})
        elif kind == "preference":
            lines.append({"prompt": question, "chosen": "yes!", "rejected": "never"})
        elif kind == "prompt_completion":
            lines.append({"prompt": f"{question} ", "completion": "yes!"})
        else:
            lines.append({"text": f"{question} yes!"})
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def finetune_values(folder: Path, kind: str = "chat", *, bits: int | None = None, **changes: Any) -> dict[str, Any]:
    """Config values of a run of a few steps; ``changes`` are named like ``optim__lr``, or are whole sections."""
    checkpoint = folder / f"checkpoint-{bits}"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, bits=bits)
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {"path": str(checkpoint)},
        "data": {"source": str(write_examples(folder, kind)), "format": kind, "valid_fraction": 0.2},
        "train": {
            "steps": 6,
            "batch_size": 2,
            "seq_len": 96,
            "log_every": 1,
            "eval_every": 3,
            "sample_tokens": 6,
            "sample_temperature": 0.0,
            "checkpoint_every": 2,
        },
        "optim": {"lr": 1e-2, "weight_decay": 0.0},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            values.setdefault(section, {})[key] = value
        else:
            values[section] = value
    return values


def finetune_config(folder: Path, kind: str = "chat", *, bits: int | None = None, **changes: Any) -> TrainConfig:
    """The config of such a run, as read from a file."""
    file = folder / "finetune.yaml"
    file.write_text(json.dumps(finetune_values(folder, kind, bits=bits, **changes)), encoding="utf-8")
    return load_config(file)
