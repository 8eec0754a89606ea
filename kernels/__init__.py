"""Fused, differentiable kernels to import into any MLX model: ``from forge_mlx import kernels``.

One family, one room (a folder); a room knows only mlx, numpy and ``forge_mlx.metal``. Each op takes `impl`: the engine
that runs it.
"""

from typing import TYPE_CHECKING, NoReturn

if __name__ == "kernels" and not TYPE_CHECKING:
    # transformers imports any package of this name, an optional one to it: it must get one too old to use, no error.
    __version__ = "0"
    del __path__

    def __getattr__(name: str) -> NoReturn:
        # `from kernels import x` and `import kernels.x` both begin with the path.
        error = ImportError if name == "__path__" else AttributeError
        raise error("import forge_mlx.kernels, not kernels: this folder is a part of the package forge_mlx")

else:
    from forge_mlx.kernels.activations import geglu, gelu, relu2, sigmoid, silu, softcap, swiglu
    from forge_mlx.kernels.attention import attention, flash_attention, flash_attention_backward, flash_supported
    from forge_mlx.kernels.cross_entropy import cross_entropy
    from forge_mlx.kernels.dispatch import DispatchPlan, moe_combine, moe_dispatch, row_scale, row_scale_accumulate
    from forge_mlx.kernels.elementwise import accumulate, add, add_bias, axpy, mul, scale
    from forge_mlx.kernels.embedding import embedding
    from forge_mlx.kernels.linear_cross_entropy import linear_cross_entropy
    from forge_mlx.kernels.matmul import matmul
    from forge_mlx.kernels.norms import add_rms_norm, layer_norm, rms_norm
    from forge_mlx.kernels.optimizer import adamw_step
    from forge_mlx.kernels.quantize import dequantize, fake_quant, quantize
    from forge_mlx.kernels.reductions import sum, sum_squares
    from forge_mlx.kernels.rope import rope
    from forge_mlx.kernels.routing import expert_counts, topk_renorm
    from forge_mlx.kernels.softmax import softmax

__all__ = [
    "DispatchPlan",
    "accumulate",
    "adamw_step",
    "add",
    "add_bias",
    "add_rms_norm",
    "attention",
    "axpy",
    "cross_entropy",
    "dequantize",
    "embedding",
    "expert_counts",
    "fake_quant",
    "flash_attention",
    "flash_attention_backward",
    "flash_supported",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "matmul",
    "moe_combine",
    "moe_dispatch",
    "mul",
    "quantize",
    "relu2",
    "rms_norm",
    "rope",
    "row_scale",
    "row_scale_accumulate",
    "scale",
    "sigmoid",
    "silu",
    "softcap",
    "softmax",
    "sum",
    "sum_squares",
    "swiglu",
    "topk_renorm",
]
