"""The command ``python -m forge_mlx.train CONFIG [section.key=value ...]``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import shlex
import sys

from forge_mlx._console import print_what_fits
from forge_mlx._text import visible_controls
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.dry_run import describe_run
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import Interrupted, Outcome, TrainingStopped, train
from forge_mlx.train.pretrained_config import PretrainedConfig
from rich.console import Console


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge_mlx.train",
        description="Train a language model from a YAML config. A run that was stopped goes on when the same "
        "command is given again.",
        epilog="Example: python -m forge_mlx.train models/configs/quickstart.yaml optim.lr=1e-3 run.dir=runs/mine",
    )
    parser.add_argument("config", type=Path, nargs="?", help="YAML file; models/configs holds examples")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print shapes, parameters, tokens a step and memory, and with data.format how examples fill rows and what "
        "keeps a run from starting on them; train nothing",
    )
    return parser


def _print_outcome(outcome: Outcome, config: TrainConfig) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.rule("sample")
    console.print(visible_controls(outcome.prompt + outcome.sample), markup=False)
    console.rule()
    if outcome.bits_per_byte is None:
        preferred = f"the chosen answer preferred in {100 * (outcome.accuracy or 0):.1f} %"
        measured = f"loss {outcome.loss:.4f} a pair, {preferred}"
    else:
        measured = f"{outcome.loss:.4f} nats a token, {outcome.bits_per_byte:.4f} bits per byte"
    following = _next_steps(outcome, config)
    lines = [
        f"validation: {measured}",
        f"report:     {outcome.folder / 'report.html'}",
        f"model:      {outcome.folder / 'final'}",
        *(f"{'next:' if line is following[0] else '':<12}{line}" for line in following),
    ]
    console.print("\n".join(lines), markup=False)


def _next_steps(outcome: Outcome, config: TrainConfig) -> list[str]:
    """What can be done with the result, a line each."""
    # This very interpreter: a virtual environment need not be active, and then `python` is another one or none.
    python, run = shlex.quote(sys.executable), shlex.quote(str(outcome.folder))
    # The last line of what the sample continued, where it broke off: a good place to go on from.
    prompt = visible_controls(outcome.prompt).strip().rpartition("\n")[2].strip()
    example = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    if not isinstance(config.model, PretrainedConfig):
        return [
            f"{python} -m forge_mlx.generate {run}{example}",
            "or copy the config, set data.source to your own text and train on that",
        ]
    final = shlex.quote(str(outcome.folder / "final"))
    is_adapter = (outcome.folder / "final" / "adapter_config.json").is_file()
    model = f"{shlex.quote(config.model.path)} --adapter-path {final}" if is_adapter else final
    lines = [f"{python} -m forge_mlx.generate {run}{' --chat' if outcome.in_chat else example}"]
    # mlx-lm reads no GGUF files, and has the base of codes that this run made in no folder.
    if not (is_adapter and (config.model.path.endswith(".gguf") or config.model.quantize)):
        lines.append(f"mlx_lm.generate --model {model} --prompt ...")
    if is_adapter:
        lines.append(f"{python} -m forge_mlx.export {run} OUT    # merged, for mlx-lm and transformers")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 done, 1 failed, 2 bad input, 128 + signal when interrupted."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.config is None:
        parser.error("name a config, such as models/configs/quickstart.yaml")
    print_what_fits()
    try:
        config = load_config(options.config, options.overrides)
        if options.dry_run:
            describe_run(config)
            return 0
        _print_outcome(train(config), config)
        return 0
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal
    except TrainingStopped as stopped:
        print(f"error: {stopped}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "Compile::eval_cpu" in str(error) or "filesystem error" in str(error):
            print(f"error: MLX could not compile for the CPU: {str(error).splitlines()[0]}", file=sys.stderr)
            print("TMPDIR=/path names another folder for it; MLX_DISABLE_COMPILE=1 does without.", file=sys.stderr)
            return 1
        # MLX has no exception of its own for this, on any of its devices.
        if "memory" not in str(error).lower() and "alloc" not in str(error).lower():
            raise
        print(f"error: out of memory: {error}", file=sys.stderr)
        print("Lower train.batch_size (train.accumulate keeps the tokens a step) or train.seq_len.", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
