"""Optimizers and learning-rate schedules."""

from forge_mlx.optim.adamw import AdamW
from forge_mlx.optim.config import OptimConfig
from forge_mlx.optim.groups import GroupedOptimizer, build_optimizer
from forge_mlx.optim.schedule import learning_rate_factor

__all__ = ["AdamW", "GroupedOptimizer", "OptimConfig", "build_optimizer", "learning_rate_factor"]
