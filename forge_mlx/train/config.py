"""The training config: every section and field, with its help text. ``load.py`` reads it from YAML."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from forge_mlx._config import Section
from forge_mlx._text import count
from forge_mlx.data.config import DataConfig, TokenizerConfig
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.qat import QATConfig
from forge_mlx.models.registry import ARCHITECTURES, ModelConfig
from forge_mlx.optim import OptimConfig
from forge_mlx.train.duration import describe_epochs, epochs_text, step_problems, steps_of_epochs
from forge_mlx.train.loop_config import LoopConfig
from forge_mlx.train.preference_config import PreferenceConfig
from forge_mlx.train.pretrained_config import PretrainedConfig
from forge_mlx.train.router_problems import router_problems
from pydantic import Discriminator, Field, Tag, create_model, field_validator, model_validator


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
        description="of the forward and backward pass, and of what is frozen; what is trained and its moments are "
        "float32. auto: bfloat16 on a GPU, float32 on a CPU, where 16-bit products bypass the BLAS",
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


def _kind_of_model(value: Any) -> str:
    """A model that exists is one that has a path."""
    has_path = "path" in value if isinstance(value, dict) else isinstance(value, PretrainedConfig)
    return "pretrained" if has_path else "new"


def _kind_of_data(value: Any) -> str:
    """Examples are data that have a format."""
    has_format = "format" in value if isinstance(value, dict) else isinstance(value, ExampleConfig)
    return "examples" if has_format else "corpus"


AnyModel: TypeAlias = Annotated[
    Annotated[ModelConfig, Tag("new")] | Annotated[PretrainedConfig, Tag("pretrained")], Discriminator(_kind_of_model)
]
AnyData: TypeAlias = Annotated[
    Annotated[DataConfig, Tag("corpus")] | Annotated[ExampleConfig, Tag("examples")], Discriminator(_kind_of_data)
]


class TrainConfig(Section):
    """A whole training config."""

    run: RunConfig
    model: AnyModel = Field(
        description=f"the shape of a new model (arch: {' or '.join(ARCHITECTURES)}), or the path of one that exists"
    )
    data: AnyData = Field(description="a corpus of texts, or with a format examples: chats, prompts, pairs")
    train: LoopConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    adapter: AdapterConfig | None = Field(
        None, description="low-rank adapters on a frozen model; null: all parameters are trained"
    )
    qat: QATConfig | None = Field(None, description="quantisation-aware training; null: none")
    preference: PreferenceConfig | None = Field(
        None, description="how pairs of data.format: preference are trained on; null: with its defaults"
    )

    @model_validator(mode="after")
    def _check_across_sections(self) -> "TrainConfig":
        shape = self.model if isinstance(self.model, DecoderConfig) else None
        problems = _length_problems(self, shape) if shape else []
        if (steps := self.train.steps) is not None:
            problems += step_problems(steps, f"train.steps, {steps:,}", self.optim, self.qat)
        problems += _head_problems(self, shape) + router_problems(shape) if shape else []
        problems += self._expert_rate_problems() + self._method_problems()
        if shape and isinstance(self.data, DataConfig):
            problems += _vocabulary_problems(shape, self.data.tokenizer)
        if problems:
            # A line each: `explain.py` finds the key that a line begins with.
            raise ValueError("\n".join(problems))
        return self

    def _method_problems(self) -> list[str]:
        """What of adapters, quantised bases, examples and pairs does not go together."""
        problems = []
        pretrained = isinstance(self.model, PretrainedConfig)
        if self.adapter is not None and not pretrained:
            problems.append(
                "adapter must be null with a new model, whose parameters have learned nothing yet. Set it to null, or "
                "name a checkpoint in model.path"
            )
        if self.adapter is not None and self.optim.name != "adamw":
            problems.append(
                f"optim.name must be adamw with adapter but got {self.optim.name}: Muon is for matrices of full rank"
            )
        if isinstance(self.model, PretrainedConfig) and self.model.quantize and self.adapter is None:
            problems.append(
                "model.quantize must be null without adapter: codes cannot be trained. Add a section adapter (QLoRA), "
                "or train with qat"
            )
        if isinstance(self.data, ExampleConfig) and not pretrained:
            problems.append(
                f"data.format must be left out with a new model but got {self.data.format}: examples need the "
                "tokenizer of a checkpoint. Name one in model.path (forge_mlx.export makes one of a run)"
            )
        if isinstance(self.data, DataConfig) and pretrained and self.data.tokenizer != TokenizerConfig():
            problems.append("data.tokenizer must be left out with model.path, which brings its own. Remove the section")
        if self.preference is not None and not self.trains_pairs:
            problems.append("preference must be null without data.format: preference. Remove the section")
        return problems

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
        if isinstance(self.model, DecoderConfig) and not isinstance(self.model, MoEConfig):
            return [
                f"optim.muon_expert_lr must be null with model.arch: {self.model.arch} but got {rate:g}: the model has "
                "no experts. Set it to null"
            ]
        return []

    @property
    def trains_pairs(self) -> bool:
        """Whether the data are pairs of a chosen and a rejected answer."""
        return isinstance(self.data, ExampleConfig) and self.data.format == "preference"

    @property
    def isolates_texts(self) -> bool:
        """Whether rows may hold several texts of which none sees another."""
        if isinstance(self.data, DataConfig):
            return self.data.packing == "documents"
        return self.data.packing and not self.trains_pairs

    @property
    def sample_temperature(self) -> float:
        """The temperature of samples."""
        given = self.train.sample_temperature
        return given if given is not None else 0.0 if isinstance(self.data, ExampleConfig) else 0.7

    def with_vocab_size(self, size: int) -> "TrainConfig":
        """The config of a new model with the size of the tokenizer's vocabulary filled in.

        Args:
            size: the tokenizer's.

        Raises:
            ValueError: ``model.vocab_size`` is another.
        """
        assert isinstance(self.model, DecoderConfig)
        if self.model.vocab_size not in (None, size):
            raise ValueError(
                f"model.vocab_size must be the tokenizer's {size} (or null) but got {self.model.vocab_size}."
            )
        return self.model_copy(update={"model": self.model.model_copy(update={"vocab_size": size})})

    @property
    def rows_per_pass(self) -> int:
        """Rows of one forward and backward pass: of pairs two for each."""
        return self.train.batch_size * (2 if self.trains_pairs else 1)

    def total_steps(self, num_rows: int) -> int:
        """Updates of the whole run.

        Args:
            num_rows: rows, or pairs, of an epoch.

        Raises:
            ValueError: a setting needs more of them than the epochs take.
        """
        loop = self.train
        if loop.steps is not None:
            return loop.steps
        assert loop.epochs is not None
        steps = steps_of_epochs(loop.epochs, num_rows, loop.rows_per_step)
        said = f"the {count(steps, 'step')} that {epochs_text(loop.epochs)} of {count(num_rows, self.row_noun)} take"
        if problems := step_problems(steps, said, self.optim, self.qat):
            raise ValueError("; ".join(problems) + ".")
        return steps

    def describe_epochs(self, num_rows: int) -> str:
        """The steps that the epochs take, in words; nothing where the steps are given.

        Args:
            num_rows: rows, or pairs, of an epoch.
        """
        loop = self.train
        if loop.epochs is None:
            return ""
        return describe_epochs(loop.epochs, num_rows, loop.rows_per_step, self.row_noun)

    @property
    def row_noun(self) -> str:
        """What a batch counts, in the singular."""
        return "pair" if self.trains_pairs else "row"

    @property
    def positions_per_step(self) -> int:
        """Positions of the rows of one update: targets, but for what examples only read, and padding."""
        return self.rows_per_pass * self.train.seq_len * self.train.accumulate


def require_fitting_shape(config: TrainConfig, shape: DecoderConfig) -> None:
    """Check what of a config a checkpoint's shape decides.

    Args:
        config: of a run.
        shape: of the checkpoint that it names.

    Raises:
        ValueError: rows are longer than the model takes, or packed for heads that are too large.
    """
    if problems := _length_problems(config, shape) + _head_problems(config, shape):
        raise ValueError("; ".join(problems) + ".")


def _length_problems(config: TrainConfig, shape: DecoderConfig) -> list[str]:
    if config.train.seq_len <= shape.max_seq_len:
        return []
    is_new = isinstance(config.model, DecoderConfig)
    limit = "model.max_seq_len" if is_new else "the model's longest sequence"
    return [
        f"train.seq_len must be at most {limit}, {shape.max_seq_len}, but got {config.train.seq_len}. "
        f"{'Lower one or raise the other' if is_new else 'Lower it'}"
    ]


def _head_problems(config: TrainConfig, shape: DecoderConfig) -> list[str]:
    if not config.isolates_texts or shape.head_size <= LARGEST_HEAD:
        return []
    if isinstance(config.model, DecoderConfig):
        return [
            f"model.head_dim must be at most {LARGEST_HEAD} with data.packing: documents but the head size is "
            f"{shape.head_size}. Set it or raise model.num_heads"
        ]
    other = "concat" if isinstance(config.data, DataConfig) else "false"
    return [
        f"data.packing must be {other} with heads of {shape.head_size} elements: packed texts take at most "
        f"{LARGEST_HEAD}"
    ]


def _vocabulary_problems(model: DecoderConfig, tokenizer: TokenizerConfig) -> list[str]:
    if tokenizer.path is not None or model.vocab_size in (None, tokenizer.vocab_size):
        return []
    return [
        f"model.vocab_size must be data.tokenizer.vocab_size, {tokenizer.vocab_size}, or null, "
        f"but got {model.vocab_size}"
    ]


def of_kinds(architecture: object, *, pretrained: bool, examples: bool) -> type[TrainConfig]:
    """The config with the sections ``model`` and ``data`` of one kind alone, whose errors are those of their fields.

    Args:
        architecture: a value of ``model.arch``, a wrong one too; of a new model.
        pretrained: whether the model exists.
        examples: whether the data have a format.
    """
    if pretrained:
        model: type[Section] = PretrainedConfig
    elif isinstance(architecture, str) and architecture in ARCHITECTURES:
        model = ARCHITECTURES[architecture].config
    else:
        names: Any = Literal[tuple(ARCHITECTURES)]
        model = create_model("Model", __base__=ARCHITECTURES["gpt"].config, arch=(names, "gpt"))
    data = ExampleConfig if examples else DataConfig
    return create_model("TrainConfig", __base__=TrainConfig, model=(model, ...), data=(data, ...))
