"""The ``train`` section of a training config."""

from forge_mlx._config import Section
from pydantic import Field, ValidationInfo, field_validator


class LoopConfig(Section):
    """The training loop: sizes and how often what happens."""

    epochs: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="how often a run goes through its training rows, each of which comes once an epoch; 0.5 is half of "
        "them. null: train.steps says how long it is",
    )
    steps: int | None = Field(
        None, gt=0, validate_default=True, description="optimizer updates; null: as many as train.epochs takes"
    )
    batch_size: int = Field(gt=0, description="rows in one forward and backward pass; of preference pairs")
    seq_len: int = Field(gt=0, description="tokens in a row")
    accumulate: int = Field(
        1, gt=0, description="passes whose gradients make one update, weighted by their targets or pairs"
    )
    log_every: int = Field(10, gt=0, description="steps between training records")
    eval_every: int = Field(100, ge=0, description="steps between evaluations; 0: only at the end")
    eval_tokens: int = Field(32768, gt=0, description="validation targets of an evaluation during training, about")
    final_eval_tokens: int | None = Field(
        None, gt=0, description="validation targets of the last evaluation, about; null: all of them"
    )
    sample_every: int = Field(0, ge=0, description="steps between samples; 0: only at the end")
    sample_prompt: str = Field(
        "",
        description="what a sample continues, with data.packing: documents as the start of one, in chats what the user "
        "says; empty: the start of a document, or with data.format the first three examples that are held out",
    )
    sample_tokens: int = Field(128, gt=0, description="most tokens in a sample; it ends at model.max_seq_len")
    sample_temperature: float | None = Field(
        None,
        ge=0,
        description="temperature of samples, with top-p 0.95; 0: greedy. null: 0.7, or with data.format 0, so that "
        "what is said before training and after it can be compared",
    )
    checkpoint_every: int = Field(100, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, gt=0, description="newest checkpoints that are kept")
    grad_checkpoint: bool = Field(
        False, description="compute each block anew in the backward pass: a third more work, far less memory"
    )

    @field_validator("steps")
    @classmethod
    def _check_one_length(cls, steps: int | None, info: ValidationInfo) -> int | None:
        """A field's check, so that it is listed beside what is wrong with other fields."""
        if "epochs" not in info.data:
            return steps
        epochs = info.data["epochs"]
        if steps is None and epochs is None:
            raise ValueError("is required but missing, and train.epochs too: one of the two says how long a run is")
        if steps is not None and epochs is not None:
            raise ValueError(
                f"must be null with train.epochs, {epochs:.12g}, but got {steps}: one of the two says how long a run "
                f"is. Set the other to null: train.epochs=null train.steps={steps}, or train.steps=null"
            )
        return steps

    @property
    def rows_per_step(self) -> int:
        """Rows, or pairs, of one update."""
        return self.batch_size * self.accumulate
