"""Texts are those that transformers renders; what a template must not do is one clear line."""

import time

from chat_templates import FAMILIES
from forge_mlx.data import template_bounds
from forge_mlx.data.chat_template import BUILT_IN_TEMPLATES, ChatTemplate, end_of_turn
import pytest

transformers = pytest.importorskip("transformers", reason="it comes with mlx-lm, which needs Python 3.11")
render_theirs = transformers.utils.chat_template_utils.render_jinja_template

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "yes"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"ä": [1, None, True], "b": "<&>"}}}
CONVERSATIONS = {
    "one question": [USER],
    "one turn": [USER, ASSISTANT],
    "several turns": [USER, ASSISTANT, {"role": "user", "content": "why?"}, {"role": "assistant", "content": "So."}],
    "system": [{"role": "system", "content": " Be short.\n"}, USER, ASSISTANT],
    "empty contents": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "Unicode and spaces": [
        {"role": "user", "content": " é🙂\u2028日本 \n\n"},
        {"role": "assistant", "content": "\ta\r\n b "},
    ],
    "names of tokens": [{"role": "user", "content": "<|im_end|></s> {{ messages }} {% if %}"}, ASSISTANT],
    "thinking": [
        USER,
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nyes"},
        USER,
        {"role": "assistant", "content": "no", "reasoning_content": "second"},
    ],
    "another name for reasoning": [USER, {"role": "assistant", "content": "no", "thinking": "so"}],
    "tools": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"a": 1}'},
        ASSISTANT,
    ],
    "answers only": [ASSISTANT],
    "two questions": [USER, USER],
}
SOURCES = {name: template for name, (template, _, _) in FAMILIES.items()}
SOURCES |= {
    "built-in chatml": BUILT_IN_TEMPLATES["chatml"].source,
    "everything of JSON": "{{ messages | tojson(indent=2) }}{{ tools | tojson }}{{ documents }}{{ nothing }}",
    "year and control": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    "{{ strftime_now('%Y') }}",
    "spaces around blocks": "a\n  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\nb\n",
}


def outcome(render):
    try:
        return render()
    except Exception:
        return "refused"


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_texts_are_those_of_transformers(source, messages):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": "é"}}}]
    template = ChatTemplate(source)
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for add_generation_prompt in (False, True):
        shared = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        theirs = outcome(lambda shared=shared: render_theirs([given], chat_template=source, **shared, **names)[0][0])
        ours = outcome(lambda shared=shared: template.render(messages, names=names, **shared))
        assert ours == theirs


def test_most_conversations_are_rendered():
    template = ChatTemplate(SOURCES["gemma"])
    results = {name: outcome(lambda m=m: template.render(m, names={})) for name, m in CONVERSATIONS.items()}
    assert {name for name, text in results.items() if text == "refused"} == {
        "system",
        "tools",
        "answers only",
        "two questions",
    }


def test_generation_tags_are_marked():
    source = "{% macro m(x) %}{% generation %}{{ x }}{% endgeneration %}{% endmacro %}a{{ m('b') }}c{{ m('') }}"
    template = ChatTemplate(source)
    assert template.has_generation_tags
    assert template.render([USER], names={}) == "abc"
    assert template.render([USER], names={}, marks=("[", "]")) == "a[b]c[]"
    untagged = "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}generation{% endcall %}"
    assert not ChatTemplate(untagged).has_generation_tags


@pytest.mark.parametrize(
    ("family", "tail"),
    {"chatml": "<|im_end|>\n", "gemma": "<end_of_turn>\n", "mistral": "</s>", "llama 2": " </s>"}.items(),
)
def test_end_of_a_turn(family, tail):
    template, _, names = FAMILIES[family]
    assert end_of_turn(template, names) == tail
    assert end_of_turn("{{ raise_exception('no') }}", {}) == end_of_turn("{% if %}", {}) == ""
    assert end_of_turn("{{ messages[0].content }}", {}) == ""


REACHES = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a function's globals": "{{ cycler.__init__.__globals__ }}",
    "a changed message": "{{ messages.append(1) }}",
    "a cleared message": "{{ messages[0].clear() }}",
    "a private name": "{% set ns = namespace(__html__=1) %}",
    "a private name set later": "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
}
TOO_MUCH = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loops": "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 9 }}{% endfor %}",
    "macros that call themselves": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(50) }}",
    "a long range": "{% for i in range(10**9) %}{% endfor %}",
    "a long product": "{{ 'a' * 10**10 }}",
    "a long list": "{{ ([1] * 10000) * 10000 }}",
    "a large power": "{{ 10**10**10 }}",
    "a doubled text": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a squared number": "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "replacing": "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s | replace('a', 'aaaa') %}{% endfor %}",
    "replacing by a method": "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s.replace('a', 'aaaa') %}{% endfor %}",
    "a wide filter": "{{ 'a' | center(10000000000) }}",
    "a wide indent": "{{ 'a' | indent(10**10, true) }}",
    "a wide method": "{{ 'a'.ljust(10**10) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format by a filter": "{{ '%*d' | format(10**10, 1) }}",
    "a wide format by a method": "{{ '{:10000000000}'.format(1) }}",
    "a wide format by an argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "output": "{% for i in range(400) %}{{ 'a' * 100000 }}{% endfor %}",
}


@pytest.mark.parametrize("source", {**REACHES, **TOO_MUCH}.values(), ids={**REACHES, **TOO_MUCH})
def test_hostile_templates_are_stopped(monkeypatch, source):
    monkeypatch.setattr(template_bounds, "MAX_ROUNDS", 5000)
    began = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"must keep to messages and text but( in line 1)? it does not: .*\. Do not use"
    ) as caught:
        ChatTemplate(source).render([USER], names={})
    assert "\n" not in str(caught.value)
    # Unbounded, each runs for minutes or takes all memory.
    assert time.perf_counter() - began < 10


def test_what_leads_to_python_is_not_there():
    for source in ("{{ '{0.__class__}'.format(messages) }}", "{{ messages | attr('__class__') }}", "{{ self.x }}"):
        assert ChatTemplate(source).render([USER], names={}) == ""


def test_what_a_template_may_do_is_not_stopped():
    source = (
        "{% for i in range(1000) %}{% for j in range(50) %}{% endfor %}{% endfor %}"
        "{{ ('%5.2f' % 1.5) ~ '{:>5}'.format(1) }}"
        "{{ 'a' | center(9) }}{{ 2**10 }}{{ 7 % 4 }}{{ 'ab' * 3 }}{{ [1] + [2] }}{{ 'a\n%d' % 3 }}{{ 10**6 }}"
    )
    expected = render_theirs([[USER]], chat_template=source)[0][0]
    assert ChatTemplate(source).render([USER], names={}) == expected


FAULTY = {
    "refuses": ("{{ raise_exception('Only\n user!') }}", r"cannot render the conversation in line 1: Only user!\."),
    "a missing message": ("\n\n{{ messages[7].content + 'x' }}", r"in line 3: list object has no element 7\."),
    "a wrong type": ("{{ 1 + messages }}", r"cannot render the conversation in line 1: unsupported operand"),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"in line 1: maximum recursion depth"),
    "includes": ("{% include 'x' %}", r"cannot render the conversation in line 1: no loader"),
}


@pytest.mark.parametrize(("source", "message"), FAULTY.values(), ids=FAULTY)
def test_a_template_that_fails_says_where(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render([USER], names={})


def test_what_is_no_template():
    with pytest.raises(ValueError, match=r"the chat template must be Jinja but line 2 is not: Expected an expression"):
        ChatTemplate("a\n{% if %}")
    with pytest.raises(ValueError, match=r"must be Jinja but line 1 is not: No filter named 'nothing'"):
        ChatTemplate("{{ 'a' | nothing }}")
    with pytest.raises(ValueError, match=r"a message must be made of JSON's types but got set\. Convert it"):
        ChatTemplate("").render([{"role": "user", "content": {1}}], names={})
