"""Which experts a token goes to, with what weight, and how many tokens each of them has."""

from forge_mlx.kernels.routing.counts_op import expert_counts
from forge_mlx.kernels.routing.topk_op import topk_renorm

__all__ = ["expert_counts", "topk_renorm"]
