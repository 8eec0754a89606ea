"""Where things live: the folders, the two links, what goes into the wheel, and which ways to import work."""

from dataclasses import dataclass
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

from packaging.requirements import Requirement
import pytest

from scripts import check_wheel

ROOT = Path(__file__).parents[1]
FOLDERS = [
    *(f"forge_mlx/{name}" for name in ("metal", "nn", "optim", "data", "train", "hub")),
    *("kernels", "models", "models/configs", "tests", "scripts", "scripts/bench"),
]


def run_python(code: str, *, cwd: Path, pythonpath: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if pythonpath is None else {"PYTHONPATH": str(pythonpath)})
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_exists_and_is_no_link(folder):
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder).is_symlink()


@pytest.mark.parametrize("name", ["kernels", "models"])
def test_package_holds_a_relative_link(name):
    link = ROOT / "forge_mlx" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize(
    "name",
    ["LICENSE", "README.md", "CONTRIBUTING.md", "forge_mlx/py.typed", ".ci/run", ".github/workflows/ci.yml"],
)
def test_file_exists(name):
    assert (ROOT / name).is_file()


def test_every_folder_with_code_is_a_package():
    code = {file.parent for folder in ("forge_mlx", "kernels", "models") for file in (ROOT / folder).rglob("*.py")}
    assert len(code) > 5
    assert [folder for folder in code if not (folder / "__init__.py").is_file()] == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the package is built from, links kept."""
    for name in ("forge_mlx", "kernels", "models"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@dataclass(frozen=True)
class Distribution:
    """What setuptools makes of pyproject.toml.

    Attributes:
        files: what it would put into a wheel.
        requires: requirements without an extra.
        extras: extra -> its requirements.
    """

    files: set[str]
    requires: list[str]
    extras: dict[str, list[str]]


def distribution(checkout: Path) -> Distribution:
    code = """
import json
from setuptools import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
files = [file.removeprefix("build/lib/") for file in command.get_outputs(include_bytecode=False)]
print(json.dumps([files, distribution.install_requires, distribution.extras_require]))
"""
    result = run_python(code, cwd=checkout)
    assert result.returncode == 0, result.stderr
    files, requires, extras = json.loads(result.stdout.splitlines()[-1])
    return Distribution(set(files), requires, extras)


def test_wheel_holds_every_file_and_nothing_else(checkout):
    room = checkout / "kernels" / "planted" / "inner"
    room.mkdir(parents=True)
    for file in (
        room.parent / "__init__.py",
        room.parent / "forward.metal",
        room / "__init__.py",
        room / "tile.h",
    ):
        file.touch()
    (checkout / "tests").mkdir()
    (checkout / "tests" / "__init__.py").touch()
    built = distribution(checkout).files
    assert built == check_wheel.expected_files(checkout)
    assert {"forge_mlx/kernels/planted/forward.metal", "forge_mlx/kernels/planted/inner/tile.h"} <= built
    assert {
        "forge_mlx/models/configs/quickstart.yaml",
        "forge_mlx/train/report.html",
        "forge_mlx/py.typed",
    } <= built


def test_bare_checkout_works_through_pythonpath(checkout, tmp_path_factory):
    code = "import forge_mlx.kernels as a, forge_mlx.models.gpt as b; print(a.__file__, b.__file__)"
    result = run_python(code, cwd=tmp_path_factory.mktemp("elsewhere"), pythonpath=checkout)
    assert result.returncode == 0, result.stderr
    files = [f"{checkout}/forge_mlx/kernels/__init__.py", f"{checkout}/forge_mlx/models/gpt.py"]
    assert result.stdout.split() == files


@pytest.mark.parametrize("name", ["kernels", "models"])
@pytest.mark.parametrize(
    "way", ["from NAME import gpt", "from NAME import *", "import NAME.gpt", "import NAME; NAME.gpt"]
)
def test_folder_beside_the_package_is_not_used_by_mistake(name, way):
    result = run_python(way.replace("NAME", name), cwd=ROOT)
    assert result.returncode == 1
    kind, message = result.stderr.strip().splitlines()[-1].split(": ", 1)
    assert kind == ("AttributeError" if ";" in way else "ImportError")
    assert message.startswith(f"import forge_mlx.{name}, not {name}: ")


@pytest.mark.parametrize("name", ["kernels", "models"])
def test_a_library_that_looks_for_such_a_name_gets_no_error(name):
    code = f"""
import importlib, pickle, sys
from importlib.util import find_spec
module = importlib.import_module({name!r})
assert find_spec({name!r}) is module.__spec__
assert not hasattr(module, "get_kernel")
print(getattr(module, "__version__", None), "mlx" in sys.modules, "forge_mlx" in sys.modules)
# Pickling a function that does not say where it is from asks every module.
def planted(): pass
planted.__module__ = None
sys.modules["last"] = type(sys)("last")
sys.modules["last"].planted = planted
del planted
assert pickle.loads(pickle.dumps(sys.modules["last"].planted)).__name__ == "planted"
"""
    result = run_python(code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0" if name == "kernels" else "None", "False", "False"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers comes with mlx-lm, which needs Python 3.11")
def test_transformers_does_not_take_the_folder_for_its_optional_package():
    code = "from transformers.utils.import_utils import is_kernels_available as a; print(a())"
    result = run_python(code, cwd=ROOT)
    assert (result.stdout, result.returncode) == ("False\n", 0), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="mlx-lm needs Python 3.11")
def test_transformers_and_mlx_lm_work_at_the_root():
    code = """
import sys, transformers, mlx_lm.generate
transformers.LlamaForCausalLM, transformers.AutoTokenizer
print(sys.modules["kernels"].__file__)
"""
    result = run_python(code, cwd=ROOT)
    assert (result.stdout, result.returncode) == (f"{ROOT / 'kernels' / '__init__.py'}\n", 0), result.stderr


def test_extra_cpu_is_for_linux_only(checkout):
    found = distribution(checkout)
    assert "mlx>=0.32.4" in found.requires
    cpu = [Requirement(text) for text in found.extras["cpu"]]
    assert {item.name for item in cpu} == {"mlx", "scipy-openblas32"}
    for item in cpu:
        assert item.marker.evaluate({"sys_platform": "linux"})
        assert not item.marker.evaluate({"sys_platform": "darwin"})


def test_no_extra_is_empty(checkout):
    extras = distribution(checkout).extras
    assert {"cpu", "cuda", "test"} <= extras.keys()
    assert all(extras.values())
