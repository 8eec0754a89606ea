"""The command ``python -m forge_mlx.export MODEL OUT``: a model as a folder that mlx-lm opens, or as a GGUF file."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import shlex
import sys
from typing import Any, Final, NamedTuple

from forge_mlx._console import print_what_fits
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.gguf_write import write_gguf
from forge_mlx.hub.new_folder import require_new
from forge_mlx.hub.pretrained import is_pretrained, load_pretrained, save_pretrained
from forge_mlx.kernels.quantize.options import checked_options
from forge_mlx.metal.dtypes import FLOATS_BY_NAME
from forge_mlx.models.adapters import adapted_layers, merge_adapters
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.nn.quantized import QUANTIZABLE, Coded
from forge_mlx.opened_model import open_model
from forge_mlx.train.folder import RunFolder
import mlx.core as mx

_DESCRIPTION: Final = """\
Write a model as a folder in Hugging Face's layout, which mlx-lm opens, and transformers too where nothing is quantised;
or as a GGUF file for llama.cpp. Adapters are merged. Numbers stay what they are unless an option says otherwise: floats
in the dtype of the checkpoint, and codes of a quantised model. The tokenizer gives every text the same ids. A model
whose parts no published family has, or whose tokenizer is no BPE model, is refused.
"""
_GGUF_KINDS: Final = ("f16", "f32", "q8_0", "q4_0")


class _Source(NamedTuple):
    """What is to be written.

    Attributes:
        model: In evaluation mode.
        tokenizer: The model's.
        path: Where it came from.
        config: config.json of a checkpoint, else None.
        generation: generation_config.json of a checkpoint, else None.
        begins_with_end: Whether the end token stood before every text of training.
    """

    model: GPT
    tokenizer: HubTokenizer | Tokenizer
    path: Path
    config: dict[str, Any] | None
    generation: dict[str, Any] | None
    begins_with_end: bool


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forge_mlx.export", description=_DESCRIPTION)
    parser.add_argument(
        "model",
        help="a run's folder (its final model, else its newest checkpoint), a model folder such as RUN/final, a "
        "checkpoint; a folder in Hugging Face's or mlx-lm's layout, a .gguf file, or a model's name on the hub",
    )
    parser.add_argument("out", type=Path, help="the folder, or file with --gguf, to write; it must be new or empty")
    parser.add_argument(
        "--quantize",
        type=int,
        metavar="BITS",
        help="write the matrices in MLX's affine codes of 2, 3, 4, 5, 6 or 8 bits",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="with --quantize: codes that share a scale, 32, 64 or 128 (default 64)",
    )
    parser.add_argument(
        "--dtype", choices=sorted(FLOATS_BY_NAME), help="round floats to it (default: as the checkpoint's are)"
    )
    parser.add_argument("--gguf", choices=_GGUF_KINDS, help="write a GGUF file of this type instead of a folder")
    return parser


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _checkpoint(model: str) -> str | Path | None:
    """What `load_pretrained` opens; None for forge-mlx's own folders."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    for each in (folder, RunFolder(folder).final):
        if (each / "config.json").is_file():
            return each if is_pretrained(each) else None
    return None


def _open(model: str) -> _Source:
    checkpoint = _checkpoint(model)
    if checkpoint is None:
        opened = open_model(model, log=_to_stderr)
        tokenizer = opened.tokenizer
        assert isinstance(tokenizer, (HubTokenizer, Tokenizer))
        if adapted_layers(opened.model):
            merge_adapters(opened.model)
        return _Source(opened.model, tokenizer, opened.source, opened.config, opened.generation, opened.begins_with_end)
    loaded = load_pretrained(checkpoint, log=_to_stderr)
    generation = loaded.generation or None
    return _Source(loaded.model, loaded.tokenizer, Path(checkpoint), loaded.config or None, generation, False)


def _quantize(model: GPT, bits: int, group_size: int | None) -> None:
    """Put the matrices of a float model in codes; those whose rows are no whole groups stay as they are."""
    options = checked_options("export", "affine", bits, group_size, None)
    coded = sorted(name for name, module in model.named_modules() if isinstance(module, Coded))
    if coded:
        raise ValueError(f"--quantize needs a float model but {coded[0]} and {len(coded) - 1} more are codes already.")
    config = QATConfig(bits=options.bits, group_size=options.group_size)
    multiple = options.columns_multiple
    left = {
        name: None
        for name, module in model.named_modules()
        if isinstance(module, QUANTIZABLE) and module.weight.shape[-1] % multiple
    }
    if left:
        _to_stderr(f"{len(left)} matrices stay floats: their rows are no multiple of {multiple}, as {next(iter(left))}")
    convert_qat(prepare_qat(model, config.model_copy(update={"overrides": left})))


def _dtype(asked: str | None, source: _Source) -> mx.Dtype | None:
    """What floats are rounded to: what is asked for, else the dtype of the checkpoint that training went on from."""
    own = source.config or {}
    return FLOATS_BY_NAME.get(asked or str(own.get("dtype") or own.get("torch_dtype")))


def _summary(config: dict[str, Any]) -> str:
    """What was written, in a few words."""
    quantization = config.get("quantization")
    if quantization is None:
        return f"{config['model_type']}, {config['dtype']}"
    other = sum(isinstance(value, dict) for value in quantization.values())
    more = f", other formats: {other}" if other else ""
    return (
        f"{config['model_type']}, {quantization['mode']} {quantization['bits']} bits in groups of "
        f"{quantization['group_size']}{more}"
    )


def _export(options: argparse.Namespace) -> str:
    """Do what the options say. Returns what is said of it."""
    if options.gguf is not None and (options.quantize is not None or options.dtype is not None):
        raise ValueError("--gguf says the type of all numbers: leave out --quantize and --dtype.")
    if options.group_size is not None and options.quantize is None:
        raise ValueError("--group-size needs --quantize.")
    if options.gguf is None:
        # Before any work is done.
        require_new(options.out, "export")
    source = _open(options.model)
    if options.quantize is not None:
        _quantize(source.model, options.quantize, options.group_size)
    out = shlex.quote(str(options.out))
    if options.gguf is not None:
        write_gguf(
            options.out,
            source.model,
            source.tokenizer,
            kind=options.gguf,
            texts_begin_with_end=source.begins_with_end,
        )
        return f"wrote {options.out} from {source.path} ({options.gguf}); open it: llama-cli -m {out}"
    config = save_pretrained(
        options.out,
        source.model,
        source.tokenizer,
        source=source.config,
        generation=source.generation,
        dtype=_dtype(options.dtype, source),
        texts_begin_with_end=source.begins_with_end,
        log=_to_stderr,
    )
    summary = _summary(config)
    return f"wrote {options.out} from {source.path} ({summary}); open it: mlx_lm.generate --model {out} --prompt ..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    print_what_fits()
    try:
        print(_export(options))
    except (ValueError, OSError) as error:
        _to_stderr(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
