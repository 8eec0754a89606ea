"""Matrix products."""

from forge_mlx.kernels.matmul.op import matmul

__all__ = ["matmul"]
