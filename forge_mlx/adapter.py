"""The command ``python -m forge_mlx.adapter``: adapters merged into a model, converted, described."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
import sys
from typing import Final

from forge_mlx._console import HelpFormatter, run_command, to_stderr
from forge_mlx._text import count
from forge_mlx.hub.adapter_files import load_adapters, with_own_template
from forge_mlx.hub.adapter_folder import read_folder
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.merged import merge_for_saving
from forge_mlx.hub.new_folder import require_new
from forge_mlx.hub.peft import from_peft, to_peft
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained

_DESCRIPTION: Final = """\
Adapters are small: they mean nothing without the model that they were trained on. merge adds them to its weights and
writes a whole model; to-peft and from-peft change the layout between mlx-lm's, which forge_mlx writes, and PEFT's; info
says what a folder holds.
"""
_EPILOG: Final = """\
examples:
  python -m forge_mlx.adapter info runs/mine/final
  python -m forge_mlx.adapter merge runs/mine/final merged
  python -m forge_mlx.adapter merge adapters merged --base ../models/Qwen3-0.6B-4bit --dequantize
  python -m forge_mlx.adapter to-peft runs/mine/final for-peft
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge_mlx.adapter", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=HelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="add adapters to the weights of their model, and write it whole")
    merge.add_argument("adapter", type=Path, help="a folder of adapters in mlx-lm's layout")
    merge.add_argument("out", type=Path, help="the folder to write; it must be new or empty")
    merge.add_argument(
        "--base", metavar="MODEL", help="the model's folder, GGUF file or hub id (default: what the adapters name)"
    )
    merge.add_argument(
        "--dequantize", action="store_true", help="write floats where the model has codes (default: codes, made anew)"
    )
    for name, text in {"to-peft": "mlx-lm's layout to PEFT's", "from-peft": "PEFT's layout to mlx-lm's"}.items():
        convert = commands.add_parser(name, help=f"convert a folder of adapters from {text}")
        convert.add_argument("adapter", type=Path, help="the folder to read")
        convert.add_argument("out", type=Path, help="the folder to write; it must be new or empty")
    info = commands.add_parser("info", help="what a folder of adapters in mlx-lm's layout holds")
    info.add_argument("adapter", type=Path, help="the folder")
    return parser


def _merge(options: argparse.Namespace) -> str:
    content = read_folder(options.adapter)
    base = options.base or content.base
    if base is None:
        raise HubError(f"{options.adapter}: must name its model but does not. Give it: --base MODEL")
    # Before any work is done.
    require_new(options.out, "merge")
    loaded = load_pretrained(base, revision=None if options.base else content.own.get("revision"))
    config = load_adapters(options.adapter, loaded.model, base=loaded.folder)
    merge_for_saving(loaded.model, dequantize=options.dequantize, log=to_stderr)
    tokenizer = with_own_template(options.adapter, loaded.tokenizer)
    save_pretrained(options.out, loaded.model, tokenizer, source=loaded.config, generation=loaded.generation)
    return f"wrote {options.out}: {base} with {count(len(config.targets), 'adapter')} merged"


def _to_peft(options: argparse.Namespace) -> str:
    to_peft(options.adapter, options.out)
    return f"wrote {options.out} in PEFT's layout"


def _from_peft(options: argparse.Namespace) -> str:
    copies = from_peft(options.adapter, options.out)
    left_out = f"; {count(copies, 'whole embedding table')} beside the adapters left out" if copies else ""
    return f"wrote {options.out} in mlx-lm's layout{left_out}"


def _info(options: argparse.Namespace) -> str:
    content = read_folder(options.adapter)
    elements = sum(array.size for parts in content.tensors.values() for array in parts.values())
    kinds = sorted({name.rpartition(".")[2] for name in content.tensors})
    return "\n".join(
        [
            f"model    {content.base or 'not said'}",
            f"method   {content.fine_tune_type}, rank {content.rank}, scale {content.scale:g}, "
            f"dropout {content.dropout:g}",
            f"layers   {len(content.tensors)}: {', '.join(kinds)}",
            f"size     {count(elements, 'parameter')}",
        ]
    )


_COMMANDS: Final[dict[str, Callable[[argparse.Namespace], str]]] = {
    "merge": _merge,
    "to-peft": _to_peft,
    "from-peft": _from_peft,
    "info": _info,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: print(_COMMANDS[options.command](options)))


if __name__ == "__main__":
    sys.exit(main())
