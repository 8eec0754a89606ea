"""Cross entropy of a linear layer's logits, which never exist whole."""

from forge_mlx.kernels.linear_cross_entropy.forward_gradients import gradients_in_forward
from forge_mlx.kernels.linear_cross_entropy.op import linear_cross_entropy

__all__ = ["gradients_in_forward", "linear_cross_entropy"]
