"""Neural network modules and losses. Where a kernel exists they call it, else `mx.fast` or plain operations."""

from forge_mlx.nn.activations import relu2, softcap
from forge_mlx.nn.attention import Attention
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.fake_quant import FakeQuantEmbedding, FakeQuantExpertLinear, FakeQuantLinear
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.latent_attention import LatentAttention
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.losses import IGNORE_INDEX, cross_entropy, cross_entropy_sum
from forge_mlx.nn.mlp import MLP, GatedMLP
from forge_mlx.nn.moe import Experts, MoELayer, update_selection_bias
from forge_mlx.nn.norms import LayerNorm, RMSNorm
from forge_mlx.nn.parameters import count_elements, is_matrix
from forge_mlx.nn.quantized import (
    CodesEmbedding,
    CodesExpertLinear,
    CodesLinear,
    QuantizedEmbedding,
    QuantizedExpertLinear,
    QuantizedLinear,
)
from forge_mlx.nn.router import Router, Routing
from forge_mlx.nn.routing_record import RoutingRecord, aux_loss, routing_penalty, routing_records, z_loss
from forge_mlx.nn.token_shift import LastToken, TokenShift

__all__ = [
    "IGNORE_INDEX",
    "MLP",
    "Attention",
    "CodesEmbedding",
    "CodesExpertLinear",
    "CodesLinear",
    "Embedding",
    "ExpertLinear",
    "Experts",
    "FakeQuantEmbedding",
    "FakeQuantExpertLinear",
    "FakeQuantLinear",
    "GatedMLP",
    "KVCache",
    "LastToken",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "MoELayer",
    "QuantizedEmbedding",
    "QuantizedExpertLinear",
    "QuantizedLinear",
    "RMSNorm",
    "Router",
    "Routing",
    "RoutingRecord",
    "TokenShift",
    "aux_loss",
    "count_elements",
    "cross_entropy",
    "cross_entropy_sum",
    "is_matrix",
    "relu2",
    "routing_penalty",
    "routing_records",
    "softcap",
    "update_selection_bias",
    "z_loss",
]
