"""adamw_step: AdamW's update of one tensor in one pass."""

from functools import cache
from pathlib import Path
from typing import Final

from forge_mlx.kernels._common.folding import Arrays, Axes, Function, map_elements
from forge_mlx.kernels._common.rows import round_up, vector_size
from forge_mlx.kernels._common.without_gradient import without_gradient
from forge_mlx.kernels.optimizer import reference
from forge_mlx.kernels.optimizer.reference import Options
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import SIMDGROUP
import mlx.core as mx

_ROOM = Path(__file__).parent
_THREADS: Final = 256
_SCALARS: Final = 4
_NO_GRADIENT: Final = (
    "[adamw_step] has no gradient: an optimizer's step is no part of a loss. Call it outside of mx.grad, or wrap its "
    "arguments in mx.stop_gradient."
)


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
    impl: str | None = None,
) -> Arrays:
    """One step of AdamW (Loshchilov and Hutter 2019), as PyTorch's, in one pass over each array::

        g = grad_scale * g
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        w = w * (1 - lr * weight_decay)
        w = w - lr / (1 - b1**step) * m / (sqrt(v / (1 - b2**step)) + eps)

    Computed in float32 and rounded once. The given arrays stay as they are. A gradient that is not finite is not held
    back: an infinite one leaves infinite moments and NaN in w, a NaN leaves NaN; look at the norm before the step.

    It has no gradient: differentiating through it raises.

    Args:
        w: Weights of any shape, float32, float16 or bfloat16. Fewer than 2^31 elements.
        g: Their gradient, of these dtypes; not necessarily that of w.
        m: First moment, float32 whatever w is: 16 bits would lose small changes.
        v: Second moment, float32.
        lr: Learning rate. Like step and grad_scale it may be a 0-d array: a compiled function then is not compiled
            again for another value.
        betas: Decay rates of the two moments, each in [0, 1). Like eps and weight_decay they are Python numbers.
        eps: Added to the denominator, 0 or more.
        weight_decay: Decoupled from the gradient, 0 or more.
        step: The number of this update, from 1. An array is not looked at: one of 0 gives NaN.
        grad_scale: Factor on g, as of clipping or of a mean: it saves a pass over the gradients.
        bias_correction: Whether the moments are divided by 1 - b^step.
        master: A float32 copy of w. The update is made on it (w is not read), and w is what it rounds to: steps that
            are small beside a 16-bit w are not lost.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides. "reference" is made for `mx.compile`.

    Returns:
        The new w in its dtype, m, v and, if there is one, master.

    Raises:
        ValueError: Something other than arrays, shapes that differ, other dtypes, a number out of its range, an array
            where a Python number belongs, an unknown engine; when it is differentiated; on a GPU, when `mx.vmap` maps
            lr, step or grad_scale.
        RuntimeError: The engine that was asked for cannot run here.
    """
    options = Options(betas, eps, weight_decay, bias_correction)
    return AdamWStep(options, lr, step, grad_scale, impl=impl)(w, g, m, v, master)


class AdamWStep:
    """`adamw_step` for many tensors: what does not depend on them is computed once.

    Args:
        options: What is the same in every step.
        lr: As `adamw_step` takes it.
        step: As `adamw_step` takes it.
        grad_scale: As `adamw_step` takes it.
        impl: As `adamw_step` takes it.

    Raises:
        ValueError: As `adamw_step`.
        RuntimeError: As `adamw_step`.
    """

    def __init__(
        self,
        options: Options,
        lr: float | mx.array,
        step: int | mx.array,
        grad_scale: float | mx.array = 1.0,
        *,
        impl: str | None = None,
    ) -> None:
        self._options = options
        # This also keeps mx.compile from fusing them into the step, which would compute them for every element.
        self._scalars = _without_gradient(*reference.step_scalars(options, lr, step, grad_scale))
        # A pass less where nothing is compiled.
        self._is_scaled = isinstance(grad_scale, mx.array) or grad_scale != 1
        self._engine = resolve("adamw_step", impl).name

    def __call__(self, w: mx.array, g: mx.array, m: mx.array, v: mx.array, master: mx.array | None = None) -> Arrays:
        """The step of one tensor.

        Args:
            w: As `adamw_step` takes it.
            g: As `adamw_step` takes it.
            m: As `adamw_step` takes it.
            v: As `adamw_step` takes it.
            master: As `adamw_step` takes it.

        Returns:
            The new w, m, v and, if there is one, master.
        """
        reference.check_arrays(w, g, m, v, master)
        arrays = (w, g, m, v) if master is None else (w, g, m, v, master)
        if w.size == 0:
            return arrays[:1] + arrays[2:]
        if self._engine == "reference":
            # Around the inputs: around the results, it would keep mx.compile from making them in one pass.
            scalars = self._scalars if self._is_scaled else self._scalars[1:]
            return reference.update(_without_gradient(*arrays), scalars, self._options)
        return _step(self._engine, self._options)(*arrays, *self._scalars)


def _as_they_are(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
    """The vmap rule of a function that returns its inputs."""
    return function(*inputs), axes


_without_gradient = without_gradient(lambda *inputs: inputs, _as_they_are, _NO_GRADIENT)


@cache
def _step(engine: EngineName, options: Options) -> Function:
    """The launch of w, g, m, v, master or not, then four scalars -> w, m, v, master or not."""

    def launch(*inputs: mx.array) -> Arrays:
        return _launch(engine, inputs[:-_SCALARS], inputs[-_SCALARS:], options)

    def vmap(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        arrays, scalars = inputs[:-_SCALARS], inputs[-_SCALARS:]
        if any(axis is not None for axis in axes[-_SCALARS:]):
            raise ValueError("[adamw_step] lr, step and grad_scale must be shared under mx.vmap: map arrays only.")
        return map_elements(lambda *arrays: function(*arrays, *scalars), arrays, axes[:-_SCALARS])

    return without_gradient(launch, vmap, _NO_GRADIENT)


@cache
def _kernel() -> MetalKernel:
    return MetalKernel(_ROOM / "adamw_step.metal")


def _launch(engine: EngineName, arrays: Arrays, scalars: Arrays, options: Options) -> Arrays:
    """w, m, v and, if there is one, master, launched on an engine that runs kernels."""
    shape, has_master = arrays[0].shape, len(arrays) == 5
    w, g, m, v = (each.reshape(-1) for each in arrays[:4])
    parameter = arrays[4].reshape(-1) if has_master else w
    grad_scale, kept, rate, scale = scalars
    b1, b2 = options.betas
    threads = round_up(-(-w.size // max(vector_size(w.dtype), vector_size(g.dtype))), SIMDGROUP)
    outputs = _kernel()(
        {
            **{"parameter": parameter, "g": g, "m": m, "v": v},
            **{"grad_scale": grad_scale, "kept": kept, "rate": rate, "scale": scale},
            **{"beta1": b1, "beta2": b2, "rest1": 1 - b1, "rest2": 1 - b2, "eps": options.eps},
        },
        output_shapes=[w.shape, w.shape, w.shape, w.shape if has_master else (1,)],
        output_dtypes=[w.dtype, mx.float32, mx.float32, mx.float32],
        grid=(threads, 1, 1),
        threadgroup=(min(_THREADS, threads), 1, 1),
        template={"T": w.dtype, "P": parameter.dtype, "G": g.dtype, "MASTER": has_master},
        engine=engine,
    )
    return tuple(each.reshape(shape) for each in outputs[: len(arrays) - 1])
