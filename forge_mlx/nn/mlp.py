"""The feed-forward half of a transformer block, plain or gated."""

from forge_mlx.nn.activations import ACTIVATIONS, GATED_ACTIVATIONS
from forge_mlx.nn.linear import Linear
import mlx.core as mx
import mlx.nn as nn


class MLP(nn.Module):
    """down(act(up(x))).

    Args:
        hidden_size: Width C of input and output.
        intermediate_size: Width of the hidden layer.
        activation: A key of `ACTIVATIONS`.
        bias: Whether both projections have a bias.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation]
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., C]` to `[..., C]`."""
        hidden: mx.array = self.down_proj(self._activation(self.up_proj(x)))
        return hidden


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU with SiLU, GEGLU with GELU, product and activation in one pass.

    Args:
        hidden_size: Width C of input and output.
        intermediate_size: Width of gate and up.
        activation: A key of `GATED_ACTIVATIONS`.
        bias: Whether the three projections have a bias.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool) -> None:
        super().__init__()
        self._activation = GATED_ACTIVATIONS[activation]
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., C]` to `[..., C]`."""
        hidden: mx.array = self.down_proj(self._activation(self.gate_proj(x), self.up_proj(x)))
        return hidden
