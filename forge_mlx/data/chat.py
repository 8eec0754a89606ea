"""Examples for fine-tuning as tokens, and which of the tokens count in the loss."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from forge_mlx.data.chat_messages import checked_messages, require_answer
from forge_mlx.data.chat_spans import Conversation, Span
from forge_mlx.data.chat_template import ChatTemplate, compile_template
from forge_mlx.data.hub_tokenizer import HubTokenizer
import numpy as np
from numpy.typing import NDArray

TrainOn = Literal["assistant", "last", "all"]


class Encoded(NamedTuple):
    """Tokens of one example.

    Attributes:
        ids: int32 `[num_tokens]`.
        is_target: bool `[num_tokens]`: whether predicting this token, from those before it, counts in the loss. The
            first token has none before it and never counts.
    """

    ids: NDArray[np.int32]
    is_target: NDArray[np.bool_]


def encode_chat(
    tokenizer: HubTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    train_on: TrainOn = "assistant",
) -> Encoded:
    """A conversation in the tokenizer's chat template, with the assistant's part as the target.

    The whole text is tokenised at once, so that the ids are those that transformers gives; special tokens' names in it
    become those tokens. What counts is the content of the assistant with the token that ends its turn, and neither the
    header before it nor what follows. Where the template has `{% generation %}` tags, it is what they enclose.

    A token that begins before the assistant's text and reaches into it counts, such as `▁Yes` where the text begins at
    `Yes`: it can only be predicted by knowing the answer. A special token that takes in the space behind it does not.

    Args:
        tokenizer: with a chat template.
        messages: objects with `role`, `content` and what else the template reads. The content is a text, or a list of
            text parts. The last message is the assistant's, unless `train_on` is `all`.
        tools: JSON schemas of the functions that the model may call, for the template.
        train_on: `assistant`: all that the assistant says. `last`: its last message. `all`: the whole text.

    Raises:
        ValueError: there is no template, a message is malformed, the template refuses the conversation, or writes it in
            a way that leaves open what the assistant writes.
    """
    template = template_of(tokenizer)
    checked = checked_messages(messages, template)
    if train_on != "all":
        require_answer(checked)
    conversation = Conversation(template, checked, tokenizer.special_names, tools)
    encoding = tokenizer.encode_with_offsets(conversation.text, specials=True)
    ids = np.array(encoding.ids, np.int32)
    offsets = [Span(*offset) for offset in encoding.offsets]
    if train_on == "all":
        return _encoded(ids, np.ones(len(ids), np.bool_))
    only_last = train_on == "last"
    if template.has_generation_tags:
        spans = conversation.tagged_spans(only_last=only_last)
    else:
        stops = [place for token, place in zip(encoding.ids, offsets, strict=True) if token in tokenizer.stop_ids]
        spans = conversation.turn_spans(stops, only_last=only_last)
    is_special = np.isin(ids, list(tokenizer.special_ids))
    return _encoded(ids, _covered(offsets, spans, is_special))


def encode_prompt_completion(
    tokenizer: HubTokenizer, prompt: str, completion: str, *, train_on_prompt: bool = False
) -> Encoded:
    """What begins a text, the prompt, the completion right behind it, and `end_id`; the last two are the target.

    Prompt and completion are tokenised as one text, without special tokens out of it. A token that reaches from the
    prompt into the completion counts.

    Args:
        tokenizer: any.
        prompt: what is given.
        completion: what is learnt.
        train_on_prompt: whether the prompt counts too.

    Raises:
        ValueError: a text holds a lone surrogate.
    """
    encoding = tokenizer.encode_with_offsets(prompt + completion)
    span = Span(0 if train_on_prompt else len(prompt), len(prompt) + len(completion))
    inside = _covered([Span(*offset) for offset in encoding.offsets], [span], np.zeros(len(encoding.ids), np.bool_))
    ids = np.array([*tokenizer.begin_ids, *encoding.ids, tokenizer.end_id], np.int32)
    return _encoded(ids, np.concatenate([np.zeros(len(tokenizer.begin_ids), np.bool_), inside, [True]]))


def encode_text(tokenizer: HubTokenizer, text: str) -> Encoded:
    """What begins a text, the text, and `end_id`; the last two are the target.

    Args:
        tokenizer: any.
        text: what is learnt.

    Raises:
        ValueError: the text holds a lone surrogate.
    """
    return encode_prompt_completion(tokenizer, "", text)


def render_prompt(
    tokenizer: HubTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation in the chat template, up to where the assistant speaks next.

    Args:
        tokenizer: with a chat template.
        messages: as for `encode_chat`; the last one is not by the assistant.
        tools: JSON schemas of the functions that the model may call, for the template.

    Raises:
        ValueError: there is no template, a message is malformed, or the template refuses the conversation.
    """
    template = template_of(tokenizer)
    checked = checked_messages(messages, template)
    if checked[-1]["role"] == "assistant":
        raise ValueError(
            f"[chat] messages[{len(checked) - 1}], the last one, must leave the assistant to speak but is its own. "
            "Leave it out."
        )
    text = template.render(checked, names=tokenizer.special_names, tools=tools, add_generation_prompt=True)
    return tokenizer.encode(text, specials=True)


def template_of(tokenizer: HubTokenizer) -> ChatTemplate:
    """The compiled chat template of a tokenizer.

    Raises:
        ValueError: it has none, or one that is no Jinja.
    """
    if tokenizer.chat_template is None:
        names = tokenizer.template_names
        has = f"only those named {' and '.join(names)[:200]}, none of them default" if names else "none"
        raise ValueError(
            f"[chat] the tokenizer must have a chat template but {tokenizer.name} has {has}. Set chat_template to a "
            "file with one, or to chatml."
        )
    return compile_template(tokenizer.chat_template)


def _covered(offsets: Sequence[Span], spans: Iterable[Span], is_special: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which tokens have a character in one of the spans; a special token must begin in it."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    covered = np.zeros(len(offsets), np.bool_)
    for span in spans:
        reaches_in = (starts < span.end) & (ends > span.start)
        covered |= reaches_in & ((starts >= span.start) | ~is_special)
    return covered


def _encoded(ids: NDArray[np.int32], is_target: NDArray[np.bool_]) -> Encoded:
    is_target[:1] = False
    return Encoded(ids, is_target)
