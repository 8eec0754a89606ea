"""Who differentiates a loss may say so beforehand: its gradients then come from the products that the loss needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Variable = Literal["hidden", "weight", "bias"]
"""An array that linear_cross_entropy has a gradient for, beside the weights of the targets."""

_chosen: ContextVar[tuple[Variable, ...]] = ContextVar("forge_mlx_gradients_in_forward", default=())


@contextmanager
def gradients_in_forward(*, weight: bool = True) -> Iterator[None]:
    """Compute gradients with the loss: 3 products instead of 4, and the exponentials once instead of twice.

    For the calls of `linear_cross_entropy` in a `with` block, reductions "mean" and "sum"::

        def loss(model, tokens, targets):
            with gradients_in_forward():
                return linear_cross_entropy(model.hidden(tokens), model.head_weight, targets)

        nn.value_and_grad(model, loss)(model, tokens, targets)

    Otherwise the backward pass computes each chunk's logits once more. The gradients are the same. They are computed
    whether they are used or not, so a loss that is only looked at takes three times the time in here, and a loss in
    `mx.checkpoint` computes them twice. The choice belongs to the thread or task that makes it.

    Args:
        weight: Whether the gradients of weight and bias are computed too. False where those are frozen: 2 products;
            should their gradients be needed after all, the backward pass computes them.
    """
    token = _chosen.set(("hidden", "weight", "bias") if weight else ("hidden",))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_variables() -> tuple[Variable, ...]:
    """Whose gradients the forward is to compute; none outside `gradients_in_forward`."""
    return _chosen.get()
