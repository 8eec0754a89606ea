"""Optimizers over groups of parameters: decay on matrices only, Muon on hidden matrices only."""

from collections.abc import Callable
from typing import Any

from forge_mlx.nn.parameters import is_matrix, named_arrays
from forge_mlx.optim.adamw import AdamW
from forge_mlx.optim.config import OptimConfig
import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map, tree_merge

ParameterFilter = Callable[[str, mx.array], bool]


class DecoupledMuon(optim.Muon):
    """MLX's Muon with decoupled weight decay: ``w <- w (1 - lr wd) - lr orthogonalised(momentum)``.

    A parameter of three axes is a stack of matrices, the experts of an MoE layer, and each is orthogonalised by itself;
    MLX's would take the stack for one wide matrix.

    MLX adds the decay to the gradient, where the orthogonalisation turns it into a direction of unit scale.
    Liu et al. 2025 ("Muon is scalable for LLM training") decay the weights themselves, as AdamW does.
    """

    def __init__(self, learning_rate: float, momentum: float, weight_decay: float, ns_steps: int) -> None:
        super().__init__(learning_rate, momentum=momentum, weight_decay=0.0, nesterov=True, ns_steps=ns_steps)
        self.decoupled_decay = weight_decay

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """One update of one matrix, or of a stack of them."""
        decayed = parameter * (1 - self.learning_rate * self.decoupled_decay)

        def update(gradient: mx.array, parameter: mx.array, momentum: mx.array) -> tuple[mx.array, mx.array]:
            own = {"v": momentum}
            return super(DecoupledMuon, self).apply_single(gradient, parameter, own), own["v"]

        is_stack = gradient.ndim > 2
        updated, state["v"] = (mx.vmap(update) if is_stack else update)(gradient, decayed, state["v"])
        return updated


class GroupedOptimizer(optim.MultiOptimizer):
    """Several optimizers, each over the parameters its filter selects, under one learning-rate schedule.

    Args:
        optimizers: one a group; a parameter belongs to the first whose filter accepts ``(name, array)``.
        filters: one for each optimizer but the last, which takes what is left.
    """

    def __init__(self, optimizers: list[optim.Optimizer], filters: list[ParameterFilter]) -> None:
        super().__init__(optimizers, filters)
        self._peak_rates = [float(o.learning_rate) for o in optimizers]

    def set_rate_factor(self, factor: float) -> None:
        """Set every group's learning rate to ``factor`` times its peak."""
        for optimizer, peak in zip(self.optimizers, self._peak_rates, strict=True):
            optimizer.learning_rate = peak * factor

    def apply_gradients(
        self, gradients: dict[str, Any], parameters: dict[str, Any], grad_scale: float | mx.array = 1.0
    ) -> dict[str, Any]:
        """One step of every group.

        Args:
            gradients: a tree of arrays.
            parameters: a tree with at least these parameters.
            grad_scale: factor on all gradients; AdamW multiplies with it in its own pass.

        Returns:
            the new parameters, in the form of the gradients.
        """
        updated: dict[str, Any] = {}
        for optimizer, part in zip(self.optimizers, self._split_dictionary(gradients), strict=True):
            if isinstance(optimizer, AdamW):
                new = optimizer.apply_gradients(part, parameters, grad_scale)
            else:
                new = optimizer.apply_gradients(tree_map(lambda g: g * grad_scale, part), parameters)
            updated = tree_merge(updated, new)
        return updated

    def flat_state(self) -> dict[str, mx.array]:
        """The whole state as one flat dictionary of arrays by parameter, ready for a safetensors file."""
        return {
            f"states.{index}.{name}": array
            for index, optimizer in enumerate(self.optimizers)
            for name, array in _flat_state(optimizer).items()
        }

    def load_flat_state(self, arrays: dict[str, mx.array]) -> None:
        """Restore what ``flat_state`` returned.

        The optimizer must have been initialised on the same parameters.

        Raises:
            ValueError: names, shapes or dtypes differ from this optimizer's own.
        """
        own = self.flat_state()
        if missing := sorted(own.keys() - arrays.keys()):
            raise ValueError(f"[GroupedOptimizer] the saved state lacks {', '.join(missing)}.")
        if extra := sorted(arrays.keys() - own.keys()):
            raise ValueError(f"[GroupedOptimizer] the saved state has no place for {', '.join(extra)}.")
        for name, array in arrays.items():
            if array.shape != own[name].shape or array.dtype != own[name].dtype:
                raise ValueError(
                    f"[GroupedOptimizer] {name} must be {own[name].dtype} {own[name].shape} "
                    f"but got {array.dtype} {array.shape}."
                )
        for index, optimizer in enumerate(self.optimizers):
            prefix = f"states.{index}"
            if isinstance(optimizer, AdamW):
                names = _flat_state(optimizer)
                optimizer.load_flat_state({name: arrays[f"{prefix}.{name}"] for name in names})
            else:
                _assign(optimizer.state, arrays, prefix)


def _flat_state(optimizer: optim.Optimizer) -> dict[str, mx.array]:
    """An optimizer's state by dotted names, AdamW's by parameter."""
    return optimizer.flat_state() if isinstance(optimizer, AdamW) else dict(named_arrays(optimizer.state))


def _assign(tree: dict[str, Any] | list[Any], arrays: dict[str, mx.array], prefix: str) -> None:
    """Replace the leaves of ``tree`` in place: compiled functions hold on to the containers."""
    keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    for key in keys:
        path = f"{prefix}.{key}"
        if isinstance(tree[key], (dict, list)):
            _assign(tree[key], arrays, path)
        else:
            tree[key] = arrays[path]


def is_hidden_matrix(name: str, parameter: mx.array) -> bool:
    """Whether Muon takes a parameter: the matrices between embedding and head, also routers' and each expert's."""
    return parameter.ndim in (2, 3) and name.startswith("layers.")


def is_stack_of_experts(name: str, parameter: mx.array) -> bool:
    """Whether a parameter is the matrices of an MoE layer's experts."""
    return parameter.ndim == 3 and is_hidden_matrix(name, parameter)


def build_optimizer(config: OptimConfig) -> GroupedOptimizer:
    """The optimizer that a config describes.

    AdamW follows Loshchilov and Hutter 2019 with bias correction, as PyTorch's. Muon is Jordan et al. 2024.
    """

    def adamw(weight_decay: float) -> AdamW:
        return AdamW(config.lr, config.betas, config.eps, weight_decay)

    optimizers: list[optim.Optimizer] = [adamw(config.weight_decay), adamw(0.0)]
    filters: list[ParameterFilter] = [lambda _name, parameter: is_matrix(parameter)]
    if config.name == "muon":
        groups: list[tuple[float, ParameterFilter]] = [(config.muon_lr, is_hidden_matrix)]
        if config.muon_expert_lr is not None:
            groups.insert(0, (config.muon_expert_lr, is_stack_of_experts))
        muons = [DecoupledMuon(lr, config.muon_momentum, config.weight_decay, config.muon_steps) for lr, _ in groups]
        optimizers = [*muons, *optimizers]
        filters = [*(group for _, group in groups), *filters]
    return GroupedOptimizer(optimizers, filters)
