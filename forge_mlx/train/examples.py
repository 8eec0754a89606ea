"""The examples of a fine-tuning run, with all that would keep it from starting on them."""

from collections.abc import Callable
from typing import NamedTuple

from forge_mlx._text import count
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.prepare_examples import PreparedExamples, prepare_examples
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.prompts import Prompt, example_prompts

Log = Callable[[str], None]


class BegunExamples(NamedTuple):
    """Examples as a run has them before its first step.

    Attributes:
        prepared: their rows, and the tokenizer with its chat template.
        prompts: what samples continue.
        lines: what a person should know of them.
    """

    prepared: PreparedExamples
    prompts: list[Prompt]
    lines: list[str]


def begin_examples(config: TrainConfig, tokenizer: HubTokenizer, shape: DecoderConfig, log: Log) -> BegunExamples:
    """Prepare a run's examples, which needs none of the model's weights. Tokens and masks are kept in the cache.

    Args:
        config: of the run; its data have a format.
        tokenizer: the checkpoint's.
        shape: the checkpoint's.
        log: takes a line for people, of the files as they are read.

    Raises:
        ValueError: examples are missing, malformed, too few, or too long, one has a token that the model has no
            embedding of, or the sample's prompt leaves no room for a sample.
        OSError: the cache's folder cannot be written.
    """
    assert isinstance(config.data, ExampleConfig)
    seq_len, batch_size = config.train.seq_len, config.train.batch_size
    prepared = prepare_examples(config.data, tokenizer, seq_len=seq_len, log=log, limit=shape.max_seq_len)
    for split in (prepared.train, prepared.valid):
        prepared.tokenizer.require_embeddings(split.tokens.tokens, shape.vocab_size or 0, "the examples")
    lines, rows = list(prepared.lines), prepared.train
    if rows.num_rows < batch_size:
        noun = "row" if rows.group_size == 1 else "pair"
        lines.append(
            f"{count(rows.num_rows, noun)} to train on, fewer than train.batch_size, {batch_size}: a batch takes "
            "those of several epochs"
        )
    return BegunExamples(prepared, example_prompts(config, shape, prepared), lines)
