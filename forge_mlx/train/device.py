"""Which device and dtype a run uses, and why."""

from dataclasses import dataclass

from forge_mlx.metal.dtypes import FLOATS_BY_NAME
from forge_mlx.train.config import RunConfig
import mlx.core as mx

DTYPES = FLOATS_BY_NAME


@dataclass(frozen=True)
class Placement:
    """Device and dtype of a run, with the reasons in words."""

    device: mx.Device
    dtype_name: str
    reason: str

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the forward and backward pass."""
        return DTYPES[self.dtype_name]


def has_gpu() -> bool:
    """Whether this build of MLX can run on a GPU here."""
    return bool(mx.is_available(mx.Device(mx.gpu)))


def choose_placement(run: RunConfig) -> Placement:
    """Resolve ``run.device`` and ``run.dtype``.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    gpu = has_gpu()
    if run.device == "gpu" and not gpu:
        raise ValueError("run.device must be cpu or auto here but got gpu: MLX finds no GPU.")
    on_gpu = gpu and run.device != "cpu"
    device = mx.Device(mx.gpu if on_gpu else mx.cpu)
    if run.dtype != "auto":
        reason = "as the config says"
        if not on_gpu and run.dtype != "float32":
            reason += "; slow, since a CPU's BLAS has no 16-bit products"
        return Placement(device, run.dtype, reason)
    if on_gpu:
        return Placement(device, "bfloat16", "chosen for the GPU; weights and moments stay float32")
    return Placement(device, "float32", "chosen for the CPU, where 16-bit products are slow")
