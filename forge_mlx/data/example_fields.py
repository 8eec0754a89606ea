"""From the fields of an example to the conversation or the texts that it means, in whichever common spelling."""

from collections.abc import Mapping
import difflib
import json
from typing import Any, NamedTuple, TypeAlias

from forge_mlx._text import short_json
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_files import field_names, format_of

Message: TypeAlias = Mapping[str, Any]

SHAREGPT = "ShareGPT's `conversations`"
ALPACA = "Alpaca's `instruction`, `input` and `output`"
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}


class Chat(NamedTuple):
    """A conversation.

    Attributes:
        messages: with `role` and `content`, at least one.
        tools: what the template is told of tools; None: nothing.
        only_last: whether all before the last message is a prompt.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    only_last: bool = False


class Completion(NamedTuple):
    """A text and how it goes on."""

    prompt: str
    completion: str


class Pair(NamedTuple):
    """Two answers to one prompt."""

    chosen: Chat | Completion
    rejected: Chat | Completion


Example: TypeAlias = Chat | Completion | Pair | str


def read_example(fields: dict[str, Any], config: ExampleConfig) -> tuple[Example, str | None]:
    """What an example says.

    Args:
        fields: as the file has them.
        config: says the format and the names of the fields.

    Returns:
        The example, and the name of the spelling it has where that is not the config's.

    Raises:
        ValueError: a field is missing, empty, or holds something else.
    """
    if config.format == "text":
        return _text(fields, "text_field", config), None
    if config.format == "preference":
        return _pair(fields, config), None
    if config.format == "chat":
        return _chat(fields, config)
    if _is_unnamed(fields, "prompt_field", config) and "instruction" in fields:
        return _alpaca(fields, config), ALPACA
    prompt = _field(fields, "prompt_field", config)
    completion = _field(fields, "completion_field", config)
    return _answered(prompt, completion, config.prompt_field, config.completion_field, config), None


def _chat(fields: dict[str, Any], config: ExampleConfig) -> tuple[Chat, str | None]:
    spelling = None
    name = config.messages_field
    if _is_unnamed(fields, "messages_field", config) and "conversations" in fields:
        name, spelling = "conversations", SHAREGPT
    else:
        _field(fields, "messages_field", config)
    return Chat(_messages(fields[name], name), _tools(fields.get("tools"))), spelling


def _messages(value: object, name: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"the field {name!r} must be a list of messages but is {short_json(value)}.")
    if not value:
        raise ValueError(f"the field {name!r} must hold at least one message but is empty.")
    return [_message(each, f"{name}[{index}]") for index, each in enumerate(value)]


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object with role and content but is {short_json(value)}.")
    if "role" in value or "from" not in value:
        return value
    role = value["from"]
    if role not in _SHAREGPT_ROLES:
        raise ValueError(f"{where} must be from {', '.join(_SHAREGPT_ROLES)} but is from {short_json(role)}.")
    if "value" not in value:
        raise ValueError(f"{where} must have a value but has {', '.join(map(repr, value))}.")
    return {"role": _SHAREGPT_ROLES[role], "content": value["value"]}


def _tools(value: object) -> list[Any] | None:
    """Some data sets keep the tools as JSON in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"the field 'tools' must be a list, or one as JSON text, but {error}.") from error
    if value is not None and not isinstance(value, list):
        raise ValueError(f"the field 'tools' must be a list but is {short_json(value)}.")
    return value or None


def _alpaca(fields: dict[str, Any], config: ExampleConfig) -> Chat | Completion:
    parts = [fields["instruction"], fields.get("input") or ""]
    for name, part in zip(("instruction", "input"), parts, strict=True):
        if not isinstance(part, str):
            raise ValueError(f"the field {name!r} must be text but is {short_json(part)}.")
    if "output" not in fields:
        raise ValueError(f"an example with an 'instruction' must have an 'output' but has {field_names(fields)}.")
    prompt = "\n\n".join(filter(None, parts))
    separator = "\n\n" if config.prompt_as == "text" else ""
    return _answered(prompt + separator, fields["output"], "instruction", "output", config)


def _answered(
    prompt: object, answer: object, prompt_name: str, answer_name: str, config: ExampleConfig
) -> Chat | Completion:
    """A prompt and its answer, each a text or messages."""
    if isinstance(prompt, list):
        before = _messages(prompt, prompt_name)
    elif isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}]
    else:
        raise ValueError(f"the field {prompt_name!r} must be text or a list of messages but is {short_json(prompt)}.")
    if isinstance(answer, list):
        last = _messages(answer, answer_name)
        if len(last) > 1:
            raise ValueError(
                f"the field {answer_name!r} must be one message but holds {len(last)}. format: chat learns several "
                "turns."
            )
        return Chat([*before, *last], only_last=True)
    if not isinstance(answer, str):
        raise ValueError(f"the field {answer_name!r} must be text or a list of messages but is {short_json(answer)}.")
    if not answer.strip():
        raise ValueError(f"the field {answer_name!r} must not be empty: there would be nothing to learn.")
    if isinstance(prompt, str) and config.prompt_as == "text":
        return Completion(prompt, answer)
    return Chat([*before, {"role": "assistant", "content": answer}], only_last=True)


def _pair(fields: dict[str, Any], config: ExampleConfig) -> Pair:
    chosen, rejected = (_field(fields, f"{name}_field", config) for name in ("chosen", "rejected"))
    names = config.chosen_field, config.rejected_field
    if type(chosen) is not type(rejected):
        raise ValueError(
            f"the fields {names[0]!r} and {names[1]!r} must be of one kind but are {short_json(chosen)} and "
            f"{short_json(rejected)}."
        )
    if chosen == rejected:
        raise ValueError(
            f"the fields {names[0]!r} and {names[1]!r} must differ but are the same: {short_json(chosen)}."
        )
    answers = (chosen, rejected)
    if any(isinstance(answer, list) and len(answer) > 1 for answer in answers):
        # Whole conversations, which repeat a prompt if the example has one beside them.
        first, second = (_messages(answer, name) for answer, name in zip(answers, names, strict=True))
        if first[:-1] != second[:-1]:
            raise ValueError(
                f"the conversations {names[0]!r} and {names[1]!r} must be the same but for their last message, but "
                f"[{_first_difference(first, second)}] differs already."
            )
        return Pair(Chat(first, only_last=True), Chat(second, only_last=True))
    prompt = _field(fields, "prompt_field", config)
    return Pair(
        *(
            _answered(prompt, answer, config.prompt_field, name, config)
            for answer, name in zip(answers, names, strict=True)
        )
    )


def _first_difference(first: list[Message], second: list[Message]) -> int:
    same = [one == other for one, other in zip(first[:-1], second[:-1], strict=False)]
    return same.index(False) if False in same else len(same)


def _text(fields: dict[str, Any], setting: str, config: ExampleConfig) -> str:
    value = _field(fields, setting, config)
    name = getattr(config, setting)
    if not isinstance(value, str):
        raise ValueError(f"the field {name!r} must be text but is {short_json(value)}.")
    if not value.strip():
        raise ValueError(f"the field {name!r} must not be empty: there would be nothing to learn.")
    return value


def _is_unnamed(fields: dict[str, Any], setting: str, config: ExampleConfig) -> bool:
    """Whether a field has its default name, and no example a field of that name: only then other spellings count."""
    default = ExampleConfig.model_fields[setting].default
    return bool(getattr(config, setting) == default) and default not in fields


def _field(fields: dict[str, Any], setting: str, config: ExampleConfig) -> Any:
    name = getattr(config, setting)
    if name in fields:
        return fields[name]
    raise ValueError(
        f"an example must have the field {name!r} but has {field_names(fields)}. {_way_out(fields, setting, config)}"
    )


def _way_out(fields: dict[str, Any], setting: str, config: ExampleConfig) -> str:
    if near := difflib.get_close_matches(getattr(config, setting), fields, 1):
        return f"Did you mean data.{setting}: {near[0]}?"
    told, by = format_of(fields)
    if told == "choices":
        return "Questions with choices are for forge_mlx.evaluate."
    if told not in (None, config.format):
        return f"Set data.format to {told}, whose fields are {' and '.join(map(repr, by))}."
    return f"Name it with data.{setting}."
