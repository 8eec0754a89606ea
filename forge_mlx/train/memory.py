"""An estimate of a run's peak memory, before any step."""

from dataclasses import dataclass
from math import prod

from forge_mlx.data.stream import Packing
from forge_mlx.kernels.attention.blocked import BLOCK_BYTES
from forge_mlx.kernels.linear_cross_entropy.chunks import chunk_rows
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.moe import MoEConfig
from forge_mlx.nn.coded import coded_shape, holds_codes
from forge_mlx.nn.quantized import CodesEmbedding, CodesExpertLinear, CodesLinear
from forge_mlx.optim import OptimConfig
from forge_mlx.train.attention_path import takes_mlx
from forge_mlx.train.device import DTYPES
import mlx.core as mx
import mlx.nn as nn

# How many arrays of the MLP's width one layer keeps for its backward pass, by `model.mlp`; measured.
_MLP_ARRAYS = {"swiglu": 5, "geglu": 6, "geglu_tanh": 6, "gelu": 4, "gelu_tanh": 4, "silu": 4, "relu2": 3}

# Of attention through blocks of queries, measured: how many arrays of a block's scores its backward pass holds at a
# time, and how many of the heads' width each layer keeps beside what any attention does, and the layer in hand takes.
_BLOCK_ARRAYS = 2
_LAYER_HEADS = 2
_BACKWARD_HEADS = 8

# How many arrays of the MLP's width the backward pass of the layer in hand takes; measured.
_MLP_GRADIENTS = 2

# Of a row for each expert of a token, as wide as the residual stream, how many arrays a layer keeps and how many the
# backward pass of the layer in hand takes, beside some for each token; measured.
_ROUTED_ARRAYS = 4
_ROUTED_GRADIENTS = 3
_TOKEN_GRADIENTS = 5

# How many arrays of a token's scores for all experts a router keeps, float32 whatever the run's dtype; measured.
_ROUTER_ARRAYS = 4

# How many arrays of a chunk's logits a CPU holds at a time, by how many chunks there are, the last for all more: the
# logits, their exponentials and their gradient, and those of the chunks that MLX allocates ahead; measured. With a
# softcap one more.
_CHUNK_ARRAYS = (3, 7, 9)

# How many matrices made of codes exist at a time: MLX makes those of the next products ahead; measured.
_MATRICES_AHEAD = 4

# Of a table only the rows that are looked up become floats; a GPU multiplies by codes, but for those that MLX cannot.
_TABLES = (nn.QuantizedEmbedding, CodesEmbedding)
_MADE = (CodesLinear, CodesExpertLinear)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, by what they hold.

    Attributes:
        weights: the float32 weights, twice: an update writes new ones before the old ones go.
        gradients: of the weights, float32; with accumulation those of the passes before too.
        optimizer: the moments, likewise twice.
        activations: what the backward pass needs of the forward pass.
        frozen: weights that are not trained.
        logits: of the chunks of rows in hand: the logits, their exponentials and their gradient, float32 in the loss;
            and the gradient of the head's weight, which is summed over the chunks in float32.
        decoded: floats made of codes for products.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    frozen: int = 0
    decoded: int = 0

    @property
    def total(self) -> int:
        """Estimated peak: the larger of the backward pass and the update."""
        backward = self.weights // 2 + self.gradients + self.optimizer // 2 + self.activations + self.logits
        update = self.weights + self.gradients + self.optimizer
        return max(backward + self.decoded, update) + self.frozen


def decoded_bytes(model: GPT, dtype: str, device: mx.DeviceType) -> int:
    """The floats that a step makes of codes at a time: the head's matrix in the loss, elsewhere some of the layers'.

    Args:
        model: as it is trained.
        dtype: of the forward and backward pass.
        device: where it runs.
    """
    size = DTYPES[dtype].size
    found = [0]
    for name, layer in model.named_modules():
        if not holds_codes(layer):
            continue
        elements = prod(coded_shape(layer))
        if name.split(".")[0] == model.head_name:
            # A CPU unpacks codes to bytes first, and its loss is in float32 throughout.
            found.append(elements * (4 + 1) + elements * layer.bits // 8 if device == mx.cpu else elements * size)
        elif not isinstance(layer, _TABLES) and (device == mx.cpu or isinstance(layer, _MADE)):
            found.append(_MATRICES_AHEAD * elements * size)
    return max(found)


def estimate_memory(
    model: DecoderConfig,
    optim: OptimConfig,
    parameters: int,
    batch_size: int,
    seq_len: int,
    dtype: str,
    accumulate: int = 1,
    device: mx.DeviceType = mx.cpu,
    packing: Packing = "concat",
    frozen: int = 0,
    checkpoint_blocks: bool = False,
    trains_head: bool = True,
    decoded: int = 0,
) -> MemoryEstimate:
    """Estimate the peak of one training step.

    The count of activations is one layer's inputs and outputs of every product, norm and activation. Plain causal
    attention of short rows keeps its probabilities ``[B, H, T, T]`` on a CPU; all other attention keeps none and
    computes them again, on a CPU for a block of queries at a time. The layer whose backward pass is in hand takes more.

    Args:
        model: the model's config, with its vocabulary size.
        optim: the optimizer's config.
        parameters: number of weights that are trained.
        batch_size: rows in one pass.
        seq_len: tokens in a row.
        dtype: of the forward and backward pass.
        accumulate: passes an update.
        device: where it runs.
        packing: how documents become rows.
        frozen: bytes of the weights that are not trained.
        checkpoint_blocks: whether the backward pass computes each block anew, and only one is whole at a time.
        trains_head: whether the head's weight is trained, or what it is made of.
        decoded: as `decoded_bytes` counts them.
    """
    size = DTYPES[dtype].size
    tokens = batch_size * seq_len
    qk_size, v_size = model.attention_sizes
    heads = model.num_heads * v_size
    kv = model.kv_heads * (qk_size + v_size)
    widths = 4 * model.hidden_size + 2 * (model.num_heads * qk_size + kv) + heads
    if model.dropout:
        widths += 2 * model.hidden_size
    if model.post_norms:
        widths += 4 * model.hidden_size
    probabilities, blocks, in_hand = 0, 0, _backward_width(model)
    if device == mx.cpu and takes_mlx(model, packing, seq_len, DTYPES[dtype], device):
        probabilities = 2 * model.num_heads * seq_len
    elif device == mx.cpu:
        blocks = _BLOCK_ARRAYS * min(BLOCK_BYTES[mx.cpu], 4 * tokens * model.num_heads * seq_len)
        widths += _LAYER_HEADS * heads
        in_hand += _BACKWARD_HEADS * heads
    per_token = model.num_layers * (widths + probabilities) + _feed_forward_widths(model)
    if checkpoint_blocks:
        per_token = per_token // model.num_layers + model.num_layers * model.hidden_size
    per_token += in_hand
    activations = tokens * (per_token * size + 4 * _router_floats(model)) + blocks
    vocabulary = model.vocab_size or 1
    # The gradient of a head that is trained, summed over the chunks.
    head_gradient = 2 * model.hidden_size if trains_head else 0
    chunk = chunk_rows(tokens, 4 * vocabulary, device, adds_weight=trains_head)
    arrays = _CHUNK_ARRAYS[min(-(-tokens // chunk), len(_CHUNK_ARRAYS)) - 1 if device == mx.cpu else 0]
    moments = 2 if optim.name == "adamw" else 1
    return MemoryEstimate(
        weights=2 * 4 * parameters,
        gradients=(1 if accumulate == 1 else 2) * 4 * parameters,
        optimizer=2 * moments * 4 * parameters,
        activations=activations,
        logits=4 * vocabulary * ((arrays + (model.logit_softcap is not None)) * chunk + head_gradient),
        frozen=frozen,
        decoded=decoded,
    )


def _feed_forward_widths(model: DecoderConfig) -> int:
    """How many elements a token the feed-forward halves of all layers keep."""
    arrays = _MLP_ARRAYS[model.mlp]
    if not isinstance(model, MoEConfig):
        return model.num_layers * arrays * model.mlp_size
    routed = model.experts_per_token * (_ROUTED_ARRAYS * model.hidden_size + arrays * model.expert_size)
    shared = arrays * model.shared_experts * model.expert_size
    sparse = routed + shared
    return model.dense_layers * arrays * model.mlp_size + (model.num_layers - model.dense_layers) * sparse


def _router_floats(model: DecoderConfig) -> int:
    """How many float32 numbers a token the routers of all layers keep."""
    if not isinstance(model, MoEConfig):
        return 0
    return (model.num_layers - model.dense_layers) * _ROUTER_ARRAYS * model.num_experts


def _backward_width(model: DecoderConfig) -> int:
    """How many elements a token the backward pass of one feed-forward half takes, the larger of the two kinds."""
    dense = _MLP_GRADIENTS * model.mlp_size
    if not isinstance(model, MoEConfig):
        return dense
    inside = (model.experts_per_token + model.shared_experts) * model.expert_size
    outside = (_ROUTED_GRADIENTS * model.experts_per_token + _TOKEN_GRADIENTS) * model.hidden_size
    sparse = _MLP_GRADIENTS * inside + outside
    return max(sparse, dense) if model.dense_layers else sparse
