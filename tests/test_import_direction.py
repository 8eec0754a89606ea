"""Imports go one way: metal <- kernels <- nn <- models <- train, with data, optim and hub beside nn.

Read from the source of every module, so that an import inside a function or under TYPE_CHECKING counts too.
"""

import ast
from collections.abc import Iterator
from importlib import metadata
import os
from pathlib import Path
import re
import sys

import pytest

ROOT = Path(__file__).parents[1]

# What a part of forge_mlx may import of forge_mlx beside itself. "_" stands for the small helpers at the top
# (_cache, _config ...), "" for the package itself.
ALLOWED = {
    "": {"blas", "patching", "_"},
    "_": set(),
    "blas": {"_"},
    "metal": {"_"},
    "kernels": {"metal"},
    "nn": {"kernels", "metal", "_"},
    "patching": {"kernels", "metal"},
    "models": {"nn", "kernels", "metal", "_"},
    "optim": {"nn", "kernels", "metal", "_"},
    "data": {"_"},
    "hub": {"models", "data", "nn", "kernels", "metal", "_", ""},
    "info": {"metal", "blas", "_", ""},
    "sampling": {"models", "nn", "kernels", "metal", "_"},
    "train": {"hub", "data", "optim", "models", "nn", "kernels", "metal", "info", "sampling", "blas", "_", ""},
    "opened_model": {"train", "hub", "data", "models", "nn", "kernels", "metal", "info", "sampling", "blas", "_", ""},
    "chat": {"data", "models", "nn", "kernels", "metal", "sampling", "_"},
    "generate": {"opened_model", "chat", "sampling", "data", "models", "nn", "kernels", "metal", "_", ""},
    "evaluation": {"data", "models", "nn", "kernels", "metal", "_"},
    "evaluate": {"opened_model", "evaluation", "data", "models", "nn", "kernels", "metal", "_", ""},
    "export": {"opened_model", "train", "hub", "data", "models", "nn", "kernels", "metal", "_", ""},
    "adapter": {"hub", "models", "_"},
}
# The command of a part may know more than the part itself.
COMMANDS = {"forge_mlx.data.__main__": {"hub", "models", "train"}}
# A kernel can be taken out and used in any MLX model.
FEW_DEPENDENCIES = {"metal": {"mlx", "numpy"}, "kernels": {"mlx", "numpy"}}
# What only an extra brings: the import's name -> the one part that may import it, and the distribution's name.
OPTIONAL = {
    "elftools": ("forge_mlx.metal.emulator.lines", "pyelftools"),
    "pytest": ("forge_mlx.metal.emulator.pytest_plugin", "pytest"),
    "pyarrow": ("forge_mlx.data.parquet", "pyarrow"),
}


def modules(root: Path) -> dict[str, Path]:
    """Module name -> file, for everything under root/forge_mlx, links followed."""
    found = {}
    for folder, _, names in os.walk(root / "forge_mlx", followlinks=True):
        for file in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(module: str, file: Path) -> Iterator[str]:
    """Dotted names that a file imports. Of `from a import b`, `a.b`: b may be a module."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def part_of(name: str, known: dict[str, Path]) -> str:
    """The part of forge_mlx that a dotted name belongs to, as ALLOWED calls it."""
    component = name.split(".")[1] if "." in name else ""
    if f"forge_mlx.{component}" not in known:
        return ""  # A name that forge_mlx/__init__.py defines.
    return "_" if component.startswith("_") else component


def violations(root: Path) -> list[str]:
    """One line for each import that goes the wrong way."""
    known = modules(root)
    found = []
    for module, file in known.items():
        part = part_of(module, known)
        if part not in ALLOWED:
            found.append(f"{module}: no rule says what forge_mlx.{part} may import: add one")
            continue
        for name in sorted(set(imported(module, file))):
            top = name.split(".")[0]
            if top in OPTIONAL:
                if module != OPTIONAL[top][0]:
                    found.append(f"{module} imports {name}: {part} may not know {top}")
            elif top == "forge_mlx":
                target = part_of(name, known)
                if target != part and target not in ALLOWED[part] | COMMANDS.get(module, set()):
                    found.append(f"{module} imports {name}: {part or 'forge_mlx'} may not know {target or top}")
            elif part in FEW_DEPENDENCIES and top not in sys.stdlib_module_names | FEW_DEPENDENCIES[part]:
                found.append(f"{module} imports {name}: {part} may not know {top}")
    return found


def test_imports_go_one_way():
    assert violations(ROOT) == []


def test_every_module_is_read():
    read = {file.resolve() for file in modules(ROOT).values()}
    on_disk = {file for folder in ("forge_mlx", "kernels", "models") for file in (ROOT / folder).rglob("*.py")}
    assert len(read) > 30
    assert read == {file.resolve() for file in on_disk}


def test_what_is_imported_is_declared():
    required = [item for item in metadata.requires("forge-mlx") or [] if "extra ==" not in item]
    declared = {re.split(r"[^A-Za-z0-9_]", item)[0].lower() for item in required}
    found = {name.split(".")[0] for module, file in modules(ROOT).items() for name in imported(module, file)}
    assert found - sys.stdlib_module_names - {"forge_mlx"} <= declared | OPTIONAL.keys()


def test_what_is_optional_is_in_an_extra():
    extras = [item for item in metadata.requires("forge-mlx") or [] if "extra ==" in item]
    declared = {re.split(r"[^A-Za-z0-9]", item)[0].lower() for item in extras}
    assert {distribution for _, distribution in OPTIONAL.values()} <= declared


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree, laid out as the real one, in which every import is allowed."""
    files = {
        "forge_mlx/__init__.py": "from forge_mlx.blas import load_blas\n__version__ = '1'",
        "forge_mlx/_config.py": "import pydantic",
        "forge_mlx/blas.py": "from forge_mlx import _config",
        "forge_mlx/metal/__init__.py": "import mlx.core as mx\nfrom .. import _config",
        "kernels/__init__.py": "",
        "kernels/norms/__init__.py": "import numpy\nfrom .op import f",
        "kernels/norms/op.py": "from forge_mlx import metal\nfrom ...metal import k\nfrom .. import _x",
        "forge_mlx/nn/__init__.py": "from forge_mlx.kernels.norms import op",
        "forge_mlx/optim/__init__.py": "",
        "models/__init__.py": "",
        "models/gpt.py": "from ..nn import norms\nfrom .._config import Section",
        "forge_mlx/data/__init__.py": "import sentencepiece",
        "forge_mlx/hub/__init__.py": "from forge_mlx import __version__, models",
        "forge_mlx/train/__init__.py": "from forge_mlx.models import gpt\nfrom forge_mlx.hub import native",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    for folder in ("kernels", "models"):
        (tmp_path / "forge_mlx" / folder).symlink_to(f"../{folder}")
    return tmp_path


def test_allowed_imports_pass(tree):
    assert violations(tree) == []


PLANTED = [
    ("forge_mlx/metal/kernel.py", "from forge_mlx.kernels import rms_norm", "metal may not know kernels"),
    ("forge_mlx/metal/kernel.py", "from forge_mlx import blas_choice", "metal may not know forge_mlx"),
    ("forge_mlx/metal/kernel.py", "import elftools", "metal may not know elftools"),
    ("forge_mlx/metal/kernel.py", "def f():\n    from pytest import raises", "metal may not know pytest"),
    ("kernels/norms/op.py", "from forge_mlx.nn import norms", "kernels may not know nn"),
    ("kernels/norms/op.py", "from forge_mlx import nn", "kernels may not know nn"),
    ("kernels/norms/op.py", "from ...nn import norms", "kernels may not know nn"),
    ("kernels/norms/op.py", "from ..._config import Section", "kernels may not know _"),
    ("kernels/norms/op.py", "import pydantic", "kernels may not know pydantic"),
    ("kernels/norms/op.py", "import torch.nn as F", "kernels may not know torch"),
    ("forge_mlx/nn/norms.py", "def f():\n    import forge_mlx.models.gpt", "nn may not know models"),
    ("forge_mlx/nn/norms.py", "if TYPE_CHECKING:\n    from ..train import loop", "nn may not know train"),
    ("models/gpt.py", "import_module('forge_mlx.train')", "models may not know train"),
    ("models/gpt.py", "from forge_mlx.data import stream", "models may not know data"),
    ("forge_mlx/data/corpus.py", "from ..models import gpt", "data may not know models"),
    ("forge_mlx/data/corpus.py", "from forge_mlx.optim import groups", "data may not know optim"),
    ("forge_mlx/optim/groups.py", "from ..data import corpus", "optim may not know data"),
    ("forge_mlx/optim/groups.py", "from forge_mlx.hub import native", "optim may not know hub"),
    ("forge_mlx/hub/native.py", "from forge_mlx.train.loop import train", "hub may not know train"),
    ("forge_mlx/_config.py", "from . import blas", "_ may not know blas"),
    ("forge_mlx/blas.py", "import forge_mlx.nn", "blas may not know nn"),
    ("forge_mlx/new.py", "", "no rule says what forge_mlx.new may import"),
]


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    PLANTED,
    ids=[f"{file}: {line.splitlines()[-1].strip() if line else 'new'}" for file, line, _ in PLANTED],
)
def test_planted_violation_is_found(tree, file, line, rule):
    with (tree / file).open("a") as source:
        source.write(line + "\n")
    (found,) = violations(tree)
    assert rule in found
    assert found.startswith(f"forge_mlx.{file.removeprefix('forge_mlx/').removesuffix('.py').replace('/', '.')}")
