"""The compiled pieces of training: gradients of one batch, one update, one evaluation batch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from forge_mlx.kernels.linear_cross_entropy import gradients_in_forward, linear_cross_entropy
from forge_mlx.kernels.reductions import sum_squares
from forge_mlx.nn.losses import cross_entropy
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.optim import GroupedOptimizer
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

Tree = dict[str, Any]


class _Config(Protocol):
    logit_softcap: float | None


@runtime_checkable
class HasHead(Protocol):
    """A model whose logits are softcap(hidden(tokens) @ head_weight.T)."""

    config: _Config

    def hidden(self, tokens: mx.array) -> mx.array:
        """Map ``[B, T]`` to ``[B, T, C]``."""

    @property
    def head_weight(self) -> mx.array:
        """``[V, C]``."""


def summed_loss(model: nn.Module, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
    """Sum over the targets of ``-ln p(target)``, in nats.

    The logits of a model that has ``hidden`` and ``head_weight`` are computed and dropped chunk by chunk.

    Args:
        model: maps tokens ``[B, T]`` to logits ``[B, T, V]``.
        tokens: int32 ``[B, T + 1]``: the first T are the inputs, the last T the targets.
        mask: float32 ``[B, T]`` of weights of the targets; None: all count once.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if not isinstance(model, HasHead):
        return cross_entropy(model(inputs), targets, weights=mask, reduction="sum")
    return linear_cross_entropy(
        model.hidden(inputs),
        model.head_weight,
        targets,
        softcap=model.config.logit_softcap,
        weights=mask,
        reduction="sum",
    )


def _trains_head(model: nn.Module) -> bool:
    """Whether the head's weight is trainable."""
    if not isinstance(model, HasHead):
        return False
    weight = model.head_weight
    return any(array is weight for _, array in named_arrays(model.trainable_parameters()))


def cast_floats(tree: Tree, dtype: mx.Dtype) -> Tree:
    """The tree with its floating arrays in another dtype."""
    cast: Tree = tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, tree)
    return cast


def global_norm(tree: Tree) -> mx.array:
    """Square root of the sum of squares of all arrays, in float32."""
    return mx.sqrt(sum_squares([array for _, array in named_arrays(tree)]))


class TrainStep:
    """Gradients and updates of one model, compiled once for one batch shape.

    The weights are float32; the forward and backward pass run in ``dtype``. The gradient of an update is that of
    the mean over all its target tokens, however many passes they came in.

    Args:
        model: maps tokens ``[B, T]`` to logits ``[B, T, V]``; its weights are read and written by ``update``.
        optimizer: initialised here on the model's trainable parameters.
        dtype: of the forward and backward pass.
        clip_norm: largest global norm of the gradient, or None.
    """

    def __init__(self, model: nn.Module, optimizer: GroupedOptimizer, dtype: mx.Dtype, clip_norm: float | None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.dtype = dtype
        optimizer.init(model.trainable_parameters())
        mx.eval(model.parameters(), optimizer.state)
        random_state = mx.random.state
        trains_head = _trains_head(model)

        def loss_of(params: Tree, tokens: mx.array) -> mx.array:
            model.update(cast_floats(params, dtype))
            # Every loss here is differentiated: its logits need not be computed twice.
            with gradients_in_forward(weight=trains_head):
                return summed_loss(model, tokens)

        @partial(mx.compile, inputs=random_state, outputs=random_state)
        def first_pass(params: Tree, tokens: mx.array) -> tuple[mx.array, Tree]:
            return mx.value_and_grad(loss_of)(params, tokens)

        @partial(mx.compile, inputs=random_state, outputs=random_state)
        def next_pass(params: Tree, tokens: mx.array, loss: mx.array, grads: Tree) -> tuple[mx.array, Tree]:
            more_loss, more_grads = mx.value_and_grad(loss_of)(params, tokens)
            return loss + more_loss, tree_map(mx.add, grads, more_grads)

        @mx.compile
        def finish(loss: mx.array, grads: Tree, count: mx.array) -> tuple[mx.array, mx.array]:
            return loss / count, global_norm(grads) / count

        @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
        def apply(params: Tree, grads: Tree, scale: mx.array) -> Tree:
            return optimizer.apply_gradients(grads, params, scale)

        self._first_pass, self._next_pass, self._finish, self._apply = first_pass, next_pass, finish, apply
        self._clip_norm = clip_norm

    def gradients(self, batches: Iterable[mx.array], seed: int) -> tuple[float, float, Tree, int]:
        """Mean loss, gradient norm, summed gradients and number of targets of some batches.

        Nothing of the model or the optimizer changes, so that the caller can look at the numbers first.

        Args:
            batches: int32 ``[B, T + 1]`` each.
            seed: of MLX's random generator (dropout): a function of run and step, so that a resumed run draws
                what an unbroken one would have drawn.

        Returns:
            the loss in nats a token, the global norm of its gradient before clipping, the gradients *summed* over
            tokens, and the number of target tokens.
        """
        mx.random.seed(seed)
        params = self.model.trainable_parameters()
        count = 0
        loss = mx.array(0.0)
        grads: Tree = {}
        try:
            for tokens in batches:
                loss, grads = (
                    self._next_pass(params, tokens, loss, grads) if count else self._first_pass(params, tokens)
                )
                count += tokens.shape[0] * (tokens.shape[1] - 1)
                # One pass at a time: otherwise the activations of all passes would be alive together.
                mx.eval(loss, grads)
        finally:
            # Tracing leaves placeholders in the model; put the weights back.
            self.model.update(params)
        mean, norm = self._finish(loss, grads, mx.array(float(count)))
        return float(mean), float(norm), grads, count

    def update(self, grads: Tree, norm: float, count: int, rate_factor: float) -> None:
        """Apply summed gradients: divide by the count, clip to the largest norm, step the optimizer."""
        clip = min(1.0, self._clip_norm / (norm + 1e-6)) if self._clip_norm is not None else 1.0
        self.optimizer.set_rate_factor(rate_factor)
        params = self._apply(self.model.trainable_parameters(), grads, mx.array(clip / count))
        self.model.update(params)
        mx.eval(params, self.optimizer.state)


def make_evaluator(model: nn.Module, dtype: mx.Dtype) -> Callable[[Tree, mx.array, mx.array], mx.array]:
    """A compiled function ``(params, tokens [B, T + 1], mask [B, T]) -> summed loss`` in evaluation mode."""

    @mx.compile
    def evaluate(params: Tree, tokens: mx.array, mask: mx.array) -> mx.array:
        model.update(cast_floats(params, dtype))
        return summed_loss(model, tokens, mask)

    def run(params: Tree, tokens: mx.array, mask: mx.array) -> mx.array:
        model.eval()
        loss = evaluate(params, tokens, mask)
        mx.eval(loss)
        model.update(params)
        model.train()
        return loss

    return run
