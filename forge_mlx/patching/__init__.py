"""The kernels in models of mlx-lm: `patch` swaps modules by their type, `loss` takes the place of mlx-lm's own."""

from forge_mlx.patching.loss import loss
from forge_mlx.patching.patch import patch, unpatch
from forge_mlx.patching.report import PatchReport
from forge_mlx.patching.rows import packed_rows

__all__ = ["PatchReport", "loss", "packed_rows", "patch", "unpatch"]
