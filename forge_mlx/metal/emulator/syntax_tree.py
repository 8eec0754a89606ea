"""Where the nodes of clang's syntax tree stand in the user's source.

`-ast-dump=json` writes of a place only what differs from the place that it wrote before: the tree has to be read in the
order in which it was written, all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_mlx.metal.emulator.toolchain import AST_FILE

# What json.loads makes of a node.
Json = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A place in the source.

    Attributes:
        file: as a `#line` directive names it; None in another file than the compiled text.
        line: in that file.
        offset: in bytes of the compiled text.
        is_macro: whether a macro's expansion stands there.
    """

    file: str | None
    line: int
    offset: int
    is_macro: bool = False


@dataclass(frozen=True)
class Visit:
    """A node on the way through the tree.

    Attributes:
        node: as clang wrote it.
        parent: the visit of the node that it belongs to.
        place: where it stands: its name if it declares one, else its beginning, else its parent's place.
        begin: where its first token stands, if anywhere.
        end: where its last token begins, if anywhere.
        is_hidden: whether the compiler made it, or it is part of a lambda.
    """

    node: Json
    parent: "Visit | None"
    place: Place | None
    begin: Place | None
    end: Place | None
    is_hidden: bool

    @property
    def kind(self) -> str:
        """Clang's name for what it is; empty where an optional part is absent."""
        return str(self.node.get("kind", ""))

    @property
    def name(self) -> str:
        """The name that it declares, if any."""
        return str(self.node.get("name", ""))

    @property
    def type(self) -> str:
        """The type that it declares or has, as written."""
        return str(self.node.get("type", {}).get("qualType", ""))

    def enclosing(self, *kinds: str) -> "Visit | None":
        """The nearest node around this one of any of these kinds."""
        visit = self.parent
        while visit is not None and visit.kind not in kinds:
            visit = visit.parent
        return visit


def visits(tree: Json) -> Iterator[Visit]:
    """All nodes of a tree, parents before children, in the order of the source.

    Args:
        tree: from `toolchain.dump_ast`.

    Yields:
        A visit for each node.
    """
    reader = _PlaceReader()
    waiting: list[tuple[Json, Visit | None]] = [(tree, None)]
    while waiting:
        node, parent = waiting.pop()
        name = reader.read(node.get("loc"))
        extent = node.get("range", {})
        begin = reader.read(extent.get("begin"))
        end = reader.read(extent.get("end"))
        hidden = "isImplicit" in node or (parent is not None and (parent.is_hidden or parent.kind == "LambdaExpr"))
        place = name or begin or (parent.place if parent is not None else None)
        visit = Visit(node, parent, place, begin, end, hidden)
        yield visit
        waiting.extend((child, visit) for child in reversed(node.get("inner", ())))


class _PlaceReader:
    """Fills in what clang left out: the file and line, and the file and line that `#line` made of them."""

    def __init__(self) -> None:
        self._file = self._presumed_file = ""
        self._line = self._presumed_line = 0

    def read(self, location: Json | None) -> Place | None:
        """The place of a `loc`, `begin` or `end`; of a macro's expansion, where the macro is used."""
        if not location:
            return None
        if "expansionLoc" in location:
            self._read(location["spellingLoc"])
            return self._read(location["expansionLoc"], is_macro=True)
        return self._read(location)

    def _read(self, location: Json, *, is_macro: bool = False) -> Place | None:
        if "offset" not in location:
            return None
        self._file = location.get("file", self._file)
        self._line = location.get("line", self._line)
        is_main = self._file == AST_FILE
        # In the compiled text no line is the one that its directives make of it (toolchain.AST_PREFIX), so what is not
        # written is what it was. In other files nothing is written where there are no directives.
        self._presumed_file = location.get("presumedFile", self._presumed_file if is_main else self._file)
        self._presumed_line = location.get("presumedLine", self._presumed_line if is_main else self._line)
        return Place(self._presumed_file if is_main else None, self._presumed_line, location["offset"], is_macro)
