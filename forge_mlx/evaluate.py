"""The command ``python -m forge_mlx.evaluate MODEL DATA``: perplexity, bits per byte, multiple choice."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
import json
from pathlib import Path
import sys
from typing import Any, Final, NamedTuple

from forge_mlx._console import HelpFormatter, run_command, to_stderr
from forge_mlx._text import count
from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_files import suffixes_of, told_format
from forge_mlx.data.example_reader import read_examples
from forge_mlx.data.files import TEXT_SUFFIXES, SourceFile, list_paths
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.evaluation.choices import Question, encode_choices, read_questions, score_choices
from forge_mlx.evaluation.likelihood import encode_texts, likelihood, read_texts
from forge_mlx.evaluation.rows import Row
from forge_mlx.opened_model import OpenedModel, add_model_arguments, open_model, run_config
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_FORMATS: Final = ("text", "chat", "prompt_completion", "choices")
_SEQ_LEN: Final = 2048

_DESCRIPTION: Final = """\
Measure a model on data: files or folders of text, JSON lines or Parquet. text: every token is predicted once; of JSON
lines the field "text". chat and prompt_completion: what the assistant says and the token that ends its turn; where
MODEL is a run, examples are read as its section data says, whose loss in validation this then is. choices:
{"question": ..., "choices": [...], "answer": 0, "B" or a choice}; a choice is scored by its log-probability behind the
question and a space. acc takes the likeliest choice, acc_norm the likeliest per character and acc_bytes per byte, as
lm-evaluation-harness does, and acc_tokens per token.
"""
_EPILOG: Final = """\
examples:
  python -m forge_mlx.evaluate runs/quickstart book.txt
  python -m forge_mlx.evaluate runs/mine held-out.jsonl --json result.json
  python -m forge_mlx.evaluate ../models/SmolLM2-135M-Instruct held-out.jsonl --prompt-as chat
  python -m forge_mlx.evaluate ../models/SmolLM2-135M questions.jsonl --format choices
"""


class _Data(NamedTuple):
    """What is measured.

    Attributes:
        files: that hold it.
        format: one of `_FORMATS`.
        settings: of `ExampleConfig`, where they are not its defaults.
    """

    files: list[SourceFile]
    format: str
    settings: dict[str, Any]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge_mlx.evaluate", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=HelpFormatter
    )
    add_model_arguments(parser, adapter="adapters to put on the model (default: none)")
    parser.add_argument("data", nargs="+", help="files, folders and globs")
    parser.add_argument("--format", choices=_FORMATS, help="what the data are (default: as the first record looks)")
    parser.add_argument(
        "--text-field",
        metavar="NAME",
        help="of texts in JSON lines or Parquet: the field that holds them (default: the run's, or text)",
    )
    parser.add_argument(
        "--prompt-as",
        choices=("text", "chat"),
        help="of prompt_completion: whether prompt and completion are one text, or a user's message and the "
        "assistant's in the chat template (default: as in the run, or text)",
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows in a forward pass (default 8)")
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help=f"most tokens that the model reads at once (default {_SEQ_LEN}, or the model's own length if less); "
        "longer texts are read in windows, and of a question that is too long the beginning is cut off",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens by which windows advance (default --seq-len: they do not overlap); with half of it each token has "
        "at least the other half to look back on, at twice the cost; not of choices",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too, as JSON")
    return parser


@contextmanager
def _bar() -> Iterator[Callable[[list[Row]], Callable[[int], None]]]:
    """A bar on standard error where that is a terminal: called with the rows, it gives what counts them."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.completed:,}/{task.total:,} rows"), BarColumn(), TimeRemainingColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, refresh_per_second=4, transient=True, disable=not shown) as progress:

        def start(rows: list[Row]) -> Callable[[int], None]:
            task = progress.add_task("", total=len(rows))
            return lambda done: progress.advance(task, done)

        yield start


def _find_data(options: argparse.Namespace) -> _Data:
    """The files, their format, as asked for or as the first record tells, and how they are read."""
    suffixes = suffixes_of("text" if options.format in (None, "text") else "chat")
    listing = list_paths(options.data, suffixes)
    if left_out := sum(listing.left_out.values()):
        to_stderr(f"{count(len(listing.files), 'file')}, {left_out} others left out{listing.describe_left_out()}")
    first = listing.files[0]
    run = None if first.kind in TEXT_SUFFIXES else run_config(options.model)
    own = run.data if run is not None and isinstance(run.data, ExampleConfig) else None
    asked = options.format or ("text" if options.text_field is not None else None)
    found = asked or _told_format(first, own)
    settings = own.reads_as(found) if own is not None else {}
    if settings:
        shown = ", ".join(f"{name}: {value}" for name, value in settings.items())
        to_stderr(f"as in the run's section data: {shown}")
    asked_settings = {"text_field": options.text_field, "prompt_as": options.prompt_as}
    settings |= {name: value for name, value in asked_settings.items() if value is not None}
    _require_read(options, found)
    return _Data(listing.files, found, settings)


def _require_read(options: argparse.Namespace, data_format: str) -> None:
    """Raise for an option that the format does not read."""
    readers = {
        "text_field": ("text",),
        "prompt_as": ("prompt_completion",),
        "stride": ("text", "chat", "prompt_completion"),
    }
    for name, formats in readers.items():
        if getattr(options, name) is not None and data_format not in formats:
            raise ValueError(
                f"[evaluate] --{name.replace('_', '-')} holds for {' and '.join(formats)} but the data are "
                f"{data_format}. Leave it out, or name another --format."
            )


def _told_format(file: SourceFile, own: ExampleConfig | None) -> str:
    """What a file's first record looks like; where nothing tells, a text."""
    if file.kind in TEXT_SUFFIXES:
        return "text"
    told = told_format(file, {} if own is None else {own.format: own.required_fields})
    if told.format == "preference":
        raise ValueError(
            f"[evaluate] {told.where}: must be a text, a chat, a prompt with its completion or a question with choices "
            "but is a pair of answers. Name one of its fields with --text-field."
        )
    if told.format in (None, "text"):
        return "text"
    to_stderr(f"format: {told.format}, as the first record has {' and '.join(told.by)}")
    return str(told.format)


def _lengths(opened: OpenedModel, options: argparse.Namespace) -> tuple[int, int]:
    """The most tokens of a row, and the stride of windows."""
    limit = opened.model.config.max_seq_len
    seq_len = min(_SEQ_LEN, limit) if options.seq_len is None else options.seq_len
    if not 1 <= seq_len <= limit:
        raise ValueError(
            f"[evaluate] --seq-len must be in 1 ... {limit}, which is how much the model reads, but got {seq_len}."
        )
    return seq_len, seq_len if options.stride is None else options.stride


def _encoded(opened: OpenedModel, data: _Data, source: list[str]) -> list[Encoded]:
    """The tokens of each text or example, and which of them are scored."""
    if data.format == "text":
        texts = read_texts(data.files, data.settings.get("text_field", "text"))
        return list(encode_texts(texts, opened.tokenizer, opened.begin_ids))
    if not isinstance(opened.tokenizer, HubTokenizer):
        raise ValueError(
            f"[evaluate] --format {data.format} needs a tokenizer of Hugging Face's kind but {opened.source} has none."
        )
    config = ExampleConfig.model_validate({"format": data.format, "source": source, **data.settings})
    examples = read_examples(config, opened.tokenizer, log=to_stderr, hold_out=False)
    encoded = [item.texts[0] for item in examples.train]
    for each in encoded:
        opened.tokenizer.require_embeddings(each.ids, opened.model.config.vocab_size or 0, "[evaluate] the examples")
    return encoded


def _measure_texts(opened: OpenedModel, data: _Data, options: argparse.Namespace) -> dict[str, Any]:
    seq_len, stride = _lengths(opened, options)
    texts = _encoded(opened, data, options.data)
    with _bar() as bar:
        found = likelihood(
            opened.model,
            opened.tokenizer.token_bytes,
            texts,
            seq_len=seq_len,
            stride=stride,
            batch_size=options.batch_size,
            progress=bar,
        )
    if empty := len(texts) - found.texts:
        to_stderr(f"{count(empty, 'text')} left out: nothing in them to predict")
    print(f"perplexity     {found.perplexity:.4f}")
    print(f"nats a token   {found.nats_per_token:.4f}")
    if found.bits_per_byte is not None:
        print(f"bits a byte    {found.bits_per_byte:.4f}")
    print(
        f"over           {count(found.targets, 'token')} ({count(found.num_bytes, 'byte')}) of "
        f"{count(found.texts, 'text' if data.format == 'text' else 'example')}, in {count(found.rows, 'row')} of up to "
        f"{count(seq_len, 'token')}"
    )
    return {**found.as_dict(), "seq_len": seq_len, "stride": stride}


def _measure_choices(opened: OpenedModel, questions: list[Question], options: argparse.Namespace) -> dict[str, Any]:
    seq_len, _ = _lengths(opened, options)
    encoded = [encode_choices(question, opened.tokenizer, opened.begin_ids, seq_len) for question in questions]
    if cut := sum(each.cut for each in encoded):
        to_stderr(f"the beginning of {count(cut, 'prompt')} was cut off: --seq-len {seq_len} holds no more")
    with _bar() as bar:
        scores = score_choices(opened.model, questions, encoded, options.batch_size, bar)
    for measure in scores.correct:
        share, error = scores.accuracy(measure)
        print(f"{measure:<12}{100 * share:6.2f} %" + ("" if error is None else f" +- {100 * error:.2f}"))
    print(f"over        {count(len(questions), 'question')}; chance gives {100 * scores.chance:.2f} %")
    return {**scores.as_dict(), "seq_len": seq_len, "cut": cut}


def _evaluate(options: argparse.Namespace) -> None:
    data = _find_data(options)
    # What is wrong with them shows before a model is loaded.
    questions = read_questions(data.files) if data.format == "choices" else []
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json must name a file in a folder that exists but got {options.json}.")
    opened = open_model(options.model, adapter=options.adapter, log=to_stderr)
    to_stderr(f"[{opened.source}]")
    found = _measure_choices(opened, questions, options) if questions else _measure_texts(opened, data, options)
    if options.json is not None:
        head = {"model": str(options.model), "data": options.data, "format": data.format, **data.settings}
        if options.adapter is not None:
            head["adapter"] = str(options.adapter)
        options.json.write_text(json.dumps({**head, **found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _evaluate(options))


if __name__ == "__main__":
    sys.exit(main())
