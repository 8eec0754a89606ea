"""A Jinja environment for templates that nobody has read: no way into Python, bounds on rounds, text and numbers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
import functools
import json
import re
import sys
from typing import Any, NoReturn, TypeVar

from forge_mlx.data.template_compiler import ReportingGenerator
from forge_mlx.data.template_lengths import (
    Extents,
    filter_bound,
    formatted_bound,
    items_bound,
    method_bound,
    parts_bound,
)
from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_ROUNDS = 200_000
MAX_LENGTH = 1 << 25
MAX_BYTES = 1 << 28
_MAX_BITS = 64
# What a list takes for an element that is there anyway, and for one that is made for it.
_REFERENCE, _SMALL_TEXT = 16, 64
# Of `%` and of `str.format`: a width that is long, or one of the arguments.
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")
_BRACE_WIDTH = re.compile(r"[:.]\D*\d{6}|\{[^}]*\{")
# What compiled templates give to everything that they call.
_OF_JINJA = ("_loop_vars", "_block_vars")
# Filters of which the items must be there to say how long the result is.
_LISTING = ("join", "list", "sum")
_LONG_WIDTH = "its format string has a width of over 99,999 or a variable one"

_Value = TypeVar("_Value")


@dataclass
class _Run:
    """One rendering: how much was repeated and made, and what generation tags put around their text."""

    rounds: int = 0
    bytes_made: int = 0
    marks: tuple[str, str] | None = None
    extents: Extents = field(default_factory=Extents)

    def require_room(self, size: int) -> None:
        """Raise unless so many bytes may still be made."""
        if self.bytes_made + size > MAX_BYTES:
            raise SecurityError(f"its texts and lists take more than {MAX_BYTES:,} bytes together")

    def made(self, size: int) -> None:
        """So many bytes were made."""
        self.require_room(size)
        self.bytes_made += size

    def metered(self, items: Iterable[Any]) -> Iterator[Any]:
        """Items that come to stand in a list, one after another."""
        for item in items:
            self.made(_REFERENCE)
            yield item


_RUN: ContextVar[_Run] = ContextVar("run")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, as transformers has it, with bounds.

    Everything that repeats counts its rounds. How long the text of a filter, of a method, of an operator or of a list
    that is written out can be is known before it is made, and how much all of them made is summed up. Lists are nested
    only so deep, with so many values in them. Not bounded is the time that one filter or method takes, which grows with
    the texts and lists that it is given: seconds, at the bounds of these.
    """

    code_generator_class = ReportingGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Without the optimizer no expression is evaluated while a template is only compiled.
        extensions = [_GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self.filters["tojson"] = _tojson
        self.filters = {name: _checked(name, function) for name, function in self.filters.items()}
        self.finalize = _printed
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "namespace": _Namespace}
        # It writes as many paragraphs as it is asked for.
        del self.globals["lipsum"]

    @contextmanager
    def run(self, marks: tuple[str, str] | None = None) -> Iterator[None]:
        """One rendering; its generation tags put `marks` around their text."""
        token = _RUN.set(_Run(marks=marks))
        try:
            yield
        finally:
            _RUN.reset(token)

    def count_round(self) -> None:
        """One more round of a loop, or one more call of a macro."""
        run = _RUN.get()
        run.rounds += 1
        if run.rounds > MAX_ROUNDS:
            raise SecurityError(f"its loops go over {MAX_ROUNDS:,} rounds")

    def bounded(self, value: _Value) -> _Value:
        """The value, unless it is too long, too deep, or one too many."""
        return _bounded(value)

    def joined(self, join: Callable[[tuple[Any, ...]], str], parts: tuple[Any, ...]) -> str:
        """`a ~ b ~ c`."""
        _require_length(sum(map(_RUN.get().extents.text, parts)))
        return self.bounded(join(parts))

    def concat(self, parts: Iterable[str]) -> str:
        """What stands in a macro or in a block."""
        parts = list(parts)
        _require_length(sum(map(len, parts)))
        return self.bounded("".join(parts))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"...".format`, unless it asks for a long field."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form = value.__self__
        if _BRACE_WIDTH.search(form):
            raise SecurityError(_LONG_WIDTH)

        def formatted(*args: Any, **kwargs: Any) -> str:
            _require_length(formatted_bound(_RUN.get().extents, form, "{", args, kwargs))
            return self.bounded(wrapped(*args, **kwargs))

        return formatted

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what the sandbox lets a template call."""
        run, subject, name = _RUN.get(), getattr(function, "__self__", None), getattr(function, "__name__", "")
        _check_arguments(subject, args, kwargs)
        if isinstance(subject, str):
            if name == "join" and args and not isinstance(args[0], (str, list, tuple, dict)):
                args = (list(run.metered(args[0])), *args[1:])
            named = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
            _require_length(method_bound(run.extents, subject, name, args, named))
            run.require_room(_SMALL_TEXT * parts_bound(subject, name, args, named))
        result = self.bounded(super().call(context, function, *args, **kwargs))
        if isinstance(subject, str) and isinstance(result, list):
            run.made(_SMALL_TEXT * len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`."""
        if operator == "%" and isinstance(left, str):
            _check_arguments(left, (), {})
            _require_length(formatted_bound(_RUN.get().extents, left, "%", (right,), {}))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _require_room(left, len(left) + len(right))
        elif operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                    _require_room(sequence, len(sequence) * factor)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() * right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            _require_bits(result.bit_length())
        return self.bounded(result)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: around what the model writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _mark(self, _: nodes.EvalContext, caller: Macro) -> str:
        before, behind = _RUN.get().marks or ("", "")
        return f"{before}{caller()}{behind}"


class _Namespace(Namespace):
    """Jinja's namespace without names that Python itself looks up."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in Jinja, so that `namespace(self=...)` works.
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        Namespace.__setitem__(self, name, value)


def _require_public(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it gives a namespace the attribute {name!r}, and none may begin with an underscore")


def _require_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError(f"it makes a text or a list longer than {MAX_LENGTH:,}")


def _require_room(kind: str | list[Any] | tuple[Any, ...], length: int) -> None:
    """Raise unless a text or a list may be so long."""
    _require_length(length)
    _RUN.get().require_room(length if isinstance(kind, str) else _REFERENCE * length)


def _bounded(value: _Value) -> _Value:
    run = _RUN.get()
    if isinstance(value, (str, list, tuple, dict)):
        _require_length(len(value))
        run.made(sys.getsizeof(value))
    elif isinstance(value, (bytes, bytearray)):
        raise SecurityError("it makes bytes")
    if isinstance(value, (list, tuple, dict)):
        run.extents.of(value)
    return value


def _require_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise SecurityError(f"it makes a number longer than {_MAX_BITS} bits")


def _check_arguments(subject: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse widths that would make a text too long before it is made."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _require_length(value)
    if isinstance(subject, str) and _PERCENT_WIDTH.search(subject):
        raise SecurityError(_LONG_WIDTH)


def _printed(value: Any) -> Any:
    """A value as it is written out. Before a template runs, only what stands in its source is."""
    run = _RUN.get(None)
    if run is None or isinstance(value, str):
        return value
    _require_length(run.extents.text(value))
    text = str(value)
    run.made(sys.getsizeof(text))
    return text


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with bounds. What it needs of Jinja comes before the value, as in the filter itself."""
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        run, of_jinja, value, args = _RUN.get(), args[:first], args[first], args[first + 1 :]
        _check_arguments(value if name == "format" else None, args, kwargs)
        if name in _LISTING and not isinstance(value, (str, list, tuple, dict)):
            value = list(run.metered(value))
        elif isinstance(value, Iterator):
            value = run.metered(value)
        _require_length(filter_bound(run.extents, value, name, args, kwargs))
        run.require_room(_SMALL_TEXT * items_bound(value, name, args, kwargs))
        return _bounded(function(*of_jinja, value, *args, **kwargs))

    return checked


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
