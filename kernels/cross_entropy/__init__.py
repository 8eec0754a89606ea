"""Cross entropy of logits and targets."""

from forge_mlx.kernels.cross_entropy.op import cross_entropy
from forge_mlx.kernels.cross_entropy.options import IGNORE_INDEX, Reduction

__all__ = ["IGNORE_INDEX", "Reduction", "cross_entropy"]
