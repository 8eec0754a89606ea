"""Files that are read, which must be files: a pipe or a device may never end."""

from pathlib import Path
import stat

from forge_mlx.hub.errors import HubError


def regular_size(file: Path) -> int:
    """The size of a file in bytes, once it is known to be one.

    Args:
        file: Its path.

    Raises:
        HubError: It is a folder, a pipe, a socket or a device.
        OSError: There is none, or it cannot be looked at.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise HubError(f"{file}: must be a regular file but is a folder, a pipe or a device.")
    return found.st_size
