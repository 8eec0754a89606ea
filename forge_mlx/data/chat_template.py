"""A tokenizer's Jinja chat template: conversations to text, the same text as transformers writes."""

from collections.abc import Mapping, Sequence
import functools
import traceback
from typing import Any, NamedTuple

from forge_mlx._text import one_line
from forge_mlx.data.template_bounds import MAX_LENGTH
from forge_mlx.data.template_sandbox import TemplateEnvironment
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError

# Names under which a message's reasoning comes; templates read the first, a few the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class BuiltInTemplate(NamedTuple):
    """A chat template that is known by name.

    Attributes:
        source: its Jinja source.
        tokens: the special tokens that it writes.
    """

    source: str
    tokens: tuple[str, ...]


BUILT_IN_TEMPLATES = {
    "chatml": BuiltInTemplate(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    )
}


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.

    Attributes:
        source: as given.
        has_generation_tags: whether it says itself what the model writes, between `{% generation %}` tags.
        literals: the texts that stand in the template, such as names of roles.

    Raises:
        ValueError: the source is no Jinja.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._environment = TemplateEnvironment()
        try:
            tree = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            message = str(error.message).rstrip(".")
            raise ValueError(
                f"[chat_template] the chat template must be Jinja but line {error.lineno} is not: {message}."
            ) from error
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"[chat_template] the chat template must be Jinja but is not: {error}.") from error
        self.has_generation_tags = "generation" in source and _has_generation_tag(tree)
        self.literals = frozenset(const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        names: Mapping[str, str],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: with `role` and `content` each, and whatever else the template reads. A key with null is left out.
            names: the special tokens' texts by their roles, such as `eos_token`.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: whether the text ends with the beginning of an assistant's turn.
            marks: what generation tags put before and behind their text.

        Raises:
            ValueError: the template refuses the conversation, fails, or does what it must not.
        """
        plain = [_with_reasoning(_plain_message(message)) for message in messages]
        variables = {"messages": plain, "tools": _plain(tools), "documents": None}
        parts: list[str] = []
        length = 0
        try:
            with self._environment.run(marks):
                for part in self._template.generate(
                    **{**names, **variables, "add_generation_prompt": add_generation_prompt}
                ):
                    parts.append(part)
                    length += len(part)
                    if length > MAX_LENGTH:
                        raise SecurityError(f"it writes more than {MAX_LENGTH:,} characters")
        except Exception as error:
            raise _failure(error) from error
        return "".join(parts)


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> ChatTemplate:
    """The template of a source; compiled once.

    Raises:
        ValueError: the source is no Jinja.
    """
    return ChatTemplate(source)


def end_of_turn(source: str, names: Mapping[str, str]) -> str:
    """What a template writes behind an assistant's content; nothing where it refuses two short messages.

    Args:
        source: Jinja source.
        names: the special tokens' texts by their roles.
    """
    answer = "\ufdd0answer\ufdd1"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = compile_template(source).render(messages, names=names)
    except ValueError:
        return ""
    return text.rpartition(answer)[2] if answer in text else ""


def _has_generation_tag(tree: nodes.Template) -> bool:
    calls = (block.call.node for block in tree.find_all(nodes.CallBlock))
    return any(isinstance(node, nodes.ExtensionAttribute) for node in calls)


def _failure(error: Exception) -> ValueError:
    """One line that says where in the template, and what."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    where = f" in line {lines[-1]}" if lines and lines[-1] else ""
    message = one_line(error)
    if isinstance(error, SecurityError):
        return ValueError(
            f"[chat_template] the chat template must keep to messages and text but{where} it does not: {message}. "
            "Do not use this template."
        )
    return ValueError(f"[chat_template] the chat template cannot render the conversation{where}: {message}.")


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    # Templates ask whether a key is there, and print null as None.
    return {str(key): _plain(value) for key, value in message.items() if value is not None}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = next((message[key] for key in REASONING_KEYS if key in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain(value: object) -> Any:
    """A copy out of JSON's types: a template cannot reach the methods of anything else.

    Raises:
        ValueError: there is a value that JSON does not have.
    """
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            raise ValueError(
                f"[chat_template] a message must be made of JSON's types but got {type(value).__name__}. Convert it."
            )
