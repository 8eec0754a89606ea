"""The command ``python -m forge_mlx.evaluate MODEL DATA``: perplexity, bits per byte, multiple choice."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
import json
from pathlib import Path
import sys
from typing import Any, Final

from forge_mlx._console import print_what_fits
from forge_mlx._text import count
from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_files import read_records, suffixes_of
from forge_mlx.data.example_reader import read_examples
from forge_mlx.data.files import TEXT_SUFFIXES, SourceFile, list_paths
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.evaluation.choices import Question, encode_choices, read_questions, score_choices
from forge_mlx.evaluation.likelihood import encode_texts, likelihood, read_texts
from forge_mlx.evaluation.rows import Row
from forge_mlx.opened_model import OpenedModel, open_model
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_FORMATS: Final = ("text", "chat", "prompt_completion", "choices")
# A format -> the fields of a record that tell it.
_TELLING: Final = {
    "choices": ({"choices"},),
    "chat": ({"messages"}, {"conversations"}),
    "prompt_completion": ({"prompt", "completion"}, {"instruction", "output"}),
}
_SEQ_LEN: Final = 2048

_DESCRIPTION: Final = """\
Measure a model on data: files or folders of text, JSON lines or Parquet. text: every token is predicted once; of JSON
lines the field "text". chat and prompt_completion: what the assistant says and the token that ends its turn. choices:
{"question": ..., "choices": [...], "answer": 0, "B" or a choice}; a choice is scored by its log-probability behind the
question and a space. acc takes the likeliest choice, acc_norm the likeliest per character and acc_bytes per byte, as
lm-evaluation-harness does, and acc_tokens per token.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forge_mlx.evaluate", description=_DESCRIPTION)
    parser.add_argument(
        "model",
        help="a run's folder, a model folder such as RUN/final, a checkpoint of a run; a folder in Hugging Face's or "
        "mlx-lm's layout, a .gguf file, or a model's name on the Hugging Face Hub",
    )
    parser.add_argument("data", nargs="+", help="files, folders and globs")
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="adapters to put on the model")
    parser.add_argument("--format", choices=_FORMATS, help="default: told by the first record")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="of JSON lines of texts (default text)")
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
        "at least the other half to look back on, at twice the cost",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


def _files_and_format(options: argparse.Namespace) -> tuple[list[SourceFile], str]:
    """The files, and their format: as asked for, or as the first record tells."""
    suffixes = suffixes_of("text" if options.format in (None, "text") else "chat")
    listing = list_paths(options.data, suffixes)
    if left_out := sum(listing.left_out.values()):
        _to_stderr(f"{count(len(listing.files), 'file')}, {left_out} others left out{listing.describe_left_out()}")
    if options.format is not None:
        return listing.files, options.format
    file = listing.files[0]
    if file.kind in TEXT_SUFFIXES:
        return listing.files, "text"
    record = next(iter(read_records(file, "text", options.text_field)), None)
    if record is None:
        raise ValueError(f"[evaluate] {file.name} must hold something to evaluate but is empty.")
    if isinstance(record.content, ValueError):
        raise record.content
    for name, alternatives in _TELLING.items():
        for fields in alternatives:
            if fields <= record.content.keys():
                _to_stderr(f"format: {name}, as the first record has {' and '.join(sorted(fields))}")
                return listing.files, name
    return listing.files, "text"


def _lengths(opened: OpenedModel, options: argparse.Namespace) -> tuple[int, int]:
    """The most tokens of a row, and the stride of windows."""
    limit = opened.model.config.max_seq_len
    seq_len = min(_SEQ_LEN, limit) if options.seq_len is None else options.seq_len
    if not 1 <= seq_len <= limit:
        raise ValueError(
            f"[evaluate] --seq-len must be in 1 ... {limit}, which is how much the model reads, but got {seq_len}."
        )
    return seq_len, seq_len if options.stride is None else options.stride


def _encoded(
    opened: OpenedModel, files: list[SourceFile], data_format: str, options: argparse.Namespace
) -> list[Encoded]:
    """The tokens of each text or example, and which of them are scored."""
    if data_format == "text":
        return list(encode_texts(read_texts(files, options.text_field), opened.tokenizer, opened.begin_ids))
    if not isinstance(opened.tokenizer, HubTokenizer):
        raise ValueError(
            f"[evaluate] --format {data_format} needs a tokenizer of Hugging Face's kind but {opened.source} has none."
        )
    config = ExampleConfig.model_validate({"format": data_format, "source": options.data})
    examples = read_examples(config, opened.tokenizer, log=_to_stderr, hold_out=False)
    return [item.texts[0] for item in examples.train]


def _measure_texts(
    opened: OpenedModel, files: list[SourceFile], data_format: str, options: argparse.Namespace
) -> dict[str, Any]:
    seq_len, stride = _lengths(opened, options)
    texts = _encoded(opened, files, data_format, options)
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
        _to_stderr(f"{count(empty, 'text')} left out: nothing in them to predict")
    print(f"perplexity     {found.perplexity:.4f}")
    print(f"nats a token   {found.nats_per_token:.4f}")
    if found.bits_per_byte is not None:
        print(f"bits a byte    {found.bits_per_byte:.4f}")
    print(
        f"over           {count(found.targets, 'token')} ({count(found.num_bytes, 'byte')}) of "
        f"{count(found.texts, 'text' if data_format == 'text' else 'example')}, in {count(found.rows, 'row')} of up to "
        f"{count(seq_len, 'token')}"
    )
    return {**found.as_dict(), "seq_len": seq_len, "stride": stride}


def _measure_choices(opened: OpenedModel, questions: list[Question], options: argparse.Namespace) -> dict[str, Any]:
    seq_len, _ = _lengths(opened, options)
    encoded = [encode_choices(question, opened.tokenizer, opened.begin_ids, seq_len) for question in questions]
    if cut := sum(each.cut for each in encoded):
        _to_stderr(f"the beginning of {count(cut, 'prompt')} was cut off: --seq-len {seq_len} holds no more")
    with _bar() as bar:
        scores = score_choices(opened.model, questions, encoded, options.batch_size, bar)
    for measure in scores.correct:
        share, error = scores.accuracy(measure)
        print(f"{measure:<12}{100 * share:6.2f} %" + ("" if error is None else f" +- {100 * error:.2f}"))
    print(f"over        {count(len(questions), 'question')}; chance gives {100 * scores.chance:.2f} %")
    return {**scores.as_dict(), "seq_len": seq_len, "cut": cut}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    print_what_fits()
    try:
        files, data_format = _files_and_format(options)
        # What is wrong with them shows before a model is loaded.
        questions = read_questions(files) if data_format == "choices" else []
        opened = open_model(options.model, adapter=options.adapter, log=_to_stderr)
        _to_stderr(f"[{opened.source}]")
        if questions:
            found = _measure_choices(opened, questions, options)
        else:
            found = _measure_texts(opened, files, data_format, options)
        if options.json is not None:
            head = {"model": str(options.model), "data": options.data, "format": data_format}
            if options.adapter is not None:
                head["adapter"] = str(options.adapter)
            options.json.write_text(
                json.dumps({**head, **found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        return 0
    except BrokenPipeError:
        return 0
    except (ValueError, OSError) as error:
        _to_stderr(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print()
        return 130


if __name__ == "__main__":
    sys.exit(main())
