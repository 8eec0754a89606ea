"""A folder that is there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import shutil

from forge_mlx.hub.errors import HubError


@contextmanager
def new_folder(folder: Path, caller: str) -> Iterator[Path]:
    """Give a folder beside the one that is wanted, which takes its name when everything in it is written.

    Args:
        folder: What is wanted: nothing is there, or an empty folder.
        caller: What an error calls the function that writes.

    Raises:
        HubError: Something is there, or no folder can be made there. Nothing is written then.
        OSError: What is written inside fails; nothing is left of it.
    """
    require_new(folder, caller)
    whole = folder.absolute()
    begun = whole.with_name(f".{whole.name}.{os.getpid()}.part")
    was_there = whole.is_dir()
    try:
        begun.mkdir(parents=True)
        if was_there:
            # What cannot be replaced, as a mounted folder, is found before the work.
            whole.rmdir()
    except OSError as error:
        shutil.rmtree(begun, ignore_errors=True)
        raise HubError(
            f"[{caller}] folder must be one that can be made but got {folder}: {error.strerror}. Give another."
        ) from error
    try:
        yield begun
        begun.rename(whole)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        if was_there:
            whole.mkdir(exist_ok=True)
        raise


def require_new(folder: Path, caller: str) -> None:
    """Raise unless nothing would be overwritten.

    Args:
        folder: What is to be written.
        caller: What an error calls the function that writes.

    Raises:
        HubError: A file is there, or a folder that holds something.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise HubError(f"[{caller}] folder must be new or empty but got {folder}. Give another or remove it.")
