"""What the samples of a run continue."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from forge_mlx.data.batch import Batch
from forge_mlx.data.chat import render_prompt
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.prepare_examples import PreparedExamples
from forge_mlx.data.stream import Rows
from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.train.config import TrainConfig
import numpy as np

# A sample without a prompt starts behind an end token, as documents do. With few documents the model hardly ever saw
# what follows one, so the sample continues the start of the validation text instead.
_DOCUMENTS_TO_LEARN_STARTS = 100
_BORROWED_TOKENS = 16

# How many examples of the validation set show what a model answers, and how much of one that asks nothing is given.
_EXAMPLES = 3
_GIVEN_TOKENS = 64


class Prompt(NamedTuple):
    """One text that samples continue.

    Attributes:
        tokens: what the model reads.
        text: the same as a person reads it.
        expected: what the data have there; None: nothing in particular.
    """

    tokens: list[int]
    text: str
    expected: str | None = None


def corpus_prompt(
    config: TrainConfig, shape: DecoderConfig, tokenizer: TextTokenizer, valid: Rows, train_documents: int
) -> Prompt:
    """The prompt of a run on a corpus: the config's, or what stands in for it.

    Args:
        config: of the run.
        shape: the model's.
        tokenizer: the model's.
        valid: the validation text.
        train_documents: documents of the training text.

    Raises:
        ValueError: the config's leaves no room for a sample.
    """
    limit = shape.max_seq_len
    first = [tokenizer.end_id] if config.isolates_texts else []
    prompt = tokenizer.encode(config.train.sample_prompt)
    what = "model.max_seq_len" if isinstance(config.model, DecoderConfig) else "the model's longest sequence"
    if prompt and len(first) + len(prompt) >= limit:
        raise ValueError(
            f"train.sample_prompt must be shorter than {what}, {limit} tokens, but has "
            f"{len(first) + len(prompt)}{' with the end token before it' if first else ''}. Shorten it."
        )
    if prompt:
        tokens = first + prompt
    elif train_documents >= _DOCUMENTS_TO_LEARN_STARTS:
        tokens = [tokenizer.end_id]
    else:
        room = max(0, limit - 1 - len(first))
        borrowed = [int(token) for token in valid.tokens.tokens[: min(_BORROWED_TOKENS, room)]]
        if first and tokenizer.end_id in borrowed:
            borrowed = borrowed[: borrowed.index(tokenizer.end_id)]
        tokens = first + borrowed
    # The end token decodes to nothing.
    return Prompt(tokens, tokenizer.decode(tokens))


def example_prompts(config: TrainConfig, shape: DecoderConfig, examples: PreparedExamples) -> list[Prompt]:
    """The prompts of a run on examples: the config's, asked as they ask, else what the first few held out ask.

    No two have one text, by which the report finds the answers to each.

    Args:
        config: of the run; its data have a format.
        shape: the model's.
        examples: with the tokenizer.

    Raises:
        ValueError: the config's leaves no room for a sample, or the chat template cannot render it.
    """
    asked, tokenizer, valid = config.train.sample_prompt, examples.tokenizer, examples.valid
    if not asked:
        rows = (valid.batch(np.array([row])) for row in range(valid.num_rows))
        return list(islice(_distinct(prompt for row in rows for prompt in _prompts_of(row, tokenizer)), _EXAMPLES))
    if examples.facts.in_chat:
        tokens = render_prompt(tokenizer, [{"role": "user", "content": asked}])
    else:
        tokens = [*tokenizer.begin_ids, *tokenizer.encode(asked)]
    if len(tokens) >= shape.max_seq_len:
        raise ValueError(
            f"train.sample_prompt must be shorter than the model's longest sequence, {shape.max_seq_len} tokens, but "
            f"has {len(tokens)}. Shorten it."
        )
    return [Prompt(tokens, tokenizer.decode(tokens))]


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    seen = set[str]()
    for prompt in prompts:
        if prompt.text not in seen:
            seen.add(prompt.text)
            yield prompt


def _prompts_of(row: Batch, tokenizer: HubTokenizer) -> Iterator[Prompt]:
    """What each example of a row asks, and the answer that follows there; of one that is all learnt its first half."""
    assert row.weights is not None
    segments = np.zeros_like(row.inputs) if row.segment_ids is None else row.segment_ids
    for segment in range(int(segments.max()) + 1):
        (places,) = np.nonzero(segments[0] == segment)
        counts = row.weights[0, places] > 0
        if not counts.any():
            continue
        first = int(counts.argmax())
        end = first + int(np.append(~counts[first:], True).argmax())
        if first < max(1, len(tokenizer.begin_ids)):
            first = max(first, min((end + 1) // 2, _GIVEN_TOKENS) - 1)
        tokens = row.inputs[0, places[: first + 1]].tolist()
        expected = row.targets[0, places[first:end]].tolist()
        yield Prompt(tokens, tokenizer.decode(tokens), tokenizer.decode(expected))
