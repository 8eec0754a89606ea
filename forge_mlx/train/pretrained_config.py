"""The `model:` section of a run that goes on from an existing checkpoint."""

import os
from pathlib import Path
from typing import Annotated

from forge_mlx._config import Section
from forge_mlx.kernels.quantize.options import Granularity, Mode
from forge_mlx.models.qat import QATConfig
from pydantic import Field, model_validator


class QuantizeConfig(Section):
    """How the matrices of a base model are quantised before training; adapters are trained on them (QLoRA)."""

    weights: Mode = Field("affine", description="Format of the weights: one of MLX's, int8, int4, ternary or fp8_e4m3.")
    bits: int | None = Field(None, description="Bits of a code: affine 2, 3, 4, 5, 6 or 8; null: the mode's own.")
    group_size: int | None = Field(
        None, description="Neighbours in a row that share a scale: affine 32, 64 or 128; null: the mode's own."
    )
    granularity: Granularity | None = Field(
        None, description="What shares a scale in ternary and fp8_e4m3: a row or a matrix; null: the mode's own."
    )
    modules: list[str] = Field(
        ["*"],
        min_length=1,
        description="Patterns of the names of the linear layers, experts and embeddings to quantise.",
    )

    @model_validator(mode="after")
    def _check_format(self) -> "QuantizeConfig":
        self.as_qat()
        return self

    def as_qat(self) -> QATConfig:
        """The same as what `prepare_qat` takes.

        Raises:
            ValueError: the mode does not take an option.
        """
        return QATConfig(**self.model_dump())


class PretrainedConfig(Section):
    """A model that exists: its shape, weights and tokenizer come from a checkpoint."""

    path: Annotated[str, Field(min_length=1)] = Field(
        description="The checkpoint: a folder in Hugging Face's or mlx-lm's layout, a .gguf file, or the name of a "
        "model on the Hugging Face Hub such as HuggingFaceTB/SmolLM2-135M-Instruct.",
    )
    revision: str | None = Field(
        None,
        description="Branch, tag or commit of a model on the hub; null: its main branch. Unused with a local path.",
    )
    dequantize: bool = Field(
        False,
        description="Make floats of a quantised checkpoint's codes, to train all of it, or because a CPU multiplies "
        "floats many times faster.",
    )
    quantize: QuantizeConfig | None = Field(
        None,
        description="Quantise the base before training; needs adapter. null: as the checkpoint is, whose codes stay.",
    )

    def anchored(self) -> "PretrainedConfig":
        """The same with the whole path of what is here, which then is found from any folder; else itself."""
        path = Path(self.path).expanduser()
        # Not resolved: a file of the hub's cache is a link to one without its ending.
        return self.model_copy(update={"path": os.path.abspath(path)}) if path.exists() else self
