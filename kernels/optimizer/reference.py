"""The formula of adamw_step in plain MLX operations: the engine "reference", and what the kernel is compared with."""

from dataclasses import dataclass
import math

from forge_mlx.kernels._common.checks import check_constant, check_eps, check_floating, check_scalar, check_shape
from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx


@dataclass(frozen=True)
class Options:
    """What is the same in every step.

    Attributes:
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the denominator, 0 or more.
        weight_decay: Decoupled from the gradient, 0 or more.
        bias_correction: Whether the moments are divided by 1 - b^t.

    Raises:
        ValueError: Something other than Python numbers, a number out of its range.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool = True

    def __post_init__(self) -> None:
        _check_pair(self.betas)
        for index, beta in enumerate(self.betas, start=1):
            check_constant("adamw_step", f"beta{index}", beta)
            if not 0 <= beta < 1:
                raise ValueError(f"[adamw_step] beta{index} must lie in [0, 1) but got {beta}.")
        check_eps("adamw_step", self.eps)
        check_constant("adamw_step", "weight_decay", self.weight_decay)
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(
                f"[adamw_step] weight_decay must be a finite number of 0 or more but got {self.weight_decay}."
            )
        # NumPy's numbers would turn what is computed with them into NumPy's.
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        object.__setattr__(self, "eps", float(self.eps))
        object.__setattr__(self, "weight_decay", float(self.weight_decay))


def _check_pair(betas: object) -> None:
    if isinstance(betas, (tuple, list)) and len(betas) == 2:
        return
    got = "an mx.array" if isinstance(betas, mx.array) else repr(betas)
    raise ValueError(f"[adamw_step] betas must be two Python numbers but got {got}.")


def check_arrays(w: mx.array, g: mx.array, m: mx.array, v: mx.array, master: mx.array | None) -> None:
    """Raise what `adamw_step` raises for its arrays.

    Args:
        w: Weights of any shape.
        g: Their gradient.
        m: First moment.
        v: Second moment.
        master: The float32 copy of w, or None.

    Raises:
        ValueError: Shapes that differ, another dtype than the three, moments or a master that are not float32, 2^31
            elements or more.
    """
    check_floating("adamw_step", w=w, g=g)
    named = {"g": g, "m": m, "v": v} | ({} if master is None else {"master": master})
    for name, array in named.items():
        check_shape("adamw_step", name, array, w.shape, "that of w")
        if name != "g" and array.dtype != mx.float32:
            raise ValueError(
                f"[adamw_step] {name} must be float32 but got {dtype_name(array.dtype)}. "
                f"Convert it: {name}.astype(mx.float32)."
            )
    if w.size >= 2**31:
        raise ValueError(f"[adamw_step] w must have fewer than 2^31 elements but got {w.size}. Split it.")


def step_scalars(options: Options, lr: float | mx.array, step: int | mx.array, grad_scale: float | mx.array) -> Arrays:
    """What a step needs beside arrays, once for all elements of all tensors.

    1 - b^t is -expm1(t ln b), with ln b taken in float64: written out in float32, 1 - 0.999^1 is off by 1.3e-5.

    Args:
        options: Decay rates, weight decay.
        lr: Learning rate.
        step: t, the number of this update, from 1.
        grad_scale: Factor on the gradient.

    Returns:
        grad_scale, 1 - lr wd, lr / (1 - b1^t), 1 / sqrt(1 - b2^t): each 0-d in float32.

    Raises:
        ValueError: Something that is not one real number; a step, as a Python number, that is below 1 or not whole.
    """
    for name, value in (("lr", lr), ("step", step), ("grad_scale", grad_scale)):
        check_scalar("adamw_step", name, value)
    if not isinstance(step, mx.array) and not (step >= 1 and float(step).is_integer()):
        raise ValueError(
            f"[adamw_step] step must be a whole number of 1 or more, the number of this update, but got {step}."
        )
    rate, scale = _float32(lr), mx.array(1.0)
    kept = 1 - rate * options.weight_decay
    if options.bias_correction:
        t = _float32(step)
        first, second = (-mx.expm1(t * (math.log(beta) if beta > 0 else -math.inf)) for beta in options.betas)
        rate, scale = rate / first, mx.rsqrt(second)
    return _float32(grad_scale), kept, rate, scale


def update(arrays: Arrays, scalars: Arrays, options: Options) -> Arrays:
    """One step: g' = s g, m = b1 m + (1 - b1) g', v = b2 v + (1 - b2) g'^2 and
    w = w kept - rate m / (sqrt(v) scale + eps), in float32 and rounded once.

    Args:
        arrays: w, g, m, v and, if it takes the update in the place of w, master.
        scalars: s, kept, rate, scale, as `step_scalars` returns them; without s for 1.
        options: Decay rates, eps.

    Returns:
        w, m, v and, if there is one, master.
    """
    w, g, m, v = arrays[:4]
    *grad_scale, kept, rate, scale = scalars
    b1, b2 = options.betas
    scaled = g.astype(mx.float32)
    if grad_scale:
        scaled = scaled * grad_scale[0]
    m = b1 * m + (1 - b1) * scaled
    v = b2 * v + (1 - b2) * mx.square(scaled)
    weights = arrays[-1] if len(arrays) == 5 else w.astype(mx.float32)
    weights = weights * kept - rate * m / (mx.sqrt(v) * scale + options.eps)
    return (weights.astype(w.dtype), m, v, weights)[: len(arrays) - 1]


def adamw_step(
    w: mx.array,
    g: mx.array,
    m: mx.array,
    v: mx.array,
    *,
    lr: float | mx.array,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int | mx.array,
    grad_scale: float | mx.array = 1.0,
    bias_correction: bool = True,
    master: mx.array | None = None,
) -> Arrays:
    """One step of AdamW, as `forge_mlx.kernels.adamw_step` but for `impl`, and for the gradient, which this one has.

    Args:
        w: Weights of any shape.
        g: Their gradient.
        m: First moment.
        v: Second moment.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient.
        step: The number of this update, from 1.
        grad_scale: Factor on g.
        bias_correction: Whether the moments are divided by 1 - b^t.
        master: The float32 copy of w, or None.

    Returns:
        w, m, v and, if there is one, master.

    Raises:
        ValueError: As `Options`, `step_scalars` and `check_arrays`.
    """
    options = Options(betas, eps, weight_decay, bias_correction)
    scalars = step_scalars(options, lr, step, grad_scale)
    check_arrays(w, g, m, v, master)
    return update((w, g, m, v) if master is None else (w, g, m, v, master), scalars, options)


def _float32(value: float | mx.array) -> mx.array:
    return value.astype(mx.float32) if isinstance(value, mx.array) else mx.array(float(value), mx.float32)
