"""Neural network modules and losses. Where a kernel exists they call it, else `mx.fast` or plain operations."""

from forge_mlx.nn.activations import relu2, softcap
from forge_mlx.nn.attention import Attention
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.losses import IGNORE_INDEX, cross_entropy, cross_entropy_sum
from forge_mlx.nn.mlp import MLP, GatedMLP
from forge_mlx.nn.norms import LayerNorm, RMSNorm
from forge_mlx.nn.parameters import count_elements, is_matrix
from forge_mlx.nn.token_shift import LastToken, TokenShift

__all__ = [
    "IGNORE_INDEX",
    "MLP",
    "Attention",
    "Embedding",
    "GatedMLP",
    "KVCache",
    "LastToken",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "TokenShift",
    "count_elements",
    "cross_entropy",
    "cross_entropy_sum",
    "is_matrix",
    "relu2",
    "softcap",
]
