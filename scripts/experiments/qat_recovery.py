"""How much of what quantisation loses does quantisation-aware training bring back?

Trains quickstart.yaml in float and, for each format, once more with fake quantisation from half of the steps on, for
several seeds; quantises the float models after training in the same formats; and prints validation losses.
recovered = (after training - QAT) / (after training - float).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from forge_mlx.data.prepare import prepare
from forge_mlx.data.stream import eval_batches, validation_rows
from forge_mlx.hub.native import load_model
from forge_mlx.kernels import fake_quant
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.train.device import DTYPES
from forge_mlx.train.load import load_config
from forge_mlx.train.step import make_evaluator
import mlx.core as mx
from mlx.utils import tree_unflatten
from runs import CONFIGS, Task, final_loss, spread, train_all

Rounding = Callable[[mx.array], mx.array]


def affine(bits: int) -> Rounding:
    """MLX's own quantisation in groups of 64, there and back."""

    def there_and_back(weight: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(weight, group_size=64, bits=bits), group_size=64, bits=bits)

    return there_and_back


@dataclass(frozen=True)
class Format:
    """One way to quantise the model.

    Attributes:
        settings: of the `qat` section.
        layers: what becomes of the layers' matrices after training.
        table: what becomes of the embedding table, which is the head too.
    """

    settings: tuple[str, ...]
    layers: Rounding
    table: Rounding


def whole(bits: int) -> Format:
    """All matrices alike, as `mlx.nn.quantize` does it."""
    return Format(("qat.weights=affine", f"qat.bits={bits}"), affine(bits), affine(bits))


def ternary(weight: mx.array) -> mx.array:
    """As `fake_quant` has it: MLX has no such mode."""
    return fake_quant(weight, "ternary", impl="reference")


TABLE_8_BITS = "qat.overrides={embed_tokens: {weights: affine, bits: 8}}"
FORMATS = {
    "4 bits": whole(4),
    "3 bits": whole(3),
    "2 bits": whole(2),
    "2 bits, table 8": Format(("qat.weights=affine", "qat.bits=2", TABLE_8_BITS), affine(2), affine(8)),
    "ternary, table 8": Format(("qat.weights=ternary", TABLE_8_BITS), ternary, affine(8)),
}


def folder_name(format_name: str, seed: int) -> str:
    """Of a run."""
    return f"{format_name.replace(',', '').replace(' ', '-')}-{seed}"


def quantised_after_training(model: GPT, how: Format) -> None:
    """Round the matrices as the QAT runs have them."""
    # MLX's back ends quantise differently; the CPU's way is that of the QAT runs.
    with mx.stream(mx.cpu):
        changed = [
            (name, (how.table if name == "embed_tokens.weight" else how.layers)(array))
            for name, array in named_arrays(model.parameters())
            if array.ndim == 2
        ]
        mx.eval(changed)
    model.update(tree_unflatten(changed))


def validation_loss(folder: Path, how: Format) -> float:
    """Of the run's final model, quantised now, over the rows of the run's own last evaluation."""
    config = load_config(folder / "config.yaml")
    model, _ = load_model(folder / "final")
    quantised_after_training(model, how)
    data = prepare(config.data, log=lambda _: None)
    rows = validation_rows(data.valid, config.train.seq_len, config.data.packing)
    evaluate = make_evaluator(model, DTYPES[config.run.dtype])
    nats, tokens = 0.0, 0
    for batch in eval_batches(rows, config.train.batch_size, config.train.final_eval_tokens):
        nats += float(evaluate(model.trainable_parameters(), batch)[0])
        tokens += batch.counted_targets().size
    return nats / tokens


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/qat-recovery"), help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--start", type=float, default=0.5, help="share of the steps before fake quantisation begins")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every run")
    options = parser.parse_args()
    seeds = range(options.seeds)
    # What the overrides leave of the config's own number.
    start = round(options.start * load_config(CONFIGS / "quickstart.yaml", options.overrides).train.steps)
    tasks = []
    for seed in seeds:
        shared = (f"run.seed={seed}", *options.overrides)
        tasks.append(Task(f"float-{seed}", "quickstart.yaml", shared))
        for name, how in FORMATS.items():
            qat = (*how.settings, f"qat.start_step={start}")
            tasks.append(Task(folder_name(name, seed), "quickstart.yaml", (*shared, *qat)))
    folders = train_all(tasks, options.runs, options.jobs)
    full = [final_loss(folders[f"float-{seed}"]) for seed in seeds]
    print(f"float: {spread(full)}")
    for name, how in FORMATS.items():
        after = [validation_loss(folders[f"float-{seed}"], how) for seed in seeds]
        trained = [final_loss(folders[folder_name(name, seed)]) for seed in seeds]
        recovered = (mean(after) - mean(trained)) / (mean(after) - mean(full))
        print(f"{name}: after training {spread(after)}, QAT {spread(trained)}, recovered {recovered:.2f}")


if __name__ == "__main__":
    main()
