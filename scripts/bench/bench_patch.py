#!/usr/bin/env python
"""Peak memory and time of one LoRA step on a model of mlx-lm, with forge-mlx's kernels in it and without.

The model has the shape of SmolLM2-135M, random weights in float32, and LoRA of rank 8 on every linear layer. All ways
take turns in one process, forwards and then backwards, on the same weights and tokens; no figure is printed unless
their losses agree. Memory is MLX's own count, without the weights; time is a ratio to mlx-lm's.
"""

import argparse
from collections.abc import Callable
import statistics
import time
from typing import Any

from forge_mlx.patching import loss, patch, unpatch
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

SHAPE = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "vocab_size": 49152,
}
# What is measured: whether the model is patched, and the loss.
WAYS: dict[str, tuple[bool, Callable[..., Any]]] = {
    "mlx-lm": (False, default_loss),
    "our loss alone": (False, loss),
    "patched, mlx-lm's loss": (True, default_loss),
    "patched": (True, loss),
}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the 30 that the model has (default 4)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the one row (default 4096)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each way, forwards and backwards (default 1)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which to measure")
    parser.add_argument("--checkpoint", action="store_true", help="with mlx-lm's --grad-checkpoint")
    return parser.parse_args()


def prepared(layers: int) -> nn.Module:
    """The model with LoRA in all layers.

    Args:
        layers: How many.
    """
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict({**SHAPE, "num_hidden_layers": layers}))
    model.freeze()
    linear_to_lora_layers(model, layers, {"rank": 8, "scale": 20.0, "dropout": 0.0})
    model.train()
    mx.eval(model.parameters())
    return model


def measured(model: nn.Module, way: str, length: int) -> tuple[float, int, float]:
    """The loss, the peak in bytes beside what was there before, and seconds.

    Args:
        model: The model, not patched.
        way: A key of WAYS.
        length: Tokens.
    """
    is_patched, function = WAYS[way]
    if is_patched:
        patch(model)
    batch = mx.random.randint(0, SHAPE["vocab_size"], (1, length + 1), key=mx.random.key(1))
    lengths = mx.array([[1, length]])
    mx.eval(batch, lengths)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    (value, _), gradients = nn.value_and_grad(model, function)(model, batch, lengths)
    mx.eval(value, gradients)
    seconds = time.perf_counter() - start
    peak = mx.get_peak_memory() - before
    unpatch(model)
    return value.item(), peak, seconds


def main() -> None:
    """Measure, compare, print."""
    options = parse()
    model = prepared(options.layers)
    if options.checkpoint:
        grad_checkpoint(model.layers[0])
    turns = (list(options.ways) + list(reversed(options.ways))) * options.rounds
    found: dict[str, list[tuple[float, int, float]]] = {way: [] for way in options.ways}
    for way in turns:
        found[way].append(measured(model, way, options.length))
    losses = [value for results in found.values() for value, _, _ in results]
    if max(losses) - min(losses) > 1e-5 * max(losses):
        raise SystemExit(f"the losses must agree but got {sorted(set(losses))}")
    base = statistics.median(seconds for _, _, seconds in found[options.ways[0]])
    print(f"{options.layers} layers, T = {options.length}, loss {losses[0]:.5f}")
    print(f"{'':24} {'peak MiB':>9} {'time':>6}")
    for way, results in found.items():
        peak = max(peak for _, peak, _ in results)
        seconds = statistics.median(seconds for _, _, seconds in results)
        print(f"{way:24} {peak / 2**20:9.0f} {seconds / base:6.2f}")


if __name__ == "__main__":
    main()
