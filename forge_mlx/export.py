"""The command ``python -m forge_mlx.export MODEL OUT``: a model as a folder that mlx-lm opens, or as a GGUF file."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import shlex
import sys
from typing import Any, Final

from forge_mlx._console import HelpFormatter, run_command, to_stderr
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_write import write_gguf
from forge_mlx.hub.merged import merge_for_gguf, merge_for_saving
from forge_mlx.hub.new_folder import require_new
from forge_mlx.hub.pretrained import save_pretrained
from forge_mlx.kernels.quantize.options import checked_options
from forge_mlx.metal.dtypes import FLOATS_BY_NAME
from forge_mlx.models.adapters import adapted_layers
from forge_mlx.models.dequantize import dequantize_layers
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.nn.coded import coded_layers
from forge_mlx.nn.quantized import QUANTIZABLE
from forge_mlx.opened_model import OpenedModel, add_model_arguments, open_model
import mlx.core as mx

_DESCRIPTION: Final = """\
Write a model as a folder in Hugging Face's layout, which mlx-lm opens, and transformers too where nothing is quantised;
or as a GGUF file for llama.cpp. Adapters are merged. Numbers stay what they are unless an option says otherwise: floats
in the dtype of the checkpoint, and codes of a quantised model. The tokenizer gives every text the same ids. A model
whose parts no published family has, or whose tokenizer is no BPE model, is refused.
"""
_EPILOG: Final = """\
examples:
  python -m forge_mlx.export runs/mine OUT
  python -m forge_mlx.export runs/mine OUT --quantize 4
  python -m forge_mlx.export runs/mine mine.gguf --gguf q8_0
  python -m forge_mlx.export ../models/SmolLM2-135M OUT --adapter runs/mine/final
"""
_GGUF_KINDS: Final = ("f16", "f32", "q8_0", "q4_0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge_mlx.export", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=HelpFormatter
    )
    add_model_arguments(parser, adapter="adapters to merge into it (default: the run's)")
    parser.add_argument(
        "out",
        type=Path,
        help="the folder to write, which must be new or empty; with --gguf the file, which must be new",
    )
    parser.add_argument(
        "--quantize",
        type=int,
        metavar="BITS",
        help="write the matrices in MLX's affine codes of 2, 3, 4, 5, 6 or 8 bits (default: as they are)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="with --quantize: codes that share a scale, 32, 64 or 128 (default 64)",
    )
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="make floats of a quantised model's codes; adapters are then merged without rounding to codes again, "
        "as with --gguf but for q4_0 of codes that stay",
    )
    parser.add_argument(
        "--dtype", choices=sorted(FLOATS_BY_NAME), help="round floats to it (default: as the checkpoint's are)"
    )
    parser.add_argument(
        "--gguf",
        choices=_GGUF_KINDS,
        help="write a GGUF file of this type instead of a folder; in q8_0 and q4_0 codes of 4 bits in groups of 32 "
        "stay, as Q4_1, but for those under adapters in q8_0 (default: a folder)",
    )
    return parser


def _open(options: argparse.Namespace) -> OpenedModel:
    """The model with its adapters merged, and as floats where that is asked for."""
    opened = open_model(options.model, adapter=options.adapter, keep_dtype=True, log=to_stderr)
    model = opened.model
    coded = coded_layers(model)
    if options.dequantize and not coded:
        raise ValueError(f"--dequantize needs a quantised model but {opened.source} has no codes. Leave it out.")
    if options.quantize is not None and not options.dequantize:
        # Before adapters are merged into codes, with a line on what that loses.
        _require_floats(model)
    if adapted_layers(model) and options.gguf is not None:
        merge_for_gguf(model, options.gguf, dequantize=options.dequantize, log=to_stderr)
    elif adapted_layers(model):
        merge_for_saving(model, dequantize=options.dequantize, log=to_stderr)
    if options.dequantize and coded_layers(model):
        # Codes are multiplied in what is written, not made wider after they were rounded.
        dtypes = {None: options.dtype, "f16": "float16"}
        written = dtypes.get(options.gguf, "float32")
        dequantize_layers(model, FLOATS_BY_NAME[written] if written else opened.stored_dtype or _float_dtype(model))
    return opened


def _float_dtype(model: GPT) -> mx.Dtype:
    """The dtype of what is no code: every model has a norm."""
    dtype: mx.Dtype = model.norm.weight.dtype
    return dtype


def _require_floats(model: GPT) -> None:
    if coded := coded_layers(model):
        raise ValueError(
            f"--quantize needs a float model but {coded[0]} and {len(coded) - 1} more are codes already. Leave it out, "
            "or add --dequantize."
        )


def _quantize(model: GPT, bits: int, group_size: int | None) -> None:
    """Put the matrices of a float model in codes; those whose rows are no whole groups stay as they are."""
    options = checked_options("export", "affine", bits, group_size, None)
    _require_floats(model)
    config = QATConfig(bits=options.bits, group_size=options.group_size)
    multiple = options.columns_multiple
    left = {
        name: None
        for name, module in model.named_modules()
        if isinstance(module, QUANTIZABLE) and module.weight.shape[-1] % multiple
    }
    if left:
        to_stderr(f"{len(left)} matrices stay floats: their rows are no multiple of {multiple}, as {next(iter(left))}")
    convert_qat(prepare_qat(model, config.model_copy(update={"overrides": left})))


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
    if options.gguf is None and options.out.suffix.lower() == ".gguf":
        raise ValueError(
            f"--gguf must say the type of the numbers of a GGUF file, as {options.out} is: add --gguf f16."
        )
    # Before any work is done.
    if options.gguf is None:
        require_new(options.out, "export")
    elif options.out.exists():
        raise HubError(f"[export] file must be new but {options.out} exists. Give another or remove it.")
    opened = _open(options)
    if options.quantize is not None:
        _quantize(opened.model, options.quantize, options.group_size)
    out = shlex.quote(str(options.out))
    if options.gguf is not None:
        written = write_gguf(
            options.out,
            opened.model,
            opened.tokenizer,
            kind=options.gguf,
            texts_begin_with_end=opened.begins_with_end,
        )
        types = ", ".join(f"{number} {name}" for name, number in written.items())
        return f"wrote {options.out} from {opened.source} (tensors: {types}); open it: llama-cli -m {out}"
    config = save_pretrained(
        options.out,
        opened.model,
        opened.tokenizer,
        source=opened.config,
        generation=opened.generation,
        dtype=FLOATS_BY_NAME[options.dtype] if options.dtype else opened.stored_dtype,
        texts_begin_with_end=opened.begins_with_end,
        log=to_stderr,
    )
    summary = _summary(config)
    return f"wrote {options.out} from {opened.source} ({summary}); open it: mlx_lm.generate --model {out} --prompt ..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: print(_export(options)))


if __name__ == "__main__":
    sys.exit(main())
