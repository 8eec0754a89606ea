"""Which experts each token goes to, and with what weights: the routing of Mixtral, OLMoE, Qwen3-MoE and DeepSeek-V3."""

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from forge_mlx.kernels._common.checks import check_integers, check_shape, is_number
from forge_mlx.kernels.activations import sigmoid
from forge_mlx.kernels.matmul import matmul
from forge_mlx.kernels.routing import topk_renorm
from forge_mlx.kernels.softmax import softmax
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
    every checkpoint, but never trainable, not even after `unfreeze()`.

    Args:
        hidden_size: Width C of the tokens.
        num_experts: Number of experts E.
        experts_per_token: How many of them each token goes to, k.
        scores: What makes scores of the logits.
        normalize: Whether the gates of a token are divided by their sum.
        scaling: Factor on the gates.
        groups: Number of groups, a divisor of E.
        groups_per_token: How many of them a token can choose from.
        selection_bias: Whether there is a selection bias, at first 0.

    Raises:
        ValueError: When the choice is impossible: k experts are more than there are to choose from, or the groups
            cannot be formed; for other scores.
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
            self._no_grad = _StaysFrozen({_BIAS})

    def __call__(self, x: mx.array) -> Routing:
        """Route tokens `[..., C]`."""
        logits = matmul(x.astype(mx.float32), self.weight.astype(mx.float32), transpose_b=True)
        scores = softmax(logits) if self.scores == "softmax" else sigmoid(logits)
        gates, indices = topk_renorm(scores, self.experts_per_token, self._preference(scores), self.normalize)
        return Routing(gates if self.scaling == 1 else gates * self.scaling, indices, scores, logits)

    def balance(self, load: mx.array, rate: float) -> None:
        """selection_bias += rate * sign(mean(load) - load): experts with too few tokens become likelier.

        Args:
            load: Tokens sent to each expert, integers `[E]`.
            rate: Size of the step, 0 or more.

        Raises:
            ValueError: Without a selection bias, or for another load or rate.
        """
        if _BIAS not in self:
            raise ValueError("[Router.balance] there must be a selection bias but got none. Set selection_bias.")
        check_integers("Router.balance", load=load)
        check_shape("Router.balance", "load", load, self.selection_bias.shape, "that of the selection bias")
        if not (is_number(rate) and rate >= 0):
            raise ValueError(f"[Router.balance] rate must be a number of 0 or more but got {rate!r}.")
        # Integers compare exactly: at balance the bias rests.
        load = load.astype(mx.int64)
        missing = mx.sign(load.sum() - load.size * load).astype(mx.float32)
        self.selection_bias = (self.selection_bias + rate * missing).astype(self.selection_bias.dtype)

    def _preference(self, scores: mx.array) -> mx.array | None:
        """What is added to the scores for the choice: the bias, and -inf for experts of groups that are out."""
        bias = mx.stop_gradient(self.selection_bias.astype(mx.float32)) if _BIAS in self else None
        if self.groups == self.groups_per_token:
            return bias
        chosen = mx.stop_gradient(scores) if bias is None else mx.stop_gradient(scores) + bias
        grouped = chosen.reshape(*chosen.shape[:-1], self.groups, -1)
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


class _StaysFrozen(set[str]):
    """Names of frozen parameters, of which a selection bias stays one whatever `unfreeze` takes out.

    `mlx.nn.Module.unfreeze` of a model changes this set of each module inside and calls no method of theirs.
    """

    def clear(self) -> None:
        """Take all names out but this one."""
        self.intersection_update({_BIAS})

    def difference_update(self, *others: Iterable[object]) -> None:
        """Take names out, all but this one."""
        super().difference_update(set[object]().union(*others) - {_BIAS})


def impossible_choice(num_experts: int, experts_per_token: int, groups: int, groups_per_token: int) -> str | None:
    """Why a token cannot choose so, in a sentence with a way out; None when it can.

    Args:
        num_experts: Number of experts.
        experts_per_token: How many a token chooses.
        groups: Number of groups of experts.
        groups_per_token: How many groups it chooses from.
    """
    if not 1 <= experts_per_token <= num_experts:
        return (
            f"experts_per_token must be 1 to num_experts, {num_experts}, but got {experts_per_token}. "
            "Change one of them."
        )
    if groups < 1 or num_experts % groups:
        return f"expert_groups must divide num_experts, {num_experts}, but got {groups}. Change one of them."
    if not 1 <= groups_per_token <= groups:
        return f"groups_per_token must be 1 to expert_groups, {groups}, but got {groups_per_token}. Change one of them."
    size = num_experts // groups
    if groups > 1 and size < 2:
        return (
            f"expert_groups must leave 2 or more experts in a group, whose score is the sum of two, but got {groups} "
            f"of {num_experts} experts. Lower it, or set 1 for no groups."
        )
    if experts_per_token > groups_per_token * size:
        return (
            f"experts_per_token must be at most the experts in groups_per_token groups, {groups_per_token * size}, but "
            f"got {experts_per_token}. Lower it or raise groups_per_token."
        )
    return None
