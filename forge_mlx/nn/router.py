"""Which experts each token goes to, and with what weights: the routing of Mixtral, OLMoE, Qwen3-MoE and DeepSeek-V3."""

import math
from numbers import Integral
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from forge_mlx.kernels._common.checks import (
    check_axes,
    check_constant,
    check_float32_range,
    check_floating,
    check_integers,
    check_shape,
    is_number,
)
from forge_mlx.kernels.activations import sigmoid
from forge_mlx.kernels.matmul import matmul
from forge_mlx.kernels.routing import topk_renorm
from forge_mlx.kernels.routing.tiles import MAX_EXPERTS
from forge_mlx.kernels.softmax import softmax
from forge_mlx.nn.parameters import StaysFrozen
import mlx.core as mx
import mlx.nn as nn

RouterScores: TypeAlias = Literal["softmax", "sigmoid"]

_BIAS: Final = "selection_bias"


class Routing(NamedTuple):
    """What a router decides for each token.

    Attributes:
        gates: Weights of the experts, float32 `[..., E]`: 0 but for the k that are chosen.
        indices: The chosen experts, int32 `[..., k]`.
        scores: Softmax or sigmoid of the logits, float32 `[..., E]`.
        logits: float32 `[..., E]`.
    """

    gates: mx.array
    indices: mx.array
    scores: mx.array
    logits: mx.array


class Router(nn.Module):
    """p = softmax or sigmoid of x W^T; the k experts of the largest p + selection_bias; their p are the gates.

    All in float32, whatever the dtype of x and W: a choice must not turn on rounding. A tie goes to the expert of the
    lowest index. The gates are divided by their sum (normalize), then multiplied by `scaling`.

    With groups, the experts are split into `groups` of neighbours; a group's score is the sum of the two largest
    p + selection_bias in it, and only experts of the best `groups_per_token` groups can be chosen (DeepSeek-V3, 2024).

    `selection_bias` `[E]`, float32, evens out the experts' loads without a loss (Wang et al. 2024): it takes part in
    the choice alone, never in the gates, and has no gradient. `balance` moves it. It is in `parameters()` and so in
    every checkpoint, but never trainable, not even after `unfreeze()`. It stays float32 when a model is cast or loads
    16-bit weights: the cast rounds what it holds once, and steps of 0.001 move it as before.

    Args:
        hidden_size: Width C of the tokens.
        num_experts: Number of experts E, at most 1024.
        experts_per_token: How many of them each token goes to, k.
        scores: What makes scores of the logits.
        normalize: Whether the gates of a token are divided by their sum.
        scaling: Factor on the gates, over 0.
        groups: Number of groups, a divisor of E.
        groups_per_token: How many of them a token can choose from.
        selection_bias: Whether there is a selection bias, at first 0.

    Raises:
        ValueError: When the choice is impossible: k experts are more than there are to choose from, or the groups
            cannot be formed; for other scores, for sizes that are no integers of 1 or more, a normalize or
            selection_bias that is no bool, a scaling that is not over 0 and finite in float32.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        scores: RouterScores = "softmax",
        normalize: bool = True,
        scaling: float = 1.0,
        groups: int = 1,
        groups_per_token: int = 1,
        selection_bias: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(
            hidden_size=hidden_size,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            groups=groups,
            groups_per_token=groups_per_token,
        )
        _check_switches(normalize=normalize, selection_bias=selection_bias)
        _check_scaling(scaling)
        problem = impossible_choice(num_experts, experts_per_token, groups, groups_per_token)
        if problem is not None:
            raise ValueError(f"[Router] {problem}")
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"[Router] scores must be softmax or sigmoid but got {scores!r}.")
        self.experts_per_token = experts_per_token
        self.scores = scores
        self.normalize = normalize
        self.scaling = scaling
        self.groups = groups
        self.groups_per_token = groups_per_token
        self.weight = mx.random.normal((num_experts, hidden_size)) * 0.02
        if selection_bias:
            self.selection_bias = mx.zeros((num_experts,))
            self._no_grad = StaysFrozen({_BIAS})

    def __call__(self, x: mx.array) -> Routing:
        """Route tokens.

        Args:
            x: `[..., C]`, float32, float16 or bfloat16.

        Raises:
            ValueError: For an x of another dtype or width.
        """
        check_floating("Router", x=x)
        check_axes("Router", 1, x=x)
        width = self.weight.shape[1]
        check_shape("Router", "x", x, (*x.shape[:-1], width), f"whose last axis is the router's hidden_size, {width}")
        if x.ndim == 1:
            return Routing(*(each[0] for each in self(x[None])))
        logits = matmul(x.astype(mx.float32), self.weight.astype(mx.float32), transpose_b=True)
        scores = softmax(logits) if self.scores == "softmax" else sigmoid(logits)
        gates, indices = topk_renorm(scores, self.experts_per_token, self._preference(scores), self.normalize)
        return Routing(gates if self.scaling == 1 else gates * self.scaling, indices, scores, logits)

    def balance(self, load: mx.array, rate: float) -> None:
        """selection_bias += rate * sign(mean(load) - load): experts with too few tokens become likelier.

        Args:
            load: Tokens sent to each expert, integers `[E]`.
            rate: Size of the step, 0 or more, finite in float32.

        Raises:
            ValueError: Without a selection bias, or for another load or rate.
        """
        if _BIAS not in self:
            raise ValueError("[Router.balance] there must be a selection bias but got none. Set selection_bias.")
        check_integers("Router.balance", load=load)
        check_shape("Router.balance", "load", load, self.selection_bias.shape, "that of the selection bias")
        if not (is_number(rate) and math.isfinite(rate) and rate >= 0):
            raise ValueError(f"[Router.balance] rate must be a finite number of 0 or more but got {rate!r}.")
        check_float32_range("Router.balance", "rate", rate)
        # Integers compare exactly: at balance the bias rests.
        load = load.astype(mx.int64)
        missing = mx.sign(load.sum() - load.size * load).astype(mx.float32)
        self.selection_bias = self.selection_bias + rate * missing

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a parameter; the selection bias becomes float32."""
        # The one place that all ways come through: `set_dtype`, `update` and `load_weights` of a model that has routers
        # call no other method of theirs. In 16 bits steps of 0.001 would be rounded away.
        if key == _BIAS and isinstance(value, mx.array) and value.dtype != mx.float32:
            value = value.astype(mx.float32)
        super().__setitem__(key, value)

    def _preference(self, scores: mx.array) -> mx.array | None:
        """What is added to the scores for the choice: the bias, and -inf for experts of groups that are out."""
        bias = mx.stop_gradient(self.selection_bias) if _BIAS in self else None
        if self.groups == self.groups_per_token:
            return bias
        chosen = mx.stop_gradient(scores) if bias is None else mx.stop_gradient(scores) + bias
        grouped = chosen.reshape(*chosen.shape[:-1], self.groups, chosen.shape[-1] // self.groups)
        of_groups = mx.topk(grouped, 2, axis=-1).sum(axis=-1)
        # Ties go to the lowest index, as among experts.
        order = mx.argsort(-of_groups, axis=-1)[..., : self.groups_per_token]
        is_in = mx.any(order[..., None] == mx.arange(self.groups, dtype=order.dtype), axis=-2)
        out = mx.where(is_in, 0.0, -mx.inf)
        out = mx.broadcast_to(out[..., None], grouped.shape).reshape(chosen.shape)
        return out if bias is None else out + bias

    def _extra_repr(self) -> str:
        experts, hidden_size = self.weight.shape
        return f"{hidden_size}, num_experts={experts}, experts_per_token={self.experts_per_token}, scores={self.scores}"


def _check_sizes(*, hidden_size: int, num_experts: int, **others: int) -> None:
    for name, size in {"hidden_size": hidden_size, "num_experts": num_experts, **others}.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise ValueError(f"[Router] {name} must be an integer but got {size!r}.")
    if hidden_size < 1:
        raise ValueError(f"[Router] hidden_size must be 1 or more but got {hidden_size}.")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"[Router] num_experts must be 1 to {MAX_EXPERTS} but got {num_experts}.")


def _check_switches(**switches: bool) -> None:
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ValueError(f"[Router] {name} must be a bool but got {switch!r}.")


def _check_scaling(scaling: float) -> None:
    check_constant("Router", "scaling", scaling)
    if not (math.isfinite(scaling) and scaling > 0):
        raise ValueError(f"[Router] scaling must be a finite number over 0 but got {scaling}.")
    check_float32_range("Router", "scaling", scaling)


def impossible_choice(
    num_experts: int, experts_per_token: int, groups: int, groups_per_token: int, *, groups_name: str = "groups"
) -> str | None:
    """Why a token cannot choose so, in a sentence with a way out; None when it can.

    Args:
        num_experts: Number of experts.
        experts_per_token: How many a token chooses.
        groups: Number of groups of experts.
        groups_per_token: How many groups it chooses from.
        groups_name: What the caller's argument is called.
    """
    if not 1 <= experts_per_token <= num_experts:
        return (
            f"experts_per_token must be 1 to num_experts, {num_experts}, but got {experts_per_token}. "
            "Change one of them."
        )
    if groups < 1 or num_experts % groups:
        return f"{groups_name} must divide num_experts, {num_experts}, but got {groups}. Change one of them."
    if not 1 <= groups_per_token <= groups:
        return f"groups_per_token must be 1 to {groups_name}, {groups}, but got {groups_per_token}. Change one of them."
    size = num_experts // groups
    if groups > 1 and size < 2:
        return (
            f"{groups_name} must leave 2 or more experts in a group, whose score is the sum of two, but got {groups} "
            f"of {num_experts} experts. Lower it, or set 1 for no groups."
        )
    if experts_per_token > groups_per_token * size:
        return (
            f"experts_per_token must be at most the experts in groups_per_token groups, {groups_per_token * size}, but "
            f"got {experts_per_token}. Lower it or raise groups_per_token."
        )
    return None
