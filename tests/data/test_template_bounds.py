"""What a template could make is refused before it is made: the bounds hold against Jinja, and memory stays small."""

import time
import tracemalloc

from forge_mlx.data import template_bounds, template_sandbox
from forge_mlx.data.chat_template import ChatTemplate
from forge_mlx.data.template_lengths import Extents, filter_bound, formatted_bound, method_bound
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
import pytest

transformers = pytest.importorskip("transformers", reason="it comes with mlx-lm, which needs Python 3.11")
render_theirs = transformers.utils.chat_template_utils.render_jinja_template

MESSAGES = [{"role": "user", "content": "Hello"}]
NEST = "{% set ns = namespace(l=['a'*100], m=['a'*100], n=0) %}{% for i in range(900) %}"
# Each would make more than a GiB, nearly all of them in one step.
HUGE = {
    "replacing": "{{ ('a'*1000000) | replace('a', 'b'*1500) }}",
    "replacing by a method": "{{ ('a'*1000000).replace('a', 'b'*1500) }}",
    "replacing nothing": "{{ ('a'*1000000).replace('', 'b'*1500) }}",
    "replacing in each": "{{ (['a'*100000]*100) | map('replace', 'a', 'b'*10000) | list }}",
    "a filter block": "{% filter replace('a', 'b'*100000) %}{{ 'a'*100000 }}{% endfilter %}",
    "joining": "{{ (['a'*1000000]*1000) | join }}",
    "joining by a method": "{{ ''.join(['a'*1000000]*1000) }}",
    "joining what a filter gives": "{{ ([{'c': 'a'*1000000}]*1000) | map(attribute='c') | join }}",
    "a long separator": "{{ ([1]*10000) | join('a'*1000000) }}",
    "a list as a text": "{{ (['a'*1000000]*1000) | string }}",
    "a list put to a text": "{{ (['a'*1000000]*1000) ~ '' }}",
    "a list in capitals": "{{ (['a'*1000000]*1000) | upper }}",
    "a list as JSON": "{{ (['a'*1000000]*1000) | tojson }}",
    "a pretty list": "{{ (['a'*1000000]*1000) | pprint }}",
    "a list written out": "{{ ['a'*1000000]*1000 }}",
    "each in capitals": "{{ (['a'*1000000]*1000) | map('upper') | list }}",
    "the characters of a text": "{{ ('\u65e5'*30000000) | list }}",
    "the words of a text": "{{ ('a '*15000000).split() }}",
    "a list in itself": NEST + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "a list deep in itself": NEST + "{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    "a list often in itself": NEST + "{% set ns.l = [ns.l] * 1000 %}{% endfor %}{{ ns.l }}",
    "lists compared": NEST + "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
    "a mapping in itself": NEST + "{% set ns.l = {1: ns.l, 2: ns.l} %}{% endfor %}{{ ns.l.items() }}",
    "a namespace in itself": NEST + "{% set ns.l = namespace(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}",
    "batches of themselves": NEST
    + "{% for b in [ns.l, ns.l] | batch(2) %}{% set ns.l = b %}{% endfor %}{% endfor %}{{ ns.l }}",
    "arguments of themselves": "{% macro f(n) %}{{ f(n-1, varargs, varargs) if n else varargs }}{% endmacro %}"
    "{{ f(60, 'a', 'a') }}",
    "a format": "{{ '%(a)s'*1000 % {'a': 'b'*1000000} }}",
    "a format by a filter": "{{ ('%(a)s'*1000) | format(a='b'*1000000) }}",
    "a format by a method": "{{ ('{0}'*1000).format('b'*1000000) }}",
    "a format of a mapping": "{{ ('{a}'*1000).format_map({'a': 'b'*1000000}) }}",
    "a format of a namespace": "{{ ('{0.s}'*1000).format(namespace(s='a'*1000000)) }}",
    "wide fields": "{{ ('{:99999}'*10000).format(1) }}",
    "many operands": "{% set a = 'a'*30000000 %}{{ " + " ~ ".join(["a"] * 50) + " }}",
    "a doubled block": "{% set ns = namespace(s='a'*1000) %}{% for i in range(60) %}"
    "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "a long macro": "{% macro m() %}{% for i in range(1000) %}{{ 'a'*1000000 }}{% endfor %}{% endmacro %}{{ m() }}",
    "texts that are kept": "{% set ns = namespace(l=[]) %}{% for i in range(1500) %}"
    "{% set ns.l = ns.l + ['a'*1000000] %}{% endfor %}",
    "slices that are kept": "{% set a = 'a'*10000000 %}{% set ns = namespace(l=[]) %}{% for i in range(900) %}"
    "{% set ns.l = ns.l + [a[i:]] %}{% endfor %}",
    "tabs": "{{ ('\\t'*1000000).expandtabs(30000) }}",
    "translating": "{{ ('a'*1000000).translate({97: 'b'*1000000}) }}",
    "indenting": "{{ ('a\n'*1000000) | indent('b'*10000) }}",
    "wrapping": "{{ ('a'*1000000) | wordwrap(1, wrapstring='b'*10000) }}",
    "links": "{{ ('a.com '*100000) | urlize(rel='b'*100000) }}",
    "indented JSON": "{{ ([1]*100000) | tojson(indent=100000) }}",
    "batches": "{{ [1] | batch(30000000, 2) | list }}",
    "slices": "{{ [1] | slice(30000000) | list }}",
    "a sum": "{{ ([[1]*1000]*1000) | sum(start=[]) }}",
    "bytes": "{{ ('a'*1000000).encode() * 1000 }}",
}


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_what_would_take_all_memory_is_refused_before_it_does(monkeypatch, source):
    monkeypatch.setattr(template_bounds, "MAX_BYTES", 1 << 26)
    template = ChatTemplate(source)
    began = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"must keep to messages and text but in line \d+ it does not: it"):
            template.render(MESSAGES, names={})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 96 << 20
    assert time.perf_counter() - began < 20


VALUES = {
    "plain": "one two, three",
    "lines": "a\nb\r\n\tc\x0bd\u2028e\n",
    "quotes": 'it\'s "<b>" & \\ %s {0}',
    "no ASCII": "\u65e5\U0001f600\xdf\u0390\ufb03\U000e0001",
    "nothing": "",
    "control": "\x00\x1f\x7f",
    "link": "www.a.com (https://b.org) c@d.net",
    "list": ["it's \"", {"\U000e0001": [1, -2.5e300, None, True]}, ("\x00",), []],
    "mapping": {"a": "<", "b": [10**18, {"c": "\u0390\n"}]},
}
FILTERS = [
    *((name,) for name in ("e", "forceescape", "upper", "lower", "title", "capitalize", "trim", "striptags", "string")),
    *((name,) for name in ("urlencode", "pprint", "urlize", "wordwrap", "indent", "center", "tojson", "join")),
    ("replace", "", "xy"),
    ("replace", "'", "\u0390\n"),
    ("join", "\n-\n"),
    ("indent", "> ", True, True),
    ("indent", 9, True),
    ("wordwrap", 1, True, "<br>\n"),
    ("truncate", 10, True, "..........", 0),
    ("center", 300),
    ("tojson", True),
    ("tojson", False, 7),
    ("tojson", False, "\t\t\t"),
    ("tojson", False, None, (" , ", " : ")),
    ("urlize", None, True, "_blank", "nofollow me"),
]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("call", FILTERS, ids=str)
def test_no_filter_s_text_is_longer_than_its_bound(call, value):
    name, *args = call
    plain = ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = template_sandbox._tojson
    try:
        text = plain.from_string("{{ v | " + name + "(*a) }}").render(v=value, a=args)
    except (AttributeError, TypeError, ValueError):
        # Not what the filter is for.
        assert not isinstance(value, str)
        return
    assert len(text) <= filter_bound(Extents(), value, name, tuple(args), {})


METHODS = [
    ("replace", "", "xy"),
    ("replace", "a", "\u0390" * 9, 1),
    ("join", ["a", "it's", ""]),
    ("join", "abc"),
    ("center", 99),
    ("zfill", 99),
    ("expandtabs", 30),
    ("translate", {97: "bcd" * 9, 10: None}),
]


@pytest.mark.parametrize("value", [each for each in VALUES.values() if isinstance(each, str)], ids=ascii)
@pytest.mark.parametrize("call", METHODS, ids=str)
def test_no_method_s_text_is_longer_than_its_bound(call, value):
    name, *args = call
    assert len(getattr(value, name)(*args)) <= method_bound(Extents(), value, name, tuple(args), {})


@pytest.mark.parametrize("value", [*VALUES.values(), 1.5e308, -(2**63)], ids=ascii)
def test_no_written_value_is_longer_than_its_bound(value):
    extents = Extents()
    assert len(str(value)) <= extents.text(value)
    assert len(repr([value, value])) <= extents.text([value, value])
    percent, braces = "%s, %-400s, %%", "{}, {!r:>400}"
    assert len(percent % (value, value)) <= formatted_bound(extents, percent, "%", (value, value), {})
    assert len(braces.format(value, value)) <= formatted_bound(extents, braces, "{", (value, value), {})


def test_extents_of_lists_in_lists():
    inner = ["ab", 1]
    outer = [inner, inner, [inner]]
    assert Extents().of(outer) == Extents().of([["ab", 1], ["ab", 1], [["ab", 1]]])
    assert Extents().of(outer)[1:] == (11, 3)
    for _ in range(98):
        outer = [outer]
    with pytest.raises(SecurityError, match="nests lists deeper than 100"):
        Extents().of(outer)


def test_long_conversations_are_rendered_as_by_transformers():
    """A megabyte, with what templates do to every message, and with tools."""
    content = "It's \u65e5\U0001f600 <think>\nso\n</think>\n" + "word " * 190
    messages = [{"role": ("user", "assistant")[i % 2], "content": content + str(i)} for i in range(1000)]
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"a": ["x"] * 50}}} for i in range(50)]
    source = (
        "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}"
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% set ns.last = [loop.index, ns.last] | max %}"
        "{% endfor %}{{ ns.last }}"
        "{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
        "{% if m.role == 'user' and messages[loop.index0 + 1:] | length %}{% endif %}"
        "{{ '<|' + m['role'] + '|>' + m.content | trim + '\n' }}{{ c | replace('word', 'w') ~ c.split() | join('-') }}"
        "{{ m.content.splitlines() }}{{ '%s: %d' | format(m.role, 1) }}{{ '{}'.format(m.role) }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}"
        "{{ messages | map(attribute='role') | unique | join(', ') }}{{ messages[:9] | string }}"
        "{{ messages[:3] | tojson }}"
    )
    theirs = render_theirs([messages], chat_template=source, tools=tools)[0][0]
    assert ChatTemplate(source).render(messages, names={}, tools=tools) == theirs
    assert len(theirs) > 1_000_000
