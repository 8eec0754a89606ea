"""The command ``python -m forge_mlx.generate MODEL``: continue a text, or chat."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import sys
from typing import Any, Final

from forge_mlx._console import HelpFormatter, run_command, to_stderr
from forge_mlx._text import visible_controls
from forge_mlx.chat import Conversation, answer_once, converse
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.stream_decoder import StreamDecoder
from forge_mlx.opened_model import OpenedModel, add_model_arguments, open_model
from forge_mlx.sampling import Sampler, generate_tokens

_TEXT_TOKENS: Final = 200
_CHAT_TOKENS: Final = 512
_SAMPLING: Final[dict[str, Any]] = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0}
_EPILOG: Final = """\
examples:
  python -m forge_mlx.generate runs/quickstart --prompt "def test_"
  python -m forge_mlx.generate runs/mine --chat
  python -m forge_mlx.generate ../models/SmolLM2-135M-Instruct --chat --prompt "Why is the sky blue?"
  python -m forge_mlx.generate ../models/SmolLM2-135M --adapter runs/mine/final --temperature 0
"""


def stream_text(
    opened: OpenedModel,
    prompt: str,
    sampler: Sampler,
    max_tokens: int,
    seed: int,
    warn: Callable[[str], None],
) -> Iterator[str]:
    """The continuation of a prompt piece by piece, only whole characters.

    Learned positions end at ``max_seq_len``. Others do not, but the model has never seen longer texts.

    Args:
        opened: the model and its tokenizer.
        prompt: the text to continue; it is checked before the first piece is asked for.
        sampler: how a token is chosen.
        max_tokens: the most tokens to write.
        seed: of the choices.
        warn: told in one line when the text may become longer than those of training.

    Raises:
        ValueError: ``max_tokens`` is below 1, or prompt and answer together are longer than the learned positions.
    """
    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1 but got {max_tokens}.")
    # A prompt may come from anywhere in a text, as the rows of training do, unless those were whole texts. Without one,
    # the end token: what follows it is the start of a document.
    tokens = [*opened.begin_ids, *opened.tokenizer.encode(prompt)] or [opened.tokenizer.end_id]
    limit = opened.model.config.max_seq_len
    if len(tokens) + max_tokens > limit:
        size = f"{len(tokens)} tokens of prompt and {max_tokens} of text"
        if opened.model.config.position == "learned":
            fits = limit - len(tokens)
            way_out = f"Use --max-tokens {fits} or less." if fits > 0 else "Use a shorter prompt."
            raise ValueError(f"the model has {limit} learned positions but got {size}. {way_out}")
        warn(f"warning: {size} may exceed the {limit} tokens that the model was trained on; quality falls there")
    return _pieces(opened, tokens, sampler, max_tokens, seed)


def _pieces(opened: OpenedModel, tokens: list[int], sampler: Sampler, max_tokens: int, seed: int) -> Iterator[str]:
    decoder = StreamDecoder(opened.tokenizer)
    for token in generate_tokens(
        opened.model,
        tokens,
        sampler,
        max_tokens,
        stop=opened.tokenizer.stop_ids,
        vocab_size=opened.tokenizer.vocab_size,
        seed=seed,
    ):
        yield decoder.push(token)
    yield decoder.finish()


def _sampler(options: argparse.Namespace, generation: Mapping[str, Any]) -> Sampler:
    """The sampler of the options; what they leave open is as generation_config.json has it, else the command's own."""
    given = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    theirs = {name: generation[name] for name in _SAMPLING if name not in given and generation.get(name) is not None}
    # Transformers then samples by none of the others.
    is_greedy = generation.get("do_sample") is False and not given
    if is_greedy:
        theirs = {"temperature": 0.0}
    try:
        if words := [name for name, value in theirs.items() if not isinstance(value, (int, float))]:
            raise ValueError(f"{words[0]} must be a number but is {theirs[words[0]]!r}.")
        sampler = Sampler(**{**_SAMPLING, **theirs, **given})
    except ValueError as error:
        if not theirs:
            raise
        names = ", ".join(f"--{name.replace('_', '-')}" for name in theirs)
        raise ValueError(f"generation_config.json of the model cannot be followed: {error} Give {names}.") from None
    if theirs:
        shown = "greedy" if is_greedy else ", ".join(f"{name} {value}" for name, value in theirs.items())
        to_stderr(f"as the model's generation_config.json says: {shown}")
    return sampler


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge_mlx.generate",
        description="Continue a prompt with a model, or chat with it. Tokens are chosen as the generation_config.json "
        "of a published model says, and by these options where they are given.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_model_arguments(parser, adapter="adapters to put on the model (default: none)")
    parser.add_argument(
        "--prompt",
        help="text to continue (default: the start of a document; a model of few documents needs a prompt); with "
        "--chat the one message to answer",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="talk to the model through its chat template, in turns or with --prompt once (default: continue a text)",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message (default: none)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most tokens to write (default {_TEXT_TOKENS}; of an answer with --chat {_CHAT_TOKENS})",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's, else 0.8)")
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default: the model's, else 0: all)"
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest to this sum (default: the model's, else 0.95)"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="drop what is rarer than this x the likeliest (default: the model's, else 0: none)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed gives the same text (default 0)"
    )
    return parser


def _write(piece: str) -> None:
    # An escape sequence that the model writes must not act on the terminal; what goes to a file stays as it is.
    print(visible_controls(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def _continue(opened: OpenedModel, sampler: Sampler, options: argparse.Namespace) -> None:
    prompt, most = options.prompt or "", _given(options.max_tokens, _TEXT_TOKENS)
    pieces = stream_text(opened, prompt, sampler, most, options.seed, warn=to_stderr)
    to_stderr(f"[{opened.source}]")
    _write(prompt)
    written = False
    for piece in pieces:
        _write(piece)
        written = written or bool(piece)
    _write("\n")
    if not written:
        to_stderr("the model ended the text at once; another --prompt or --temperature may help")


def _chat(opened: OpenedModel, sampler: Sampler, options: argparse.Namespace) -> None:
    if not isinstance(opened.tokenizer, HubTokenizer):
        raise ValueError(
            f"{opened.source}: --chat needs a tokenizer with a chat template, and a model trained here from scratch "
            "has none. Leave --chat out, and give the start of a text with --prompt."
        )
    conversation = Conversation(
        opened.model,
        opened.tokenizer,
        sampler,
        max_tokens=_given(options.max_tokens, _CHAT_TOKENS),
        seed=options.seed,
        warn=to_stderr,
    )
    conversation.reset(options.system)
    to_stderr(f"[{opened.source}]")
    if options.prompt is None:
        converse(conversation, _write)
    else:
        answer_once(conversation, options.prompt, _write)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _generate(options: argparse.Namespace) -> None:
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat.")
    # What is wrong with the options shows before a model is loaded.
    _sampler(options, {})
    opened = open_model(options.model, adapter=options.adapter, log=to_stderr)
    (_chat if options.chat else _continue)(opened, _sampler(options, opened.generation or {}), options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _generate(options))


if __name__ == "__main__":
    sys.exit(main())
