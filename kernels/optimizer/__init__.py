"""Steps of optimizers."""

from forge_mlx.kernels.optimizer.op import adamw_step

__all__ = ["adamw_step"]
