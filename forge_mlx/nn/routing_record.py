"""What MoE layers did with the tokens of one pass, and the two losses that are made of it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from forge_mlx.kernels.routing import expert_counts
import mlx.core as mx

# Against a division by 0 where every sigmoid score of a token has underflowed.
_TINY: Final = 1e-20


class RoutingRecord(NamedTuple):
    """Sums over the tokens of one pass through one MoE layer; padding counts in none.

    Two records of one layer add up field by field to that of both passes.

    Attributes:
        load: Tokens sent to each expert, int32 `[E]`.
        probability_sum: Sum of the tokens' scores, each token's divided by their sum, float32 `[E]`.
        entropy_sum: Sum of the entropies of those, nats, float32; without a gradient.
        z_sum: Sum of logsumexp(logits)^2, float32.
        tokens: Number of tokens, float32.
    """

    load: mx.array
    probability_sum: mx.array
    entropy_sum: mx.array
    z_sum: mx.array
    tokens: mx.array


_RECORDS: ContextVar[list[RoutingRecord] | None] = ContextVar("routing_records", default=None)


@contextmanager
def routing_records() -> Iterator[list[RoutingRecord]]:
    """Collect a record of every MoE layer that runs inside, in the order in which they run.

    Only what runs in the same thread (or `contextvars` context) is collected, and an inner collection hides the outer
    one. In a function that is compiled or differentiated, open it inside of the function and return what is needed: the
    records hold tracers there.
    """
    records: list[RoutingRecord] = []
    token = _RECORDS.set(records)
    try:
        yield records
    finally:
        _RECORDS.reset(token)


def are_recorded() -> bool:
    """Whether a collection is open."""
    return _RECORDS.get() is not None


def add_records(records: Iterable[RoutingRecord]) -> None:
    """Add records of layers that ran in a collection of their own to the one that is open; without one, do nothing.

    Args:
        records: In the order in which the layers ran.
    """
    found = _RECORDS.get()
    if found is not None:
        found.extend(records)


def record_routing(logits: mx.array, scores: mx.array, indices: mx.array, is_token: mx.array | None) -> None:
    """Add a record to the collection that is open; without one, do nothing.

    Args:
        logits: The router's, float32 `[..., E]`.
        scores: Softmax or sigmoid of them, `[..., E]`.
        indices: The experts of each token, integers `[..., k]`.
        is_token: Whether a position holds a token and no padding, bool `[...]`; None: all do.
    """
    records = _RECORDS.get()
    if records is None:
        return
    counted = mx.ones(logits.shape[:-1]) if is_token is None else is_token.astype(mx.float32)
    shares = scores / (scores.sum(axis=-1, keepdims=True) + _TINY)
    held = mx.stop_gradient(shares)
    entropy = -(held * mx.log(mx.maximum(held, _TINY))).sum(axis=-1)
    sent = indices if is_token is None else mx.where(is_token[..., None], indices, -1)
    record = RoutingRecord(
        load=expert_counts(sent, logits.shape[-1]),
        probability_sum=(shares * counted[..., None]).reshape(-1, shares.shape[-1]).sum(axis=0),
        entropy_sum=(entropy * counted).sum(),
        z_sum=(mx.square(_logsumexp(logits)) * counted).sum(),
        # Of the layer's own indices: two layers with the same output, a sum of one mask, break MLX 0.32.4's compiling.
        tokens=(sent[..., 0] >= 0).astype(mx.float32).sum(),
    )
    records.append(record)


def _logsumexp(logits: mx.array) -> mx.array:
    # MLX has none of an empty array, though each of its rows would have one.
    return mx.logsumexp(logits, axis=-1) if logits.size else mx.zeros(logits.shape[:-1])


def aux_loss(record: RoutingRecord) -> mx.array:
    """E sum_e f_e P_e, the load-balancing loss: 1 when all experts get as much, up to E / k when k get all.

    f_e is the share of the assignments that went to expert e, without a gradient, and P_e the mean of its scores,
    normalised over the experts. With k = 1 it is that of the Switch Transformer (Fedus et al. 2021).

    Args:
        record: Of one pass, or the sum of several, through one layer.

    Returns:
        A float32 scalar; 0 without a token.
    """
    load = mx.stop_gradient(record.load.astype(mx.float32))
    shares = load / mx.maximum(load.sum(), 1)
    means = record.probability_sum / mx.maximum(record.tokens, 1)
    return load.size * (shares * means).sum()


def z_loss(record: RoutingRecord) -> mx.array:
    """mean over tokens of logsumexp(logits)^2, the router z-loss of ST-MoE (Zoph et al. 2022): it keeps logits small.

    Args:
        record: Of one pass, or the sum of several, through one layer.

    Returns:
        A float32 scalar; 0 without a token.
    """
    return record.z_sum / mx.maximum(record.tokens, 1)


def routing_penalty(
    records: Sequence[RoutingRecord], *, aux_loss_weight: float, router_z_loss_weight: float
) -> mx.array:
    """sum over layers of aux_loss_weight * aux_loss + router_z_loss_weight * z_loss.

    Args:
        records: One for each MoE layer.
        aux_loss_weight: Factor of the load-balancing loss.
        router_z_loss_weight: Factor of the router z-loss.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: When there is no record: a forgotten `routing_records` must not turn the losses off.
    """
    if not records:
        raise ValueError(
            "[routing_penalty] records must hold one for each MoE layer but got none. Run the model inside of "
            "routing_records()."
        )
    total = mx.array(0.0)
    for record in records:
        if aux_loss_weight:
            total = total + aux_loss_weight * aux_loss(record)
        if router_z_loss_weight:
            total = total + router_z_loss_weight * z_loss(record)
    return total
