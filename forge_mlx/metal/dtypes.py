"""Names of dtypes, for messages."""

import mlx.core as mx


def dtype_name(dtype: mx.Dtype) -> str:
    """A dtype's name without its module, as people write it: "float32"."""
    return str(dtype).removeprefix("mlx.core.")
