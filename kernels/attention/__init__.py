"""Attention in O(T) memory, for packed documents, windows, soft-capping and sinks; its backward; and the plain way."""

from forge_mlx.kernels.attention.attention_op import attention
from forge_mlx.kernels.attention.backward_op import flash_attention_backward
from forge_mlx.kernels.attention.op import flash_attention
from forge_mlx.kernels.attention.options import flash_supported

__all__ = ["attention", "flash_attention", "flash_attention_backward", "flash_supported"]
