"""Weights in few bits: codes in MLX's layout, and the rounding that training sees."""

from forge_mlx.kernels.quantize.op import dequantize, fake_quant, quantize

__all__ = ["dequantize", "fake_quant", "quantize"]
