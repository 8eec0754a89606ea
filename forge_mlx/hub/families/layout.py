"""Where a checkpoint has the arrays of a model: names, and what is turned, split or stacked on the way."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import re
from typing import Final, NamedTuple

import mlx.core as mx

# Buffers that old checkpoints hold beside the weights: nothing is computed with them.
_BUFFERS: Final = re.compile(r"(.*\.)?rotary_emb\.inv_freq|.*\.attn\.(bias|masked_bias)")


class Piece(NamedTuple):
    """How one array of a model is made of tensors of a checkpoint.

    Attributes:
        names: Of the tensors, without the checkpoint's prefix.
        make: The array, of these tensors.
    """

    names: tuple[str, ...]
    make: Callable[[list[mx.array]], mx.array]


def same(tensors: list[mx.array]) -> mx.array:
    """A tensor as it is, for a `Piece` of one.

    Args:
        tensors: The one.
    """
    return tensors[0]


def split_name(name: str) -> tuple[str, str]:
    """A parameter's module and its name in there.

    Args:
        name: Its dotted name.
    """
    module, _, part = name.rpartition(".")
    return module, part


class Layout:
    """Llama's names, with other names for some modules.

    Args:
        renames: Ends of our modules' names -> what a checkpoint calls them.
        prefixes: What stands before the names of a checkpoint, the longest first; it may be left out.
        dropped: Beginnings of names of what is no part of the text model.
    """

    def __init__(
        self,
        renames: Mapping[str, str] | None = None,
        *,
        prefixes: tuple[str, ...] = ("model.",),
        dropped: tuple[str, ...] = (),
    ) -> None:
        self._renames, self._prefixes, self._dropped = dict(renames or {}), prefixes, dropped

    def bare(self, name: str) -> str:
        """A checkpoint's name without what stands before it.

        Args:
            name: Of a tensor or a module.
        """
        prefix = next((each for each in self._prefixes if name.startswith(each)), "")
        return name[len(prefix) :]

    def is_dropped(self, name: str) -> bool:
        """Whether a tensor is no part of the text model.

        Args:
            name: As the checkpoint has it.
        """
        return name.startswith(self._dropped) if self._dropped else False

    def is_buffer(self, name: str) -> bool:
        """Whether nothing is computed with a tensor.

        Args:
            name: Without what stands before it.
        """
        return _BUFFERS.fullmatch(name) is not None

    def upright(self, name: str, array: mx.array) -> mx.array:
        """A tensor with the axes that ours have.

        Args:
            name: As the checkpoint has it.
            array: Likewise.
        """
        del name
        return array

    def place(self, module: str) -> str:
        """What a checkpoint calls a module, without what stands before it.

        Args:
            module: Our dotted name.
        """
        for ours, theirs in self._renames.items():
            if module.endswith(ours):
                return module[: len(module) - len(ours)] + theirs
        return module

    def pieces(self, name: str, names: Iterable[str]) -> list[Piece]:
        """The ways in which a checkpoint may hold one of our arrays, the likeliest last.

        Args:
            name: Our dotted name of the array.
            names: All names of the checkpoint, without what stands before them.
        """
        del names
        module, part = split_name(name)
        return [Piece((f"{self.place(module)}.{part}",), same)]

    def written(self, arrays: Mapping[str, mx.array], *, coded: bool) -> Iterator[tuple[str, mx.array]]:
        """Each tensor of the checkpoint of a model, with its name.

        Args:
            arrays: Our arrays by their names.
            coded: Whether layers hold codes: then the names are those of mlx-lm, which alone reads such a checkpoint.
        """
        for name, array in arrays.items():
            module, part = split_name(name)
            yield f"{self.module(module, coded=coded)}.{part}", array

    def module(self, module: str, *, coded: bool) -> str:
        """What a checkpoint calls a module, whole.

        Args:
            module: Our dotted name.
            coded: As in `written`.
        """
        del coded
        place = self.place(module)
        return place if place.startswith("lm_head") else f"model.{place}"
