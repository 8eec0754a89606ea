"""Files that the emulator makes once and keeps: `forge_mlx._cache.cache_dir()/"emulator"`.

A file's name is the hash of its contents, in a folder named by the key of all that the contents depend on: half a file
or a damaged one shows itself and is made again. It is written in another folder on the same disk and renamed, so other
processes see it whole or not at all; two that make the same file at once both succeed.

Where nothing can be written, files live in a folder of this process's own and go with it.
"""

import atexit
from collections.abc import Callable
import contextlib
import errno
from functools import lru_cache
import hashlib
import os
from pathlib import Path
import shutil
import tempfile

from forge_mlx._cache import cache_dir
from forge_mlx.metal.emulator.errors import ToolchainError

# Errors that say "not here": the process's own folder serves instead. Others, a full disk above all, are raised.
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def cached(kind: str, key: str, suffix: str, build: Callable[[Path], Path], beside: str = "") -> Path:
    """The file for a key, made by `build` where it is absent or damaged.

    Args:
        kind: what the file is: the name of a folder.
        key: hash of all that the contents depend on.
        suffix: of the file.
        build: makes the file somewhere in the folder that it is given, and returns its path.
        beside: suffix of a second file from the same build, to keep beside the first under the same stem.

    Returns:
        The file, complete and undamaged.

    Raises:
        ToolchainError: the cache cannot be written for a reason other than permissions.
    """
    for root in _roots():
        for found in sorted((root / kind / key).glob(f"*{suffix}")):
            if found.stem == _content_hash(found) and (not beside or found.with_suffix(beside).is_file()):
                return found
            # Where the folder cannot be written it stays, and is passed over.
            with contextlib.suppress(OSError):
                found.unlink()
    root = _writable_root()
    try:
        return _build(root, root / kind / key, suffix, build, beside)
    except OSError as error:
        raise ToolchainError(f"cannot write to the cache {root}: {error}. Set FORGE_MLX_CACHE.") from error


def digest_of(folder: Path) -> str:
    """A hash of the names and contents of all files in a folder."""
    state = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def _build(root: Path, folder: Path, suffix: str, build: Callable[[Path], Path], beside: str) -> Path:
    with tempfile.TemporaryDirectory(dir=root, prefix="building-") as work:
        made = build(Path(work))
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / f"{_content_hash(made)}{suffix}"
        if beside:
            os.replace(made.with_suffix(beside), final.with_suffix(beside))
        os.replace(made, final)
    return final


def _content_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError:
        # Another process has just removed it.
        return ""


def _roots() -> list[Path]:
    """Folders to look in: the cache, then this process's own where it has one."""
    roots = [_own_folder()] if _own_folder.cache_info().currsize else []
    with contextlib.suppress(OSError):
        roots.insert(0, cache_dir() / "emulator")
    return roots


def _writable_root() -> Path:
    """The cache, or this process's own folder."""
    try:
        root = cache_dir() / "emulator"
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        # Without an errno: cache_dir found no home folder.
        if error.errno is not None and error.errno not in _UNWRITABLE:
            raise ToolchainError(f"cannot write to the cache: {error}. Set FORGE_MLX_CACHE.") from error
        return _own_folder()


@lru_cache(maxsize=1)
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="forge-mlx-emulator-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
