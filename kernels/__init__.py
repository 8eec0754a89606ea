"""Fused, differentiable kernels to import into any MLX model: ``from forge_mlx import kernels``.

One family, one room (a folder); a room knows only mlx, numpy and ``forge_mlx.metal``. No room exists yet:
``forge_mlx.nn`` calls ``mx.fast`` and plain MLX ops where it will call the rooms.
"""

if __name__ == "kernels":
    raise ImportError("import forge_mlx.kernels, not kernels: this folder is a part of the package forge_mlx")
