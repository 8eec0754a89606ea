"""A conversation with a model: its messages, what the KV cache holds of them, and the loop in a terminal."""

from collections.abc import Callable, Generator
from contextlib import closing, suppress
from importlib import import_module
import sys
from typing import Final

from forge_mlx._console import to_stderr
from forge_mlx.data.chat import render_prompt
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.stream_decoder import StreamDecoder
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.sampling import Sampler, generate_tokens

_HELP: Final = "/reset begins anew, /system TEXT sets the system message, /exit or Ctrl-D ends; Ctrl-C stops an answer"


class Conversation:
    """A conversation through the chat template of the model's tokenizer.

    Each turn is rendered anew from all messages, and the model reads what differs from the turn before: usually the new
    message alone.

    Args:
        model: in evaluation mode.
        tokenizer: the model's, with a chat template.
        sampler: how a token is chosen.
        max_tokens: the most tokens of an answer.
        seed: of the choices of each answer.
        warn: told in one line, once, when the conversation is longer than the texts of training.

    Attributes:
        messages: what was said, as the template takes it; the system message included.
        was_cut: whether the last answer ended at ``max_tokens`` or where the model's positions end.

    Raises:
        ValueError: ``max_tokens`` is below 1.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: HubTokenizer,
        sampler: Sampler,
        *,
        max_tokens: int,
        seed: int = 0,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"--max-tokens must be at least 1 but got {max_tokens}.")
        self._model, self._tokenizer, self._sampler = model, tokenizer, sampler
        self._max_tokens, self._seed, self._warn = max_tokens, seed, warn
        self.messages: list[dict[str, str]] = []
        self.was_cut = False
        self._has_warned = False
        self._cache = model.make_cache()
        # The cache holds the first of these, as many as its offset says.
        self._text: list[int] = []

    @property
    def system(self) -> str | None:
        """The system message, or None."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def reset(self, system: str | None = None) -> None:
        """Begin anew, with a system message or without.

        Raises:
            ValueError: the chat template takes no system message; nothing has changed.
        """
        messages = [] if system is None else [{"role": "system", "content": system}]
        if messages:
            render_prompt(self._tokenizer, [*messages, {"role": "user", "content": "?"}])
        self.messages = messages

    def answer(self, message: str) -> Generator[str, None, None]:
        """The answer to a message piece by piece, only whole characters; both then belong to the conversation.

        An answer that is not taken to its end belongs to it as far as it came; without a first piece, neither does.

        Raises:
            ValueError: the template refuses the messages, one has a token that the model has no embedding of, or the
                model's learned positions end before the answer.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        prompt = render_prompt(self._tokenizer, messages)
        self._tokenizer.require_embeddings(prompt, self._model.config.vocab_size or 0, "the messages")
        return self._pieces(messages, prompt, self._room(len(prompt)))

    def _pieces(self, messages: list[dict[str, str]], prompt: list[int], room: int) -> Generator[str, None, None]:
        unread = self._go_back_to(prompt)
        decoder, pieces, tokens, ended = StreamDecoder(self._tokenizer), list[str](), 0, False
        try:
            for token in generate_tokens(
                self._model,
                unread,
                self._sampler,
                room,
                stop=self._tokenizer.stop_ids,
                vocab_size=self._tokenizer.vocab_size,
                seed=self._seed,
                cache=self._cache,
            ):
                self._text.append(token)
                tokens += 1
                if piece := decoder.push(token):
                    pieces.append(piece)
                    yield piece
            ended = True
            if piece := decoder.finish():
                pieces.append(piece)
                yield piece
            self._warn_past_training(len(prompt) + tokens)
        finally:
            if ended or pieces:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
                self.was_cut = ended and tokens == room

    def _go_back_to(self, prompt: list[int]) -> list[int]:
        """Let the cache hold the longest beginning of the prompt that it can; return the rest, at least a token."""
        layers = [part for part in self._cache if isinstance(part, KVCache)]
        # An interrupt may have come when only some layers had read the last tokens.
        held = self._text[: min(layer.offset for layer in layers)]
        kept = 0
        while kept < min(len(held), len(prompt) - 1) and held[kept] == prompt[kept]:
            kept += 1
        if len(layers) == len(self._cache):
            for layer in layers:
                layer.keep(kept)
        else:
            # The last token that a token shift has seen cannot be taken back.
            self._cache, kept = self._model.make_cache(), 0
        self._text = list(prompt)
        return prompt[kept:]

    def _warn_past_training(self, length: int) -> None:
        limit = self._model.config.max_seq_len
        if length > limit and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"warning: {length} tokens of conversation exceed the {limit} tokens that the model was trained on; "
                "quality falls there"
            )

    def _room(self, length: int) -> int:
        """The most tokens of an answer behind so many tokens of conversation."""
        limit, most = self._model.config.max_seq_len, self._max_tokens
        if length + most <= limit:
            return most
        if self._model.config.position != "learned":
            self._warn_past_training(length)
            return most
        if length >= limit:
            raise ValueError(
                f"the conversation must be shorter than the model's {limit} positions but has {length} tokens. "
                "/reset begins a new one."
            )
        return limit - length


def answer_once(conversation: Conversation, message: str, write: Callable[[str], None]) -> None:
    """Write the answer to one message, and say where it was cut.

    Args:
        conversation: where the message is said.
        message: what is said.
        write: takes each piece at once.

    Raises:
        ValueError: as `Conversation.answer`.
    """
    with closing(conversation.answer(message)) as pieces:
        for piece in pieces:
            write(piece)
    write("\n")
    if conversation.was_cut:
        to_stderr("the answer was cut; a larger --max-tokens allows longer ones")


def converse(conversation: Conversation, write: Callable[[str], None]) -> None:
    """Read messages and commands from standard input and write the answers, until the input ends.

    Args:
        conversation: where they are said.
        write: takes each piece of an answer at once.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        # Editing and history of the lines, where Python has it.
        with suppress(ImportError):
            import_module("readline")
        to_stderr(_HELP)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                write("\n")
            return
        except KeyboardInterrupt:
            to_stderr("\n/exit or Ctrl-D ends")
            continue
        if line.startswith("/"):
            if not _obey(conversation, line):
                return
        elif line.strip():
            _say(conversation, line, write)


def _say(conversation: Conversation, line: str, write: Callable[[str], None]) -> None:
    try:
        answer_once(conversation, line, write)
    except KeyboardInterrupt:
        write("\n")
        to_stderr("stopped")
    except ValueError as error:
        to_stderr(f"error: {error}")


def _obey(conversation: Conversation, line: str) -> bool:
    """Do what a command says. Returns whether the conversation goes on."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command in ("/exit", "/quit"):
        return False
    if command == "/reset":
        conversation.reset(conversation.system)
        to_stderr("a new conversation" if conversation.system is None else f"a new conversation: {conversation.system}")
    elif command == "/system" and rest:
        try:
            conversation.reset(rest)
            to_stderr("a new conversation with this system message")
        except ValueError as error:
            to_stderr(f"error: {error}")
    elif command == "/system":
        to_stderr(f"system message: {conversation.system or 'none'}; /system TEXT sets one")
    else:
        start = "" if command == "/help" else f"there is no command {command}; to say it, begin with a space. "
        to_stderr(f"{start}{_HELP}")
    return True
