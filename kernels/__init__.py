"""Fused, differentiable kernels to import into any MLX model: ``from forge_mlx import kernels``.

One family, one room (a folder); a room knows only mlx, numpy and ``forge_mlx.metal``. Where no room exists yet,
``forge_mlx.nn`` calls ``mx.fast`` and plain MLX ops.
"""

if __name__ == "kernels":
    raise ImportError("import forge_mlx.kernels, not kernels: this folder is a part of the package forge_mlx")

from forge_mlx.kernels.rms_norm import rms_norm

__all__ = ["rms_norm"]
