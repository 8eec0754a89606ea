"""What goes wrong with a checkpoint of another layout."""


class HubError(ValueError):
    """A checkpoint that cannot be read or written; its message is one line and names the file."""
