"""The affine map, on the kernels' matmul."""

from forge_mlx.kernels.matmul import matmul
import mlx.core as mx
import mlx.nn as nn


class Linear(nn.Linear):
    """x W^T + b, W `[output_dims, input_dims]`: `mlx.nn.Linear(input_dims, output_dims, bias)` on `kernels.matmul`.

    Parameters, initial values and text are those of `mlx.nn.Linear`, and it is one: `nn.quantize` and adapters such as
    mlx-lm's LoRA replace it as they replace theirs. Automatic runs what `mlx.nn.Linear` runs, `mx.matmul` and
    `mx.addmm`, on every device; `use_engine` and FORGE_MLX_ENGINE put it on the kernels, which add the bias before they
    round.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., input_dims]` to `[..., output_dims]`."""
        if x.ndim == 1:
            return self(x[None])[0]
        return matmul(x, self.weight, transpose_b=True, accumulate=self.get("bias"))
