#!/usr/bin/env python
"""Fine-tune with mlx-lm's own LoRA, its trainer and its data sets, on a model with forge-mlx's kernels in it.

The model is a folder that mlx-lm loads; the data a folder with train.jsonl and perhaps valid.jsonl, in any form that
mlx-lm takes (messages, prompt and completion, or text). The adapters are mlx-lm's, for mlx_lm.generate --adapter-path.
--no-patch trains without the kernels and with mlx-lm's loss, to compare: the losses agree, the peak memory does not.
"""

import argparse
import json
from pathlib import Path
import tempfile
from types import SimpleNamespace
from typing import Any

import forge_mlx  # Before mlx.core: it loads the BLAS.
from forge_mlx.patching import loss
import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Adam
from mlx_lm.tuner.datasets import CacheDataset, load_local_dataset
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, train
from mlx_lm.tuner.utils import linear_to_lora_layers, print_trainable_parameters
from mlx_lm.utils import load, save_config
import numpy as np

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,?!<>|"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model that mlx-lm loads, quantised or not")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and perhaps valid.jsonl")
    parser.add_argument("--tiny", action="store_true", help="take a small random model and data made up on the spot")
    parser.add_argument("--no-patch", action="store_true", help="mlx-lm alone, to compare")
    parser.add_argument("--adapter-path", type=Path, default=Path("adapters"), help="where to save (default adapters)")
    parser.add_argument("--iters", type=int, default=100, help="steps (default 100)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows a step (default 4)")
    parser.add_argument("--max-seq-length", type=int, default=2048, help="longer rows are cut (default 2048)")
    parser.add_argument("--num-layers", type=int, default=16, help="layers with LoRA, the last ones (default 16)")
    parser.add_argument("--rank", type=int, default=8, help="rank of LoRA (default 8)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="Adam's (default 1e-4)")
    parser.add_argument("--mask-prompt", action="store_true", help="count the answer's tokens alone")
    parser.add_argument("--grad-checkpoint", action="store_true", help="mlx-lm's: compute each layer again")
    parser.add_argument("--seed", type=int, default=0, help="of the adapters and of the order of rows (default 0)")
    options = parser.parse_args()
    if options.tiny == bool(options.model or options.data) or (options.model is None) != (options.data is None):
        parser.error("give --model and --data, or --tiny alone")
    return options


def make_tiny(folder: Path) -> None:
    """Write a random Llama, a tokenizer of letters, and questions with answers, for a look at a run.

    Args:
        folder: Where to; it exists.
    """
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.utils import save_model
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(ALPHABET)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="|")
    tokenizer.chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}|"
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(ALPHABET),
    }
    save_model(folder, Model(ModelArgs.from_dict(config)))
    save_config(config, folder / "config.json")
    animals = ["cat", "dog", "cow", "owl", "hen", "fox", "bee", "ant"]
    rows = [{"prompt": f"who is the {animal}?", "completion": f"{animal[::-1]} it is."} for animal in animals * 4]
    for name, part in {"train": rows[8:], "valid": rows[:8]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def prepared(options: argparse.Namespace) -> tuple[nn.Module, Any, Any]:
    """The model with LoRA, patched unless it is not to be, and rows for training and validation.

    Args:
        options: The command line's.
    """
    model, tokenizer = load(str(options.model))
    settings = SimpleNamespace(mask_prompt=options.mask_prompt)
    rows, valid, _ = load_local_dataset(options.data, tokenizer, settings)
    if len(rows) < options.batch_size:
        raise SystemExit(f"{options.data}/train.jsonl must have {options.batch_size} rows or more but got {len(rows)}.")
    if not options.no_patch:
        print(forge_mlx.patch(model))
    model.freeze()
    mx.random.seed(options.seed)
    layers = min(options.num_layers, len(model.layers))
    lora = {"rank": options.rank, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(model, layers, lora)
    print_trainable_parameters(model)
    options.adapter_path.mkdir(parents=True, exist_ok=True)
    adapter = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": lora}
    save_config(adapter, options.adapter_path / "adapter_config.json")
    return model, rows, valid


def main() -> None:
    """Train, and say what memory it took."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            mx.random.seed(options.seed)
            make_tiny(Path(folder))
            options.model = options.data = Path(folder)
        model, rows, valid = prepared(options)
    arguments = TrainingArgs(
        batch_size=options.batch_size,
        iters=options.iters,
        steps_per_save=options.iters,
        max_seq_length=options.max_seq_length,
        adapter_file=options.adapter_path / "adapters.safetensors",
        grad_checkpoint=options.grad_checkpoint,
    )
    np.random.seed(options.seed)
    mx.reset_peak_memory()
    train(
        model,
        Adam(options.learning_rate),
        CacheDataset(rows),
        CacheDataset(valid) if len(valid) >= options.batch_size else None,
        arguments,
        loss=default_loss if options.no_patch else loss,
    )
    print(f"peak memory {mx.get_peak_memory() / 2**20:.1f} MiB; adapters in {options.adapter_path}")


if __name__ == "__main__":
    main()
