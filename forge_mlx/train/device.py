"""Which device and dtype a run uses, and why."""

from dataclasses import dataclass
import os
from pathlib import Path
import sys

from forge_mlx.hub.native import ModelFolderError
from forge_mlx.metal.dtypes import FLOATS_BY_NAME
from forge_mlx.train.config import RunConfig, TrainConfig
import mlx.core as mx

DTYPES = FLOATS_BY_NAME
# MLX's CUDA back end keeps all that the operations of one graph have made until the graph has run, and by default a
# graph has up to a hundred: a step held 1.3 to 2.8 GB more so, and was no faster.
_CUDA_OPERATIONS = ("MLX_MAX_OPS_PER_BUFFER", "10")


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
    if on_gpu and sys.platform == "linux":
        # Read by MLX when it first runs something there.
        os.environ.setdefault(*_CUDA_OPERATIONS)
    if run.dtype != "auto":
        reason = "as the config says"
        if not on_gpu and run.dtype != "float32":
            reason += "; slow, since a CPU's BLAS has no 16-bit products"
        return Placement(device, run.dtype, reason)
    if on_gpu:
        return Placement(device, "bfloat16", "chosen for the GPU; what is trained and its moments are float32")
    return Placement(device, "float32", "chosen for the CPU, where 16-bit products are slow")


def recorded_placement(run: RunConfig, file: Path) -> Placement:
    """The dtype that a run was trained in, on the device that is here, whichever it was trained on.

    Args:
        run: of the run's own config.
        file: where that is.

    Raises:
        ModelFolderError: it says auto, and is not what the run wrote.
    """
    if run.dtype == "auto":
        raise ModelFolderError(
            f"{file}: run.dtype must be what the run was trained in but got auto. A run writes it there: put back one "
            f"of {', '.join(DTYPES)}."
        )
    return Placement(mx.default_device(), run.dtype, "as the run was trained")


def resolved(config: TrainConfig, placement: Placement) -> TrainConfig:
    """The config with what the device decides, and the samples' temperature, filled in.

    Args:
        config: of the run.
        placement: device and dtype.
    """
    run = config.run.model_copy(update={"device": placement.device.type.name, "dtype": placement.dtype_name})
    loop = config.train.model_copy(update={"sample_temperature": config.sample_temperature})
    return config.model_copy(update={"run": run, "train": loop})
