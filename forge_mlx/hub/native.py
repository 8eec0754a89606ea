"""forge-mlx's own model folder: ``model.safetensors``, ``config.json``, ``tokenizer.model``."""

from contextlib import suppress
import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.native_layers import check_dtypes, describe_layers, rebuild_layers
from forge_mlx.hub.safetensors_files import write_tensors
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.registry import ARCHITECTURES, build_model
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
from pydantic import ValidationError

_BEGINS_WITH_END: Final = "texts_begin_with_end"
_QUANTIZATION: Final = "quantization"


class ModelFolderError(ValueError):
    """A folder that holds no model that can be read."""


def save_model(folder: Path, model: GPT, tokenizer: Tokenizer, *, texts_begin_with_end: bool = False) -> None:
    """Write a model and its tokenizer into an existing folder; of layers of codes, what they are made of.

    Args:
        folder: where to.
        model: what to write.
        tokenizer: the model's.
        texts_begin_with_end: whether the end token stood before every text that the model was trained on.

    Raises:
        ValueError: a layer is quantised in a way that a folder cannot say; nothing is written.
        OSError: a file cannot be written.
    """
    quantization = describe_layers(model)
    write_tensors(folder / "model.safetensors", dict(named_arrays(model.parameters())))
    values = model.config.model_dump(mode="json")
    if texts_begin_with_end:
        values[_BEGINS_WITH_END] = True
    if quantization:
        values[_QUANTIZATION] = quantization
    (folder / "config.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(folder / "tokenizer.model")


def load_model(folder: Path) -> tuple[GPT, Tokenizer]:
    """Read what ``save_model`` wrote.

    Raises:
        ModelFolderError: a file is missing, or the weights do not fit the config.
    """
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        if not (folder / name).is_file():
            raise ModelFolderError(f"{folder}: is no model folder: {name} is missing.")
    content = _read_config(folder / "config.json")
    model = build_model(content.config)
    try:
        rebuild_layers(model, content.quantization)
    except ValueError as error:
        raise ModelFolderError(f"{folder / 'config.json'}: {_QUANTIZATION}.{str(error).rstrip('. ')}.") from None
    load_weights(model, folder / "model.safetensors")
    model.eval()
    return model, Tokenizer.load(folder / "tokenizer.model")


def begins_with_end(folder: Path) -> bool:
    """Whether a model folder says that the end token stood before every text of training; not if it says nothing.

    Raises:
        ModelFolderError: its config.json describes no model.
        OSError: it cannot be read.
    """
    return _read_config(folder / "config.json").begins_with_end


class _Content(NamedTuple):
    """What a ``config.json`` holds.

    Attributes:
        config: the model's.
        begins_with_end: whether texts begin with the end token.
        quantization: for each layer of codes its name and what it is.
    """

    config: DecoderConfig
    begins_with_end: bool
    quantization: dict[str, Any]


def _read_config(file: Path) -> _Content:
    content, end_first, quantization, architecture = file.read_bytes(), False, {}, "gpt"
    with suppress(ValueError):
        values = json.loads(content)
        if isinstance(values, dict):
            end_first = values.pop(_BEGINS_WITH_END, False)
            quantization = values.pop(_QUANTIZATION, {})
            architecture = values.get("arch", architecture)
            content = json.dumps(values).encode()
    if not isinstance(end_first, bool):
        raise ModelFolderError(f"{file}: {_BEGINS_WITH_END} must be true or false but got {end_first!r}.")
    if not isinstance(quantization, dict):
        raise ModelFolderError(f"{file}: {_QUANTIZATION} must name layers but got {quantization!r}.")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelFolderError(f"{file}: arch must be one of {', '.join(ARCHITECTURES)} but got {architecture!r}.")
    chosen = ARCHITECTURES[architecture]
    try:
        # What is no JSON, this says.
        config = chosen.config.model_validate_json(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise ModelFolderError(f"{file}: describes no {chosen.model.__name__}: {'; '.join(problems)}.") from None
    if config.vocab_size is None:
        raise ModelFolderError(f"{file}: vocab_size must be a number but got null.")
    return _Content(config, end_first, quantization)


def load_weights(model: GPT, file: Path) -> None:
    """Put the arrays of a safetensors file into a model; every name and shape must fit.

    Raises:
        ModelFolderError: the file is damaged or does not fit the model.
    """
    try:
        model.load_weights(str(file), strict=True)
        check_dtypes(model)
        mx.eval(model.parameters())
    except (ValueError, RuntimeError) as error:
        raise ModelFolderError(f"{file}: is damaged or of another model: {str(error).rstrip('. ')}.") from None
