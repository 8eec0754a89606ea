"""The kernels' benchmark knows no op by name: it asks every room for its cases, and picks some by what it is told."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
import difflib
from importlib import import_module
from typing import Literal

from forge_mlx.kernels._common.cases import OpCase
from forge_mlx.metal import check
from forge_mlx.metal.dtypes import dtype_name

Purpose = Literal["TIMED", "TRAFFIC"]


@dataclass(frozen=True)
class Entry:
    """A case and the room that it comes from."""

    room: str
    case: OpCase

    @property
    def op(self) -> str:
        """The op's name."""
        return self.case.op

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return dtype_name(self.case.dtype)

    @property
    def path(self) -> str:
        """What a word is looked for in: `room/op/case`."""
        return f"{self.room}/{self.op}/{self.case.name}"


def entries(purpose: Purpose) -> list[Entry]:
    """Every room's cases, in the order of the rooms' names and of their own lists.

    Args:
        purpose: "TIMED" for what is timed, "TRAFFIC" for what is counted: the name of a tuple in `cases.py`.

    Raises:
        ValueError: A room whose `cases.py` has no such tuple.
    """
    found = []
    for room in check.rooms():
        cases = import_module(f"forge_mlx.kernels.{room}.cases")
        if not hasattr(cases, purpose):
            raise ValueError(f"kernels/{room}/cases.py must have a tuple {purpose} of cases.")
        found += [Entry(room, case) for case in getattr(cases, purpose)]
    return found


def choose(found: Sequence[Entry], words: Sequence[str], dtypes: Collection[str] = ()) -> list[Entry]:
    """The entries that hold one of the words and have one of the dtypes.

    Args:
        found: All there are.
        words: Parts of `room/op/case`; none stands for everything.
        dtypes: Names of dtypes; none stands for all.

    Raises:
        ValueError: A word that nothing holds, or nothing is left.
    """
    for word in words:
        if not any(word in entry.path for entry in found):
            names = {name for entry in found for name in (entry.room, entry.op, entry.case.name)}
            near = difflib.get_close_matches(word, names, n=1)
            hint = f" Did you mean {near[0]}?" if near else " --list shows what there is."
            raise ValueError(f"no room, op or case has {word!r} in its name.{hint}")
    chosen = [
        entry
        for entry in found
        if (not words or any(word in entry.path for word in words)) and (not dtypes or entry.dtype in dtypes)
    ]
    if not chosen:
        raise ValueError(f"no case of these has the dtype {' or '.join(dtypes)}." if dtypes else "there are no cases.")
    return chosen


def by_op(chosen: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """(room, op) -> its entries, in their order."""
    ops: dict[tuple[str, str], list[Entry]] = {}
    for entry in chosen:
        ops.setdefault((entry.room, entry.op), []).append(entry)
    return ops


def listing(chosen: Iterable[Entry]) -> list[str]:
    """A Markdown table of the entries."""
    rows = [f"| {entry.room} | {entry.op} | {entry.case.name} | {entry.dtype} |" for entry in chosen]
    return ["| room | op | case | dtype |", "|---|---|---|---|", *rows]
