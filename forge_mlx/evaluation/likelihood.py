"""Perplexity and bits per byte of texts, and of the answers in instruction data."""

from collections.abc import Callable, Iterable, Iterator
import math
from typing import Any, NamedTuple

from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_files import field_names, read_records
from forge_mlx.data.files import SourceFile
from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.evaluation.rows import Row, windows
from forge_mlx.evaluation.scoring import score
from forge_mlx.models.gpt import GPT
import numpy as np
from numpy.typing import NDArray


class Likelihood(NamedTuple):
    """How likely the targets of some texts are.

    Attributes:
        nats: -ln p, summed over the targets.
        targets: how many were scored.
        num_bytes: UTF-8 bytes that they stand for, those of special tokens 0.
        texts: how many texts had a target.
        rows: how many rows they took.
    """

    nats: float
    targets: int
    num_bytes: int
    texts: int
    rows: int

    @property
    def nats_per_token(self) -> float:
        """Mean loss."""
        return self.nats / self.targets

    @property
    def perplexity(self) -> float:
        """e^nats_per_token, infinite where float64 ends."""
        return math.exp(self.nats_per_token) if self.nats_per_token < math.log(2.0**1023) else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits a byte of text; None where targets stand for no text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None

    def as_dict(self) -> dict[str, Any]:
        """The measures by their names, for JSON."""
        return {
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "nats_per_token": self.nats_per_token,
            "bits_per_byte": self.bits_per_byte,
            **self._asdict(),
        }


def read_texts(files: Iterable[SourceFile], text_field: str) -> Iterator[str]:
    """The texts of files: whole ones, or the `text_field` of each JSON line or row.

    Args:
        files: what to read.
        text_field: where a record has its text.

    Raises:
        ValueError: a file cannot be read, or a record is not an object with a text; the message names file and line.
    """
    for file in files:
        for record in read_records(file, "text", text_field):
            fields = record.fields()
            text = fields.get(text_field)
            if not isinstance(text, str):
                raise ValueError(
                    f"[evaluate] {record.where}: a text must be in the field {text_field!r} but the record has "
                    f"{field_names(fields)}. Name the field with --text-field."
                )
            yield text


def encode_texts(texts: Iterable[str], tokenizer: TextTokenizer, begin_ids: list[int]) -> Iterator[Encoded]:
    """The tokens of each text, all of them targets, behind those that a text begins with.

    Args:
        texts: what to encode.
        tokenizer: the model's.
        begin_ids: tokens that stand before every text; they are not scored. Without any the first token of a text is
            not either.
    """
    for text in texts:
        ids = np.array([*begin_ids, *tokenizer.encode(text)], np.int32)
        yield Encoded(ids, np.arange(len(ids)) >= len(begin_ids))


def likelihood(
    model: GPT,
    token_bytes: NDArray[np.int32],
    texts: Iterable[Encoded],
    *,
    seq_len: int,
    stride: int,
    batch_size: int,
    progress: Callable[[list[Row]], Callable[[int], None]] = lambda _: lambda _: None,
) -> Likelihood:
    """Score every target of some texts once, long texts in windows.

    Args:
        model: in evaluation mode.
        token_bytes: int32 `[vocab_size]`, bytes of text that a token stands for.
        texts: tokens and which of them are targets.
        seq_len: the most inputs of a row.
        stride: of `windows`.
        batch_size: rows in a forward pass.
        progress: given the rows, it returns what is told how many of them each pass has scored.

    Raises:
        ValueError: there is no target, or as `windows` and `score`.
    """
    of_texts = [list(windows(ids, is_target, seq_len, stride)) for ids, is_target in texts]
    rows = [row for each in of_texts for row in each]
    if not rows:
        raise ValueError("[evaluate] the data must hold a token to predict but holds none.")
    total = -score(model, rows, batch_size, progress(rows)).sum()
    targets = np.concatenate([row.counted_targets for row in rows])
    return Likelihood(float(total), len(targets), int(token_bytes[targets].sum()), sum(map(bool, of_texts)), len(rows))
