"""The command ``python -m forge_mlx.data preview CONFIG_OR_FILE``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import Any, get_args

from forge_mlx._console import run_command
from forge_mlx.data.example_config import ExampleConfig, Format
from forge_mlx.data.example_files import suffixes_of, told_format
from forge_mlx.data.example_reader import read_examples, with_template
from forge_mlx.data.files import list_paths
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.preview import Preview
from forge_mlx.hub.gguf_file import read_gguf
from forge_mlx.hub.gguf_tokenizer import read_tokenizer
from forge_mlx.hub.locate import locate
from pydantic import ValidationError
from rich.console import Console
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

_SEQ_LEN = 512
_FORMATS: tuple[Format, ...] = get_args(Format)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forge_mlx.data", description="Look at data before training on it.")
    commands = parser.add_subparsers(dest="command", required=True)
    preview = commands.add_parser(
        "preview",
        help="print examples as a model sees them, with what is learnt in colour",
        description="Print examples as a model sees them, with what is learnt in colour, their counts, and how they "
        "fill rows. Reads all of them, and says what is malformed.",
        epilog="Example: python -m forge_mlx.data preview chats.jsonl --tokenizer SmolLM2-135M-Instruct",
    )
    preview.add_argument("source", type=Path, help="a training config (YAML), or a file or folder of examples")
    preview.add_argument(
        "--tokenizer", metavar="MODEL", help="the model whose tokenizer and chat template to use; default: the config's"
    )
    preview.add_argument(
        "--format", choices=_FORMATS, help="what an example is; default: the config's, or as the first one looks"
    )
    preview.add_argument("--seq-len", type=_positive, help=f"the longest row; default: the config's, or {_SEQ_LEN}")
    preview.add_argument("-n", type=_positive, default=3, dest="number", help="examples or rows to print; default: 3")
    preview.add_argument("--tokens", type=_positive, default=600, help="most tokens of each to print; default: 600")
    preview.add_argument("--packed", action="store_true", help="print rows with all their texts instead of examples")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1 but got {text!r}")
    return int(text)


def _preview(options: argparse.Namespace) -> None:
    values = _of_yaml(options.source) if options.source.suffix in (".yaml", ".yml") else {}
    config = _example_config(options, values)
    model = options.tokenizer or _entry(values, "model", "path")
    if not isinstance(model, str):
        raise ValueError("[preview] a tokenizer is needed. Name the model whose it is with --tokenizer.")
    seq_len = options.seq_len or _entry(values, "train", "seq_len") or _SEQ_LEN
    console = Console(highlight=False)
    tokenizer = with_template(config, _tokenizer_of(model, _entry(values, "model", "revision")))
    found = read_examples(config, tokenizer, log=lambda line: console.print(line, markup=False), hold_out=False)
    items = found.train + found.valid
    preview = Preview(console, tokenizer, config, seq_len, options.tokens)
    preview.legend()
    if not options.packed:
        preview.examples(items, options.number)
    preview.counts(items)
    preview.rows(items, options.number, contents=options.packed)


def _example_config(options: argparse.Namespace, values: dict[str, Any]) -> ExampleConfig:
    if not values:
        example_format = options.format or _format_of(str(options.source))
        # JSON mode reads what a command line gives; the file is taken as it is.
        return ExampleConfig.model_validate({"format": example_format, "source": [str(options.source)]})
    data = _entry(values, "data")
    if not isinstance(data, dict) or "format" not in data:
        raise ValueError(
            f"{options.source}: data.format must say what an example is: {', '.join(_FORMATS)}. A corpus without "
            "examples has no mask to look at."
        )
    try:
        return ExampleConfig.model_validate({**data, **({"format": options.format} if options.format else {})})
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        key = ".".join(map(str, ("data", *first["loc"])))
        more = f" ({len(others)} more problems)" if others else ""
        raise ValueError(f"{options.source}: {key}: {first['msg']}{more}") from error


def _format_of(source: str) -> str:
    """The format that the first example of a source looks like."""
    told = told_format(list_paths([source], suffixes_of("text")).files[0])
    if told.format not in _FORMATS:
        raise ValueError(
            f"[preview] {told.where}: what the example is does not show in its fields, {', '.join(told.fields)}. Name "
            f"it with --format, one of {', '.join(_FORMATS)}, or write a config that names the fields."
        )
    return told.format


def _of_yaml(path: Path) -> dict[str, Any]:
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ValueError(f"{path}: must be a readable YAML file but: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold a config with a section `data`.")
    return values


def _entry(values: dict[str, Any], *keys: str) -> Any:
    found: Any = values
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _tokenizer_of(model: str, revision: str | None) -> HubTokenizer:
    found = locate(model, revision=revision)
    return read_tokenizer(read_gguf(found)) if found.suffix == ".gguf" else HubTokenizer.load(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 done, 2 bad input."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _preview(options))


if __name__ == "__main__":
    sys.exit(main())
