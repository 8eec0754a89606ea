"""Names of dtypes, for messages and configs."""

from typing import Final

import mlx.core as mx

FLOATS_BY_NAME: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
"""The dtypes of models by the names that configs have for them."""


def dtype_name(dtype: mx.Dtype) -> str:
    """A dtype's name without its module, as people write it: "float32"."""
    return str(dtype).removeprefix("mlx.core.")
