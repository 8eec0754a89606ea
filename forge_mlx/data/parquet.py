"""Rows of Parquet files; pyarrow is needed where there is one, and only there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROWS_AT_ONCE = 1024


def read_parquet(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Stream the rows of a file as plain values; what is null is left out of a row and of the structs in it.

    Args:
        path: of the file.
        name: how messages call it.

    Raises:
        ValueError: pyarrow is not installed, or the file is no intact Parquet file.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"[data] {name} is a Parquet file, which needs pyarrow. pip install 'forge-mlx[hf]', or convert it to "
            ".jsonl"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                yield from (_without_nulls(row) for row in batch.to_pylist())
    except (arrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"[data] {name} must be an intact Parquet file but reading it failed: {reason}") from error


def _without_nulls(value: Any) -> Any:
    """Structs in a column have all its keys: those that an example never had are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value
