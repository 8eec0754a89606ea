"""Sums over the steps between two training records."""

from dataclasses import dataclass, field
import math
from typing import Any

from forge_mlx.train.routing_log import RoutingWindow


@dataclass
class Window:
    """Sums since the last training record.

    Attributes:
        nats: loss, summed over units.
        seconds: time in training steps, that of evaluations and checkpoints not counted.
        tokens: target tokens.
        bytes: UTF-8 bytes of their text.
        pairs: pairs, where these are what the loss is counted in.
        measures: what the objective summed beside the loss.
        routing: what the routers of an MoE model did.
    """

    nats: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    bytes: int = 0
    pairs: int = 0
    measures: dict[str, float] = field(default_factory=dict)
    routing: RoutingWindow = field(default_factory=RoutingWindow)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Window":
        """A window that a checkpoint has kept as dictionaries."""
        return cls(**state | {"routing": RoutingWindow(**state.get("routing", {}))})

    @property
    def count(self) -> int:
        """The units that the loss is counted in."""
        return self.pairs or self.tokens

    @property
    def loss(self) -> float:
        """Mean loss, nats a unit."""
        return self.nats / self.count

    @property
    def bits_per_byte(self) -> float | None:
        """Mean loss in bits a byte of text; None of pairs, whose loss is no text's."""
        return None if self.pairs else bits_per_byte(self.nats, self.bytes)

    def add(self, nats: float, tokens: int, num_bytes: int, pairs: int, measures: dict[str, float]) -> None:
        """Another step: its sums."""
        self.nats += nats
        self.tokens += tokens
        self.bytes += num_bytes
        self.pairs += pairs
        self.measures = {name: self.measures.get(name, 0.0) + value for name, value in measures.items()}


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Nats of a text as bits a byte of it."""
    return nats / math.log(2) / max(num_bytes, 1)
