"""Tokenised examples on disk, so that a run that starts again need not read and tokenise them anew."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from forge_mlx.data.cache import DamagedCacheError, build_folder, read_json, write_json
from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_rows import ExampleTokens
import numpy as np

_FACTS = "facts.json"
_ARRAYS = ("tokens", "is_target", "borders")


class Item(NamedTuple):
    """One example.

    Attributes:
        where: `file:line`, for messages.
        texts: its tokens and masks; of a preference pair the chosen text and the rejected one.
    """

    where: str
    texts: tuple[Encoded, ...]

    @property
    def num_inputs(self) -> int:
        """The positions of a row that it needs."""
        return max(len(text.ids) for text in self.texts) - 1


@dataclass(frozen=True)
class EncodedFiles:
    """The examples of some files, all of them well-formed.

    Attributes:
        items: those of the source, then those of valid_paths; in the order of the files.
        num_source: how many are the source's.
        spellings: how many have a spelling that the config does not name, by its name.
        special_names: how many name a special token in what is said, by its name.
        unwritten: how many have tool calls or tools that the chat template does not write, by the field's name.
        empty_files: files without an example.
        has_plain_prompts: whether prompts and answers are one text, outside of a chat template.
    """

    items: list[Item]
    num_source: int
    spellings: dict[str, int]
    special_names: dict[str, int]
    unwritten: dict[str, int]
    empty_files: list[str]
    has_plain_prompts: bool


def store(folder: Path, found: EncodedFiles) -> None:
    """Write examples into a folder that `load` reads.

    Raises:
        OSError: the folder cannot be written.
    """
    tokens = ExampleTokens.of(text for item in found.items for text in item.texts)
    with build_folder(folder, lambda path: load(path, lambda _: None) is not None) as temporary:
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(tokens, name), allow_pickle=False)
        facts = {
            "fingerprint": tokens.fingerprint,
            "where": [item.where for item in found.items],
            "num_source": found.num_source,
            "spellings": found.spellings,
            "special_names": found.special_names,
            "unwritten": found.unwritten,
            "empty_files": found.empty_files,
            "has_plain_prompts": found.has_plain_prompts,
        }
        write_json(temporary / _FACTS, facts)


def load(folder: Path, log: Callable[[str], None]) -> EncodedFiles | None:
    """The examples of a folder, or None where it does not exist or is damaged, which is logged."""
    if not folder.exists():
        return None
    try:
        return _load(folder)
    except DamagedCacheError as error:
        log(f"the cached examples {folder} are damaged ({error}): reading the files again")
        return None


def _load(folder: Path) -> EncodedFiles:
    facts = read_json(folder / _FACTS)
    try:
        ids, is_target, borders = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in _ARRAYS)
        texts = [Encoded(ids[start:end], is_target[start:end]) for start, end in pairwise(borders.tolist())]
        if ExampleTokens.of(texts).fingerprint != facts["fingerprint"]:
            raise DamagedCacheError("they are not what was written")
        size = len(texts) // len(facts["where"])
        items = [
            Item(where, tuple(texts[size * index : size * (index + 1)])) for index, where in enumerate(facts["where"])
        ]
        return EncodedFiles(
            items,
            facts["num_source"],
            facts["spellings"],
            facts["special_names"],
            facts["unwritten"],
            facts["empty_files"],
            facts["has_plain_prompts"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DamagedCacheError(str(error)) from error
