"""The command ``python -m forge_mlx.generate RUN --prompt ...``: stream text from a trained model."""

import argparse
from collections.abc import Callable, Iterator, Sequence
import json
from pathlib import Path
import sys

from forge_mlx._console import print_what_fits
from forge_mlx.data.tokenizer import StreamDecoder, Tokenizer
from forge_mlx.hub.native import ModelFolderError, begins_with_end, load_model, load_weights
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import fake_quant_enabled
from forge_mlx.models.registry import build_model
from forge_mlx.sampling import Sampler, generate_tokens
from forge_mlx.train.checkpoint import list_checkpoints
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.deploy import deployed_model
from forge_mlx.train.device import DTYPES
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.load import load_config
import mlx.core as mx


def open_model(path: Path) -> tuple[GPT, Tokenizer, Path, bool]:
    """Load a model folder, one checkpoint, or of a run folder the final model, else its newest checkpoint.

    A checkpoint of quantisation-aware training gives what the run would deploy at its step: the codes of its weights,
    or before quantisation begins and after it ends the floats.

    Returns:
        the model in evaluation mode, its tokenizer, the folder the weights came from, and whether the end token stood
        before every text of training.

    Raises:
        ModelFolderError: there is no model.
    """
    if not path.is_dir():
        raise ModelFolderError(f"{path}: there is no such folder.")
    if (path / "config.json").is_file():
        return *load_model(path), path, begins_with_end(path)
    if (path / "state.json").is_file():
        return _open_checkpoint(RunFolder(path.resolve().parent.parent), path)
    run = RunFolder(path)
    if run.final.is_dir():
        return *load_model(run.final), run.final, begins_with_end(run.final)
    checkpoints = list_checkpoints(run.checkpoints)
    if not run.started or not checkpoints:
        raise ModelFolderError(f"{path}: is neither a model folder nor a run folder with a checkpoint.")
    return _open_checkpoint(run, checkpoints[-1])


def _open_checkpoint(run: RunFolder, checkpoint: Path) -> tuple[GPT, Tokenizer, Path, bool]:
    """A checkpoint holds the weights; the run's folder has the rest."""
    config = load_config(run.config_file)
    # The weights are replaced at once, whatever it is built from.
    model = build_model(config.model)
    load_weights(model, checkpoint / "model.safetensors")
    if config.qat is not None and fake_quant_enabled(config.qat, _step_of(checkpoint)):
        model = deployed_model(config, model, _training_dtype(run, config))
    model.eval()
    return model, Tokenizer.load(run.tokenizer_file), checkpoint, config.data.packing == "documents"


def _step_of(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen, whatever its folder is called by now."""
    file = checkpoint / "state.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["state"]["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{file}: is damaged: {type(error).__name__}: {error}.") from None


def _training_dtype(run: RunFolder, config: TrainConfig) -> mx.Dtype:
    """The dtype of the forward pass in training, on which the codes depend."""
    if config.run.dtype == "auto":
        raise ModelFolderError(
            f"{run.config_file}: run.dtype must be what the run was trained in but got auto. A run writes it there: "
            f"put back one of {', '.join(DTYPES)}."
        )
    return DTYPES[config.run.dtype]


def stream_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    sampler: Sampler,
    max_tokens: int,
    seed: int,
    warn: Callable[[str], None],
    begins_with_end: bool = False,
) -> Iterator[str]:
    """The continuation of a prompt piece by piece, only whole characters.

    Learned positions end at ``max_seq_len``. Others do not, but the model has never seen longer texts.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompt: the text to continue; it is checked before the first piece is asked for.
        sampler: how a token is chosen.
        max_tokens: the most tokens to write.
        seed: of the choices.
        warn: told in one line when the text may become longer than those of training.
        begins_with_end: whether the end token stood before every text of training: then it stands before a prompt too.

    Raises:
        ValueError: ``max_tokens`` is below 1, or prompt and answer together are longer than the learned positions.
    """
    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1 but got {max_tokens}.")
    # Without a prompt, the end token: what follows it is the start of a document. A prompt may come from anywhere in
    # a text, as the rows of training do, unless those were whole documents.
    tokens = tokenizer.encode(prompt)
    if begins_with_end or not tokens:
        tokens = [tokenizer.end_id, *tokens]
    limit = model.config.max_seq_len
    if len(tokens) + max_tokens > limit:
        size = f"{len(tokens)} tokens of prompt and {max_tokens} of text"
        if model.config.position == "learned":
            fits = limit - len(tokens)
            way_out = f"Use --max-tokens {fits} or less." if fits > 0 else "Use a shorter prompt."
            raise ValueError(f"the model has {limit} learned positions but got {size}. {way_out}")
        warn(f"warning: {size} may exceed the {limit} tokens that the model was trained on; quality falls there")
    return _pieces(model, tokenizer, tokens, sampler, max_tokens, seed)


def _pieces(
    model: GPT, tokenizer: Tokenizer, tokens: list[int], sampler: Sampler, max_tokens: int, seed: int
) -> Iterator[str]:
    decoder = StreamDecoder(tokenizer)
    for token in generate_tokens(model, tokens, sampler, max_tokens, stop=tokenizer.end_id, seed=seed):
        yield decoder.push(token)
    yield decoder.finish()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge_mlx.generate", description="Continue a prompt with a trained model."
    )
    parser.add_argument("model", type=Path, help="a run's folder, a model folder such as RUN/final, or a checkpoint")
    parser.add_argument(
        "--prompt",
        default="",
        help="text to continue (default: the start of a document; a model of few documents needs a prompt)",
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens to write (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default 0: all)")
    parser.add_argument("--top-p", type=float, default=0.95, help="keep the likeliest to this sum (default 0.95)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="drop what is rarer than this x the likeliest (default 0: none)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    return parser


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    print_what_fits()
    try:
        sampler = Sampler(options.temperature, options.top_k, options.top_p, options.min_p)
        model, tokenizer, source, end_first = open_model(options.model)
        pieces = stream_text(
            model,
            tokenizer,
            options.prompt,
            sampler,
            options.max_tokens,
            options.seed,
            warn=_to_stderr,
            begins_with_end=end_first,
        )
        _to_stderr(f"[{source}]")
        print(options.prompt, end="", flush=True)
        written = False
        for piece in pieces:
            print(piece, end="", flush=True)
            written = written or bool(piece)
        print()
        if not written:
            _to_stderr("the model ended the text at once; another --prompt or --temperature may help")
        return 0
    except BrokenPipeError:
        # The reader has had enough, as `head` does.
        return 0
    except (ValueError, OSError) as error:
        _to_stderr(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print()
        return 130


if __name__ == "__main__":
    sys.exit(main())
