"""LoRA by forge-mlx and by mlx_lm.lora: peak memory and useful tokens a second on one model and one set of examples.

Each side runs in a process of its own, in both orders, on the same Hugging Face folder and the same JSON lines file of
chats, with the same rank, scale, layers, batch size and longest length, and AdamW. mlx-lm's side is its own `train`
with its own datasets and batches (sorted by length, padded); forge-mlx's is its trainer with packed rows. A useful
token is one that is learnt: both mask the prompt. MLX's BLAS is the same on both sides.

mlx-lm's batches have many shapes: it gets its longest one, whose peak counts, and then batches drawn evenly from all
lengths, each twice, of which the second is timed, as the first may compile its shape. forge-mlx has one shape. Peaks
are those of whole steps, the first included. Where other processes share the machine, CPU seconds say more than those
of the clock; on a GPU only the latter count. `first_loss`, before any update, and `trained`, the parameters that are,
show that both sides do the same.

    python scripts/bench/bench_lora.py make FOLDER      # a random model of SmolLM2-135M's shape, and data
    python scripts/bench/bench_lora.py run FOLDER --data full --steps 6 --batch-size 4
    python scripts/bench/bench_lora.py run FOLDER --data spread --steps 13 --batch-size 4
"""

import argparse
from collections.abc import Iterator
import json
from pathlib import Path
import random
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.nn as nn

RANK, SCALE = 16, 2.0
SMOLLM2 = {
    "vocab_size": 49152,
    "num_layers": 30,
    "hidden_size": 576,
    "num_heads": 9,
    "num_kv_heads": 3,
    "intermediate_size": 1536,
    "max_seq_len": 8192,
    "rope_base": 100000.0,
}
WORDS = ("the", "a", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "it", "by", "at", "from")


def make(folder: Path, layers: int | None) -> None:
    """Write a random model, a byte-level tokenizer and chats whose lengths are spread as those of real ones."""
    from forge_mlx.data.hub_tokenizer import HubTokenizer
    from forge_mlx.hub.pretrained import save_pretrained
    from forge_mlx.models.gpt import GPT, GPTConfig
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    tokenizer = HubTokenizer(files, "bytes").with_chat_template("chatml")
    config = GPTConfig(**SMOLLM2 | ({} if layers is None else {"num_layers": layers}))
    save_pretrained(folder, GPT(config, seed=0), tokenizer)
    draw = random.Random(0)
    # Log-normal lengths, most of them short and some of almost 1000 tokens; and all of almost 1000.
    write_chats(folder / "spread.jsonl", draw, [min(int(draw.lognormvariate(5.5, 0.8)), 970) for _ in range(512)])
    write_chats(folder / "full.jsonl", draw, [970] * 128)


def write_chats(path: Path, draw: random.Random, sizes: list[int]) -> None:
    """Write a chat of one turn for each size, that of all its text in bytes, which are tokens here."""
    with path.open("w") as file:
        for size in sizes:
            question = " ".join(draw.choices(WORDS, k=10))
            answer = " ".join(draw.choices(WORDS, k=size))[: max(1, size - len(question))]
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


def forge(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """forge-mlx's trainer, step by step."""
    import forge_mlx  # noqa: F401
    from forge_mlx.train.device import choose_placement
    from forge_mlx.train.folder import RunFolder
    from forge_mlx.train.load import load_config
    from forge_mlx.train.trainer import Trainer
    from forge_mlx.train.work import begin_work
    import mlx.core as mx

    values = {
        "run": {"dir": str(folder / f"run-{options.data}")},
        "model": {"path": str(folder)},
        "data": {"source": str(folder / f"{options.data}.jsonl"), "format": "chat", "packing": options.packing},
        "adapter": {"rank": RANK, "alpha": RANK * SCALE},
        "train": {
            "steps": options.steps,
            "batch_size": options.batch_size,
            "seq_len": options.seq_len,
            "grad_checkpoint": options.grad_checkpoint,
        },
        "optim": {"lr": 1e-4, "weight_decay": 0.0},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)
        file.flush()
        config = load_config(Path(file.name))
    placement = choose_placement(config.run)
    mx.set_default_device(placement.device)
    trainer = Trainer(begin_work(config, placement, lambda _: None), placement, RunFolder(config.run.dir))
    mx.reset_peak_memory()
    trainer.train_step()
    first_loss, before, started = trainer.window.loss, trainer.tokens, _clocks()
    for _ in range(options.steps - 1):
        trainer.train_step()
    wall, cpu = (now - then for now, then in zip(_clocks(), started, strict=True))
    return _result(trainer.model, trainer.tokens - before, wall, cpu, mx.get_peak_memory(), first_loss)


def peer(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """mlx_lm.lora's own parts: its model, its layers, its data, its loop."""
    import forge_mlx  # noqa: F401
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm import load
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.datasets import CacheDataset, ChatDataset
    from mlx_lm.tuner.utils import linear_to_lora_layers

    gpu = mx.is_available(mx.Device(mx.gpu))
    mx.set_default_device(mx.Device(mx.gpu if gpu else mx.cpu))
    model, tokenizer = load(str(folder))
    model.set_dtype(mx.bfloat16 if gpu else mx.float32)
    model.freeze()
    mx.random.seed(0)
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    lines = (folder / f"{options.data}.jsonl").read_text().splitlines()
    data = CacheDataset(ChatDataset([json.loads(line) for line in lines], tokenizer, mask_prompt=True))
    # Of each step: the loss, all learnt tokens up to it, and the clocks.
    reports: list[tuple[float, int, float, float]] = []

    class Callback(trainer.TrainingCallback):
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            reports.append((info["train_loss"], info["trained_tokens"], *_clocks()))

    def batches(dataset: Any, batch_size: int, max_seq_length: int, **_: Any) -> Iterator[Any]:
        every = list(trainer.iterate_batches(dataset, batch_size, max_seq_length))
        every.sort(key=lambda batch: (batch[0].shape[1], int(batch[1].sum())))
        yield every[-1]
        for index in range(options.steps - 1):
            batch = every[int((index + 0.5) * len(every) / (options.steps - 1))]
            yield batch
            yield batch

    arguments = trainer.TrainingArgs(
        batch_size=options.batch_size,
        iters=2 * options.steps - 1,
        steps_per_report=1,
        steps_per_save=10**9,
        max_seq_length=options.seq_len,
        grad_checkpoint=options.grad_checkpoint,
        adapter_file=folder / "peer.safetensors",
    )
    optimizer = optim.AdamW(1e-4, weight_decay=0.0)
    mx.reset_peak_memory()
    trainer.train(model, optimizer, data, args=arguments, iterate_batches=batches, training_callback=Callback())
    peak = mx.get_peak_memory()
    timed = zip(reports[1::2], reports[2::2], strict=True)
    spent = [[now - then for now, then in zip(second, first, strict=True)] for first, second in timed]
    _, tokens, wall, cpu = (sum(column) for column in zip(*spent, strict=True))
    return _result(model, tokens, wall, cpu, peak, reports[0][0])


def _clocks() -> tuple[float, float]:
    """Seconds of the clock, and of all threads of this process."""
    return time.perf_counter(), time.process_time()


def _result(model: "nn.Module", tokens: float, wall: float, cpu: float, memory: int, loss: float) -> dict[str, Any]:
    from mlx.utils import tree_flatten

    return {
        "trained": sum(array.size for _, array in tree_flatten(model.trainable_parameters())),
        "first_loss": round(float(loss), 4),
        "tokens": int(tokens),
        "seconds": round(wall, 3),
        "cpu_seconds": round(cpu, 3),
        "tokens_per_second": round(tokens / wall, 2),
        "tokens_per_cpu_second": round(tokens / cpu, 2),
        "peak_mb": round(memory / 1e6, 1),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run", "forge", "peer"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="of `make`: fewer layers than SmolLM2's 30")
    parser.add_argument("--data", choices=["spread", "full"], default="spread", help="lengths of the chats")
    parser.add_argument("--steps", type=int, default=13, help="the first is not timed")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--grad-checkpoint", action="store_true")
    parser.add_argument("--padded", dest="packing", action="store_false", help="forge-mlx without packing")
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.layers)
    elif options.what == "run":
        for side in ("forge", "peer", "peer", "forge"):
            command = [sys.executable, __file__, side, *sys.argv[2:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr[-2000:], flush=True)
    else:
        result = (forge if options.what == "forge" else peer)(options.folder, options)
        print(json.dumps({"side": options.what, "data": options.data} | result))


if __name__ == "__main__":
    main()
