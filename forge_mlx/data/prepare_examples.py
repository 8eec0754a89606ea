"""From a `data:` section with a `format` to rows for training and validation."""

from collections.abc import Callable
from dataclasses import dataclass
import time
from typing import TypeAlias

from forge_mlx._text import count
from forge_mlx.data.example_cache import Item
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_reader import ReadExamples, described, read_examples, with_template
from forge_mlx.data.example_rows import ExampleRows, ExampleTokens, PaddedRows
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.preference_rows import PreferenceRows
import numpy as np

AnyRows: TypeAlias = ExampleRows | PaddedRows | PreferenceRows


@dataclass(frozen=True)
class ExampleFacts:
    """What some examples hold; `dataclasses.asdict` gives plain JSON values.

    Attributes:
        source: the config's source.
        format: the config's format.
        files: files read.
        examples: examples read, of both splits.
        read_as: how many had another common spelling, by its name.
        in_chat: whether all of them are in the chat template.
        train_examples, valid_examples: examples of each split, without those that were dropped.
        train_tokens, valid_tokens: their tokens, without pieces that are left out.
        train_targets, valid_targets: those that are learnt, or measured.
        mean_tokens, longest_tokens: tokens of a text of either split that is in a row: an example, one of a pair's two,
            or a piece.
        too_long: examples that need more than a row.
        dropped: those of them that were left out.
        split: those of them that were cut.
        pieces: how many pieces with a target these became.
        left_out_pieces: how many pieces without one.
        left_out_tokens: tokens of these.
        row_length: positions of a training row.
        train_rows: rows of an epoch; of preference pairs, two for each.
        fill: share of their positions that is no padding.
        from_cache: whether the tokens were there already.
        seconds: what preparing took this time.
    """

    source: list[str]
    format: str
    files: int
    examples: int
    read_as: dict[str, int]
    in_chat: bool
    train_examples: int
    valid_examples: int
    train_tokens: int
    valid_tokens: int
    train_targets: int
    valid_targets: int
    mean_tokens: float
    longest_tokens: int
    too_long: int
    dropped: int
    split: int
    pieces: int
    left_out_pieces: int
    left_out_tokens: int
    row_length: int
    train_rows: int
    fill: float
    from_cache: bool
    seconds: float


@dataclass(frozen=True)
class PreparedExamples:
    """Examples that are ready for training.

    Attributes:
        tokenizer: with the chat template that was used.
        train: rows for `BatchStream`.
        valid: rows for `eval_batches`.
        facts: counts of both.
        lines: what a person should know of them, the counts last.
    """

    tokenizer: HubTokenizer
    train: AnyRows
    valid: AnyRows
    facts: ExampleFacts
    lines: list[str]


def prepare_examples(
    config: ExampleConfig,
    tokenizer: HubTokenizer,
    *,
    seq_len: int,
    log: Callable[[str], None],
    limit: int | None = None,
) -> PreparedExamples:
    """Read the examples, tokenise them with their loss masks, and lay both splits out in rows.

    All is held in memory, 5 bytes a token, twice while it is laid out. Tokens and masks are kept in the cache under a
    hash of the files' contents, of the settings and of the tokenizer; when they are there, only the files' contents are
    hashed again.

    Args:
        config: the `data:` section.
        tokenizer: the model's.
        seq_len: the longest row, in positions.
        log: takes one line of text for everything that a person should know of the files.
        limit: the longest row that the model takes; None: any. Advice keeps to it.

    Raises:
        ValueError: a file cannot be read, examples are malformed, too few or, with `truncate: error`, too long.
        OSError: there is no folder for the cache, because the user has no home.
    """
    if seq_len < 1:
        raise ValueError(f"[data] seq_len must be at least 1 but got {seq_len}.")
    started = time.monotonic()
    tokenizer = with_template(config, tokenizer)
    found = read_examples(config, tokenizer, log=log, longest=seq_len if config.truncate == "drop" else None)
    items = found.train + found.valid + found.dropped
    too_long = [item for item in items if item.num_inputs > seq_len]
    if too_long and config.truncate == "error":
        raise ValueError(_too_long_message(too_long, len(items), seq_len, config, limit))
    train, valid = (build_rows(split, config, seq_len) for split in (found.train, found.valid))
    facts = _facts(config, found, (train, valid), seq_len, time.monotonic() - started)
    return PreparedExamples(tokenizer, train, valid, facts, _lines(facts, seq_len, described(items)))


def build_rows(items: list[Item], config: ExampleConfig, seq_len: int) -> AnyRows:
    """The rows of some examples, in the layout that the config asks for."""
    tokens = ExampleTokens.of(text for item in items for text in item.texts)
    if config.format == "preference":
        return PreferenceRows(tokens, seq_len)
    packed = ExampleRows(tokens, seq_len)
    # Where no two examples fit together, rows of one each are the same and need no segments.
    return packed if config.packing and packed.num_rows < len(packed.piece_lengths) else PaddedRows(tokens, seq_len)


def _too_long_message(
    too_long: list[Item], total: int, seq_len: int, config: ExampleConfig, limit: int | None = None
) -> str:
    """What is wrong with examples that need more than a row, and what to do; `limit` as `prepare_examples` takes it."""
    needed = max(item.num_inputs for item in too_long)
    others = f"set data.truncate to {'drop' if config.format == 'preference' else 'drop or split'}"
    if limit is None or needed <= limit:
        way_out = f"Raise train.seq_len to {needed:,}, or {others}."
    elif limit > seq_len:
        way_out = (
            f"Raise train.seq_len to the model's longest sequence, {limit:,}, and {others} for what is longer still."
        )
    else:
        way_out = f"The model takes no longer ones: {others}."
    return (
        f"[data] with truncate: error all examples must fit into train.seq_len, {seq_len:,}, but {len(too_long):,} of "
        f"{total:,} do not, {described(too_long)}. {way_out}"
    )


def _facts(
    config: ExampleConfig,
    found: ReadExamples,
    rows: tuple[AnyRows, AnyRows],
    seq_len: int,
    seconds: float,
) -> ExampleFacts:
    num_kept, num_dropped = len(found.train) + len(found.valid), len(found.dropped)
    too_long = num_dropped + sum(item.num_inputs > seq_len for item in found.train + found.valid)
    split = too_long if config.truncate == "split" else 0
    train, valid = rows
    lengths = np.concatenate([train.piece_lengths, valid.piece_lengths]) + 1
    train_rows = train.num_rows * train.group_size
    return ExampleFacts(
        source=config.source,
        format=config.format,
        files=found.files,
        examples=num_kept + num_dropped,
        read_as=found.spellings,
        in_chat=found.in_chat,
        train_examples=len(found.train),
        valid_examples=len(found.valid),
        train_tokens=train.tokens.num_tokens - int(train.left_out.sum()),
        valid_tokens=valid.tokens.num_tokens - int(valid.left_out.sum()),
        train_targets=train.num_targets,
        valid_targets=valid.num_targets,
        mean_tokens=round(float(lengths.mean()), 1),
        longest_tokens=int(lengths.max()),
        too_long=too_long,
        dropped=num_dropped,
        split=split,
        pieces=len(lengths) - (num_kept - split) if split else 0,
        left_out_pieces=len(train.left_out) + len(valid.left_out),
        left_out_tokens=int(train.left_out.sum() + valid.left_out.sum()),
        row_length=train.seq_len,
        train_rows=train_rows,
        fill=train.num_positions / (train_rows * train.seq_len),
        from_cache=found.from_cache,
        seconds=round(seconds, 3),
    )


def _lines(facts: ExampleFacts, seq_len: int, longest: str) -> list[str]:
    lines = []
    if facts.dropped:
        lines.append(
            f"left out as longer than a row of {seq_len:,}: {facts.dropped:,} of {count(facts.examples, 'example')}, "
            f"{longest}"
        )
    if facts.split:
        left_out = facts.left_out_pieces
        more = (
            f"; {count(left_out, 'piece')} without a token to learn left out, {facts.left_out_tokens:,} tokens"
            if left_out
            else ""
        )
        lines.append(
            f"split as longer than a row of {seq_len:,}: {count(facts.split, 'example')} into "
            f"{count(facts.pieces, 'piece')}, each a text of its own, {longest}{more}"
        )
    rows = f"{count(facts.train_rows, 'row')} of {facts.row_length:,}"
    lines.append(
        f"data: {count(facts.train_examples, 'example')} to train on ({facts.train_targets:,} of their "
        f"{facts.train_tokens:,} tokens are learnt), {facts.valid_examples:,} to validate; {facts.mean_tokens:,.0f} "
        f"tokens {_a_text(facts)} on average, {facts.longest_tokens:,} the longest; {rows}, "
        f"{100 * facts.fill:.0f} % full; {'from the cache' if facts.from_cache else 'read'} in "
        f"{facts.seconds:.1f} s"
    )
    return lines


def _a_text(facts: ExampleFacts) -> str:
    """Of what the mean is."""
    if facts.format == "preference":
        return "an answer with its prompt"
    return "a piece" if facts.split else "each"
