"""What an example says of tools that its chat template does not write, so that it is neither read nor learnt."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forge_mlx.data.chat import template_of
from forge_mlx.data.chat_messages import checked_messages
from forge_mlx.data.chat_template import ChatTemplate
from forge_mlx.data.example_fields import Chat, Example, Pair
from forge_mlx.data.hub_tokenizer import HubTokenizer

_CALLS: Final = "tool_calls"
_TOOLS: Final = "tools"


def unwritten_fields(tokenizer: HubTokenizer, example: Example) -> set[str]:
    """Which of `tool_calls` and `tools` an example has for nothing: its text is the same without them.

    Args:
        tokenizer: with the chat template to use.
        example: one that the template takes.
    """
    if isinstance(example, Pair):
        return set[str]().union(*(unwritten_fields(tokenizer, answer) for answer in example))
    if not isinstance(example, Chat):
        return set()
    calls = any(message.get(_CALLS) for message in example.messages)
    if not calls and example.tools is None:
        return set()
    template, names = template_of(tokenizer), tokenizer.special_names
    messages = checked_messages(example.messages, template)
    text = template.render(messages, names=names, tools=example.tools)
    without = [{key: value for key, value in message.items() if key != _CALLS} for message in messages]
    found = set()
    if calls and _text(template, without, names, example.tools) == text:
        found.add(_CALLS)
    if example.tools is not None and _text(template, messages, names, None) == text:
        found.add(_TOOLS)
    return found


def _text(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str | None:
    try:
        return template.render(messages, names=names, tools=tools)
    except ValueError:
        # It missed what was taken away.
        return None
