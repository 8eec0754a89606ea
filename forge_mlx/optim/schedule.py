"""Learning-rate schedules, as a factor of the peak rate."""

import math

from forge_mlx.optim.config import OptimConfig


def learning_rate_factor(config: OptimConfig, step: int, total_steps: int) -> float:
    """Factor on the peak learning rate for one update.

    With w warmup steps the factor of step ``s`` (counted from 0) is ``(s + 1) / w`` while ``s < w``. Then, with
    ``u = (s - w) / (total_steps - 1 - w)`` running from 0 to 1 and ``f = final_lr``:

    - cosine: ``f + (1 - f) (1 + cos(pi u)) / 2``
    - wsd (warmup, stable, decay; Hu et al. 2024, MiniCPM): 1, then linear to ``f`` over the last
      ``decay_fraction`` of all steps, or over all that the warmup leaves if these are fewer
    - constant: 1

    Args:
        config: the optimizer's section.
        step: the update, from 0 to ``total_steps - 1``.
        total_steps: number of updates of the whole run.

    Raises:
        ValueError: the step is not one of the run.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"[learning_rate_factor] step must lie in [0, {total_steps}) but got {step}.")
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    last = total_steps - 1
    if config.schedule == "cosine":
        span = last - config.warmup_steps
        progress = (step - config.warmup_steps) / span if span > 0 else 0.0
        return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "wsd":
        decay_steps = min(max(1, round(config.decay_fraction * total_steps)), last - config.warmup_steps)
        into_decay = step - (last - decay_steps)
        return 1.0 if into_decay <= 0 else 1.0 - (1 - config.final_lr) * into_decay / decay_steps
    return 1.0
