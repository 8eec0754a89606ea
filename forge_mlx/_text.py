"""Counts and sizes as people read them."""


def count(number: int, noun: str) -> str:
    """``1 document``, ``1,671 documents``: a number and a noun whose plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """``731 bytes``, ``50.3 kB``, ``30.0 MB``, ``1.2 GB``: decimal units."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    for unit in ("kB", "MB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} GB"
