"""The command ``python -m forge_mlx.data preview CONFIG_OR_FILE [section.key=value ...]``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import get_args

from forge_mlx._console import HelpFormatter, run_command
from forge_mlx.data.example_config import ExampleConfig, Format
from forge_mlx.data.example_files import suffixes_of, told_format
from forge_mlx.data.example_reader import read_examples, with_template
from forge_mlx.data.files import list_paths
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.preview import Preview
from forge_mlx.hub.pretrained import read_shape, read_tokenizer
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.train.config import TrainConfig, require_fitting_shape
from forge_mlx.train.duration import describe_steps
from forge_mlx.train.examples import begin_examples
from forge_mlx.train.load import load_config, make_config
from forge_mlx.train.pretrained_config import PretrainedConfig
from rich.console import Console

_SEQ_LEN = 512
# Where nobody said how long a run is: no setting is refused for needing more steps.
_NO_END = sys.maxsize
_FORMATS: tuple[Format, ...] = get_args(Format)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forge_mlx.data", description="Look at data before training on it.")
    commands = parser.add_subparsers(dest="command", required=True)
    preview = commands.add_parser(
        "preview",
        help="print examples as a model sees them, with what is learnt in colour",
        description="Print examples as a model sees them, with what is learnt in colour, their counts, and how they "
        "fill rows. Reads all of them, and says what is malformed and what keeps training from starting on them: "
        "the exit status is then 2.",
        epilog="examples:\n"
        "  python -m forge_mlx.data preview mine.yaml data.truncate=drop train.seq_len=512\n"
        "  python -m forge_mlx.data preview chats.jsonl --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct",
        formatter_class=HelpFormatter,
    )
    preview.add_argument("source", type=Path, help="a training config (YAML), or a file or folder of examples")
    preview.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that replace the config's, as in training"
    )
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


def _preview(options: argparse.Namespace) -> bool:
    """Print it all. Returns whether training would start."""
    config, shape = _config_of(options)
    base, data = config.model, config.data
    assert isinstance(base, PretrainedConfig)
    assert isinstance(data, ExampleConfig)
    console = Console(highlight=False)

    def log(line: str) -> None:
        console.print(line, markup=False)

    tokenizer = read_tokenizer(base.path, shape, revision=base.revision, log=log)
    templated = with_template(data, tokenizer)
    found = read_examples(data, templated, log=log, hold_out=False)
    items = found.train + found.valid
    preview = Preview(console, templated, data, config.train.seq_len, options.tokens)
    preview.legend()
    if not options.packed:
        preview.examples(items, options.number)
    preview.counts(items)
    preview.rows(items, options.number, contents=options.packed)
    refusals, lines = _verdict(config, tokenizer, shape)
    preview.verdict(refusals, lines)
    return not refusals


def _verdict(config: TrainConfig, tokenizer: HubTokenizer, shape: DecoderConfig) -> tuple[list[str], list[str]]:
    """Why training would not start on the examples, and what it would say of them. They are in the cache by now."""
    refusals, lines = [], []
    try:
        require_fitting_shape(config, shape)
    except ValueError as error:
        refusals.append(str(error))
    try:
        examples = begin_examples(config, tokenizer, shape, lambda _: None)
        lines, num_rows = list(examples.lines), examples.prepared.train.num_rows
        steps = config.total_steps(num_rows)
        if steps != _NO_END:
            epochs = config.describe_epochs(num_rows) or describe_steps(
                steps, num_rows, config.train.rows_per_step, config.row_noun
            )
            lines.append(f"epochs: {epochs}")
    except ValueError as error:
        refusals.append(str(error))
    return refusals, lines


def _config_of(options: argparse.Namespace) -> tuple[TrainConfig, DecoderConfig]:
    """What would be trained, and the shape of its model."""
    source, overrides = options.source, _overrides(options)
    if source.suffix in (".yaml", ".yml"):
        config = load_config(source, overrides)
        if not isinstance(config.data, ExampleConfig):
            raise ValueError(
                f"{source}: data.format must say what an example is: {', '.join(_FORMATS)}. A corpus without "
                "examples has no mask to look at."
            )
        return config, _shape_of(config)
    named = {override.partition("=")[0] for override in overrides}
    if "model.path" not in named:
        raise ValueError("[preview] a tokenizer is needed. Name the model whose it is with --tokenizer.")
    if "data.format" not in named:
        overrides.append(f"data.format={_format_of(str(source))}")
    length = {} if "train.epochs" in named else {"steps": _NO_END}
    values = {
        "run": {"dir": "."},
        "data": {"source": [str(source)]},
        "train": {**length, "batch_size": 1, "seq_len": _SEQ_LEN},
    }
    config = make_config(values, overrides, source)
    shape = _shape_of(config)
    if "train.seq_len" in named:
        return config, shape
    longest = min(_SEQ_LEN, shape.max_seq_len)
    return config.model_copy(update={"train": config.train.model_copy(update={"seq_len": longest})}), shape


def _overrides(options: argparse.Namespace) -> list[str]:
    """What the command line says of the config, options first."""
    given = {"model.path": options.tokenizer, "data.format": options.format, "train.seq_len": options.seq_len}
    return [*(f"{key}={value}" for key, value in given.items() if value is not None), *options.overrides]


def _shape_of(config: TrainConfig) -> DecoderConfig:
    assert isinstance(config.model, PretrainedConfig)
    # What of the file is not used is no matter of its data.
    return read_shape(config.model.path, revision=config.model.revision, log=lambda _: None)


def _format_of(source: str) -> str:
    """The format that the first example of a source looks like."""
    told = told_format(list_paths([source], suffixes_of("text")).files[0])
    if told.format not in _FORMATS:
        raise ValueError(
            f"[preview] {told.where}: what the example is does not show in its fields, {', '.join(told.fields)}. Name "
            f"it with --format, one of {', '.join(_FORMATS)}, or write a config that names the fields."
        )
    return told.format


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 done, 2 bad input, or training would not start on it."""
    parser = _parser()
    # Options may stand between the overrides, which argparse then leaves.
    options, rest = parser.parse_known_args(arguments)
    if strange := [each for each in rest if each.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    options.overrides += rest
    starts: list[bool] = []
    status = run_command(lambda: starts.append(_preview(options)))
    return 2 if starts == [False] else status


if __name__ == "__main__":
    sys.exit(main())
