#!/usr/bin/env python
"""Training speed on a CPU: the stock mlx-cpu wheel, forge-mlx and PyTorch on the same model, in one run.

Each is a process of its own, and they take turns, so that a drift of the machine's speed meets all alike. All
start from the same weights and see the same tokens; no speed is printed unless their losses agree. The time is
that of whole AdamW steps after the first ones, which compile; the figure is the median of all rounds.
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import forge_mlx  # noqa: F401  Before mlx.core: it loads the BLAS.
import numpy as np

WARMUP_STEPS = 2
ENGINES = {
    "stock mlx-cpu": {"FORGE_MLX_BLAS": "off"},
    "forge-mlx": {},
    "PyTorch": {},
}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="training config whose model and sizes to take")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each process (default 3)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps a turn (default 8; stock: 1)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="which to run")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def setting(options: argparse.Namespace) -> tuple[Any, int, int]:
    """Model config, rows and tokens a row: the given config's, or a GPT-2 of 6 layers of 384."""
    from forge_mlx.models.gpt import GPTConfig
    from forge_mlx.train.load import load_config

    if options.config:
        config = load_config(options.config)
        vocab_size = config.model.vocab_size or config.data.tokenizer.vocab_size
        # The engines draw different dropout masks; residual matrices of zeros would hide a difference of the blocks.
        changes = {"vocab_size": vocab_size, "zero_init_residual": False, "dropout": 0.0}
        model = config.model.model_copy(update=changes)
        return model, config.train.batch_size, config.train.seq_len
    model = GPTConfig(
        vocab_size=4096, num_layers=6, hidden_size=384, num_heads=6, norm="layer_norm", position="learned",
        mlp="gelu_tanh", bias=True,
    )  # fmt: skip
    return model, 8, 256


def batch(vocab_size: int, rows: int, length: int, step: int) -> np.ndarray:
    """Random tokens `[B, T + 1]`, the same for every engine."""
    return np.random.default_rng(step).integers(0, vocab_size, (rows, length + 1), dtype=np.int32)


def work_mlx(options: argparse.Namespace, steps: int) -> dict:
    """Train with forge_mlx and time the steps."""
    from forge_mlx.data import Batch
    from forge_mlx.models.gpt import GPT
    from forge_mlx.optim import OptimConfig, build_optimizer
    from forge_mlx.train.step import TrainStep
    import mlx.core as mx

    config, rows, length = setting(options)
    model = GPT(config)
    model.load_weights(str(options.weights))
    step_function = TrainStep(model, build_optimizer(OptimConfig()), mx.float32, 1.0)

    def step(index: int) -> float:
        tokens = batch(config.vocab_size, rows, length, index)
        loss, norm, grads, count = step_function.gradients([Batch(tokens[:, :-1], tokens[:, 1:])], seed=index)
        step_function.update(grads, norm, count, 1.0)
        return loss

    return timed(step, steps, rows * length)


def work_torch(options: argparse.Namespace, steps: int) -> dict:
    """Train with PyTorch and time the steps."""
    import mlx.core as mx
    import torch
    from torch_gpt import TorchGPT

    config, rows, length = setting(options)
    model = TorchGPT(config)
    weights = mx.load(str(options.weights))
    state = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    model.load_state_dict(state)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(index: int) -> float:
        tokens = torch.from_numpy(batch(config.vocab_size, rows, length, index)).long()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return timed(step, steps, rows * length)


def timed(step: Callable[[int], float], steps: int, tokens: int) -> dict:
    """Losses of all steps, and tokens a second of those after the warmup."""
    losses, seconds = [], []
    for index in range(WARMUP_STEPS + steps):
        began = time.perf_counter()
        losses.append(step(index))
        seconds.append(time.perf_counter() - began)
    return {"losses": losses, "speeds": [tokens / s for s in seconds[WARMUP_STEPS:]]}


def run_worker(engine: str, options: argparse.Namespace, weights: Path) -> dict:
    """One turn of one engine in a process of its own."""
    steps = 1 if engine == "stock mlx-cpu" else options.steps
    command = [sys.executable, __file__, "--worker", engine, "--weights", str(weights), "--steps", str(steps)]
    if options.config:
        command += ["--config", str(options.config)]
    environment = {**os.environ, **ENGINES[engine], "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    """Run all engines in turns and print a Markdown table."""
    options = parse()
    if options.worker:
        work = work_torch if options.worker == "PyTorch" else work_mlx
        print(json.dumps(work(options, options.steps)))
        return
    from forge_mlx.models.gpt import GPT
    from forge_mlx.nn.parameters import named_arrays
    import mlx.core as mx

    config, rows, length = setting(options)
    model = GPT(config)
    speeds: dict[str, list[float]] = {engine: [] for engine in options.engines}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        mx.save_safetensors(str(weights), dict(named_arrays(model.parameters())))
        for turn in range(options.rounds):
            # The stock wheel is 20 times slower and its figure steady: one turn is enough.
            for engine in options.engines if turn == 0 else [e for e in options.engines if e != "stock mlx-cpu"]:
                result = run_worker(engine, options, weights)
                speeds[engine] += result["speeds"]
                losses[engine] = result["losses"]
    shared = min(len(values) for values in losses.values())
    table = np.array([values[:shared] for values in losses.values()])
    if np.abs(table - table[0]).max() > 1e-3:
        raise SystemExit(f"the engines' losses differ, so no speed is reported: {losses}")
    medians = {engine: statistics.median(values) for engine, values in speeds.items()}
    print(f"{model.num_parameters():,} parameters, {rows} x {length} tokens a step, float32, {os.cpu_count()} cores\n")
    print("| engine | tokens/s | range | against PyTorch |")
    print("|---|---|---|---|")
    for engine, median in medians.items():
        ratio = f"{median / medians['PyTorch']:.2f}" if "PyTorch" in medians else ""
        print(f"| {engine} | {median:,.0f} | {min(speeds[engine]):,.0f} to {max(speeds[engine]):,.0f} | {ratio} |")


if __name__ == "__main__":
    main()
