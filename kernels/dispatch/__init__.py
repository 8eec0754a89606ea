"""Tokens to the experts that their router chose and back, and rows times a column of gates."""

from forge_mlx.kernels.dispatch.moe_op import moe_combine, moe_dispatch
from forge_mlx.kernels.dispatch.plan import DispatchPlan
from forge_mlx.kernels.dispatch.row_scale_op import row_scale, row_scale_accumulate

__all__ = ["DispatchPlan", "moe_combine", "moe_dispatch", "row_scale", "row_scale_accumulate"]
