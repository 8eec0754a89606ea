"""How a Metal kernel runs: sources, engines and the emulator. Knows MLX; knows no op."""

from forge_mlx.metal.engine import ENGINES, Engine, EngineName, resolve, use_engine
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.source import KernelSource, SourceError, load

__all__ = [
    "ENGINES",
    "Engine",
    "EngineName",
    "KernelSource",
    "MetalKernel",
    "SourceError",
    "load",
    "resolve",
    "use_engine",
]
