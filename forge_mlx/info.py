"""`python -m forge_mlx.info`: versions, machine, BLAS and measured speed, to read or for a bug report."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
import json
import os
from pathlib import Path
import platform
import shutil
from statistics import median
import time
from typing import Any

import forge_mlx
from forge_mlx.metal.engine import resolve
import mlx.core as mx
import numpy as np

_PACKAGES = ("mlx", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal", "numpy", "scipy-openblas32")
_SIZE, _BF16_SIZE, _GPU_SIZE = 1024, 512, 4096
# What `mx.device_info` gives in bytes, on CUDA and on Metal.
_IN_BYTES = (
    "total_memory",
    "free_memory",
    "memory_size",
    "max_buffer_length",
    "max_recommended_working_set_size",
)


def _mlx_product(dtype: mx.Dtype, n: int, device: mx.Device) -> Callable[[], object]:
    a, b = (mx.ones((n, n), dtype=dtype) for _ in range(2))
    mx.eval(a, b)
    return lambda: mx.eval(mx.matmul(a, b, stream=device))


def _numpy_product(n: int) -> Callable[[], object]:
    a, b = (np.ones((n, n), dtype=np.float32) for _ in range(2))
    return lambda: a @ b


def _gflops(products: Sequence[Callable[[], object]], n: int, runs: int) -> list[float]:
    """`2 n^3 / seconds / 1e9` of each product of `[n, n]` matrices, the median of `runs`.

    The products take turns, in both orders, so that a busy moment of the machine hits all alike. One untimed run
    of each comes first.
    """
    for product in products:
        product()
    turns = [(product, list[float]()) for product in products]
    for run in range(runs):
        for product, seconds in turns if run % 2 else reversed(turns):
            start = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - start)
    return [2 * n**3 / median(seconds) / 1e9 for _, seconds in turns]


def collect() -> dict[str, Any]:
    """Everything the command prints, as JSON types; a value that this machine cannot tell is None.

    Returns:
        `versions` (name -> version, installed packages only), `machine`, `device`, `blas` (origin, path,
        reason), `matmul` (GFLOP/s; `ratio` is MLX's over NumPy's), `compiler` (path of g++, None if absent) and
        `kernel_engine` (what runs the ops of forge_mlx.kernels, and why).
    """
    choice = forge_mlx.blas_choice()
    return {
        "versions": _package_versions(),
        "machine": {
            "os": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": _memory_gib(),
        },
        "device": _device(),
        "blas": {
            "origin": choice.origin,
            "path": None if choice.path is None else str(choice.path),
            "reason": choice.reason,
        },
        "matmul": _matmul_rates(),
        "compiler": shutil.which("g++"),
        "kernel_engine": _kernel_engine(),
    }


def versions() -> dict[str, str]:
    """What a run's record needs to be understood later; nothing is measured.

    Returns:
        `forge-mlx`, `python`, `mlx` and its installed builds, `numpy`: their versions; `blas`: the origin and
        the reason of the BLAS in use.
    """
    choice = forge_mlx.blas_choice()
    return _package_versions() | {"blas": f"{choice.origin}: {choice.reason}"}


def _package_versions() -> dict[str, str]:
    found = {"forge-mlx": forge_mlx.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Not Linux.
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _device() -> dict[str, Any]:
    device = mx.default_device()
    details: dict[str, Any] = {"default": str(device)}
    if device.type == mx.DeviceType.gpu:
        # The uuid tells one device from all others in the world, which no bug report needs.
        details["info"] = {key: value for key, value in sorted(mx.device_info(device).items()) if key != "uuid"}
    return details


def _kernel_engine() -> str:
    try:
        engine = str(resolve("info"))
    except (ValueError, RuntimeError) as error:
        # FORGE_MLX_ENGINE asks for one that does not exist or cannot run: every op would say the same.
        engine = f"none: {error}"
    return f"{engine}; forge_mlx.nn uses it for RMSNorm and mx.fast for the rest"


def _matmul_rates() -> dict[str, float | None]:
    cpu, default = mx.Device(mx.cpu), mx.default_device()
    products = [_mlx_product(mx.float32, _SIZE, cpu), _numpy_product(_SIZE)]
    mlx_rate, numpy_rate = _gflops(products, _SIZE, runs=20)
    (bf16_rate,) = _gflops([_mlx_product(mx.bfloat16, _BF16_SIZE, cpu)], _BF16_SIZE, runs=3)
    rates: dict[str, float | None] = {
        "mlx_float32": round(mlx_rate, 1),
        "numpy_float32": round(numpy_rate, 1),
        "ratio": round(mlx_rate / numpy_rate, 3),
        "mlx_bfloat16": round(bf16_rate, 1),
        "default_device_float32": None,
    }
    if default.type == mx.DeviceType.gpu:
        (rate,) = _gflops([_mlx_product(mx.float32, _GPU_SIZE, default)], _GPU_SIZE, runs=8)
        rates["default_device_float32"] = round(rate, 1)
    return rates


def _lines(info: dict[str, Any]) -> list[tuple[str, str]]:
    machine, device, blas, rates = info["machine"], info["device"], info["blas"], info["matmul"]
    memory = "memory unknown" if machine["memory_gib"] is None else f"{machine['memory_gib']} GiB"
    lines = list(info["versions"].items())
    lines += [
        ("system", machine["os"]),
        ("processor", f"{machine['processor']}, {machine['cores']} cores, {memory}"),
        ("device", device["default"]),
    ]
    lines += [
        (f"  {key}", f"{value / 2**30:.1f} GiB" if key in _IN_BYTES else str(value))
        for key, value in device.get("info", {}).items()
    ]
    lines += [
        ("BLAS", f"{blas['origin']}: {blas['reason']}"),
        ("  library", blas["path"] or "none loaded by forge-mlx"),
        (
            "  float32",
            f"{rates['mlx_float32']} GFLOP/s on the CPU at {_SIZE}^3, numpy {rates['numpy_float32']}: "
            f"ratio {rates['ratio']:.2f}",
        ),
        (
            "  bfloat16",
            f"{rates['mlx_bfloat16']} GFLOP/s on the CPU at {_BF16_SIZE}^3: MLX calls no BLAS for it, "
            "so the trainer picks float32 on a CPU",
        ),
    ]
    if rates["default_device_float32"] is not None:
        lines.append(("  on the GPU", f"{rates['default_device_float32']} GFLOP/s in float32 at {_GPU_SIZE}^3"))
    missing = "no g++ found: on a CPU mx.compile then runs op by op instead of fusing"
    lines += [("C++ compiler", info["compiler"] or missing), ("kernel engine", info["kernel_engine"])]
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the report, or the same as JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="python -m forge_mlx.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    info = collect()
    if options.json:
        print(json.dumps(info, indent=2, default=str))
        return
    lines = _lines(info)
    width = max(len(name) for name, _ in lines) + 2
    for name, value in lines:
        print(f"{name:<{width}}{value}")


if __name__ == "__main__":
    # The reader may have had enough, as `head` does.
    with suppress(BrokenPipeError):
        main()
