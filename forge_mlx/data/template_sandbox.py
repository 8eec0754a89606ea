"""A Jinja environment for templates that nobody has read: no way into Python, bounds on rounds, text and numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
import functools
import json
import re
from typing import Any, NoReturn, TypeVar

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_ROUNDS = 200_000
MAX_LENGTH = 1 << 25
_MAX_BITS = 64
# Of `%` and of `str.format`: a width that is long, or one of the arguments.
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")
_BRACE_WIDTH = re.compile(r"[:.]\D*\d{6}|\{[^}]*\{")
_LONG_WIDTH = "its format string has a width of over 99,999 or a variable one"

_Value = TypeVar("_Value")


@dataclass
class _Run:
    """One rendering: how often something was repeated, and what generation tags put around their text."""

    rounds: int = 0
    marks: tuple[str, str] | None = None


_RUN: ContextVar[_Run] = ContextVar("run")


class _Generator(CodeGenerator):
    """Compiles templates in which loops, macros, and texts put together report to the environment."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Count the rounds of everything that can repeat."""
        parts: list[nodes.For | nodes.Macro | nodes.CallBlock]
        parts = [*node.find_all(nodes.For), *node.find_all(nodes.Macro), *node.find_all(nodes.CallBlock)]
        for part in parts:
            count = nodes.Call(nodes.EnvironmentAttribute("count_round"), [], [], None, None)
            part.body.insert(0, nodes.ExprStmt(count, lineno=part.lineno))
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`."""
        self.write("environment.bounded(")
        super().visit_Concat(node, frame)
        self.write(")")

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:
        """`a | b`."""
        self.write("environment.bounded(")
        super().visit_Filter(node, frame)
        self.write(")")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, as transformers has it, with bounds.

    Everything that repeats counts its rounds, and what can make a text, a list or a number much larger than its parts
    is checked. Not held up is a template that nests lists in themselves many times over and then prints them.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Without the optimizer no expression is evaluated while a template is only compiled.
        extensions = [_GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "format"):
            self.filters[name] = _with_checked_arguments(self.filters[name])
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
        """The value, unless it is too long."""
        if isinstance(value, (str, list, tuple)):
            _require_length(len(value))
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"...".format`, unless it asks for a long field."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _BRACE_WIDTH.search(value.__self__):
            raise SecurityError(_LONG_WIDTH)
        return wrapped

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what the sandbox lets a template call."""
        _check_arguments(getattr(function, "__self__", None), args, kwargs)
        return self.bounded(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`."""
        if operator == "%" and isinstance(left, str):
            _check_arguments(left, (), {})
        elif operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                    _require_length(len(sequence) * factor)
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


def _with_checked_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(value, args, kwargs)
        return function(value, *args, **kwargs)

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
