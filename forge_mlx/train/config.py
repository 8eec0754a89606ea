"""The training config: every section and field, with its help text. ``load.py`` reads it from YAML."""

from pathlib import Path
from typing import Any, Literal

from forge_mlx._config import Section
from forge_mlx.data.config import DataConfig
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.qat import QATConfig
from forge_mlx.models.registry import ARCHITECTURES, ModelConfig
from forge_mlx.optim import OptimConfig
from pydantic import Field, create_model, field_validator, model_validator


class RunConfig(Section):
    """Where a run lives and how it starts."""

    dir: Path = Field(description="the run's folder: config, metrics, checkpoints, final model, report")
    seed: int = Field(0, ge=0, lt=2**31, description="seeds the weights, dropout and the order of the data")
    resume: Literal["auto", "never", "must"] = Field(
        "auto",
        description="auto: continue where the folder's last checkpoint is, else start; never: start anew and "
        "keep an existing folder under another name; must: continue, or fail without a checkpoint",
    )
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="auto: the GPU where MLX has one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of the forward and backward pass; weights and moments stay float32. auto: bfloat16 on a "
        "GPU, float32 on a CPU, where 16-bit products bypass the BLAS",
    )

    @field_validator("dir", mode="before")
    @classmethod
    def _check_dir(cls, value: object) -> object:
        if value == "":
            raise ValueError("must name a folder but is empty")
        return value

    @field_validator("dir")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return value.expanduser()


class LoopConfig(Section):
    """The training loop: sizes and how often what happens."""

    steps: int = Field(gt=0, description="optimizer updates")
    batch_size: int = Field(gt=0, description="rows in one forward and backward pass")
    seq_len: int = Field(gt=0, description="tokens in a row")
    accumulate: int = Field(1, gt=0, description="passes whose gradients make one update, weighted by tokens")
    log_every: int = Field(10, gt=0, description="steps between training records")
    eval_every: int = Field(100, ge=0, description="steps between evaluations; 0: only at the end")
    eval_tokens: int = Field(32768, gt=0, description="validation targets of an evaluation during training, about")
    final_eval_tokens: int | None = Field(
        None, gt=0, description="validation targets of the last evaluation, about; null: all of them"
    )
    sample_every: int = Field(0, ge=0, description="steps between samples; 0: only at the end")
    sample_prompt: str = Field(
        "",
        description="what a sample continues, with data.packing: documents as the start of one; empty: the start of a "
        "document",
    )
    sample_tokens: int = Field(128, gt=0, description="most tokens in a sample; it ends at model.max_seq_len")
    sample_temperature: float = Field(0.7, ge=0, description="temperature of samples, with top-p 0.95; 0: greedy")
    checkpoint_every: int = Field(100, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, gt=0, description="newest checkpoints that are kept")


class TrainConfig(Section):
    """A whole training config."""

    run: RunConfig
    model: ModelConfig = Field(description=f"the shape of the model; arch: {' or '.join(ARCHITECTURES)}")
    data: DataConfig
    train: LoopConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    qat: QATConfig | None = Field(None, description="quantisation-aware training; null: none")

    @model_validator(mode="after")
    def _check_across_sections(self) -> "TrainConfig":
        problems = []
        if self.train.seq_len > self.model.max_seq_len:
            problems.append(
                f"train.seq_len must be at most model.max_seq_len, {self.model.max_seq_len}, "
                f"but got {self.train.seq_len}. Lower one or raise the other"
            )
        if self.optim.warmup_steps >= self.train.steps:
            problems.append(
                f"optim.warmup_steps must be less than train.steps, {self.train.steps}, "
                f"but got {self.optim.warmup_steps}"
            )
        if self.data.packing == "documents" and self.model.head_size > LARGEST_HEAD:
            problems.append(
                f"model.head_dim must be at most {LARGEST_HEAD} with data.packing: documents but the head size is "
                f"{self.model.head_size}. Set it or raise model.num_heads"
            )
        problems += self._phase_problems() + self._expert_rate_problems()
        tokenizer = self.data.tokenizer
        if tokenizer.path is None and self.model.vocab_size not in (None, tokenizer.vocab_size):
            problems.append(
                f"model.vocab_size must be data.tokenizer.vocab_size, {tokenizer.vocab_size}, or null, "
                f"but got {self.model.vocab_size}"
            )
        if problems:
            # A line each: `explain.py` finds the key that a line begins with.
            raise ValueError("\n".join(problems))
        return self

    def _phase_problems(self) -> list[str]:
        """What is wrong with the steps of quantisation-aware training."""
        steps, qat = self.train.steps, self.qat
        if qat is None:
            return []
        if qat.start_step >= steps:
            return [f"qat.start_step must be less than train.steps, {steps}, but got {qat.start_step}"]
        if qat.end_step is not None and qat.end_step >= steps:
            return [
                f"qat.end_step must be less than train.steps, {steps}, or null, but got {qat.end_step}: no step in "
                "float would be left. Lower it, or set it to null for a model that is deployed quantised"
            ]
        return []

    def _expert_rate_problems(self) -> list[str]:
        """What is wrong with a learning rate for experts: it must have an effect."""
        rate = self.optim.muon_expert_lr
        if rate is None:
            return []
        if self.optim.name != "muon":
            return [
                f"optim.muon_expert_lr must be null with optim.name: {self.optim.name} but got {rate:g}: only Muon has "
                "a rate for experts. Set it to null, or optim.name to muon"
            ]
        if not isinstance(self.model, MoEConfig):
            return [
                f"optim.muon_expert_lr must be null with model.arch: {self.model.arch} but got {rate:g}: the model has "
                "no experts. Set it to null"
            ]
        return []

    def with_vocab_size(self, size: int) -> "TrainConfig":
        """The config with the size of the tokenizer's vocabulary filled in.

        Raises:
            ValueError: ``model.vocab_size`` is another.
        """
        if self.model.vocab_size not in (None, size):
            raise ValueError(
                f"model.vocab_size must be the tokenizer's {size} (or null) but got {self.model.vocab_size}."
            )
        return self.model_copy(update={"model": self.model.model_copy(update={"vocab_size": size})})

    @property
    def tokens_per_step(self) -> int:
        """Positions of the rows of one update: all are targets, but for the padding of ``data.packing: documents``."""
        return self.train.batch_size * self.train.seq_len * self.train.accumulate


def of_architecture(name: object) -> type[TrainConfig]:
    """The config with ``model`` of one architecture alone, whose errors are those of its fields.

    Args:
        name: a value of ``model.arch``, a wrong one too.
    """
    if isinstance(name, str) and name in ARCHITECTURES:
        model: type[Section] = ARCHITECTURES[name].config
    else:
        names: Any = Literal[tuple(ARCHITECTURES)]
        model = create_model("Model", __base__=ARCHITECTURES["gpt"].config, arch=(names, "gpt"))
    return create_model("TrainConfig", __base__=TrainConfig, model=(model, ...))
