import os
from pathlib import Path

from forge_mlx.train import device
from forge_mlx.train.config import RunConfig
from forge_mlx.train.device import choose_placement
import mlx.core as mx
import pytest


def placed(monkeypatch, *, gpu, **settings):
    monkeypatch.setattr(device, "has_gpu", lambda: gpu)
    return choose_placement(RunConfig(dir=Path("runs/x"), **settings))


def test_auto_on_a_cpu_is_float32_and_says_why(monkeypatch):
    for wanted in ("auto", "cpu"):
        placement = placed(monkeypatch, gpu=wanted == "cpu", device=wanted)
        assert (placement.device, placement.dtype_name, placement.dtype) == (mx.Device(mx.cpu), "float32", mx.float32)
        assert placement.reason == "chosen for the CPU, where 16-bit products are slow"


def test_auto_on_a_gpu_is_bfloat16_and_says_why(monkeypatch):
    for wanted in ("auto", "gpu"):
        placement = placed(monkeypatch, gpu=True, device=wanted)
        assert (placement.device, placement.dtype) == (mx.Device(mx.gpu), mx.bfloat16)
        assert placement.reason == "chosen for the GPU; what is trained and its moments are float32"


def test_graphs_on_an_nvidia_gpu_are_short_unless_somebody_says(monkeypatch):
    name = "MLX_MAX_OPS_PER_BUFFER"
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv(name, "7")
    placed(monkeypatch, gpu=True)
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    placed(monkeypatch, gpu=False)
    assert name not in os.environ
    placed(monkeypatch, gpu=True)
    assert os.environ.pop(name) == "10"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_given_dtype_is_used_and_slow_ones_are_called_slow(monkeypatch, dtype):
    on_cpu = placed(monkeypatch, gpu=False, dtype=dtype)
    on_gpu = placed(monkeypatch, gpu=True, dtype=dtype)
    assert on_cpu.dtype == on_gpu.dtype == getattr(mx, dtype)
    assert on_gpu.reason == "as the config says"
    assert ("slow" in on_cpu.reason) == (dtype != "float32")


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match=r"^run\.device must be cpu or auto here but got gpu: MLX finds no GPU\.$"):
        placed(monkeypatch, gpu=False, device="gpu")


def test_has_gpu_asks_mlx():
    assert device.has_gpu() == (mx.metal.is_available() or mx.cuda.is_available())
