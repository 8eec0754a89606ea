"""The `data:` section of a config: where the text comes from and how it becomes tokens."""

from typing import Annotated, Literal

from forge_mlx._config import Section
from forge_mlx.data.stream import Packing
from pydantic import BeforeValidator, Field

STDLIB = "stdlib"


def _one_path_as_list(value: object) -> object:
    """A single path may be written without the brackets of a list."""
    return [value] if isinstance(value, str) and value != STDLIB else value


_Path = Annotated[str, Field(min_length=1)]
_Paths = Annotated[list[_Path], Field(min_length=1)]


class TokenizerConfig(Section):
    """A SentencePiece tokenizer: trained on the training text, or read from a file."""

    kind: Literal["bpe", "unigram"] = Field(
        "bpe",
        description="How the pieces are chosen. bpe trains in seconds; unigram takes many times longer.",
    )
    vocab_size: int = Field(
        2048,
        ge=258,
        le=1 << 20,
        description="Pieces of the vocabulary, of which 256 are single bytes and 2 are `unknown` and `end`.",
    )
    sample_bytes: int = Field(
        8_000_000,
        ge=4096,
        description="Training text that the tokenizer sees, in bytes, spread evenly over the corpus.",
    )
    path: _Path | None = Field(
        None,
        description="An existing SentencePiece model. kind and vocab_size are then the model's own.",
    )


class DataConfig(Section):
    """The corpus, its split into training and validation, and its tokenizer.

    Paths are relative to the current folder; a leading `~` is the home folder.
    """

    source: Annotated[Literal["stdlib"] | _Paths, BeforeValidator(_one_path_as_list)] = Field(
        description=(
            "`stdlib` (the Python sources of the running Python's standard library), or one or a list of "
            "text files, .jsonl or .ndjson files, folders and globs, each plain or .gz. "
            "A folder that is called stdlib is written ./stdlib."
        ),
    )
    text_field: _Path = Field("text", description="The field of a JSON line that holds the document.")
    valid_paths: Annotated[_Paths | None, BeforeValidator(_one_path_as_list)] = Field(
        None,
        description="Files, folders and globs to validate on; null: a share of the source is held out.",
    )
    valid_fraction: float = Field(
        0.05,
        gt=0,
        lt=1,
        description=(
            "Share of the documents that is held out, evenly over their order; with fewer than "
            "1/valid_fraction documents, the same share of each document's end. Unused with valid_paths."
        ),
    )
    packing: Packing = Field(
        "concat",
        description=(
            "How documents become rows of train.seq_len tokens. concat: they follow each other, each with an end "
            "token, and are cut into rows; attention crosses their borders, and every position is a target. "
            "documents: whole documents fill rows, and none sees another; those longer than a row are cut into "
            "pieces, each a text of its own, and what no document fills is padding. Each begins behind an end token, "
            "which samples and forge_mlx.generate then put before a prompt."
        ),
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="The tokenizer to train or to load."
    )
