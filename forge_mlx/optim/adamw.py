"""AdamW by the fused step of `forge_mlx.kernels`: one launch for each large tensor, one for all small ones together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import Any, Final

from forge_mlx.kernels.optimizer.op import AdamWStep
from forge_mlx.kernels.optimizer.reference import Options
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map, tree_map_with_path, tree_unflatten

Tree = dict[str, Any]
State = dict[str, mx.array]

SMALL: Final = 16384
"""Elements up to which a tensor is stepped together with others."""
_FLAT: Final = "flat:"
_HYPERPARAMETERS: Final = ("step", "learning_rate")


class AdamW(optim.Optimizer):
    """AdamW with bias correction (as PyTorch's), float32 moments, and MLX's optimizer interface.

    Tensors of up to `SMALL` elements, such as norms and biases, are kept together: the moments of those of one dtype
    are flat arrays, ``state["flat:float32"]["m"]``, in the order of the parameters' names; their weights and gradients
    are joined in each step. `flat_state` and `load_flat_state` give and take all moments by parameter, under the names
    that MLX's AdamW has for them, as ``norm.weight.m``.

    Args:
        learning_rate: A number, or a function of the step (a 0-d array, 0 before the first) that returns a 0-d array.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled: w <- w (1 - lr wd), of every parameter.
        bias_correction: Whether the moments are divided by 1 - b^t.
        master_weights: Whether the state has a float32 copy of each 16-bit parameter, which takes the updates.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[mx.array], mx.array],
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        master_weights: bool = False,
    ) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        b1, b2 = betas
        self.options = Options((float(b1), float(b2)), float(eps), float(weight_decay), bias_correction)
        self.master_weights = master_weights
        # Of each parameter its shape, and the key of the flat state that it is in, if it is in one.
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._keys: dict[str, str | None] = {}

    def init(self, parameters: Tree) -> None:
        """Make a state for each parameter that has none; what `state` holds already stays.

        Args:
            parameters: A tree of arrays. For a state that was saved as it is, with flat arrays: all parameters.

        Raises:
            ValueError: A flat array in `state` is not of the size of the small parameters.
        """
        arrays = dict(named_arrays(parameters))
        if not self._initialized:
            # A new state, or one that was put in its place: what its flat arrays hold follows from the parameters.
            self._shapes, self._keys = {}, {}
            self._note(arrays)
        states = self._states()
        self._note({name: array for name, array in arrays.items() if name not in self._keys})
        for name, array in arrays.items():
            new: State = {}
            self.init_single(array, new)
            states[name] = new | states.get(name, {})
        self._store(states)
        self._initialized = True

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Moments of zeros and, with master weights, the copy of a 16-bit parameter.

        Args:
            parameter: One parameter.
            state: Where they are put.
        """
        state["m"] = mx.zeros(parameter.shape, mx.float32)
        state["v"] = mx.zeros(parameter.shape, mx.float32)
        if self.master_weights and parameter.dtype != mx.float32:
            state["master"] = parameter.astype(mx.float32)

    def apply_gradients(self, gradients: Tree, parameters: Tree, grad_scale: float | mx.array = 1.0) -> Tree:
        """One step.

        Args:
            gradients: A tree of arrays. A parameter without a gradient, and its moments, stay as they are.
            parameters: A tree with at least these parameters.
            grad_scale: Factor on all gradients, a number or a 0-d array: it costs no pass over them.

        Returns:
            The new parameters in the form of the gradients.

        Raises:
            ValueError: A gradient of a parameter that `init` has not seen; a gradient or parameter of another shape; a
                small parameter of another dtype than in `init`.
        """
        chosen = tree_map(lambda _, parameter: parameter, gradients, parameters)
        if not self._initialized:
            self.init(chosen)
        weights, grads = dict(named_arrays(chosen)), dict(named_arrays(gradients))
        if unknown := [name for name in grads if name not in self._keys]:
            raise ValueError(f"[AdamW] {unknown[0]} has no state: call init with the parameters that are trained now.")
        self._check(weights, grads)
        for name, schedule in self._schedulers.items():
            self.state[name] = schedule(self.step)
        self.state["step"] = self.step + 1

        step = AdamWStep(self.options, self.learning_rate, self.step, grad_scale)
        updated = {
            name: _step(step, weights[name], grad, _at(self.state, name))
            for name, grad in grads.items()
            if self._keys[name] is None
        }
        for key in self._flat_keys():
            names = [name for name in self._members(key) if name in grads]
            if names:
                updated |= self._flat_step(step, key, names, weights, grads)
        new: Tree = tree_map_with_path(lambda name, _: updated[name], gradients)
        return new

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """One step of one tensor with a state of its own.

        Args:
            gradient: Its gradient.
            parameter: The tensor.
            state: As `init_single` made it; changed.

        Returns:
            The new tensor.
        """
        return _step(AdamWStep(self.options, self.learning_rate, self.step), parameter, gradient, state)

    def flat_state(self) -> State:
        """The whole state by parameter: "step", "learning_rate", and "<name>.m", "<name>.v", "<name>.master"."""
        moments = {f"{name}.{kind}": array for name, state in self._states().items() for kind, array in state.items()}
        return {name: self.state[name] for name in _HYPERPARAMETERS} | moments

    def load_flat_state(self, arrays: Mapping[str, mx.array]) -> None:
        """Restore what `flat_state` returned.

        Args:
            arrays: Of the parameters that `init` has seen, all with the names and shapes of `flat_state`.
        """
        self.state.update({name: arrays[name] for name in _HYPERPARAMETERS})
        self._store(_by_parameter((name, array) for name, array in arrays.items() if name not in _HYPERPARAMETERS))

    def _flat_step(self, step: AdamWStep, key: str, names: list[str], weights: State, grads: State) -> State:
        """The step of some members of a flat state, as one tensor."""
        flat, members = self.state[key], self._members(key)
        some = len(names) < len(members)
        parts = {kind: self._split(array, members) for kind, array in flat.items()} if some else {}
        state = {kind: _join(of[name] for name in names) for kind, of in parts.items()} if some else flat
        weight = _step(step, _join(weights[name] for name in names), _join(grads[name] for name in names), state)
        for kind, of in parts.items():
            of |= self._split(state[kind], names)
            flat[kind] = _join(of[name] for name in members)
        return {name: array.reshape(self._shapes[name]) for name, array in self._split(weight, names).items()}

    def _check(self, weights: State, grads: State) -> None:
        """Raise for what the joined arrays of small parameters would hide."""
        for name, grad in grads.items():
            shape, weight = self._shapes[name], weights[name]
            for what, array in (("the parameter", weight), ("its gradient", grad)):
                if array.shape != shape:
                    raise ValueError(f"[AdamW] {name}: {what} must have the shape {shape} but got {array.shape}.")
            key = self._keys[name]
            if key is not None and key != _flat_key(weight):
                raise ValueError(
                    f"[AdamW] {name} must be {key.removeprefix(_FLAT)}, as it was in init, but got "
                    f"{dtype_name(weight.dtype)}. Convert parameters before the optimizer sees them."
                )

    def _note(self, arrays: State) -> None:
        """Decide where the state of each parameter is kept."""
        for name, array in arrays.items():
            self._shapes[name] = array.shape
            self._keys[name] = _flat_key(array) if array.size <= SMALL else None

    def _flat_keys(self) -> list[str]:
        return [key for key in self.state if key.startswith(_FLAT)]

    def _members(self, key: str) -> list[str]:
        return sorted(name for name, own in self._keys.items() if own == key)

    def _split(self, flat: mx.array, names: list[str]) -> State:
        """The parts of a flat array, as flat as it is."""
        sizes = [math.prod(self._shapes[name]) for name in names]
        if flat.size != sum(sizes):
            raise ValueError(
                f"[AdamW] a flat state of these {len(names)} parameters must have {sum(sizes)} elements but has "
                f"{flat.size}: it is that of other parameters."
            )
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
        return dict(zip(names, mx.split(flat, ends) if ends else [flat], strict=True))

    def _states(self) -> dict[str, State]:
        """Each parameter's own state, wherever it is kept."""
        keys = self._flat_keys()
        tree = {key: part for key, part in self.state.items() if key not in _HYPERPARAMETERS and key not in keys}
        states = _by_parameter(named_arrays(tree))
        for key in keys:
            for kind, array in self.state[key].items():
                for name, part in self._split(array, self._members(key)).items():
                    states.setdefault(name, {})[kind] = part.reshape(self._shapes[name])
        return states

    def _store(self, states: dict[str, State]) -> None:
        """Put each parameter's state where it is kept."""
        own = [
            (f"{name}.{kind}", array)
            for name, state in states.items()
            if self._keys.get(name) is None
            for kind, array in state.items()
        ]
        state: Tree = self.state
        kept = {name: state[name] for name in _HYPERPARAMETERS}
        # The same container: compiled functions hold on to it.
        state.clear()
        state.update(kept | (tree_unflatten(own) if own else {}))
        for key in sorted({key for key in self._keys.values() if key is not None}):
            members = self._members(key)
            state[key] = {kind: _join(states[name][kind] for name in members) for kind in states[members[0]]}


def _step(step: AdamWStep, weight: mx.array, grad: mx.array, state: State) -> mx.array:
    """The new weight; the state is changed."""
    new, state["m"], state["v"], *master = step(weight, grad, state["m"], state["v"], state.get("master"))
    if master:
        state["master"] = master[0]
    return new


def _flat_key(parameter: mx.array) -> str:
    """Where the state of a small parameter is kept."""
    return f"{_FLAT}{dtype_name(parameter.dtype)}"


def _by_parameter(arrays: Iterable[tuple[str, mx.array]]) -> dict[str, State]:
    """States by the parameter's name, of arrays named as norm.weight.m is."""
    states: dict[str, State] = {}
    for name, array in arrays:
        parameter, _, kind = name.rpartition(".")
        states.setdefault(parameter, {})[kind] = array
    return states


def _at(tree: Any, name: str) -> State:
    """What a tree holds under a dotted name."""
    for part in name.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    state: State = tree
    return state


def _join(arrays: Iterable[mx.array]) -> mx.array:
    flat = [array.reshape(-1) for array in arrays]
    return flat[0] if len(flat) == 1 else mx.concatenate(flat)
