"""Root mean square normalisation."""

from forge_mlx.kernels.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
