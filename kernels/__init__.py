"""Fused, differentiable kernels to import into any MLX model: ``from forge_mlx import kernels``.

One family, one room (a folder); a room knows only mlx, numpy and ``forge_mlx.metal``. Each op takes `impl`: the engine
that runs it.
"""

if __name__ == "kernels":
    raise ImportError("import forge_mlx.kernels, not kernels: this folder is a part of the package forge_mlx")

from forge_mlx.kernels.activations import geglu, gelu, relu2, sigmoid, silu, softcap, swiglu
from forge_mlx.kernels.attention import attention, flash_attention, flash_attention_backward, flash_supported
from forge_mlx.kernels.cross_entropy import cross_entropy
from forge_mlx.kernels.elementwise import accumulate, add, add_bias, axpy, mul, scale
from forge_mlx.kernels.embedding import embedding
from forge_mlx.kernels.linear_cross_entropy import linear_cross_entropy
from forge_mlx.kernels.matmul import matmul
from forge_mlx.kernels.norms import add_rms_norm, layer_norm, rms_norm
from forge_mlx.kernels.optimizer import adamw_step
from forge_mlx.kernels.reductions import sum, sum_squares
from forge_mlx.kernels.rope import rope
from forge_mlx.kernels.softmax import softmax

__all__ = [
    "accumulate",
    "adamw_step",
    "add",
    "add_bias",
    "add_rms_norm",
    "attention",
    "axpy",
    "cross_entropy",
    "embedding",
    "flash_attention",
    "flash_attention_backward",
    "flash_supported",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "matmul",
    "mul",
    "relu2",
    "rms_norm",
    "rope",
    "scale",
    "sigmoid",
    "silu",
    "softcap",
    "softmax",
    "sum",
    "sum_squares",
    "swiglu",
]
