"""Loading a compiled kernel."""

from pathlib import Path

from forge_mlx.metal.emulator import native
from forge_mlx.metal.emulator.errors import ToolchainError
from forge_mlx.metal.emulator.settings import Settings
import numpy as np
import pytest
from runtime_launch import compiled


def test_a_library_that_the_system_does_not_load(tmp_path: Path):
    library = tmp_path / "kernel.so"
    library.write_bytes(b"no library")
    with pytest.raises(ToolchainError, match="FORGE_MLX_CACHE"):
        native.load(library)


def test_structures_that_differ_from_the_runtime(monkeypatch: pytest.MonkeyPatch):
    kernel = compiled("out[0] = 1.0f;", {}, {"out": np.zeros(1, np.float32)}, settings=Settings())
    native.load.__wrapped__(kernel.library)
    structures = (*native._STRUCTURES[:-1], native.Party)
    monkeypatch.setattr(native, "_STRUCTURES", structures)
    with pytest.raises(ToolchainError, match="differ"):
        native.load.__wrapped__(kernel.library)
