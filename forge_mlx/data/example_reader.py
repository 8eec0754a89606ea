"""Files of examples as tokens with their loss masks; all that is wrong with them in one message."""

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
import hashlib
import json
from pathlib import Path
import re
import time
from typing import NamedTuple

from forge_mlx._cache import cache_dir
from forge_mlx._text import count
from forge_mlx.data.chat import Encoded, encode_chat, encode_prompt_completion, encode_text, template_of
from forge_mlx.data.chat_template import BUILT_IN_TEMPLATES
from forge_mlx.data.example_cache import EncodedFiles, Item, load, store
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_fields import Chat, Completion, Example, Pair, read_example
from forge_mlx.data.example_files import Record, read_records, suffixes_of, with_others
from forge_mlx.data.files import SourceFile
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.sources import file_states, list_files, require_unchanged, some_names
from forge_mlx.data.unwritten import unwritten_fields

# Changes when the same files and config would give other tokens or masks.
_VERSION = 3
# Seconds after which a person is told how far it is.
_SILENCE = 10.0


class ReadExamples(NamedTuple):
    """All examples of a config, before those that are to be split are.

    Attributes:
        train, valid: the two splits, in the order of the files.
        dropped: those that are in neither, as they are too long.
        files: how many were read.
        spellings: how many examples have a spelling that the config does not name.
        from_cache: whether their tokens were there already.
        in_chat: whether all of them are in the chat template, as lists of messages are whatever the config says.
    """

    train: list[Item]
    valid: list[Item]
    dropped: list[Item]
    files: int
    spellings: dict[str, int]
    from_cache: bool
    in_chat: bool


def with_template(config: ExampleConfig, tokenizer: HubTokenizer) -> HubTokenizer:
    """The tokenizer with the chat template that the config names.

    Raises:
        ValueError: the file cannot be read, or the tokenizer lacks the tokens of a built-in template.
    """
    name = config.chat_template
    if name is None:
        return tokenizer
    if name in BUILT_IN_TEMPLATES:
        return tokenizer.with_chat_template(name)
    try:
        return tokenizer.with_chat_template(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error.reason}"
        raise ValueError(
            f"[data] chat_template must be a file or a built-in name ({', '.join(BUILT_IN_TEMPLATES)}) but reading "
            f"{name} failed: {reason}."
        ) from error


def read_examples(
    config: ExampleConfig,
    tokenizer: HubTokenizer,
    *,
    log: Callable[[str], None],
    hold_out: bool = True,
    longest: int | None = None,
) -> ReadExamples:
    """Read every example, make tokens and masks of it, and split them into training and validation.

    Args:
        config: the `data:` section.
        tokenizer: with the chat template to use.
        log: takes one line of text for everything that a person should know.
        hold_out: whether `valid_fraction` holds; otherwise, without `valid_paths`, no example is to validate.
        longest: positions of a row; what needs more is dropped before any is held out. None: nothing is.

    Raises:
        ValueError: a file cannot be read, examples are malformed (the first is described, and the others are counted
            and named), or there are too few of them.
    """
    files, split_at = list_files(config, log, suffixes_of(config.format))
    if config.asks_in_chat:
        # What is wrong with the template is no fault of each example.
        template_of(tokenizer)
    folder = cache_dir() / "data" / f"examples-{_key(config, tokenizer, files, split_at)}"
    found = load(folder, log)
    from_cache = found is not None
    if found is None:
        found = _encode_files(config, tokenizer, files, split_at, log)
        try:
            store(folder, found)
        except OSError as error:
            log(
                f"the tokens of the examples are not kept, and will be made again: the cache cannot be written: {error}"
            )
    source, valid = found.items[: found.num_source], found.items[found.num_source :]
    dropped: list[Item] = []
    if longest is not None:
        dropped = [item for item in found.items if item.num_inputs > longest]
        source = _that_fit(source, longest, "source")
        valid = _that_fit(valid, longest, "valid_paths") if valid else valid
    if split_at is None and hold_out:
        source, valid = _split(source, config.valid_fraction, len(dropped), log)
    if found.empty_files:
        log(f"files without an example: {len(found.empty_files)}{some_names(found.empty_files)}")
    for spelling, number in found.spellings.items():
        log(f"{count(number, 'example')} read as {spelling}")
    if found.special_names:
        named = ", ".join(f"{name} in {count(number, 'example')}" for name, number in found.special_names.items())
        log(f"special tokens named in messages: {named}; each name becomes that token, not text")
    if found.unwritten:
        fields = ", ".join(f"{name} in {count(number, 'example')}" for name, number in found.unwritten.items())
        log(f"the chat template leaves out: {fields}; the model neither reads nor learns them")
    if found.has_plain_prompts and tokenizer.chat_template is not None:
        log("prompts stay plain text though the model has a chat template; prompt_as: chat puts them into it")
    in_chat = config.format != "text" and not found.has_plain_prompts
    return ReadExamples(source, valid, dropped, len(files), found.spellings, from_cache, in_chat)


def _key(config: ExampleConfig, tokenizer: HubTokenizer, files: list[SourceFile], split_at: int | None) -> str:
    """Hash of all that decides which tokens and masks there are, and where messages say that they come from."""
    # How examples are split and become rows is decided behind the cache.
    settings = config.model_dump(exclude={"source", "valid_paths", "valid_fraction", "truncate", "packing"})
    contents = [[file.name, file.digest()] for file in files]
    parts = [_VERSION, tokenizer.fingerprint, split_at, sorted(settings.items()), contents]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _encode_files(
    config: ExampleConfig,
    tokenizer: HubTokenizer,
    files: list[SourceFile],
    split_at: int | None,
    log: Callable[[str], None],
) -> EncodedFiles:
    states = file_states(files)
    reader = _Reader(config, tokenizer, log)
    source = reader.read(files[:split_at], config.max_examples)
    valid = reader.read(files[split_at:], None) if split_at is not None else []
    reader.require_none_wrong()
    _require_examples(source, files[:split_at], "source")
    if split_at is not None:
        _require_examples(valid, files[split_at:], "valid_paths")
    require_unchanged(files, states)
    return EncodedFiles(
        source + valid,
        len(source),
        dict(reader.spellings),
        dict(reader.special_names.most_common()),
        dict(reader.unwritten),
        reader.empty_files,
        reader.has_plain_prompts,
    )


class _Reader:
    """Goes on behind a malformed example, so that one message can say how many there are."""

    def __init__(self, config: ExampleConfig, tokenizer: HubTokenizer, log: Callable[[str], None]) -> None:
        self.spellings: Counter[str] = Counter()
        self.special_names: Counter[str] = Counter()
        self.unwritten: Counter[str] = Counter()
        self.empty_files: list[str] = []
        self.has_plain_prompts = False
        self._config = config
        self._tokenizer = tokenizer
        self._log = log
        self._special_name = _pattern_of(tokenizer)
        self._next_word = time.monotonic() + _SILENCE
        self._first_problem: str | None = None
        self._wrong: list[str] = []

    def read(self, files: list[SourceFile], most: int | None) -> list[Item]:
        """The examples of some files that are not malformed, the first `most` of them."""
        items: list[Item] = []
        for file in files:
            empty = True
            for record in read_records(file, self._config.format, self._config.text_field):
                if len(items) == most:
                    return items
                empty = False
                if time.monotonic() > self._next_word:
                    self._log(f"reading examples: {len(items):,} so far, at {record.where}")
                    self._next_word += _SILENCE
                try:
                    items.append(self._item(record))
                except ValueError as error:
                    self._first_problem = self._first_problem or str(error)
                    self._wrong.append(record.where)
            if empty:
                self.empty_files.append(file.name)
        return items

    def require_none_wrong(self) -> None:
        """Raise for what is malformed: the first one in words, the others by number."""
        if self._first_problem is not None:
            raise ValueError(with_others(self._first_problem, self._wrong[1:]))

    def _item(self, record: Record) -> Item:
        fields = record.fields()
        try:
            example, spelling = read_example(fields, self._config)
            texts = tuple(self._encoded(example))
            for text in texts:
                if not text.is_target[1:].any():
                    raise ValueError(f"an example must have a token to learn but none of its {len(text.ids)} is one.")
        except ValueError as error:
            # The part in front names a module, and the reader needs the line.
            message = re.sub(r"^\[\w+\] ", "", str(error))
            raise ValueError(f"[data] {record.where}: {message}") from error
        if spelling is not None:
            self.spellings[spelling] += 1
        self.special_names.update(sorted(self._named(example)))
        self.unwritten.update(sorted(unwritten_fields(self._tokenizer, example)))
        return Item(record.where, texts)

    def _named(self, example: Example) -> set[str]:
        """The special tokens whose names are in what is said; a text outside of a template has none."""
        if isinstance(example, Pair):
            return set[str]().union(*map(self._named, example))
        if not isinstance(example, Chat) or self._special_name is None:
            return set()
        # Content may be a list of parts.
        said = (json.dumps(message.get("content"), ensure_ascii=False) for message in example.messages)
        return {name for text in said for name in self._special_name.findall(text)}

    def _encoded(self, example: Example) -> Iterator[Encoded]:
        train_on = self._config.train_on
        if isinstance(example, str):
            yield encode_text(self._tokenizer, example)
        elif isinstance(example, Pair):
            for answer in example:
                yield from self._encoded(answer)
        elif isinstance(example, Completion):
            self.has_plain_prompts = True
            yield encode_prompt_completion(self._tokenizer, *example, train_on_prompt=train_on == "all")
        else:
            if example.only_last and train_on == "assistant":
                train_on = "last"
            yield encode_chat(self._tokenizer, example.messages, tools=example.tools, train_on=train_on)


def _require_examples(items: list[Item], files: list[SourceFile], name: str) -> None:
    if not items:
        names = some_names([file.name for file in files])
        raise ValueError(
            f"[data] {name} must hold examples but its {count(len(files), 'file')}{names} hold none. Check data.{name}."
        )


def _pattern_of(tokenizer: HubTokenizer) -> re.Pattern[str] | None:
    names = sorted(filter(None, map(tokenizer.token_name, tokenizer.special_ids)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def _that_fit(items: list[Item], longest: int, name: str) -> list[Item]:
    kept = [item for item in items if item.num_inputs <= longest]
    if not kept:
        raise ValueError(
            f"[data] truncate: drop must leave examples but all {len(items):,} of data.{name} are longer than "
            f"train.seq_len, {longest:,}, {described(items)}. Raise train.seq_len."
        )
    return kept


def _split(
    items: list[Item], valid_fraction: float, dropped: int, log: Callable[[str], None]
) -> tuple[list[Item], list[Item]]:
    """Held out is item i where `floor((i + 1) f) > floor(i f)`, as of documents; where that gives none, the last."""
    fraction = Fraction(str(valid_fraction))
    if len(items) < 2:
        others = f" that fits train.seq_len, beside {dropped:,} that do not" if dropped else ""
        raise ValueError(
            "[data] source must hold at least 2 examples, one of them to validate on, but holds 1"
            f"{others}. Give more, or name data.valid_paths."
        )
    if len(items) * fraction < 1:
        log(
            f"data.valid_fraction {valid_fraction:g} of {len(items):,} examples is less than one; the last is held out "
            f"to validate on, {items[-1].where}"
        )
        return items[:-1], items[-1:]
    held_out = [(index + 1) * fraction // 1 > index * fraction // 1 for index in range(len(items))]
    train = [item for item, held in zip(items, held_out, strict=True) if not held]
    return train, [item for item, held in zip(items, held_out, strict=True) if held]


def described(items: list[Item]) -> str:
    """`the longest 1,044 tokens at a.jsonl:7`."""
    longest = max(items, key=lambda item: item.num_inputs)
    return f"the longest {longest.num_inputs + 1:,} tokens at {longest.where}"
