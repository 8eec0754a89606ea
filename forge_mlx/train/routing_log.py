"""What the routers of an MoE model did between two training records: loads, entropies, penalties, bias range."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forge_mlx.nn.routing_record import RoutingRecord, aux_loss, z_loss
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_SUMS: Final = ("entropy", "aux_loss", "z_loss")


@dataclass
class RoutingWindow:
    """Sums over the steps since the last training record; lists of numbers alone, as a checkpoint keeps it.

    Attributes:
        steps: how many.
        load: tokens sent to each expert, ``[MoE layers][E]``.
        dropped: expert places that tokens asked for and did not get. Nothing in this model drops any: it is counted,
            not assumed.
        entropy: of the router's distribution over experts, nats, a mean over the tokens of each step, 0 without any;
            ``[MoE layers]``.
        aux_loss: the Switch loss of each step before its weight, ``[MoE layers]``.
        z_loss: the router z-loss of each step before its weight, ``[MoE layers]``.
    """

    steps: int = 0
    load: list[list[int]] = field(default_factory=list)
    dropped: int = 0
    entropy: list[float] = field(default_factory=list)
    aux_loss: list[float] = field(default_factory=list)
    z_loss: list[float] = field(default_factory=list)

    def add(self, records: Sequence[RoutingRecord], experts_per_token: int) -> None:
        """Count one step in.

        Args:
            records: one for each MoE layer, summed over the step's passes.
            experts_per_token: how many experts each token asks for.
        """
        if not records:
            return
        found = {
            "entropy": mx.stack([record.entropy_sum / mx.maximum(record.tokens, 1) for record in records]),
            "aux_loss": mx.stack([aux_loss(record) for record in records]),
            "z_loss": mx.stack([z_loss(record) for record in records]),
        }
        load = np.array(mx.stack([record.load for record in records])).astype(np.int64)
        tokens = mx.stack([record.tokens for record in records])
        self.steps += 1
        self.dropped += round(float(np.array(tokens).sum()) * experts_per_token) - int(load.sum())
        self.load = (load + np.array(self.load, np.int64) if self.load else load).tolist()
        for name in _SUMS:
            before = getattr(self, name) or [0.0] * len(records)
            setattr(self, name, (np.array(found[name], np.float64) + before).tolist())

    def fields(self, layers: Sequence[int], biases: Sequence[mx.array | None]) -> dict[str, Any]:
        """What the training record says under ``moe``; nothing without MoE layers.

        Args:
            layers: indices of the MoE layers.
            biases: their selection biases now, ``[E]`` each, None without.
        """
        if not self.steps:
            return {}
        load: NDArray[np.int64] = np.array(self.load)
        ranges = None if any(bias is None for bias in biases) else [_range(bias) for bias in biases]
        means = {name: [value / self.steps for value in getattr(self, name)] for name in _SUMS}
        return {
            "layers": list(layers),
            "load": self.load,
            "max_over_mean": (load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)).tolist(),
            "dropped": self.dropped,
            "bias_range": ranges,
            **means,
        }


def _range(bias: mx.array | None) -> list[float]:
    values = np.array(bias)
    return [float(values.min()), float(values.max())]
