"""The ``preference`` section of a training config: the loss over pairs of answers."""

from typing import Literal

from forge_mlx._config import Section
from pydantic import Field, model_validator


class PreferenceConfig(Section):
    """Which loss over chosen and rejected answers is minimised, and its dials."""

    loss: Literal["dpo", "orpo"] = Field(
        "dpo",
        description="dpo: the chosen answer gains on the rejected one, measured from the model that training starts "
        "from, whose log-probabilities are computed once; orpo: the loss of the chosen answer and a term for the ratio "
        "of the odds, without a reference",
    )
    beta: float = Field(
        0.1, gt=0, description="dpo: how strongly the model is held to where it started; larger stays nearer"
    )
    variant: Literal["sigmoid", "hinge", "ipo"] = Field(
        "sigmoid",
        description="dpo: sigmoid is the paper's loss; hinge is SLiC's; ipo aims at the margin 1 / (2 beta) and "
        "does not go beyond",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo, sigmoid: the share of pairs whose labels are taken to be swapped"
    )
    orpo_lambda: float = Field(0.1, ge=0, description="orpo: weight of the odds ratio beside the loss of the chosen")

    @model_validator(mode="after")
    def _check_effect(self) -> "PreferenceConfig":
        """A dial that would do nothing is an error."""
        others = {"dpo": ("orpo_lambda",), "orpo": ("beta", "variant", "label_smoothing")}[self.loss]
        problems = [
            f"{name} must be left out with loss: {self.loss} but got {getattr(self, name)}: it would do nothing"
            for name in others
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if self.label_smoothing and self.variant != "sigmoid":
            problems.append(
                f"label_smoothing must be 0 with variant: {self.variant} but got {self.label_smoothing}. Set it to 0, "
                "or variant to sigmoid"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self
