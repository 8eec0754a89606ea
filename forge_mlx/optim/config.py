"""The ``optim`` section of a training config."""

from typing import Annotated, Literal

from forge_mlx._config import Section
from pydantic import Field

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """The optimizer, its schedule and gradient clipping."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw for all parameters, or muon for the hidden matrices and adamw for the rest",
    )
    lr: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="AdamW's decay rates of the two moments")
    eps: float = Field(1e-8, gt=0, description="AdamW's addition to the denominator")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="decoupled decay, w <- w (1 - lr wd), of matrices only: norms and biases have none",
    )
    muon_lr: float = Field(0.02, gt=0, description="peak learning rate of Muon's matrices")
    muon_expert_lr: float | None = Field(
        None,
        gt=0,
        description="Muon's peak rate for the experts of an MoE, of which each sees a part of the tokens and wants "
        "less; null: muon_lr",
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum (Nesterov)")
    muon_steps: int = Field(5, ge=1, le=10, description="Newton-Schulz iterations of Muon")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="after the warmup: cosine to final_lr; wsd: constant, then linearly to final_lr; constant",
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warmup")
    decay_fraction: float = Field(
        0.2, gt=0, le=1, description="wsd: the last part of all steps in which the rate falls"
    )
    final_lr: float = Field(0.1, ge=0, le=1, description="the last learning rate, as a fraction of the peak")
    clip_norm: float | None = Field(1.0, gt=0, description="clip the gradient's global norm to this; null: never")
