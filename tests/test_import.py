"""`import forge_mlx` where MLX has no usable build."""

import os
from pathlib import Path
import subprocess
import sys

import pytest


def import_with(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder), "FORGE_MLX_CACHE": str(folder / "cache")}
    environment.pop("FORGE_MLX_BLAS", None)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def no_build(tmp_path: Path) -> Path:
    """A folder whose `mlx` fails as the bare wheel does on Linux: its extension module finds no libmlx.so."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')\n")
    return tmp_path


def test_missing_build_names_the_extras(no_build):
    result = import_with(no_build, "import forge_mlx")
    assert result.returncode == 1
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: [forge_mlx] a usable MLX build is required")
    assert "libmlx.so: cannot open shared object file" in message
    assert 'pip install "forge-mlx[cpu]"' in message
    assert '(in a checkout pip install -e ".[cpu]"), or the extra cuda with an NVIDIA GPU' in message
    assert "SlowBlasWarning" not in result.stderr


def test_missing_build_keeps_the_cause(no_build):
    code = """
try:
    import forge_mlx
except ImportError as error:
    print(type(error.__cause__).__name__, error.__cause__)
"""
    result = import_with(no_build, code)
    assert result.stdout == "ImportError libmlx.so: cannot open shared object file\n"


def test_import_brings_mlx_and_the_version(tmp_path):
    code = "import sys, forge_mlx; print('mlx.core' in sys.modules, forge_mlx.__version__)"
    loaded, version = import_with(tmp_path, code).stdout.split()
    assert loaded == "True"
    assert version.count(".") == 2
