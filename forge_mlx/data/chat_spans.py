"""Which characters of a rendered conversation the assistant wrote."""

from collections.abc import Iterator, Mapping, Sequence
import functools
from typing import Any, NamedTuple

from forge_mlx.data.chat_template import REASONING_KEYS, ChatTemplate

# Characters that Unicode sets aside for a program's own use: they mark places in what a template writes.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class Span(NamedTuple):
    """The characters from `start` up to, not including, `end`."""

    start: int
    end: int


class _Content(NamedTuple):
    """Where what a message says stands; `start` is None where only its end is known."""

    start: int | None
    end: int


class Conversation:
    """A conversation with the text that a chat template makes of it.

    What the assistant writes goes from behind its header to the end of the token that ends its turn. Every place is
    proved on what the template writes: the beginning of a conversation must be the beginning of the whole text, and a
    text with marks in it must be the whole text once they are taken out.

    Args:
        template: the chat template.
        messages: checked messages.
        names: the special tokens' texts by their roles.
        tools: JSON schemas of the functions that the model may call.

    Attributes:
        messages: as given.
        text: the text of all messages.

    Raises:
        ValueError: the template refuses the conversation, or leaves a message out.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        names: Mapping[str, str],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self.messages = list(messages)
        self._template = template
        self._render = functools.partial(template.render, names=names, tools=tools)
        self._beginnings: dict[tuple[int, bool], str | None] = {}
        self.text = self._render(self.messages)
        usable = [char for char in _NONCHARACTERS if char not in self.text and char not in template.source]
        if len(usable) < 2:
            raise ValueError("[chat] a conversation must leave two of U+FDD0 ... U+FDEF unused but has them all.")
        self._marks = (usable[0], usable[1])
        for at, message in enumerate(self.messages):
            self._require_written(at, (message.get("content") or "").strip())

    def tagged_spans(self, *, only_last: bool) -> list[Span]:
        """What stands between the template's `{% generation %}` tags.

        Args:
            only_last: whether those of the last message alone are asked for.

        Raises:
            ValueError: the tags cannot be followed, or miss a message.
        """
        spans = self._between_marks(self._render(self.messages, marks=self._marks), self.text)
        turns = sum(message["role"] == "assistant" for message in self.messages)
        if spans is None or len(spans) < turns:
            raise ValueError(
                f"[chat] the generation tags of the chat template must stand around each of {turns} assistant messages "
                f"but {'change its text' if spans is None else f'stand around {len(spans)}'}. Repair the template."
            )
        if only_last:
            spans = spans[self._render(self.messages[:-1], marks=self._marks).count(self._marks[0]) :]
        return spans

    def turn_spans(self, stops: Sequence[Span], *, only_last: bool) -> list[Span]:
        """The assistant's turns, without help from the template.

        A turn begins where the prompt ends that would make the assistant speak, and ends with the first stop token
        behind its content.

        Args:
            stops: the places of all stop tokens in the text, in order.
            only_last: whether the last turn alone is asked for.

        Raises:
            ValueError: the template writes a message in a way that leaves its place open.
        """
        turns = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [self._turn(at, stops) for at in (turns[-1:] if only_last else turns)]

    def _turn(self, at: int, stops: Sequence[Span]) -> Span:
        content = self._content(self.messages, at, self.text)
        start = self._turn_start(at, content)
        through = self._beginning(at + 1, prompt=False)
        is_beginning = through is not None and self.text.startswith(through)
        if content is not None:
            end = next((stop.end for stop in stops if stop.end > content.end), None)
            is_inside = end is not None and (
                end <= len(through or "") if is_beginning else self._ends_so(at, self.text[content.end : end])
            )
        elif is_beginning:
            end = next((stop.end for stop in reversed(stops) if start < stop.end <= len(through or "")), None)
            is_inside = end is not None
        else:
            raise _unclear(at, "neither its content nor its end is found in the text of the whole conversation")
        if end is None or not is_inside:
            raise _unclear(at, "no special token ends it, so that the model would not learn to stop")
        return Span(start, end)

    def _turn_start(self, at: int, content: _Content | None) -> int:
        prompt, before = self._beginning(at, prompt=True), self._beginning(at, prompt=False)
        if prompt is not None and self.text.startswith(prompt):
            if prompt != before:
                return len(prompt)
            # A template without a generation prompt: the answer follows on the question, or on a header of its own.
            if content is not None and not self.text[len(prompt) : content.start].strip():
                return len(prompt)
        if content is None or content.start is None or any(self.messages[at].get(key) for key in REASONING_KEYS):
            raise _unclear(at, "the text before it is not what makes the assistant speak")
        return content.start

    def _beginning(self, count: int, *, prompt: bool) -> str | None:
        """The text of the first messages alone; None where the template refuses them."""
        key = (count, prompt)
        if key not in self._beginnings:
            try:
                self._beginnings[key] = self._render(self.messages[:count], add_generation_prompt=prompt)
            except ValueError:
                self._beginnings[key] = None
        return self._beginnings[key]

    def _content(self, messages: Sequence[Mapping[str, Any]], at: int, text: str) -> _Content | None:
        """Where `messages[at]` stands in the text of `messages`; None where marks change what the template does.

        Of a message without content, the end is that of the name in its last call.
        """
        before, behind = self._marks
        for marked in _marked_messages(messages[at], before, behind):
            try:
                rendered = self._render([*messages[:at], marked, *messages[at + 1 :]])
            except ValueError:
                continue
            has_start = before in rendered
            spans = self._between_marks(rendered if has_start else rendered.replace(behind, before + behind), text)
            if spans is not None and len(spans) == 1:
                return _Content(spans[0].start if has_start else None, spans[0].end)
        return None

    def _between_marks(self, marked: str, text: str) -> list[Span] | None:
        """The places between marks in the text without them; None if that is another text, or the marks do not pair."""
        before, behind = self._marks
        spans: list[Span] = []
        plain = ""
        for at, part in enumerate(marked.split(before)):
            inside, mark, outside = part.partition(behind)
            if bool(mark) != bool(at) or behind in outside:
                return None
            if at:
                spans.append(Span(len(plain), len(plain) + len(inside)))
            plain += inside + outside
        return spans if plain == text else None

    def _ends_so(self, at: int, tail: str) -> bool:
        """Whether the template writes this behind the content where the message is the last one."""
        text = self._beginning(at + 1, prompt=False)
        content = self._content(self.messages[: at + 1], at, text) if text is not None else None
        return text is not None and content is not None and text[content.end :].startswith(tail)

    def _require_written(self, at: int, content: str) -> None:
        if content in self.text:
            return
        other = {**self.messages[at], "content": f"{content}{self._marks[0]}"}
        if self._render([*self.messages[:at], other, *self.messages[at + 1 :]]) == self.text:
            raise ValueError(
                f"[chat] messages[{at}] must be in what the chat template writes but it leaves out the content of the "
                f"role {self.messages[at]['role']!r}. Use a role that it writes, or another template."
            )


def _marked_messages(message: Mapping[str, Any], before: str, behind: str) -> Iterator[dict[str, Any]]:
    """The message with marks around its content, then with fewer: a template may trim it, or look at its beginning."""
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is not None:
        core = content.strip()
        left = content[: len(content) - len(content.lstrip())]
        right = content[len(left) + len(core) :]
        texts = [f"{before}{content}{behind}", f"{left}{before}{core}{behind}{right}", f"{left}{core}{behind}{right}"]
        yield from ({**message, "content": text} for text in dict.fromkeys(texts))
    elif calls:
        function = calls[-1].get("function", calls[-1])
        named = {**function, "name": f"{function['name']}{behind}"}
        last = {**calls[-1], "function": named} if "function" in calls[-1] else named
        yield {**message, "tool_calls": [*calls[:-1], last]}


def _unclear(at: int, reason: str) -> ValueError:
    return ValueError(
        f"[chat] it must be clear which tokens of messages[{at}] the assistant writes but with this chat template it "
        f"is not: {reason}. Put {{% generation %}} and {{% endgeneration %}} around them in the template."
    )
