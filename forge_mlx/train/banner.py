"""What a run says as it starts: which path runs and why, and the facts for its log."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
import math
import os
from typing import Any

from forge_mlx._text import count
from forge_mlx.blas import blas_choice
from forge_mlx.data.documents import DocumentRows
from forge_mlx.data.stream import Packing, Rows
from forge_mlx.info import versions
from forge_mlx.kernels.linear_cross_entropy.chunks import chunk_rows
from forge_mlx.metal.engine import resolve
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.models.qat import prepared_layers
from forge_mlx.nn.coded import named_shapes
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.parameters import count_elements
from forge_mlx.optim import OptimConfig
from forge_mlx.train.attention_path import describe_attention
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.device import Placement
from forge_mlx.train.preference_config import PreferenceConfig
from forge_mlx.train.step import trains_head
from forge_mlx.train.trainer import Trainer
import mlx.core as mx
import mlx.nn as nn

_LOW_FILL = 0.9
_PACKING: dict[str | bool, str] = {
    "concat": "concat (documents follow each other in a row, each with an end token, and attention crosses their "
    "borders)",
    "documents": "documents (whole documents in a row, each with segment ids and positions of its own; none sees "
    "another)",
    True: "several examples in a row, each with segment ids and positions of its own; none sees another",
    False: "one example in a row, the rest padding",
}
_PAIRS = "two rows for each pair, one with the chosen and one with the rejected answer, the rest padding"


def log_device(placement: Placement, log: Callable[[str], None]) -> None:
    """Say on what a run computes, and why, before the work begins."""
    on_cpu = placement.device == mx.Device(mx.cpu)
    log(f"device: {placement.device.type.name}, {placement.dtype_name} ({placement.reason})")
    if on_cpu:
        choice = blas_choice()
        log(f"BLAS: {choice.origin} ({choice.reason})")
        if choice.origin == "mlx":
            log(
                "WARNING: MLX's own BLAS multiplies 20 to 50 times slower than a good one. "
                'pip install "forge-mlx[cpu]" brings one.'
            )
        if hint := _busy_hint():
            log(hint)


def log_path(trainer: Trainer, log: Callable[[str], None]) -> None:
    """Say how a run computes attention, and what stands in its rows."""
    model, placement, length = trainer.model, trainer.placement, trainer.rows.seq_len
    kind: Packing = "documents" if trainer.separates_texts or isinstance(model, MoE) else "concat"
    text = describe_attention(model.config, kind, length, placement.dtype, placement.device.type)
    log(f"attention: {text}")
    log(f"packing: {describe_packing(trainer.config, trainer.rows.packing)}")


def describe_packing(config: TrainConfig, packing: str | None = None) -> str:
    """How texts become rows, in words.

    Args:
        config: of the run.
        packing: of its rows, where there are some; None: as the config has it.
    """
    if packing == "padded":
        return _PACKING[False]
    return _PAIRS if config.trains_pairs else _PACKING[config.data.packing]


def describe_experts(model: DecoderConfig) -> str:
    """How the experts of an MoE are chosen and kept busy, in words; nothing without experts."""
    if not isinstance(model, MoEConfig):
        return ""
    of_groups = f" from {model.groups_per_token} of {model.expert_groups} groups" if model.expert_groups > 1 else ""
    shared = f", {count(model.shared_experts, 'shared expert')}" if model.shared_experts else ""
    dense = f", the first {count(model.dense_layers, 'layer')} dense" if model.dense_layers else ""
    means = {
        f"a selection bias that moves by {model.bias_rate:g} a step": model.bias_rate > 0,
        f"an auxiliary loss of weight {model.aux_loss_weight:g}": model.aux_loss_weight > 0,
    }
    balance = " and ".join(name for name, on in means.items() if on)
    return (
        f"{model.experts_per_token} of {model.num_experts}{of_groups} for each token by {model.router_scores} scores "
        f"in float32{shared}{dense}; {f'balanced by {balance}' if balance else 'nothing balances their load'}"
    )


def describe_qat(config: TrainConfig, model: nn.Module) -> str:
    """What is quantised and when, in words; nothing without QAT.

    Args:
        config: of the run.
        model: prepared for it.
    """
    qat = config.qat
    if qat is None:
        return ""
    kinds = Counter(_format_text(layer) for _, layer in prepared_layers(model))
    formats = ", ".join(f"{count(number, 'layer')} {name}" for name, number in kinds.most_common())
    begin = "from the first step" if qat.start_step == 0 else f"from step {qat.start_step + 1:,}"
    end = f" to step {qat.end_step:,}, then float again" if qat.end_step is not None else ""
    return f"{formats}; {begin}{end}"


def _format_text(layer: FakeQuantized) -> str:
    options = layer.options
    parts: list[str] = [options.mode]
    if options.mode == "affine":
        parts.append(f"of {options.bits} bits")
    if options.group_size is not None:
        parts.append(f"in groups of {options.group_size}")
    if options.granularity is not None:
        parts.append(f"by {'row' if options.granularity == 'row' else 'matrix'}")
    return " ".join(parts) + (" with int8 inputs" if layer.activations else "")


def describe_adapters(config: TrainConfig, model: nn.Module) -> str:
    """What is trained of a model with adapters, in words; nothing without them.

    Args:
        config: of the run.
        model: with its adapters.
    """
    adapter = config.adapter
    if adapter is None:
        return ""
    trained = count_elements(model.trainable_parameters())
    total = sum(math.prod(shape) for _, shape in named_shapes(model))
    return (
        f"{adapter.method} of rank {adapter.rank}, scale {adapter.scale:g}: {trained:,} parameters are trained, "
        f"{trained / (total - trained):.2%} of the base's, which is frozen"
    )


def _busy_hint() -> str | None:
    """A BLAS that splits its work evenly waits for the core that other programs keep busy: by up to ten times."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if "OPENBLAS_NUM_THREADS" in os.environ or load < cores / 2:
        return None
    return (
        f"load: other programs keep about {load:.1f} of {cores} cores busy; OPENBLAS_NUM_THREADS=1 is then often many "
        "times faster"
    )


def log_model(trainer: Trainer, log: Callable[[str], None]) -> None:
    """Say what is trained, and for how long."""
    config, model, shape = trainer.config, trainer.model, trainer.model.config
    loop, tokens = config.train, trainer.tokens_per_step
    log(
        f"model: {model.num_parameters():,} parameters ({model.num_parameters(embeddings=False):,} without "
        f"embeddings), {shape.num_layers} layers of {shape.hidden_size}"
    )
    if text := describe_adapters(config, model):
        log(f"adapters: {text}")
    if isinstance(model, MoE):
        log(f"experts: {describe_experts(shape)}; a token meets {model.num_active_parameters():,} parameters")
    if text := describe_qat(config, model):
        log(f"quantisation: {text}")
    rows, length = loop.batch_size * trainer.rows.group_size, trainer.rows.seq_len
    row_bytes, device = 4 * model.head_weight.shape[0], trainer.placement.device.type
    chunk = chunk_rows(rows * length, row_bytes, device, adds_weight=trains_head(model))
    log(
        f"loss: {_preference_text(config)}linear_cross_entropy, engine {resolve('linear_cross_entropy')}; the logits "
        f"of {chunk:,} of a pass's {rows * length:,} tokens exist at once"
    )
    log(f"optimizer: {_optimizer_text(config.optim)}")
    passes = f" x {loop.accumulate} passes" if loop.accumulate > 1 else ""
    about, filled = "", ""
    if trainer.fill < 1:
        about, filled = "about ", f", {trainer.fill:.2%} of them targets"
    if isinstance(trainer.rows, DocumentRows):
        for line in _rows_lines(trainer.rows, trainer.valid_rows, trainer.fill):
            log(line)
    if text := config.describe_epochs(trainer.rows.num_rows):
        log(f"epochs: {text}")
    steps = trainer.total_steps
    times = steps * loop.rows_per_step / trainer.rows.num_rows
    log(
        f"training: {count(steps, 'step')} of {about}{tokens:,} tokens ({rows} rows x {length}{passes}"
        f"{filled}), {times:.3g} times over the training text"
    )
    log(f"folder: {trainer.folder.path}; Ctrl-C stops after a step and saves, the same command goes on")


def _preference_text(config: TrainConfig) -> str:
    """What is minimised over pairs, in words; nothing for texts."""
    if not config.trains_pairs:
        return ""
    how = config.preference or PreferenceConfig()
    if how.loss == "orpo":
        return f"orpo, lambda {how.orpo_lambda:g}, by "
    variant = "" if how.variant == "sigmoid" else f" ({how.variant})"
    return f"dpo{variant}, beta {how.beta:g}, against the model as it is before the first step; by "


def _rows_lines(rows: DocumentRows, valid: Rows, fill: float) -> list[str]:
    documents = count(rows.tokens.num_documents, "document")
    text = f"rows: the training text's {documents} in {count(rows.num_rows, 'row')}"
    if rows.cut_documents:
        longer = count(rows.cut_documents, "document")
        text += f"; {longer} longer than a row, cut into {rows.cut_pieces:,} pieces, each a text of its own"
    else:
        text += ", each document whole"
    if isinstance(valid, DocumentRows) and valid.cut_documents:
        documents = count(valid.tokens.num_documents, "document")
        text += f"; of the validation text's {documents} {valid.cut_documents:,} cut"
    if fill >= _LOW_FILL:
        return [text]
    advice = "raise train.seq_len (and model.max_seq_len), so that more documents fit together"
    return [text, f"rows are only {100 * fill:.0f} % full: the work on the rest is lost; {advice}"]


def setup_facts(trainer: Trainer) -> dict[str, Any]:
    """The fields of the log's setup record."""
    model = trainer.model
    return {
        "corpus": asdict(trainer.work.facts),
        "parameters": model.num_parameters(),
        "non_embedding_parameters": model.num_parameters(embeddings=False),
        **_trained_facts(trainer),
        "total_steps": trainer.total_steps,
        # Null too: the report takes the last word of several starts.
        "epochs": trainer.config.train.epochs,
        "tokens_per_step": trainer.tokens_per_step,
        "packing": _packing_facts(trainer),
        **_special_facts(trainer),
        "device": trainer.placement.device.type.name,
        "dtype": trainer.placement.dtype_name,
        **versions(),
    }


def _trained_facts(trainer: Trainer) -> dict[str, int]:
    """How many parameters adapters train; nothing where all are."""
    if trainer.config.adapter is None:
        return {}
    return {"trained_parameters": count_elements(trainer.model.trainable_parameters())}


def _special_facts(trainer: Trainer) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if isinstance(trainer.model, MoE):
        facts["active_parameters"] = trainer.model.num_active_parameters()
    if (qat := trainer.config.qat) is not None:
        how = qat.merged(None)
        facts["qat"] = {
            "mode": how.options.mode,
            "bits": how.options.bits,
            "group_size": how.options.group_size,
            "granularity": how.options.granularity,
            "activations": how.activations,
            "start_step": qat.start_step,
            "end_step": qat.end_step,
            "modules": len(prepared_layers(trainer.model)),
        }
    return facts


def _packing_facts(trainer: Trainer) -> dict[str, Any]:
    rows = trainer.rows
    facts: dict[str, Any] = {"kind": rows.packing, "rows": rows.num_rows, "fill": trainer.fill}
    if isinstance(rows, DocumentRows):
        facts |= {"cut_documents": rows.cut_documents, "cut_pieces": rows.cut_pieces}
    return facts


def _optimizer_text(optim: OptimConfig) -> str:
    schedule = f"{optim.schedule} after {optim.warmup_steps} warmup steps" if optim.warmup_steps else optim.schedule
    if optim.name == "muon":
        experts = "" if optim.muon_expert_lr is None else f", {optim.muon_expert_lr:g} for experts"
        muon = f"muon (lr {optim.muon_lr:g}{experts}) on the layers' matrices"
        return f"{muon}, adamw (lr {optim.lr:g}) on the rest; {schedule}"
    return f"adamw, lr {optim.lr:g}; {schedule}"
