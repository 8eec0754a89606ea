"""Does an MoE learn more than the dense model with as many active parameters, from as many tokens?

Trains quickstart.yaml's model, and the same with its MLP replaced by 16 experts of which each token takes 2, each half
as wide, for several seeds, and prints validation losses.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

from forge_mlx.models.moe import MoE
from forge_mlx.models.registry import build_model
from forge_mlx.train.load import load_config
from runs import Task, final_loss, spread, train_all

EXPERTS = (
    "model.arch=moe",
    "model.num_experts=16",
    "model.experts_per_token=2",
    "model.expert_intermediate_size=384",
    "model.selection_bias=true",
    "model.bias_rate=1e-2",
    "model.intermediate_size=null",
    "optim.muon_expert_lr=5e-3",
)
MODELS = {"dense": (), "moe": EXPERTS}


def active_parameters(folder: Path) -> int:
    """Of a run's model: those that a token meets, embeddings not counted."""
    model = build_model(load_config(folder / "config.yaml").model)
    count = model.num_active_parameters if isinstance(model, MoE) else model.num_parameters
    return count(embeddings=False)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/moe-against-dense"), help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each model")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every run")
    options = parser.parse_args()
    tasks = [
        Task(f"{name}-{seed}", "quickstart.yaml", (*overrides, f"run.seed={seed}", *options.overrides))
        for seed in range(options.seeds)
        for name, overrides in MODELS.items()
    ]
    folders = train_all(tasks, options.runs, options.jobs)
    losses = {name: [final_loss(folders[f"{name}-{seed}"]) for seed in range(options.seeds)] for name in MODELS}
    for name, values in losses.items():
        active = active_parameters(folders[f"{name}-0"])
        print(f"{name:<6} {active:,} active parameters: validation loss {spread(values)}")
    if options.seeds > 1:
        gain = mean(losses["dense"]) - mean(losses["moe"])
        noise = max(stdev(values) for values in losses.values())
        print(f"the MoE is better by {gain:.4f}, {gain / noise:.1f} standard deviations (the larger of the two)")


if __name__ == "__main__":
    main()
