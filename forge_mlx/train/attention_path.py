"""Which path a run's attention takes, and why."""

from forge_mlx.data.stream import Packing
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.kernels.attention.plain import is_better, reason_for_mlx
from forge_mlx.metal.engine import resolve
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.nn.attention import padded_head
import mlx.core as mx


def features(model: DecoderConfig, packing: Packing) -> list[str]:
    """What attention does beside causal order, in words; nothing for plain attention."""
    some = "" if model.sliding_layers is None else f" in {len(model.sliding_layers)} of {model.num_layers} layers"
    found = {
        "documents": packing == "documents",
        f"a window of {model.sliding_window}{some}": model.sliding_window is not None,
        f"scores capped at {model.attention_softcap}": model.attention_softcap is not None,
        "sinks": model.attention_sinks,
    }
    return [name for name, on in found.items() if on]


def takes_mlx(model: DecoderConfig, packing: Packing, seq_len: int, dtype: mx.Dtype, device: mx.DeviceType) -> bool:
    """Whether MLX's own op does it, where no kernels run."""
    return not features(model, packing) and (model.head_size > LARGEST_HEAD or is_better(seq_len, dtype, device))


def describe_attention(
    model: DecoderConfig, packing: Packing, seq_len: int, dtype: mx.Dtype, device: mx.DeviceType
) -> str:
    """What attention does, the path that `flash_attention` takes for it, and why."""
    plain = takes_mlx(model, packing, seq_len, dtype, device)
    if model.head_size > LARGEST_HEAD:
        return f"causal: mx.fast.scaled_dot_product_attention, as no kernel takes heads of {model.head_size}"
    sizes = [padded_head(size) for size in model.attention_sizes]
    engine = resolve("flash_attention", prefer_mlx=reason_for_mlx(*sizes) if plain else None)
    path = "mx.fast.scaled_dot_product_attention" if plain else "blocks of queries in plain MLX operations"
    if engine.name != "reference":
        path = "the kernels of flash_attention"
    return f"{', '.join(['causal', *features(model, packing)])}: {path}, engine {engine}"
