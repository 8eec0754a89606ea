"""Does the selection bias balance the experts? Trains moe_quickstart.yaml with and without it and compares loads.

The load of a layer is pooled over the last sixth of the steps: tokens sent to each expert, the largest over the mean.
Without balancing the gates alone decide. Writes moe_balance.png: the worst layer's max / mean load over the steps.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure
import numpy as np
from runs import Task, final_loss, train_all, train_records

BALANCED = {"unbalanced": "0", "bias rate 1e-3": "1e-3", "bias rate 1e-2": "1e-2"}


def max_over_mean(folder: Path) -> np.ndarray:
    """Of each MoE layer, the load pooled over the records of the last sixth of the steps."""
    records = train_records(folder)
    last = records[-1]["step"]
    loads = [np.array(r["moe"]["load"]) for r in records if r["step"] > last - max(1, last // 6)]
    pooled = np.sum(loads, axis=0)
    return np.asarray(pooled.max(axis=1) / pooled.mean(axis=1))


def plot(folders: dict[str, Path], path: Path) -> None:
    """The worst layer over the steps, each record by itself."""
    figure = Figure(figsize=(8, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    for name, folder in folders.items():
        records = train_records(folder)
        worst = [max(record["moe"]["max_over_mean"]) for record in records]
        axes.plot([record["step"] for record in records], worst, label=name, linewidth=1.6)
    axes.axhline(1.0, color="#555555", linewidth=1, linestyle="--", label="all experts alike")
    axes.set(xlabel="step", ylabel="largest load / mean load, worst layer", yscale="log")
    axes.set_yticks([1, 1.5, 2, 3, 5, 8], labels=["1", "1.5", "2", "3", "5", "8"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/moe-balance"), help="where the runs are kept")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every run")
    options = parser.parse_args()
    shared = ("train.steps=300", "train.log_every=10", *options.overrides)
    tasks = [
        Task(name.replace(" ", "-"), "moe_quickstart.yaml", (*shared, f"model.bias_rate={rate}"))
        for name, rate in BALANCED.items()
    ]
    found = train_all(tasks, options.runs, options.jobs)
    folders = dict(zip(BALANCED, found.values(), strict=True))
    print("largest load over the mean load, by layer, pooled over the last sixth of the steps:")
    for name, folder in folders.items():
        layers = max_over_mean(folder)
        each = ", ".join(f"{value:.2f}" for value in layers)
        print(f"  {name:<16} worst {layers.max():.2f} ({each}); validation loss {final_loss(folder):.4f}")
    plot(folders, options.runs / "moe_balance.png")
    print(f"curves: {options.runs / 'moe_balance.png'}")


if __name__ == "__main__":
    main()
