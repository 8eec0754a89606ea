"""``--dry-run``: what a config would train, without reading the data or a training step."""

from dataclasses import asdict
from pathlib import Path
import textwrap

from forge_mlx._text import count, size
from forge_mlx.data.config import DataConfig
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_files import suffixes_of
from forge_mlx.data.sources import list_files
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.moe import MoE
from forge_mlx.models.qat import prepare_qat
from forge_mlx.models.registry import build_model
from forge_mlx.nn.parameters import count_elements, named_arrays
from forge_mlx.train.banner import (
    attention_text,
    describe_adapters,
    describe_experts,
    describe_packing,
    describe_qat,
    rows_kind,
)
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.device import Placement, choose_placement
from forge_mlx.train.memory import estimate_memory
from forge_mlx.train.pretrained_config import PretrainedConfig
from forge_mlx.train.step import frozen_parameters, trains_head
from forge_mlx.train.work import load_base, make_trainable
import mlx.core as mx
from rich.console import Console
from rich.table import Table

_INDENT = 15
_WIDTH = 80


def describe_run(config: TrainConfig, console: Console | None = None) -> None:
    """Print parameter shapes and counts, tokens and FLOPs a step, and the estimated peak memory.

    Raises:
        ValueError: ``model.vocab_size`` is not that of the given tokenizer, a data path does not exist, there is no
            such device, or the checkpoint cannot be read.
    """
    console = console or Console(highlight=False)
    placement = choose_placement(config.run)
    model = _model(config, placement, console)
    shape = model.config
    console.print(_shape_table(model))
    total, hidden = model.num_parameters(), model.num_parameters(embeddings=False)
    loop, steps, step_tokens = config.train, config.train.steps, config.positions_per_step
    # How much of the rows is padding, and how long the documents are, only the data say.
    most = "at most " if config.isolates_texts or isinstance(config.data, ExampleConfig) else ""
    flops = model.flops_per_token(loop.seq_len) * step_tokens
    trained = count_elements(model.trainable_parameters())
    frozen = sum(array.nbytes for _, array in named_arrays(frozen_parameters(model)))
    memory = estimate_memory(
        shape,
        config.optim,
        trained if config.adapter is not None else total,
        config.rows_per_pass,
        loop.seq_len,
        placement.dtype_name,
        loop.accumulate,
        placement.device.type,
        rows_kind(config),
        frozen if config.adapter is not None else 0,
        loop.grad_checkpoint,
        trains_head(model),
    )
    parts = [f"{name} {size(num_bytes)}" for name, num_bytes in asdict(memory).items() if num_bytes]
    passes = f"{loop.accumulate} pass{'' if loop.accumulate == 1 else 'es'}"
    lines = {
        "device": placement.device.type.name,
        "dtype": f"{placement.dtype_name} ({placement.reason})",
        "attention": _wrapped(_attention_text(config, shape, placement)),
        "packing": _wrapped(describe_packing(config)),
        "parameters": f"{total:,} ({hidden:,} without embeddings)",
        **_special_lines(config, model),
        "tokens a step": f"{most}{step_tokens:,} = {config.rows_per_pass} rows x {loop.seq_len} tokens x {passes}",
        "tokens in all": f"{most}{step_tokens * steps:,} in {steps:,} steps",
        "FLOPs": f"{most}{flops:.3g} a step, {flops * steps:.3g} in all",
        "memory": f"about {size(memory.total)} at the peak of a step; not all at once:",
        "": ", ".join(parts[:3]) + ",\n" + " " * _INDENT + ", ".join(parts[3:]),
        "run folder": f"{config.run.dir}{' (exists)' if config.run.dir.exists() else ''}",
    }
    for name, text in lines.items():
        console.print(f"{name + ':' if name else '':<{_INDENT}}{text}", soft_wrap=True, markup=False)


def _model(config: TrainConfig, placement: Placement, console: Console) -> GPT:
    """The model as it would be trained; nothing is allocated for the shapes alone."""
    if isinstance(config.data, ExampleConfig):
        list_files(config.data, console.print, suffixes_of(config.data.format))
    else:
        list_files(config.data, console.print)
    if isinstance(config.model, PretrainedConfig):
        model = load_base(config, placement, console.print).model
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


def _attention_text(config: TrainConfig, shape: DecoderConfig, placement: Placement) -> str:
    # As in the run, whose device is the default one.
    with mx.stream(placement.device):
        return attention_text(config, shape, placement, rows_kind(config))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH - _INDENT).replace("\n", "\n" + " " * _INDENT)


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
