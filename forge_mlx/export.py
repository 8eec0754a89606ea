"""The command ``python -m forge_mlx.export RUN OUT``: a trained model as a folder that mlx-lm opens."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import shlex
import sys
from typing import Any

from forge_mlx._console import print_what_fits
from forge_mlx.generate import open_model
from forge_mlx.hub.llama import export_llama

_DESCRIPTION = """\
Write a trained model as a folder in Hugging Face's layout (Llama, Qwen3, Mixtral or Qwen3-MoE), which mlx-lm opens, and
transformers too where nothing is quantised. Numbers stay what they are: floats in their dtype, and the codes of a model
that was trained quantised. The tokenizer gives every text the same ids. A model whose parts these layouts cannot say,
or whose tokenizer is no BPE model, is refused.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forge_mlx.export", description=_DESCRIPTION)
    parser.add_argument(
        "model",
        type=Path,
        help="a run's folder (its final model, else its newest checkpoint), a model folder such as RUN/final, or a "
        "checkpoint",
    )
    parser.add_argument("out", type=Path, help="the folder to write; it must be new or empty")
    return parser


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    print_what_fits()
    try:
        model, tokenizer, source, begins_with_end = open_model(options.model)
        config = export_llama(options.out, model, tokenizer, texts_begin_with_end=begins_with_end)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = shlex.quote(str(options.out))
    print(
        f"wrote {options.out} from {source} ({_summary(config)}); open it: mlx_lm.generate --model {out} --prompt ..."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
