"""forge-mlx: train and fine-tune small language models with MLX.

Importing it first loads a fast BLAS on Linux (see `forge_mlx.blas`), then MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from forge_mlx.blas import BlasChoice, SlowBlasWarning, blas_choice, load_blas

__version__ = "0.1.0"

load_blas()
try:
    import_module("mlx.core")
except ImportError as error:
    raise ImportError(
        f"[forge_mlx] a usable MLX build is required but importing mlx.core failed: {error}. "
        'On Linux: pip install "forge-mlx[cpu]" (in a checkout pip install -e ".[cpu]"), or the extra cuda with an '
        "NVIDIA GPU. "
        "On a Mac with Apple silicon: pip install forge-mlx, with a native (arm64) Python."
    ) from error

if TYPE_CHECKING:
    from forge_mlx.patching import patch, unpatch


def __getattr__(name: str) -> object:
    """`patch` and `unpatch`, imported when they are first asked for."""
    if name in ("patch", "unpatch"):
        return getattr(import_module("forge_mlx.patching"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BlasChoice", "SlowBlasWarning", "__version__", "blas_choice", "load_blas", "patch", "unpatch"]
