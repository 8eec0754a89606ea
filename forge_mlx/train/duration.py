"""How long a run is: the steps that its epochs take, and what must be over before its last step."""

from fractions import Fraction
import math

from forge_mlx._text import count
from forge_mlx.models.qat import QATConfig
from forge_mlx.optim import OptimConfig


def steps_of_epochs(epochs: float, num_rows: int, rows_per_step: int) -> int:
    """``ceil(epochs num_rows / rows_per_step)``, of the number as it was written.

    Args:
        epochs: how often the rows are gone through.
        num_rows: rows, or pairs, of an epoch.
        rows_per_step: those of one update.
    """
    return math.ceil(_rows_of_epochs(epochs, num_rows) / rows_per_step)


def describe_epochs(epochs: float, num_rows: int, rows_per_step: int, noun: str) -> str:
    """The steps that epochs take, in words, and what fills up the last of them.

    Args:
        epochs: how often the rows are gone through.
        num_rows: rows, or pairs, of an epoch.
        rows_per_step: those of one update.
        noun: what is counted, in the singular.
    """
    steps = steps_of_epochs(epochs, num_rows, rows_per_step)
    more = int(steps * rows_per_step - _rows_of_epochs(epochs, num_rows))
    filled = f", the last filled up with {count(more, f'more {noun}')}" if more else ""
    return f"{epochs_text(epochs)} of {count(num_rows, noun)}, {rows_per_step:,} a step: {count(steps, 'step')}{filled}"


def describe_steps(steps: int, num_rows: int, rows_per_step: int, noun: str) -> str:
    """How often steps go through the rows, in words.

    Args:
        steps: of the whole run.
        num_rows: rows, or pairs, of an epoch.
        rows_per_step: those of one update.
        noun: what is counted, in the singular.
    """
    return (
        f"{steps * rows_per_step / num_rows:.3g} in {count(steps, 'step')}; one takes {num_rows / rows_per_step:.3g}, "
        f"as there {'is' if num_rows == 1 else 'are'} {count(num_rows, noun)}, {rows_per_step:,} a step"
    )


def least_epochs_beyond(steps: int, num_rows: int, rows_per_step: int) -> float:
    """The least number of two decimals whose epochs take more than ``steps``.

    Args:
        steps: those that are done.
        num_rows: rows, or pairs, of an epoch.
        rows_per_step: those of one update.
    """
    return (100 * steps * rows_per_step // num_rows + 1) / 100


def epochs_text(epochs: float) -> str:
    """``1 epoch``, ``2.5 epochs``, ``1,000 epochs``."""
    return f"{epochs:,.12g} epoch{'' if epochs == 1 else 's'}"


def step_problems(steps: int, said: str, optim: OptimConfig, qat: QATConfig | None) -> list[str]:
    """What does not end before a run does, a line for each key.

    Args:
        steps: of the whole run.
        said: the key that says so, and the number.
        optim: of the run.
        qat: of the run; None: without quantisation-aware training.
    """
    problems = []
    if optim.warmup_steps >= steps:
        problems.append(f"optim.warmup_steps must be less than {said}, but got {optim.warmup_steps:,}")
    if qat is None:
        return problems
    if qat.start_step >= steps:
        problems.append(f"qat.start_step must be less than {said}, but got {qat.start_step:,}")
    elif qat.end_step is not None and qat.end_step >= steps:
        problems.append(
            f"qat.end_step must be less than {said}, or null, but got {qat.end_step:,}: no step in float would be "
            "left. Lower it, or set it to null for a model that is deployed quantised"
        )
    return problems


def _rows_of_epochs(epochs: float, num_rows: int) -> Fraction:
    # The float just above 0.1 is meant as a tenth: 0.1 of 30 rows are 3, and not a fourth one begun.
    return Fraction(str(epochs)) * num_rows
