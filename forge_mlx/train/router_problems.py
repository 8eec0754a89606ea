"""What keeps the router of a new model from learning, though a published model may be so."""

from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.moe import MoEConfig


def router_problems(model: DecoderConfig) -> list[str]:
    """What would leave a router without a gradient from the loss, a line for each key.

    Args:
        model: the shape of a new model.
    """
    if not isinstance(model, MoEConfig):
        return []
    if model.num_experts == 1:
        return [
            "model.num_experts must be at least 2 in a new model but got 1: there would be nothing to choose. Raise "
            "it, or set model.arch to gpt"
        ]
    if model.experts_per_token == 1 and model.normalize_gates:
        return [
            "model.normalize_gates must be false with experts_per_token: 1 but got true, which is its default: the one "
            "gate would always be 1, and the router would learn nothing from the loss. Set it to false"
        ]
    return []
