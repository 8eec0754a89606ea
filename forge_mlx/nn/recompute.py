"""Gradient checkpointing: a backward pass that computes a module again instead of keeping what it made."""

from collections.abc import Callable
from typing import Any, Final

from forge_mlx.nn.dropout import Dropout, dropout_keys, generator_state, skip_draws
from forge_mlx.nn.parameters import named_leaves
from forge_mlx.nn.routing_record import RoutingRecord, add_records, are_recorded, routing_records
import mlx.core as mx
import mlx.nn as nn

_DROPOUTS_OF_MLX: Final = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)


def recomputed(module: nn.Module) -> Callable[..., mx.array]:
    """module(x, ...), of which only x and the parameters are kept for the backward pass.

    There the module runs again, with the same dropout masks, and then backward. Gradients reach x and the trainable
    parameters, those of `routing_records` too; none reaches another argument. Values and gradients are what they are
    without it, and so are the draws from MLX's generator.

    Args:
        module: Maps an array, and other arguments, to an array. Its dropout must be `forge_mlx.nn.dropout.Dropout`.

    Returns:
        A function that takes what the module takes.

    Raises:
        ValueError: When the module is in training and has a dropout of another kind, whose masks would be others in the
            second run.
    """
    for name, layer in named_leaves(module):
        is_of_mlx = isinstance(layer, _DROPOUTS_OF_MLX) and not isinstance(layer, Dropout)
        if is_of_mlx and layer.training and layer._p_1 != 1:
            raise ValueError(
                f"[recomputed] {name} must be a forge_mlx.nn.dropout.Dropout, which draws the same mask twice, but is "
                f"a {type(layer).__name__} of mlx.nn. Replace it or turn checkpointing off."
            )

    def run(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        held, state, recorded = module.trainable_parameters(), generator_state(), are_recorded()
        drawn = 0

        def forward(parameters: dict[str, Any], x: mx.array) -> tuple[mx.array, list[RoutingRecord]]:
            nonlocal drawn
            module.update(parameters)
            try:
                with dropout_keys(state) as keys, routing_records() as records:
                    out = module(x, *args, **kwargs)
            finally:
                # Those of the second run must not stay behind either.
                module.update(held)
            drawn = keys.drawn
            return out, records if recorded else []

        out, records = mx.checkpoint(forward)(held, x)
        skip_draws(drawn)
        add_records(RoutingRecord(*record) for record in records)
        return out

    return run
