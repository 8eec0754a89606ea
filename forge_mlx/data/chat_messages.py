"""What a conversation must look like before a chat template gets it."""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_mlx._text import short_json
from forge_mlx.data.chat_template import ChatTemplate

ROLES = ("system", "user", "assistant", "tool")


def checked_messages(messages: object, template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages as dicts, each content that is a list of text parts joined to one text.

    Args:
        messages: a list of objects with `role` and `content`.
        template: its literals may name more roles than the usual ones.

    Raises:
        ValueError: a message is malformed; the error names its place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"[chat] messages must be a list of at least one message but got {short_json(messages)}.")
    return [_checked(message, f"messages[{at}]", template) for at, message in enumerate(messages)]


def require_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless the conversation ends with what the assistant says.

    Raises:
        ValueError: the assistant says nothing, or another message comes last.
    """
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError(
            "[chat] messages must have one by the assistant, which is what is learnt, but got only "
            f"{' and '.join(sorted(set(roles)))}."
        )
    if roles[-1] != "assistant":
        raise ValueError(
            f"[chat] messages[{len(roles) - 1}], the last one, must be by the assistant but got the role "
            f"{roles[-1]!r}. Leave out what stands behind the last answer."
        )


def _checked(message: object, where: str, template: ChatTemplate) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"[chat] {where} must be an object with role and content but got {short_json(message)}.")
    role = message.get("role")
    if not isinstance(role, str) or (role not in ROLES and role not in template.literals):
        raise ValueError(
            f"[chat] {where}.role must be one that the chat template knows, such as system, user or assistant, but "
            f"{'is missing' if role is None else f'got {short_json(role)}'}."
        )
    checked = {**message}
    calls = message.get("tool_calls")
    if calls:
        _require_calls(calls, f"{where}.tool_calls")
    if (content := message.get("content")) is not None:
        checked["content"] = _text(content, f"{where}.content")
    elif role != "assistant" or not calls:
        raise ValueError(f"[chat] {where}.content must be a text but is missing.")
    return checked


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"[chat] {where} must be a text or a list of text parts but got {short_json(content)}.")
    texts: list[str] = []
    for at, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise ValueError(
                f'[chat] {where}[{at}] must be a text part, {{"type": "text", "text": ...}}, but got '
                f"{short_json(part)}. Only text can be learnt."
            )
        texts.append(text)
    return "".join(texts)


def _require_calls(calls: object, where: str) -> None:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"[chat] {where} must be a list of calls but got {short_json(calls)}.")
    for at, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'[chat] {where}[{at}] must be {{"function": {{"name": ..., "arguments": ...}}}} but got '
                f"{short_json(call)}."
            )
