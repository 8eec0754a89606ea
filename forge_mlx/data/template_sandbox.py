"""A Jinja environment for templates that nobody has read: no way into Python, bounds on rounds, text and numbers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
import functools
import json
from typing import Any, NoReturn, TypeVar

from forge_mlx.data.template_bounds import (
    RENDERING,
    Rendering,
    require_bits,
    require_length,
    require_narrow,
    require_short_arguments,
)
from forge_mlx.data.template_compiler import ReportingGenerator
from forge_mlx.data.template_lengths import filter_bound, formatted_bound, items_bound, method_bound, parts_bound
from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Bytes of a text that is made for a list, at least.
_SMALL_TEXT = 64
# What compiled templates give to everything that they call.
_OF_JINJA = ("_loop_vars", "_block_vars")
# Filters of which the items must be there to say how long the result is.
_LISTING = ("join", "list", "sum")

_Value = TypeVar("_Value")


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
        token = RENDERING.set(Rendering(marks=marks))
        try:
            yield
        finally:
            RENDERING.reset(token)

    def count_round(self) -> None:
        """One more round of a loop, or one more call of a macro."""
        RENDERING.get().count_round()

    def bounded(self, value: _Value) -> _Value:
        """The value, unless it is too long, too deep, or one too many."""
        return RENDERING.get().bounded(value)

    def joined(self, join: Callable[[tuple[Any, ...]], str], parts: tuple[Any, ...]) -> str:
        """`a ~ b ~ c`."""
        require_length(sum(map(RENDERING.get().extents.text, parts)))
        return self.bounded(join(parts))

    def concat(self, parts: Iterable[str]) -> str:
        """What stands in a macro or in a block."""
        parts = list(parts)
        require_length(sum(map(len, parts)))
        return self.bounded("".join(parts))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"...".format`, unless it asks for a long field."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form = value.__self__
        require_narrow(form, braces=True)

        def formatted(*args: Any, **kwargs: Any) -> str:
            require_length(formatted_bound(RENDERING.get().extents, form, "{", args, kwargs))
            return self.bounded(wrapped(*args, **kwargs))

        return formatted

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what the sandbox lets a template call."""
        run, subject, name = RENDERING.get(), getattr(function, "__self__", None), getattr(function, "__name__", "")
        require_short_arguments(subject, args, kwargs)
        if isinstance(subject, str):
            if name == "join" and args and not isinstance(args[0], (str, list, tuple, dict)):
                args = (list(run.metered(args[0])), *args[1:])
            named = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
            require_length(method_bound(run.extents, subject, name, args, named))
            run.require_room(_SMALL_TEXT * parts_bound(subject, name, args, named))
        result = self.bounded(super().call(context, function, *args, **kwargs))
        if isinstance(subject, str) and isinstance(result, list):
            run.made(_SMALL_TEXT * len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`."""
        if operator == "%" and isinstance(left, str):
            require_short_arguments(left, (), {})
            require_length(formatted_bound(RENDERING.get().extents, left, "%", (right,), {}))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            RENDERING.get().require_room_for(left, len(left) + len(right))
        elif operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                    RENDERING.get().require_room_for(sequence, len(sequence) * factor)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            require_bits(left.bit_length() * right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            require_bits(result.bit_length())
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
        before, behind = RENDERING.get().marks or ("", "")
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


def _printed(value: Any) -> Any:
    """A value as it is written out. Before a template runs, only what stands in its source is."""
    rendering = RENDERING.get(None)
    return value if rendering is None or isinstance(value, str) else rendering.written(value)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with bounds. What it needs of Jinja comes before the value, as in the filter itself."""
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        run, of_jinja, value, args = RENDERING.get(), args[:first], args[first], args[first + 1 :]
        require_short_arguments(value if name == "format" else None, args, kwargs)
        if name in _LISTING and not isinstance(value, (str, list, tuple, dict)):
            value = list(run.metered(value))
        elif isinstance(value, Iterator):
            value = run.metered(value)
        require_length(filter_bound(run.extents, value, name, args, kwargs))
        run.require_room(_SMALL_TEXT * items_bound(value, name, args, kwargs))
        return run.bounded(function(*of_jinja, value, *args, **kwargs))

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
