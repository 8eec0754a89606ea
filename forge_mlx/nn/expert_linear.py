"""One matrix for each expert, applied to rows that are sorted by expert."""

import math

import mlx.core as mx
import mlx.nn as nn


def plain_blocks(x: mx.array) -> mx.array:
    """The same blocks `[M, R, C]`, with the strides of an array that was made in this shape, and so is its cotangent.

    Of blocks with one row that are a view, as `rows[:, None]` is, MLX 0.32.4's sorted `mx.gather_mm` takes the wrong
    rows on GPUs (github.com/ml-explore/mlx/issues/4253; seen on an NVIDIA H200: scripts/bench/LOG.md, 2026-12-01).

    Args:
        x: Blocks of rows.
    """
    return x.reshape(-1, x.shape[-1]).reshape(x.shape)


def expert_product(x: mx.array, weight: mx.array, experts: mx.array) -> mx.array:
    """x W_e^T for blocks of rows, each by the matrix of its expert e.

    Products of 16-bit rows on a CPU are computed in float32, as `mx.gather_mm` has no others there, and rounded.

    Args:
        x: `[M, R, in]`: M blocks of R rows.
        weight: `[E, out, in]`.
        experts: The expert of each block, integers `[M]` in [0, E), not falling.

    Returns:
        `[M, R, out]`.
    """
    if x.size == 0:
        # A product without rows ends the process on CUDA.
        return mx.zeros((*x.shape[:-1], weight.shape[1]), x.dtype)
    exact = mx.float32 if mx.default_device().type == mx.cpu else x.dtype
    out = mx.gather_mm(
        plain_blocks(x.astype(exact)),
        weight.astype(exact).swapaxes(-1, -2),
        rhs_indices=experts,
        sorted_indices=True,
    )
    return plain_blocks(out.astype(x.dtype))


class ExpertLinear(nn.Module):
    """x W_e^T for the rows of each expert e, through `mx.gather_mm`; `weight` is `[E, output_dims, input_dims]`.

    Computed as `expert_product` does.

    Args:
        input_dims: Width of the rows.
        output_dims: Width of the result.
        num_experts: Number of matrices E.
    """

    def __init__(self, input_dims: int, output_dims: int, num_experts: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(input_dims)
        self.weight = mx.random.uniform(-bound, bound, (num_experts, output_dims, input_dims))

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map blocks of rows, each block by the matrix of its expert.

        Args:
            x: `[M, R, input_dims]`: M blocks of R rows.
            experts: The expert of each block, integers `[M]` in [0, E), not falling.

        Returns:
            `[M, R, output_dims]`.
        """
        return expert_product(x, self.effective_weight(), experts)

    def effective_weight(self) -> mx.array:
        """The matrices that the product takes, `[E, output_dims, input_dims]`."""
        return self.weight

    def _extra_repr(self) -> str:
        experts, output_dims, input_dims = self.weight.shape
        return f"input_dims={input_dims}, output_dims={output_dims}, num_experts={experts}"
