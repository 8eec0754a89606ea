"""Which layers of a model get low-rank adapters, and of what kind."""

import math
from typing import Literal

from forge_mlx._config import Section
from pydantic import Field


class AdapterConfig(Section):
    """Low-rank adapters: a frozen model, and the few parameters that are trained instead.

    Patterns are those of shells on dotted names: `*` stands for any text, dots too, as in `layers.*.mlp.*`. One without
    a dot is fitted to the last part of the name, as `q_proj` or `*_proj`.
    """

    method: Literal["lora", "dora", "rslora"] = Field(
        "lora",
        description="lora: W + alpha / rank A B; rslora: with alpha / sqrt(rank), whose size does not fall with the "
        "rank; dora: lora on the directions of W's rows, and a magnitude for each row.",
    )
    rank: int = Field(8, ge=1, description="Columns of A and rows of B.")
    alpha: float = Field(16.0, gt=0, description="Factor of A B, before it is divided by rank or by its root.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Probability of dropping an element of an adapter's input in training."
    )
    targets: list[str] = Field(
        ["layers.*"],
        min_length=1,
        description="Patterns of the names of the linear layers, experts and embeddings that get adapters; by default "
        "all of the blocks'.",
    )
    layers: int | None = Field(
        None, ge=1, description="Only the last so many blocks get adapters, as mlx-lm's num_layers; null: all."
    )

    @property
    def scale(self) -> float:
        """The factor of A B: alpha / rank, in rslora alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.method == "rslora" else self.rank)
