"""Published checkpoints as models of ours, and models as such checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from forge_mlx._console import to_stderr
from forge_mlx._text import count, one_line
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.coded_checkpoints import put_codes, read_quantization
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.registry import Described, describe
from forge_mlx.hub.gguf import load_gguf, read_fitting_tokenizer
from forge_mlx.hub.gguf_config import read_config as read_gguf_config
from forge_mlx.hub.gguf_parts import read_whole
from forge_mlx.hub.json_files import read_object
from forge_mlx.hub.loaded import Pretrained
from forge_mlx.hub.locate import locate
from forge_mlx.hub.promises import require_promised
from forge_mlx.hub.safetensors_files import load_tensors, own_file
from forge_mlx.hub.save import save_pretrained
from forge_mlx.hub.weights import common_dtype, put_weights, text_tensors
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.registry import build_model
from forge_mlx.nn.coded import Coded
import mlx.core as mx

__all__ = ["Pretrained", "is_pretrained", "load_pretrained", "read_shape", "read_tokenizer", "save_pretrained"]

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_GGUF: Final = ".gguf"
_FLOATS: Final = (mx.float32, mx.float16, mx.bfloat16)


def load_pretrained(
    path: str | Path,
    *,
    dtype: mx.Dtype | None = None,
    revision: str | None = None,
    log: Callable[[str], None] = to_stderr,
) -> Pretrained:
    """Open a Hugging Face folder, one of mlx-lm's, a GGUF file, or a model of the hub.

    Weights come from safetensors alone; codes of mlx-lm's quantised checkpoints stay codes, in layers of
    `forge_mlx.nn.quantized`, which are frozen.

    Args:
        path: A folder, a `.gguf` file, of a split one the first part, or an id of the hub.
        dtype: What floats are cast to, float32, float16 or bfloat16; None: they stay what they are.
        revision: Of the hub.
        log: Told what is left out or rounded, with counts, one line for each.

    Raises:
        HubError: There is no such model, its family is not known, its files are damaged, or tensors are missing, left
            over, or of other shapes than config.json says.
        ValueError: Another dtype, or the tokenizer's files are damaged or missing.
    """
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(f"[load_pretrained] dtype must be float32, float16 or bfloat16 but got {dtype}.")
    found = locate(path, revision=revision)
    if found.suffix == _GGUF and found.is_file():
        return load_gguf(found, dtype=dtype, log=log)
    values = _read_config(found)
    described = describe(values, str(found / _CONFIG))
    if described.unknown:
        names = ", ".join(described.unknown)
        log(f"{found / _CONFIG}: {len(described.unknown)} keys are not known and not used: {names}")
    tokenizer = HubTokenizer.load(found)
    _check_table(found, tokenizer, described.config.vocab_size or 0, log)
    model = _load_model(found, values, described, dtype, log)
    generation = _read_generation(found)
    return Pretrained(model, tokenizer, found, described.family.model_type, values, generation)


def read_shape(
    path: str | Path, *, revision: str | None = None, log: Callable[[str], None] = to_stderr
) -> DecoderConfig:
    """The shape of a checkpoint, without its weights.

    Args:
        path: As `load_pretrained` takes it.
        revision: Of the hub.
        log: Told in a line what of a GGUF file is not used.

    Raises:
        HubError: There is no such model, or its family is not known.
    """
    found = locate(path, revision=revision, part="config")
    if found.suffix == _GGUF and found.is_file():
        return read_gguf_config(read_whole(found), log)
    return describe(_read_config(found), str(found / _CONFIG)).config


def read_tokenizer(
    path: str | Path, shape: DecoderConfig, *, revision: str | None = None, log: Callable[[str], None] = to_stderr
) -> HubTokenizer:
    """The tokenizer of a checkpoint, without its weights.

    Args:
        path: As `load_pretrained` takes it.
        shape: The checkpoint's, as `read_shape` gives it.
        revision: Of the hub.
        log: Told in a line how many special tokens have no embedding.

    Raises:
        HubError: There is no such model, or plain text has tokens without an embedding.
        ValueError: The tokenizer's files are damaged or missing.
    """
    found = locate(path, revision=revision, part="tokenizer")
    if found.suffix == _GGUF and found.is_file():
        return read_fitting_tokenizer(read_whole(found), shape)
    tokenizer = HubTokenizer.load(found)
    _check_table(found, tokenizer, shape.vocab_size or 0, log)
    return tokenizer


def is_pretrained(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder whose config.json names a family; forge_mlx's own folders do not.

    Args:
        path: Of anything.

    Raises:
        HubError: Its config.json is damaged.
    """
    if path.is_file():
        return path.suffix == _GGUF
    config = path / _CONFIG
    return config.is_file() and "model_type" in read_object(config)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise HubError(f"{folder}: must be a folder with {_CONFIG}, or a {_GGUF} file, but is neither.")
    file = own_file(folder, _CONFIG)
    if not file.is_file():
        ggufs = sorted(each.name for each in folder.iterdir() if each.suffix == _GGUF)
        way_out = f"Give {ggufs[0]} itself." if ggufs else "Is it a model folder?"
        raise HubError(f"{folder}: must hold {_CONFIG} but does not. {way_out}")
    return read_object(file)


def _read_generation(folder: Path) -> dict[str, Any]:
    file = own_file(folder, _GENERATION)
    values = read_object(file) if file.is_file() else {}
    ends = values.get("eos_token_id")
    if not all(each is None or type(each) is int for each in (ends if isinstance(ends, list) else [ends])):
        raise HubError(f"{file}: eos_token_id must be the id of a token, or a list of ids, but got {ends!r}.")
    return values


def _check_table(folder: Path, tokenizer: HubTokenizer, rows: int, log: Callable[[str], None]) -> None:
    """Raise for tokens of plain text that have no embedding; say how many special ones have none."""
    if tokenizer.plain_vocab_size > rows:
        raise HubError(
            f"{folder}: vocab_size must be at least {tokenizer.plain_vocab_size}, the size of the tokenizer's "
            f"vocabulary, but {_CONFIG} says {rows}. Are the files of one model?"
        )
    if missing := sorted(token for token in tokenizer.special_ids if token >= rows):
        names = ", ".join(tokenizer.token_name(token) for token in missing[:5])
        have, them = ("has", "it") if len(missing) == 1 else ("have", "them")
        number = count(len(missing), "special token")
        log(f"{folder}: {number} {have} no embedding, and no text may have {them}: {names}")


def _load_model(
    folder: Path,
    values: dict[str, Any],
    described: Described,
    dtype: mx.Dtype | None,
    log: Callable[[str], None],
) -> GPT:
    model = _filled(folder, values, described, dtype, log)
    try:
        # Nothing else holds the tensors of the files by now, so that each is freed when it has been cast or stacked.
        mx.eval(model.parameters())
    except RuntimeError as error:
        raise HubError(f"{folder}: cannot be read: {one_line(error)}.") from None
    model.eval()
    return model


def _filled(
    folder: Path,
    values: dict[str, Any],
    described: Described,
    dtype: mx.Dtype | None,
    log: Callable[[str], None],
) -> GPT:
    """The model, its arrays not yet read."""
    family, where = described.family, str(folder)
    text = described.values if "quantization" in described.values else values
    quantization = read_quantization(text, family.layout, str(folder / _CONFIG))
    tensors = text_tensors(load_tensors(folder), family, described.config.num_layers, where, log)
    require_promised(described.config, tensors, where)
    model = build_model(described.config)
    if quantization is not None:
        routers, latents = put_codes(model, family.layout, quantization, tensors, dtype or common_dtype(tensors), where)
        if not routers and not latents and not any(isinstance(module, Coded) for module in model.modules()):
            log(f"{where}: config.json has a quantization but no layer has codes: the weights are read as floats")
        if routers:
            log(f"{where}: {routers} routers in codes were made floats, as they are in every model here")
        if latents:
            log(f"{where}: kv_b_proj of {latents} layers was made floats: the codes are of its two parts")
    put_weights(model, family.layout, tensors, where, dtype=dtype)
    return model
