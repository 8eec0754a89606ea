"""What a model will see of examples: their text with the loss mask in colour, and how rows are filled."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from forge_mlx._text import count, visible_controls
from forge_mlx.data.batch import Batch
from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_cache import Item
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_rows import PaddedRows
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.preference_rows import PreferenceRows
from forge_mlx.data.prepare_examples import AnyRows, build_rows
import numpy as np
from numpy.typing import NDArray
from rich.align import AlignMethod
from rich.console import Console
from rich.text import Text

_LEARNT, _CONTEXT, _REFUSED = "bold green", "dim", "bold red"
# Rich's own is the green of what is learnt.
_RULE = "blue"
# Of the segments of a row in turn, so that borders show.
_SEGMENTS = ("cyan", "magenta")
# What becomes of examples that are longer than a row.
_DONE = {"error": "left out here", "drop": "left out", "split": "cut into pieces"}
# Cells of a bar at most, and columns that stand beside it.
_BAR, _FACTS = 64, 48


class Run(NamedTuple):
    """Neighbouring tokens that are shown alike.

    Attributes:
        text: what they stand for; of special tokens their names.
        is_target: whether they are learnt.
        is_special: whether they are special tokens.
    """

    text: str
    is_target: bool
    is_special: bool


@dataclass(frozen=True)
class Preview:
    """Prints examples.

    Attributes:
        console: where to. Without colours, what is learnt stands between marks.
        tokenizer: of the examples, with the chat template to use.
        config: of the examples.
        seq_len: the longest row.
        most_tokens: how many tokens of a text are shown, half of them from its end.
    """

    console: Console
    tokenizer: HubTokenizer
    config: ExampleConfig
    seq_len: int
    most_tokens: int

    def legend(self) -> None:
        """Print what the colours or marks mean."""
        if self._has_colours:
            legend = Text.assemble(("learnt", _LEARNT), "  ", ("context only", _CONTEXT))
            legend.append("  ").append("special token", "underline")
        else:
            legend = Text("[[learnt]]  context only  <special token>")
        self.console.print(legend)

    def examples(self, items: list[Item], number: int) -> None:
        """Print some examples, evenly spaced."""
        for index in _spread(len(items), number):
            item = items[index]
            names = ("chosen", "rejected") if len(item.texts) == 2 else ("",)
            for name, text in zip(names, item.texts, strict=True):
                learnt = int(text.is_target[1:].sum())
                self._head(
                    f"example {index + 1:,} of {len(items):,}",
                    name,
                    item.where,
                    f"{count(len(text.ids), 'token')}, {learnt:,} learnt",
                )
                self._body(text)

    def counts(self, items: list[Item]) -> None:
        """Print how many examples and tokens there are, and how long they are."""
        lengths = np.array([len(text.ids) for item in items for text in item.texts])
        learnt = sum(int(text.is_target[1:].sum()) for item in items for text in item.texts)
        noun = "pair" if self.config.format == "preference" else "example"
        middle, most = (int(np.quantile(lengths, share, method="higher")) for share in (0.5, 0.95))
        share = 100 * learnt / lengths.sum()
        self._rule("counts")
        self._print(f"{count(len(items), noun)}, {lengths.sum():,} tokens, {learnt:,} learnt ({share:.0f} %)")
        self._print(f"tokens of a text: {middle:,} in the middle, 95 % up to {most:,}, the longest {lengths.max():,}")

    def rows(self, items: list[Item], number: int, *, contents: bool) -> None:
        """Print how the examples fill rows.

        Args:
            items: all of them.
            number: rows to show.
            contents: whether to print the rows' texts too.
        """
        self._rule(f"rows of at most {self.seq_len:,}")
        fitting = [item for item in items if item.num_inputs <= self.seq_len]
        too_long = [item for item in items if item.num_inputs > self.seq_len]
        kept = items if self.config.truncate == "split" else fitting
        if too_long:
            self._print(f"{count(len(too_long), 'example')} longer than a row: {_DONE[self.config.truncate]}")
        if not kept:
            return
        rows = build_rows(kept, self.config, self.seq_len)
        positions = rows.num_rows * rows.group_size * rows.seq_len
        self._print(
            f"{count(rows.num_rows * rows.group_size, 'row')} of {rows.seq_len:,}, "
            f"{100 * rows.num_positions / positions:.0f} % full ({_layout(rows)})"
        )
        shown = np.array(_spread(rows.num_rows, number))
        numbers = (shown[:, None] * rows.group_size + np.arange(rows.group_size)).ravel()
        self._shown_rows(rows.batch(shown), numbers, contents)

    def verdict(self, refusals: list[str], lines: list[str]) -> None:
        """Print whether training would start.

        Args:
            refusals: why it would not.
            lines: what it says of the examples.
        """
        self._rule("training")
        for line in lines:
            self._print(line)
        for refusal in refusals:
            self.console.print(Text.assemble(("would not start: ", _REFUSED), refusal))

    def _shown_rows(self, batch: Batch, numbers: NDArray[np.int64], contents: bool) -> None:
        assert batch.segment_ids is not None
        assert batch.weights is not None
        width = len(f"{numbers.max() + 1:,}")
        for line, number in enumerate(numbers):
            ids, weights = batch.segment_ids[line], batch.weights[line]
            texts = int(ids.max()) + 1
            bar = self._bar(ids, weights)
            facts = f" {count(texts, 'text')}, {int((ids >= 0).sum()):,} filled, {int(weights.sum()):,} learnt"
            self.console.print(Text(f"{number + 1:{width},} ").append(bar).append(facts))
            for segment in range(texts if contents else 0):
                here = np.flatnonzero(ids == segment)
                tokens = np.append(batch.inputs[line, here], batch.targets[line, here[-1]])
                self._head(f"row {number + 1:,}, text {segment + 1}", f"{count(len(tokens), 'token')}")
                self._body(Encoded(tokens, np.append(False, weights[here] > 0)))

    def _bar(self, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> Text:
        """A row as cells: full where most positions are learnt, shaded where they are context, empty for padding."""
        cells = min(_BAR, max(self.console.width - _FACTS, 8), len(ids))
        bar = Text("|")
        full, shaded = ("█", "░") if self._is_unicode else ("#", ".")
        for places in np.array_split(np.arange(len(ids)), cells):
            segment = int(ids[places[len(places) // 2]])
            text = " " if segment < 0 else full if weights[places].mean() > 0.5 else shaded
            bar.append(text, _SEGMENTS[segment % 2] if segment >= 0 else "")
        return bar.append("|")

    def _body(self, text: Encoded) -> None:
        ids, mask = text.ids, text.is_target.copy()
        # Nothing precedes the first token, so nothing predicts it.
        mask[0] = False
        half = self.most_tokens // 2
        parts = [slice(None)] if len(ids) <= 2 * half else [slice(0, half), slice(len(ids) - half, None)]
        shown = [self._marked(token_runs(self.tokenizer, ids[part], mask[part])) for part in parts]
        gap = Text().append(f"\n... {count(len(ids) - 2 * half, 'token')} not shown (--tokens) ...\n", "italic")
        whole = gap.join(shown)
        whole.rstrip()
        # Lines are as long as the text has them.
        self.console.print(whole, soft_wrap=True)

    def _marked(self, runs: Iterator[Run]) -> Text:
        marked = Text()
        for is_target, group in groupby(runs, key=lambda run: run.is_target):
            part = Text()
            for run in group:
                text = visible_controls(run.text).replace("\n", "↵\n" if self._is_unicode else "\\n\n")
                part.append(text, self._style(run))
            marked.append(part if self._has_colours or not is_target else Text.assemble("[[", part, "]]"))
        return marked

    def _style(self, run: Run) -> str:
        if not self._has_colours:
            return ""
        style = _LEARNT if run.is_target else _CONTEXT
        return f"{style} underline" if run.is_special else style

    def _head(self, *parts: str) -> None:
        self._rule(" · ".join(filter(None, parts)), align="left")

    def _rule(self, title: str, align: AlignMethod = "center") -> None:
        self.console.rule(Text(title), align=align, style=_RULE)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    @property
    def _has_colours(self) -> bool:
        return self.console.color_system is not None and not self.console.no_color

    @property
    def _is_unicode(self) -> bool:
        return self.console.encoding.lower().startswith("utf")


def token_runs(tokenizer: HubTokenizer, ids: NDArray[np.int32], is_target: NDArray[np.bool_]) -> Iterator[Run]:
    """Tokens as text, neighbours of one kind together. A character in several tokens belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[Run] = []
    for token, learnt in zip(ids.tolist(), is_target.tolist(), strict=True):
        if token in tokenizer.special_ids:
            parts.append(Run(decoder.decode(b"", final=True) + tokenizer.token_name(token), learnt, True))
            decoder.reset()
        else:
            parts.append(Run(decoder.decode(tokenizer.token_to_bytes(token)), learnt, False))
    if rest := decoder.decode(b"", final=True):
        parts.append(Run(rest, bool(is_target[-1]), False))
    for (learnt, special), group in groupby(parts, key=lambda run: (run.is_target, run.is_special)):
        yield Run("".join(run.text for run in group), learnt, special)


def _spread(total: int, number: int) -> list[int]:
    """At most `number` of 0 ... total - 1, evenly spaced from the first on."""
    number = min(number, total)
    return [index * total // number for index in range(number)]


def _layout(rows: AnyRows) -> str:
    if isinstance(rows, PreferenceRows):
        return "two for each pair"
    return "one text each" if isinstance(rows, PaddedRows) else "whole texts side by side; none sees another"
