"""Checkpoints in and out: forge-mlx's own folders, Hugging Face's, mlx-lm's, GGUF; adapters of mlx-lm and PEFT."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_mlx.hub.pretrained import Pretrained, load_pretrained, read_shape, save_pretrained

__all__ = ["Pretrained", "load_pretrained", "read_shape", "save_pretrained"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for: importing one module of the package needs no other."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forge_mlx.hub import pretrained

    return getattr(pretrained, name)
