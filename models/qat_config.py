"""What quantisation-aware training quantises, how, and from which step to which."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from forge_mlx._config import Section
from forge_mlx.kernels.quantize.options import Granularity, Mode, Options, Ste, checked_options
from forge_mlx.nn.weight_format import Activations
from pydantic import Field, model_validator

_BITS = "Bits of a code: affine 2, 3, 4, 5, 6 or 8; null: the mode's own, for affine 4."
_GROUP_SIZE = "Neighbours in a row that share a scale: affine 32, 64 or 128; null: the mode's own, for affine 64."
_GRANULARITY = (
    "What shares a scale in ternary and fp8_e4m3: a row or a matrix; null: tensor in ternary, row in fp8_e4m3."
)
_OPTIONS: Final = ("bits", "group_size", "granularity")


@dataclass(frozen=True)
class LayerQuantization:
    """How one layer is quantised.

    Attributes:
        options: The weight's mode with all of its options.
        ste: The gradient of the weight.
        activations: "int8" where the input is quantised too.
    """

    options: Options
    ste: Ste
    activations: Activations | None


class QATOverride(Section):
    """What is different for some modules; null: as for all others."""

    weights: Mode | None = Field(
        None, description="Format of the weights; another than the others' has its own defaults."
    )
    bits: int | None = Field(None, description=_BITS)
    group_size: int | None = Field(None, description=_GROUP_SIZE)
    granularity: Granularity | None = Field(None, description=_GRANULARITY)
    activations: Literal["int8", "float"] | None = Field(
        None, description="int8: inputs are quantised, symmetric per token; float: they are not."
    )


Overrides: TypeAlias = dict[str, QATOverride | None]


class QATConfig(Section):
    """Which modules are trained as they will be deployed, and when.

    Patterns are those of shells on dotted names: `*` stands for any text, dots too, as in `layers.*.mlp.*`.
    """

    weights: Mode = Field("affine", description="Format of the weights: one of MLX's, int8, int4, ternary or fp8_e4m3.")
    bits: int | None = Field(None, description=_BITS)
    group_size: int | None = Field(None, description=_GROUP_SIZE)
    granularity: Granularity | None = Field(None, description=_GRANULARITY)
    ste: Ste = Field(
        "identity", description="Gradient of a weight: identity: that of its quantised value; clip: 0 where clipped."
    )
    activations: Activations | None = Field(
        None,
        description="int8: the inputs of layers are quantised, symmetric per token. The output head's never is: the "
        "loss reads the head's matrix alone. null: none.",
    )
    modules: list[str] = Field(
        ["*"],
        min_length=1,
        description="Patterns of the names of the linear layers, experts and embeddings to quantise.",
    )
    overrides: Overrides = Field(
        {},
        description="Pattern: what is different for such modules, or null: they stay float. The last that fits counts.",
    )
    start_step: int = Field(0, ge=0, description="Number of updates in float before quantisation begins.")
    end_step: int | None = Field(
        None, ge=1, description="Number of updates after which the model is float again; null: it stays quantised."
    )

    @model_validator(mode="after")
    def _check_formats(self) -> "QATConfig":
        problems = _option_problems("", self.weights, self)
        for pattern, override in self.overrides.items():
            if override is not None:
                problems += _option_problems(f"overrides.{pattern}.", override.weights or self.weights, override)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> "QATConfig":
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError(f"end_step must be greater than start_step, {self.start_step}, but got {self.end_step}.")
        return self

    def merged(self, override: QATOverride | None) -> LayerQuantization:
        """How a layer is quantised.

        bits, group_size and granularity are those of the whole only in the mode of the whole: another has its own
        defaults.

        Args:
            override: What is different for it; None: nothing.

        Raises:
            ValueError: When the mode does not take an option.
        """
        override = override or QATOverride()
        mode = override.weights or self.weights
        chosen = {name: getattr(override, name) for name in _OPTIONS}
        if mode == self.weights:
            chosen = {name: getattr(self, name) if value is None else value for name, value in chosen.items()}
        activations = override.activations or self.activations
        return LayerQuantization(
            checked_options("QATConfig", mode, **chosen), self.ste, None if activations == "float" else activations
        )


def _option_problems(prefix: str, mode: Mode, chosen: QATConfig | QATOverride) -> list[str]:
    """A line for each option of a mode that is wrong where it stands, by its key."""
    problems = []
    for name in _OPTIONS:
        try:
            checked_options("QATConfig", mode, **dict.fromkeys(_OPTIONS) | {name: getattr(chosen, name)})
        except ValueError as error:
            rule = str(error).partition("] ")[2]
            # The key in front, instead of the op's name.
            problems.append(f"{prefix}{rule}" if rule.startswith(f"{name} ") else f"{prefix}{name}: {rule}")
    return problems
