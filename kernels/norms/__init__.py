"""Normalisation over the last axis."""

from forge_mlx.kernels.norms.add_rms_norm_op import add_rms_norm
from forge_mlx.kernels.norms.layer_norm_op import layer_norm
from forge_mlx.kernels.norms.rms_norm_op import rms_norm

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]
