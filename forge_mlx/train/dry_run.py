"""``--dry-run``: what a config would train, and whether its examples can be trained on, without a training step."""

from dataclasses import asdict
from pathlib import Path
import textwrap
from typing import NamedTuple

from forge_mlx._text import count, size
from forge_mlx.data.config import DataConfig
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.prepare_examples import AnyRows
from forge_mlx.data.sources import list_files
from forge_mlx.data.stream import Packing
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.pretrained import read_shape, read_tokenizer
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.moe import MoE
from forge_mlx.models.qat import prepare_qat
from forge_mlx.models.registry import build_model
from forge_mlx.nn.parameters import count_elements, named_arrays
from forge_mlx.train.attention_path import describe_attention
from forge_mlx.train.banner import (
    describe_adapters,
    describe_experts,
    describe_packing,
    describe_qat,
)
from forge_mlx.train.config import TrainConfig, require_fitting_shape
from forge_mlx.train.device import Placement, choose_placement, resolved
from forge_mlx.train.duration import describe_steps, epochs_text
from forge_mlx.train.examples import BegunExamples, begin_examples
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.memory import decoded_bytes, estimate_memory
from forge_mlx.train.metrics import read_metrics
from forge_mlx.train.outcome import finished_outcome
from forge_mlx.train.pretrained_config import PretrainedConfig
from forge_mlx.train.reached import reached_step, require_not_past_end, way_on
from forge_mlx.train.step import frozen_parameters, trains_head
from forge_mlx.train.work import Log, load_base, make_trainable
import mlx.core as mx
from rich.console import Console
from rich.table import Table

_INDENT = 15
_WIDTH = 80


class _Layout(NamedTuple):
    """What of a run's rows decides the work.

    Attributes:
        length: positions of a row.
        kind: the packing of a corpus whose rows need the same of attention.
    """

    length: int
    kind: Packing


def describe_run(config: TrainConfig, console: Console | None = None) -> None:
    """Print parameter shapes and counts, tokens and FLOPs a step, and the estimated peak memory.

    Examples are prepared as the run does it, and stay in the cache; a corpus is not read.

    Raises:
        ValueError: the run would not start on its examples or in its folder, ``model.vocab_size`` is not that of the
            given tokenizer, a data path does not exist, there is no such device, or the checkpoint cannot be read.
    """
    console = console or Console(highlight=False)

    def log(line: str) -> None:
        console.print(line, markup=False)

    placement = choose_placement(config.run)
    _require_usable_folder(resolved(config, placement))
    # Before the weights, which take longer to read.
    examples = _examples(config, log)
    rows = examples.prepared.train if examples else None
    # How many steps the epochs of a corpus take, only reading it says.
    steps = config.total_steps(rows.num_rows) if rows else config.train.steps
    model = _model(config, placement, log)
    layout = _layout(config, examples)
    console.print(_shape_table(model))
    lines = {
        "device": placement.device.type.name,
        "dtype": f"{placement.dtype_name} ({placement.reason})",
        "attention": _wrapped(_attention_text(model.config, placement, layout)),
        "packing": _wrapped(describe_packing(config, rows.packing if rows else None)),
        "parameters": f"{model.num_parameters():,} ({model.num_parameters(embeddings=False):,} without embeddings)",
        **_special_lines(config, model),
        **(_data_lines(config, examples, steps) if examples and steps else {}),
        **_work_lines(config, model, steps, layout.length, rows),
        **_memory_lines(config, model, placement, layout),
        "run folder": f"{config.run.dir}{_folder_remark(config)}",
    }
    for name, text in lines.items():
        console.print(f"{name + ':' if name else '':<{_INDENT}}{text}", soft_wrap=True, markup=False)


def _require_usable_folder(config: TrainConfig) -> None:
    folder = RunFolder(config.run.dir)
    folder.check_usable(config)
    if config.run.resume == "never":
        return
    if folder.has_results:
        folder.changed_keys(config)
    if not _has_finished(folder, config):
        folder.require_way_on()
        if folder.has_results:
            require_not_past_end(folder, config)


def _has_finished(folder: RunFolder, config: TrainConfig) -> bool:
    return folder.started and finished_outcome(folder, config, lambda _: None) is not None


def _folder_remark(config: TrainConfig) -> str:
    """What is in the run's folder, and what becomes of it."""
    folder = RunFolder(config.run.dir)
    if not folder.path.exists():
        return ""
    if not folder.has_results:
        return " (exists)"
    step = reached_step(folder, read_metrics(folder.metrics_file, lambda _: None))
    if config.run.resume == "never":
        return f" (at step {step:,}; is kept under another name)"
    if _has_finished(folder, config):
        return f" (finished{way_on(folder, config)})"
    return f" (goes on from step {step:,})"


def _examples(config: TrainConfig, log: Log) -> BegunExamples | None:
    """The examples of a config whose data are some, with all that the run would refuse of them."""
    if isinstance(config.data, DataConfig):
        list_files(config.data, log)
        return None
    base = config.model
    assert isinstance(base, PretrainedConfig)
    # What of the checkpoint is not used, loading it says.
    shape = read_shape(base.path, revision=base.revision, log=lambda _: None)
    require_fitting_shape(config, shape)
    tokenizer = read_tokenizer(base.path, shape, revision=base.revision, log=lambda _: None)
    return begin_examples(config, tokenizer, shape, log)


def _layout(config: TrainConfig, examples: BegunExamples | None) -> _Layout:
    if examples is None:
        return _Layout(config.train.seq_len, "documents" if config.isolates_texts else "concat")
    train, valid = examples.prepared.train, examples.prepared.valid
    return _Layout(train.seq_len, "documents" if "examples" in (train.packing, valid.packing) else "concat")


def _model(config: TrainConfig, placement: Placement, log: Log) -> GPT:
    """The model as it would be trained; of a new one nothing is allocated."""
    if isinstance(config.model, PretrainedConfig):
        model = load_base(config, placement, log).model
        make_trainable(config, model)
        return model
    assert isinstance(config.data, DataConfig)
    tokenizer = config.data.tokenizer
    config = config.with_vocab_size(
        Tokenizer.load(Path(tokenizer.path)).vocab_size if tokenizer.path else tokenizer.vocab_size
    )
    assert isinstance(config.model, DecoderConfig)
    model = build_model(config.model, seed=config.run.seed)
    if config.qat is not None:
        prepare_qat(model, config.qat)
    return model


def _data_lines(config: TrainConfig, examples: BegunExamples, steps: int) -> dict[str, str]:
    """What the examples hold, and how often a run goes through them."""
    num_rows = examples.prepared.train.num_rows
    epochs = config.describe_epochs(num_rows) or describe_steps(
        steps, num_rows, config.train.rows_per_step, config.row_noun
    )
    said = "\n".join(line.removeprefix("data: ") for line in examples.lines)
    return {"data": _wrapped(said), "epochs": _wrapped(epochs)}


def _work_lines(
    config: TrainConfig, model: GPT, steps: int | None, length: int, rows: AnyRows | None
) -> dict[str, str]:
    """Tokens and floating-point operations, of a step and of the run."""
    learnt = rows.num_targets / rows.num_rows * config.train.rows_per_step if rows else 0.0
    tokens = config.rows_per_pass * length * config.train.accumulate
    # How much of the rows is padding, and how long the documents are, only the data say.
    most = "at most " if config.isolates_texts or isinstance(config.data, ExampleConfig) else ""
    flops, epochs = model.flops_per_token(length) * tokens, config.train.epochs
    said = {
        "tokens a step": f"{most}{tokens:,} = {config.rows_per_pass} rows x {length} tokens x "
        f"{config.train.accumulate} pass{'' if config.train.accumulate == 1 else 'es'}{_learnt_text(learnt)}",
        "tokens in all": "" if epochs is None else f"those of {epochs_text(epochs)}, which only the data say",
        "FLOPs": f"{most}{flops:.3g} a step",
    }
    if steps is not None:
        said["tokens in all"] = f"{most}{tokens * steps:,} in {count(steps, 'step')}{_learnt_text(learnt * steps)}"
        said["FLOPs"] += f", {flops * steps:.3g} in all"
    return {name: _wrapped(text) for name, text in said.items()}


def _learnt_text(tokens: float) -> str:
    return f", about {tokens:,.0f} learnt" if tokens else ""


def _memory_lines(config: TrainConfig, model: GPT, placement: Placement, layout: _Layout) -> dict[str, str]:
    """The estimated peak of a step, and what it consists of."""
    loop, has_adapter = config.train, config.adapter is not None
    frozen = sum(array.nbytes for _, array in named_arrays(frozen_parameters(model)))
    memory = estimate_memory(
        model.config,
        config.optim,
        count_elements(model.trainable_parameters()) if has_adapter else model.num_parameters(),
        config.rows_per_pass,
        layout.length,
        placement.dtype_name,
        loop.accumulate,
        placement.device.type,
        layout.kind,
        frozen if has_adapter else 0,
        loop.grad_checkpoint,
        trains_head(model),
        decoded_bytes(model, placement.dtype_name, placement.device.type),
    )
    parts = [f"{name} {size(num_bytes)}" for name, num_bytes in asdict(memory).items() if num_bytes]
    return {
        "memory": f"about {size(memory.total)} at the peak of a step; not all at once:",
        "": f",\n{' ' * _INDENT}".join(", ".join(parts[at : at + 3]) for at in range(0, len(parts), 3)),
    }


def _special_lines(config: TrainConfig, model: GPT) -> dict[str, str]:
    """What only some models have: experts, quantisation."""
    experts = describe_experts(model.config)
    if isinstance(model, MoE):
        experts += f"; a token meets {model.num_active_parameters():,} parameters"
    found = {
        "adapters": describe_adapters(config, model),
        "experts": experts,
        "quantisation": describe_qat(config, model),
    }
    return {name: _wrapped(text) for name, text in found.items() if text}


def _attention_text(shape: DecoderConfig, placement: Placement, layout: _Layout) -> str:
    # As in the run, whose device is the default one.
    with mx.stream(placement.device):
        return describe_attention(shape, layout.kind, layout.length, placement.dtype, placement.device.type)


def _wrapped(text: str) -> str:
    lines = [each for line in text.splitlines() for each in textwrap.wrap(line, _WIDTH - _INDENT)]
    return ("\n" + " " * _INDENT).join(lines)


def _shape_table(model: GPT) -> Table:
    """One row a parameter; the layers are alike, so the first stands for all."""
    table = Table(title=f"parameters ({count(len(model.layers), 'layer')}; layers.0 stands for each)")
    for column in ("name", "shape", "elements"):
        table.add_column(column, justify="left" if column == "name" else "right")
    for name, array in named_arrays(model.parameters()):
        if name.startswith("layers.") and not name.startswith("layers.0."):
            continue
        table.add_row(name, " x ".join(str(n) for n in array.shape), f"{array.size:,}")
    return table
