"""The compiled pieces of training: gradients of one batch, one update, one evaluation batch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, cast

from forge_mlx.data.batch import Batch
from forge_mlx.kernels.linear_cross_entropy import gradients_in_forward
from forge_mlx.kernels.reductions import sum_squares
from forge_mlx.models.moe import MoE
from forge_mlx.nn.log_probs import HasHead
from forge_mlx.nn.parameters import cast_floats, named_arrays
from forge_mlx.nn.routing_record import RoutingRecord, routing_records
from forge_mlx.optim import GroupedOptimizer
from forge_mlx.train.objective import Arrays, Measures, NextToken, Objective, batch_arrays
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_unflatten

Tree = dict[str, Any]
Recorded: TypeAlias = tuple[mx.array, list[RoutingRecord], Measures]
"""The summed loss, a record for each MoE layer, and what the objective measures beside the loss."""


def trains_head(model: nn.Module) -> bool:
    """Whether the head's weight is trainable: a parameter of ``head_name`` where the model has that, or one itself.

    Args:
        model: any model.
    """
    if not isinstance(model, HasHead):
        return False
    trainable = named_arrays(model.trainable_parameters())
    if (owner := getattr(model, "head_name", None)) is not None:
        return any(name.startswith(f"{owner}.") for name, _ in trainable)
    weight = model.head_weight
    return any(array is weight for _, array in trainable)


def frozen_parameters(model: nn.Module) -> Tree:
    """The parameters that are not trainable, such as the selection biases of routers, as a tree.

    A compiled function must be given them: what it only finds in the model stays what it was in the first call.
    """
    trainable = {name for name, _ in named_arrays(model.trainable_parameters())}
    frozen = [(name, array) for name, array in named_arrays(model.parameters()) if name not in trainable]
    return cast(Tree, tree_unflatten(frozen)) if frozen else {}


def _sum(first: Recorded, second: Recorded) -> Recorded:
    records = [RoutingRecord(*map(mx.add, *pair)) for pair in zip(first[1], second[1], strict=True)]
    return first[0] + second[0], records, {name: first[2][name] + array for name, array in second[2].items()}


def global_norm(tree: Tree) -> mx.array:
    """Square root of the sum of squares of all arrays, in float32."""
    return mx.sqrt(sum_squares([array for _, array in named_arrays(tree)]))


class TrainStep:
    """Gradients and updates of one model, compiled once for one batch shape.

    Trainable weights are float32; the forward and backward pass run in ``dtype``. Frozen ones stay what they are. The
    gradient of an update is that of the mean over all its units that count, targets or pairs, however many passes they
    came in. A model with routing penalties (MoE) adds them to what is differentiated, each pass's in proportion to its
    units; the loss that is reported is the objective's alone.

    Args:
        model: maps tokens ``[B, T]`` to logits ``[B, T, V]``; its weights are read and written by ``update``.
        optimizer: initialised here on the model's trainable parameters.
        dtype: of the forward and backward pass.
        clip_norm: largest global norm of the gradient, or None.
        objective: what is minimised.

    Attributes:
        routing: what the MoE layers recorded in the last call of ``gradients``, summed over its passes; empty for a
            model without such layers.
        measures: what the objective summed beside the loss in the last call of ``gradients``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: GroupedOptimizer,
        dtype: mx.Dtype,
        clip_norm: float | None,
        objective: Objective | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.dtype = dtype
        self.objective: Objective = NextToken() if objective is None else objective
        self.routing: list[RoutingRecord] = []
        self.measures: dict[str, float] = {}
        optimizer.init(model.trainable_parameters())
        mx.eval(model.parameters(), optimizer.state)
        self._clip_norm = clip_norm
        self.recompile()

    def recompile(self) -> None:
        """Trace the model anew with the next call, as after a change that is not in its parameters."""
        model, optimizer, dtype, objective = self.model, self.optimizer, self.dtype, self.objective
        random_state = mx.random.state
        weight = trains_head(model)

        def loss_of(params: Tree, frozen: Tree, arrays: Arrays, count: mx.array) -> tuple[mx.array, Recorded]:
            model.update(frozen)
            model.update(cast_floats(params, dtype))
            # Every loss here is differentiated: its logits need not be computed twice.
            with gradients_in_forward(weight=weight), routing_records() as records:
                loss, measures = objective(model, arrays)
            if not isinstance(model, MoE):
                return loss, (loss, records, measures)
            return loss + count * model.routing_penalty(records), (loss, records, measures)

        @partial(mx.compile, inputs=random_state, outputs=random_state)
        def first_pass(params: Tree, frozen: Tree, arrays: Arrays, count: mx.array) -> tuple[Recorded, Tree]:
            (_, recorded), grads = mx.value_and_grad(loss_of)(params, frozen, arrays, count)
            return recorded, grads

        @partial(mx.compile, inputs=random_state, outputs=random_state)
        def next_pass(
            params: Tree, frozen: Tree, arrays: Arrays, count: mx.array, recorded: Recorded, grads: Tree
        ) -> tuple[Recorded, Tree]:
            (_, more), more_grads = mx.value_and_grad(loss_of)(params, frozen, arrays, count)
            return _sum(recorded, more), tree_map(mx.add, grads, more_grads)

        @mx.compile
        def finish(loss: mx.array, grads: Tree, count: mx.array) -> tuple[mx.array, mx.array]:
            return loss / count, global_norm(grads) / count

        @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
        def apply(params: Tree, grads: Tree, scale: mx.array) -> Tree:
            return optimizer.apply_gradients(grads, params, scale)

        self._first_pass, self._next_pass, self._finish, self._apply = first_pass, next_pass, finish, apply

    def gradients(self, batches: Iterable[Batch], seed: int) -> tuple[float, float, Tree, int]:
        """Mean loss, gradient norm, summed gradients and number of units of some batches.

        Nothing of the model or the optimizer changes, so that the caller can look at the numbers first.

        Args:
            batches: rows of tokens, at least one unit that counts in all.
            seed: of MLX's random generator (dropout): a function of run and step, so that a resumed run draws
                what an unbroken one would have drawn.

        Returns:
            the loss in nats a unit, the global norm of its gradient before clipping, the gradients *summed* over
            units, and the number of units that count.
        """
        mx.random.seed(seed)
        params, frozen = self.model.trainable_parameters(), frozen_parameters(self.model)
        count = 0
        recorded: Recorded = (mx.array(0.0), [], {})
        grads: Tree = {}
        try:
            for index, batch in enumerate(batches):
                arrays, size = batch_arrays(batch), self.objective.count(batch)
                units = mx.array(float(size))
                recorded, grads = (
                    self._next_pass(params, frozen, arrays, units, recorded, grads)
                    if index
                    else self._first_pass(params, frozen, arrays, units)
                )
                count += size
                # One pass at a time: otherwise the activations of all passes would be alive together.
                mx.eval(recorded, grads)
        finally:
            # Tracing leaves placeholders in the model; put the weights back.
            self.model.update(params)
            self.model.update(frozen)
        loss, records, measures = recorded
        # Compiling makes plain tuples of them.
        self.routing = [RoutingRecord(*record) for record in records]
        self.measures = {name: float(array) for name, array in measures.items()}
        mean, norm = self._finish(loss, grads, mx.array(float(count)))
        return float(mean), float(norm), grads, count

    def update(self, grads: Tree, norm: float, count: int, rate_factor: float) -> None:
        """Apply summed gradients: divide by the count, clip to the largest norm, step the optimizer."""
        clip = min(1.0, self._clip_norm / (norm + 1e-6)) if self._clip_norm is not None else 1.0
        self.optimizer.set_rate_factor(rate_factor)
        params = self._apply(self.model.trainable_parameters(), grads, mx.array(clip / count))
        self.model.update(params)
        mx.eval(params, self.optimizer.state)


def make_evaluator(
    model: nn.Module, dtype: mx.Dtype, objective: Objective | None = None
) -> Callable[[Tree, Batch], tuple[mx.array, Measures]]:
    """A compiled function ``(params, batch) -> summed loss, measures`` in evaluation mode.

    Args:
        model: the model.
        dtype: of the forward pass.
        objective: whose loss; None: the next token's.
    """
    chosen: Objective = NextToken() if objective is None else objective

    @mx.compile
    def evaluate(params: Tree, frozen: Tree, arrays: Arrays) -> tuple[mx.array, Measures]:
        model.update(frozen)
        model.update(cast_floats(params, dtype))
        return chosen(model, arrays)

    def run(params: Tree, batch: Batch) -> tuple[mx.array, Measures]:
        frozen = frozen_parameters(model)
        model.eval()
        try:
            found = evaluate(params, frozen, batch_arrays(batch))
            mx.eval(found)
        finally:
            model.update(params)
            model.update(frozen)
            model.train()
        return found

    return run
