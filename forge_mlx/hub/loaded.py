"""What reading a published model gives."""

from pathlib import Path
from typing import Any, NamedTuple

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.metal.dtypes import FLOATS_BY_NAME
from forge_mlx.models.gpt import GPT
import mlx.core as mx


class Pretrained(NamedTuple):
    """A model that was read, with what came along.

    Attributes:
        model: In eval mode, its weights in the dtype that was asked for.
        tokenizer: The model's.
        folder: Where it was read from.
        family: Its `model_type`.
        config: Its config.json as it was read; of a GGUF file, what it would be.
        generation: Its generation_config.json.
    """

    model: GPT
    tokenizer: HubTokenizer
    folder: Path
    family: str
    config: dict[str, Any]
    generation: dict[str, Any]

    @property
    def stored_dtype(self) -> mx.Dtype | None:
        """The dtype of the checkpoint's own floats; None where its config.json does not say."""
        return FLOATS_BY_NAME.get(str(self.config.get("dtype") or self.config.get("torch_dtype")))
