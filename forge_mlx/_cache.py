"""Where forge-mlx keeps files it can make again."""

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The folder for cached files: `FORGE_MLX_CACHE`, else the user's cache folder for forge-mlx.

    The folder is only named here, not created: the caller that writes into it makes it, and knows
    what to do when it cannot.

    Returns:
        An absolute path; `~` in `FORGE_MLX_CACHE` is expanded.

    Raises:
        OSError: the user has no home folder and `FORGE_MLX_CACHE` is not set.
    """
    root = os.environ.get("FORGE_MLX_CACHE")
    if root:
        return Path(root).expanduser().absolute()
    path = Path(platformdirs.user_cache_dir("forge-mlx", appauthor=False))
    if not path.is_absolute():
        raise OSError(f"[cache] the user's cache folder must be absolute but got {path}. Set FORGE_MLX_CACHE.")
    return path
