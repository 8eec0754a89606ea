"""`python -m forge_mlx.info`: versions, machine, BLAS and measured speed, to read or for a bug report."""

import argparse
from collections.abc import Callable
from importlib import metadata
import json
import os
from pathlib import Path
import platform
import shutil
import time
from typing import Any

import forge_mlx
import mlx.core as mx
import numpy as np

_PACKAGES = ("mlx", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal", "numpy", "scipy-openblas32")
_BF16_SIZE = 512


def matmul_gflops(dtype: mx.Dtype, n: int = 1024, *, device: mx.Device | None = None, runs: int = 8) -> float:
    """`2 n^3 / seconds / 1e9` of MLX's `a @ b` for `[n, n]` operands of `dtype`, the best of `runs`.

    Args:
        dtype: a floating-point type.
        n: rows and columns, at least 1.
        device: where the product runs; the default device when None.
        runs: how often it is timed, at least 1. One untimed run comes first.

    Returns:
        GFLOP/s.
    """
    stream = mx.default_device() if device is None else device
    a, b = (mx.ones((n, n), dtype=dtype) for _ in range(2))
    mx.eval(a, b)
    return _gflops(lambda: mx.eval(mx.matmul(a, b, stream=stream)), n, runs)


def _numpy_gflops(n: int, runs: int) -> float:
    a = np.ones((n, n), dtype=np.float32)
    return _gflops(lambda: a @ a, n, runs)


def _gflops(product: Callable[[], object], n: int, runs: int) -> float:
    product()
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best / 1e9


def collect() -> dict[str, Any]:
    """Everything the command prints, as JSON types; a value that this machine cannot tell is None.

    Returns:
        `versions` (name -> version, installed packages only), `machine`, `device`, `blas` (origin, path,
        reason), `matmul` (GFLOP/s on the CPU), `compiler` (path of g++, None if absent) and `kernel_engine`.
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
        "kernel_engine": "none yet; forge_mlx.nn uses mx.fast",
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
        details["info"] = dict(mx.device_info(device))
    return details


def _matmul_rates() -> dict[str, float | None]:
    """Rates on the CPU. MLX and NumPy take turns, so that a busy moment of the machine hits both."""
    mlx_rate = numpy_rate = 0.0
    for _ in range(5):
        mlx_rate = max(mlx_rate, matmul_gflops(mx.float32, device=mx.Device(mx.cpu), runs=4))
        numpy_rate = max(numpy_rate, _numpy_gflops(1024, runs=4))
    bf16_rate = matmul_gflops(mx.bfloat16, _BF16_SIZE, device=mx.Device(mx.cpu), runs=2)
    rates: dict[str, float | None] = {
        "mlx_float32": round(mlx_rate, 1),
        "numpy_float32": round(numpy_rate, 1),
        "ratio": round(mlx_rate / numpy_rate, 3),
        "mlx_bfloat16": round(bf16_rate, 1),
        "default_device_float32": None,
    }
    if mx.default_device().type == mx.DeviceType.gpu:
        rates["default_device_float32"] = round(matmul_gflops(mx.float32, 4096), 1)
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
    lines += [(f"  {key}", str(value)) for key, value in device.get("info", {}).items()]
    lines += [
        ("BLAS", f"{blas['origin']}: {blas['reason']}"),
        ("  library", blas["path"] or "none loaded by forge-mlx"),
        (
            "  float32",
            f"{rates['mlx_float32']} GFLOP/s on the CPU at 1024^3, numpy {rates['numpy_float32']}: "
            f"ratio {rates['ratio']:.2f}",
        ),
        (
            "  bfloat16",
            f"{rates['mlx_bfloat16']} GFLOP/s on the CPU at {_BF16_SIZE}^3: MLX calls no BLAS for it, "
            "so the trainer picks float32 on a CPU",
        ),
    ]
    if rates["default_device_float32"] is not None:
        lines.append(("  on the GPU", f"{rates['default_device_float32']} GFLOP/s in float32 at 4096^3"))
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
    for name, value in _lines(info):
        print(f"{name:<18}{value}")


if __name__ == "__main__":
    main()
