"""How long the results of a template's expressions can be, said before they are made."""

from collections.abc import Callable, Mapping, MappingView
from typing import Any, Final, NamedTuple

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_DEPTH: Final = 100
MAX_VALUES: Final = 1 << 20
# What `%f` can make of a number, and the widest field that a format string may ask for.
_LONGEST_NUMBER = 400
_WIDEST_FIELD = 100_000
# From here on it takes longer to read a text again than to keep what is known of it.
_LONG_TEXT = 1000
_SPLITS: Final = frozenset({"split", "rsplit", "splitlines"})
# Characters of the result for each one of the text: quoted for HTML, three bytes for each of four, letters of two.
_GROWTH: Final = {
    **dict.fromkeys(("e", "escape", "forceescape", "xmlattr"), 6),
    "urlencode": 12,
    **dict.fromkeys(("upper", "lower", "title", "capitalize"), 3),
    **dict.fromkeys(("string", "safe", "trim", "striptags", "truncate", "wordcount"), 1),
}


class Extent(NamedTuple):
    """How large a value is when it is written out, what stands in it several times counted as often.

    Attributes:
        length: Characters of its text, at most.
        values: The values in it, itself among them.
        depth: How deep lists are nested in it.
    """

    length: int
    values: int
    depth: int


class Extents:
    """The extents of values; what is in a list is measured once, however often the list is used or stands in others."""

    def __init__(self) -> None:
        # With the values themselves: an id is theirs as long as they live.
        self._known: dict[int, tuple[Any, Extent]] = {}
        self._visits = 0
        self._changeable = 0

    def of(self, value: Any) -> Extent:
        """The extent of a value.

        Args:
            value: Anything that a template can have.

        Raises:
            SecurityError: Lists are nested deeper than `MAX_DEPTH`, or there are more than `MAX_VALUES` values.
        """
        self._visits = 0
        return self._measured(value, 0)

    def text(self, value: Any) -> int:
        """How long a value is as a text.

        Args:
            value: Anything that a template can have.
        """
        return len(value) if isinstance(value, str) else self.of(value).length

    def _measured(self, value: Any, depth: int) -> Extent:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, str):
            # As it stands in the text of a list: quotes, and what is not printable, in their escaped forms.
            escaped = 2 if value.isprintable() else 4 if value.isascii() else 10
            extent = Extent(2 + escaped * len(value), 1, 0)
            if len(value) > _LONG_TEXT:
                self._known[id(value)] = value, extent
            return extent
        if isinstance(value, int):
            return Extent(6 + value.bit_length() // 3, 1, 0)
        if not isinstance(value, (list, tuple, Mapping, MappingView, set, Namespace)):
            return Extent(_LONGEST_NUMBER, 1, 0)
        return self._measured_parts(value, depth)

    def _measured_parts(self, value: Any, depth: int) -> Extent:
        before = self._changeable
        if isinstance(value, Namespace):
            self._changeable += 1
            value = object.__getattribute__(value, "_Namespace__attrs")
        length, values, deepest = 2, 1, 0
        for parts in (value, value.values()) if isinstance(value, Mapping) else (value,):
            self._count(len(parts) + 1, depth)
            for part in parts:
                found = self._measured(part, depth + 1)
                length, values, deepest = length + 2 + found.length, values + found.values, max(deepest, found.depth)
        self._count(values, deepest + 1)
        extent = Extent(length, values, deepest + 1)
        if self._changeable == before:
            self._known[id(value)] = value, extent
        return extent

    def _count(self, values: int, depth: int) -> None:
        self._visits += values
        if max(values, self._visits) > MAX_VALUES:
            raise SecurityError(f"it makes a list with more than {MAX_VALUES:,} values in it")
        if depth > MAX_DEPTH:
            raise SecurityError(f"it nests lists deeper than {MAX_DEPTH}")


Bound = Callable[..., int]


def method_bound(extents: Extents, subject: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The characters that a method of a text makes, at most; of one that is in no table, as many as the text has.

    Args:
        extents: Those of the values.
        subject: The text.
        name: Of the method.
        args: What it is called with.
        kwargs: What it is called with by name.
    """
    bound = _METHODS.get(name)
    return len(subject) if bound is None else bound(extents, subject, *args, **kwargs)


def filter_bound(extents: Extents, value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The characters that a filter makes, at most; 0 for one that is in no table, which makes no text.

    Args:
        extents: Those of the values.
        value: What is filtered.
        name: Of the filter.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if name in _FILTERS:
        return _FILTERS[name](extents, value, *args, **kwargs)
    factor = _GROWTH.get(name)
    if factor is None:
        return 0
    return factor * extents.text(value) + sum(extents.text(each) for each in (*args, *kwargs.values()))


def parts_bound(subject: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The texts that a method of a text cuts it into, at most.

    Args:
        subject: The text.
        name: Of the method; 0 for one that cuts nothing.
        args: What it is called with.
        kwargs: What it is called with by name.
    """
    if name not in _SPLITS:
        return 0
    sep = args[0] if args else kwargs.get("sep")
    return subject.count(sep) + 1 if isinstance(sep, str) and sep else len(subject)


def items_bound(value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The items that a filter makes, at most; 0 for one that makes none but those of its value.

    Args:
        value: What is filtered.
        name: Of the filter.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if name == "list":
        return len(value) if isinstance(value, str) else 0
    if name in ("batch", "slice"):
        return sum(each for each in (*args[:1], *kwargs.values()) if isinstance(each, int))
    if name == "sum":
        # Lists are added one by one to a list that grows.
        return len(value) * sum(len(each) for each in value if isinstance(each, (list, tuple))) // 8
    return 0


def formatted_bound(extents: Extents, form: str, mark: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The characters that a format string makes, at most.

    Args:
        extents: Those of the values.
        form: The format string; no width in it is longer than five digits.
        mark: What a field begins with.
        args: Its values.
        kwargs: Its values by name.
    """
    longest = max((extents.text(each) for each in (*args, *kwargs.values())), default=0)
    field = longest + _LONGEST_NUMBER + (_WIDEST_FIELD if any(each.isdigit() for each in form) else 0)
    return len(form) + form.count(mark) * field


def _replaced(extents: Extents, value: Any, old: Any, new: Any, count: Any = None) -> int:
    if not isinstance(value, str) or not isinstance(old, str):
        return extents.text(value) * (1 + extents.text(new))
    found = value.count(old)
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    return len(value) + found * extents.text(new)


def _joined(extents: Extents, value: Any, d: Any = "", *_: Any, **_others: Any) -> int:
    items = len(value) if isinstance(value, str) else sum(extents.text(item) for item in value)
    return items + len(value) * extents.text(d)


def _joined_by(extents: Extents, subject: str, value: Any) -> int:
    return _joined(extents, value, subject)


def _padded(extents: Extents, value: Any, width: int = 80, *_: Any) -> int:
    return extents.text(value) + width


def _expanded(_: Extents, subject: str, tabsize: int = 8) -> int:
    return len(subject) + subject.count("\t") * tabsize


def _translated(extents: Extents, subject: str, table: Any) -> int:
    return len(subject) * max(map(extents.text, table.values() if isinstance(table, Mapping) else table), default=1)


def _as_json(
    extents: Extents,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    *_: Any,
    **_others: Any,
) -> int:
    extent = extents.of(value)
    around = extents.text(separators) + (indent if isinstance(indent, int) else extents.text(indent)) * (
        extent.depth + 1
    )
    return (6 if ensure_ascii else 3) * extent.length + extent.values * (around + 2)


def _indented(extents: Extents, value: Any, width: Any = 4, *_: Any, **_others: Any) -> int:
    length = extents.text(value)
    lines = 1 + len(value.splitlines()) if isinstance(value, str) else length
    return length + lines * (width if isinstance(width, int) else extents.text(width))


def _wrapped(extents: Extents, value: Any, *args: Any, **kwargs: Any) -> int:
    # Every character may become a line, or a link, with what stands around each of them.
    around = sum(extents.text(each) for each in (*args, *kwargs.values()))
    return extents.text(value) * (60 + around)


def _printed(extents: Extents, value: Any) -> int:
    extent = extents.of(value)
    # Every line begins with the columns of the lists that it is in, and the text of each is at most 80 wide.
    return (2 + extent.depth) * extent.length


def _formatted(extents: Extents, value: Any, *args: Any, **kwargs: Any) -> int:
    if not isinstance(value, str):
        return extents.text(value) * formatted_bound(extents, "%", "%", args, kwargs)
    return formatted_bound(extents, value, "%", args, kwargs)


_METHODS: Final[dict[str, Bound]] = {
    "replace": _replaced,
    "join": _joined_by,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    "expandtabs": _expanded,
    "translate": _translated,
}
_FILTERS: Final[dict[str, Bound]] = {
    "replace": _replaced,
    "join": _joined,
    "center": _padded,
    "tojson": _as_json,
    "indent": _indented,
    "wordwrap": _wrapped,
    "urlize": _wrapped,
    "pprint": _printed,
    "format": _formatted,
}
