"""forge-mlx's own model folder: ``model.safetensors``, ``config.json``, ``tokenizer.model``."""

from pathlib import Path

from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
from pydantic import ValidationError


class ModelFolderError(ValueError):
    """A folder that holds no model that can be read."""


def save_model(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Write a model and its tokenizer into an existing folder.

    Raises:
        OSError: a file cannot be written.
    """
    # Through Python's file: MLX's own writer does not say why it failed.
    with (folder / "model.safetensors").open("wb") as file:
        mx.save_safetensors(file, dict(named_arrays(model.parameters())))
    (folder / "config.json").write_text(model.config.model_dump_json(indent=1) + "\n", encoding="utf-8")
    tokenizer.save(folder / "tokenizer.model")


def load_model(folder: Path) -> tuple[GPT, Tokenizer]:
    """Read what ``save_model`` wrote.

    Raises:
        ModelFolderError: a file is missing, or the weights do not fit the config.
    """
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        if not (folder / name).is_file():
            raise ModelFolderError(f"{folder}: is no model folder: {name} is missing.")
    model = GPT(_read_config(folder / "config.json"))
    load_weights(model, folder / "model.safetensors")
    model.eval()
    return model, Tokenizer.load(folder / "tokenizer.model")


def _read_config(file: Path) -> GPTConfig:
    try:
        config = GPTConfig.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise ModelFolderError(f"{file}: describes no GPT: {'; '.join(problems)}.") from None
    if config.vocab_size is None:
        raise ModelFolderError(f"{file}: vocab_size must be a number but got null.")
    return config


def load_weights(model: GPT, file: Path) -> None:
    """Put the arrays of a safetensors file into a model; every name and shape must fit.

    Raises:
        ModelFolderError: the file is damaged or does not fit the model.
    """
    try:
        model.load_weights(str(file), strict=True)
        mx.eval(model.parameters())
    except (ValueError, RuntimeError) as error:
        raise ModelFolderError(f"{file}: is damaged or of another model: {str(error).rstrip('. ')}.") from None
