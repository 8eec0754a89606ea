"""The feed-forward half of a mixture-of-experts block: each token through k of E experts, none dropped."""

from collections.abc import Iterable

from forge_mlx.kernels._common.checks import check_arrays, check_shape
from forge_mlx.kernels.dispatch import moe_combine, moe_dispatch, row_scale_accumulate
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.nn.activations import ACTIVATIONS, GATED_ACTIVATIONS
from forge_mlx.nn.expert_blocks import block_rows, into_blocks, make_blocks, out_of_blocks
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.mlp import MLP, GatedMLP
from forge_mlx.nn.parameters import named_leaves
from forge_mlx.nn.router import Router
from forge_mlx.nn.routing_record import record_routing
import mlx.core as mx
import mlx.nn as nn


class Experts(nn.Module):
    """down_e(act(gate_e(x)) * up_e(x)), or without a gate down_e(act(up_e(x))), each row by its expert e.

    Args:
        hidden_size: Width C of input and output.
        intermediate_size: Width inside an expert.
        num_experts: Number of experts E.
        activation: A key of `GATED_ACTIVATIONS` or of `ACTIVATIONS`.

    Raises:
        ValueError: For another activation.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, *, activation: str) -> None:
        super().__init__()
        if activation not in ACTIVATIONS.keys() | GATED_ACTIVATIONS.keys():
            raise ValueError(
                f"[Experts] activation must be among {', '.join([*GATED_ACTIVATIONS, *ACTIVATIONS])} but got "
                f"{activation!r}."
            )
        self._activation = activation
        if activation in GATED_ACTIVATIONS:
            self.gate_proj = ExpertLinear(hidden_size, intermediate_size, num_experts)
        self.up_proj = ExpertLinear(hidden_size, intermediate_size, num_experts)
        self.down_proj = ExpertLinear(intermediate_size, hidden_size, num_experts)

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map blocks of rows.

        Args:
            x: `[M, R, C]`: M blocks of R rows of one expert each.
            experts: The expert of each block, integers `[M]`, not falling.

        Returns:
            `[M, R, C]`.
        """
        up = self.up_proj(x, experts)
        if self._activation in GATED_ACTIVATIONS:
            inside = GATED_ACTIVATIONS[self._activation](self.gate_proj(x, experts), up)
        else:
            inside = ACTIVATIONS[self._activation](up)
        out: mx.array = self.down_proj(inside, experts)
        return out


class MoELayer(nn.Module):
    """sum over the k chosen experts e of gate_e * expert_e(x), plus shared_experts(x) where there are any.

    Dropless: every token reaches all of its k experts, however many chose the same. Its rows are sorted by expert
    (`moe_dispatch`), each expert's matrices meet their rows in `mx.gather_mm`, and `moe_combine` weights and adds.
    While `routing_records` is open, each call adds a record to it.

    Neither `mx.vmap` nor `mx.jvp` goes through it: MLX has no rule of theirs for `mx.gather_mm`. More
    tokens need no `mx.vmap`, as the leading axes may be any; a loss changes along v by `(mx.grad(loss)(x) * v).sum()`.

    Args:
        router: Chooses the experts.
        experts: Computes them.
        shared_experts: Computed for every token, with weight 1; None: none.

    Raises:
        ValueError: When router, experts and shared experts are not of one width, or router and experts not of one
            number of experts.
    """

    def __init__(self, router: Router, experts: Experts, shared_experts: MLP | GatedMLP | None = None) -> None:
        super().__init__()
        _check_parts(router, experts, shared_experts)
        self.router = router
        self.experts = experts
        if shared_experts is not None:
            self.shared_experts = shared_experts

    def __call__(self, x: mx.array, is_token: mx.array | None = None, *, dense: bool = False) -> mx.array:
        """Map `[..., C]` to `[..., C]`.

        Args:
            x: `[..., C]`, float32, float16 or bfloat16. There may be no tokens.
            is_token: Whether a position holds a token and no padding, bool `[...]`: what does not count in the record.
                None: all do. The output is the same.
            dense: Whether to compute every expert on every token, weighted with its gate: E / k times the work for the
                same result, to check the other way against.

        Returns:
            `[..., C]`, in x's dtype.

        Raises:
            ValueError: For an x of another dtype or width, and an is_token of another dtype or shape.
        """
        check_arrays("MoELayer", x=x)
        if is_token is not None:
            _check_is_token(is_token, x)
        gates, indices, scores, logits = self.router(x)
        record_routing(logits, scores, indices, is_token)
        out = self._all(x, gates) if dense else self._chosen(x, gates, indices)
        if "shared_experts" in self:
            out = out + self.shared_experts(x)
        return out

    def _chosen(self, x: mx.array, gates: mx.array, indices: mx.array) -> mx.array:
        rows, plan = moe_dispatch(x, indices)
        width, num_experts = x.shape[-1], gates.shape[-1]
        size = block_rows(len(rows), num_experts)
        if size == 1:
            computed = self.experts(rows.reshape(-1, 1, width), plan.experts).reshape(-1, width)
        else:
            blocks = make_blocks(plan.experts, num_experts, size)
            places = self.experts(into_blocks(rows, blocks).reshape(-1, size, width), blocks.experts)
            computed = out_of_blocks(places.reshape(-1, width), blocks)
        out: mx.array = moe_combine(computed, gates, plan)
        return out

    def _all(self, x: mx.array, gates: mx.array) -> mx.array:
        rows = x.reshape(1, -1, x.shape[-1])
        out = mx.zeros_like(x)
        for expert in range(gates.shape[-1]):
            computed = self.experts(rows, mx.array([expert], mx.int32)).reshape(x.shape)
            out = row_scale_accumulate(out, computed, gates, expert)
        return out


def _check_parts(router: Router, experts: Experts, shared_experts: MLP | GatedMLP | None) -> None:
    num_experts, width = router.weight.shape
    own, out = experts.down_proj.weight.shape[:2]
    # mx.gather_mm would read behind the last matrix.
    if own != num_experts:
        raise ValueError(
            f"[MoELayer] experts must be as many as the router chooses from, {num_experts}, but got {own}. Change one "
            "of them."
        )
    if out != width:
        raise ValueError(f"[MoELayer] experts must have the router's hidden_size, {width}, but got {out}.")
    if shared_experts is not None and shared_experts.down_proj.weight.shape[0] != width:
        raise ValueError(
            f"[MoELayer] shared_experts must have the router's hidden_size, {width}, but got "
            f"{shared_experts.down_proj.weight.shape[0]}."
        )


def _check_is_token(is_token: mx.array, x: mx.array) -> None:
    check_arrays("MoELayer", is_token=is_token)
    if is_token.dtype != mx.bool_:
        raise ValueError(
            f"[MoELayer] is_token must be bool but got {dtype_name(is_token.dtype)}. Compare it: is_token != 0."
        )
    check_shape("MoELayer", "is_token", is_token, x.shape[:-1], "the leading axes of x")


def routers(model: nn.Module) -> list[Router]:
    """The routers of a model, in the order of its layers.

    Args:
        model: Any module.
    """
    return [module for _, module in named_leaves(model) if isinstance(module, Router)]


def update_selection_bias(model: nn.Module, loads: Iterable[mx.array], rate: float) -> None:
    """bias += rate * sign(mean(load) - load) in every MoE layer (Wang et al. 2024; DeepSeek-V3).

    Outside of the gradient: to be called after the step of the optimizer, with the loads of that step.

    Args:
        model: A model with MoE layers.
        loads: Tokens sent to each expert, integers `[E]`, for each MoE layer in order.
        rate: Size of the step, 0 or more.

    Raises:
        ValueError: When there are not as many loads as routers, or a router has no selection bias.
    """
    found, counted = routers(model), list(loads)
    if len(found) != len(counted):
        raise ValueError(
            f"[update_selection_bias] loads must hold one for each of the {len(found)} MoE layers but got "
            f"{len(counted)}."
        )
    for router, load in zip(found, counted, strict=True):
        router.balance(load, rate)
