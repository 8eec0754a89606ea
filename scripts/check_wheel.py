"""Build sdist and wheel, compare the wheel with the tree, and use it in a new environment."""

import argparse
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = Path(__file__).parents[1]
NO_SOURCE = (".*", "__pycache__", "build", "dist", "*.egg-info", "runs")

# Runs where the checkout cannot be seen.
PROBE = """
import importlib.resources as resources, pkgutil, sys
import forge_mlx, forge_mlx.kernels, forge_mlx.models.gpt
assert forge_mlx.__file__.startswith(sys.prefix), forge_mlx.__file__
for module in pkgutil.walk_packages(forge_mlx.__path__, "forge_mlx."):
    if module.name.endswith("__main__"):
        continue
    try:
        __import__(module.name)
    except ModuleNotFoundError as error:
        # What the emulator's extra brings, and the tests'; neither is installed here.
        if (error.name or "").split(".")[0] not in ("elftools", "pytest"):
            raise
configs = [f.name for f in resources.files("forge_mlx.models").joinpath("configs").iterdir()]
assert "quickstart.yaml" in configs, configs
for name in ("kernels", "models", "tests"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported from the installed wheel")
"""


def expected_files(root: Path) -> set[str]:
    """What the wheel must hold: every file under forge_mlx, links followed, but for notes and caches."""
    files = set()
    for folder, _, names in os.walk(root / "forge_mlx", followlinks=True):
        if Path(folder).name != "__pycache__":
            files |= {(Path(folder) / name).relative_to(root).as_posix() for name in names}
    return {file for file in files if not file.endswith(".md")}


def wheel_files(wheel: Path) -> set[str]:
    """The wheel's files but for its own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}


def difference(root: Path, wheel: Path) -> list[str]:
    """One line for each file that is in the tree or in the wheel only."""
    tree, built = expected_files(root), wheel_files(wheel)
    return [f"not in the wheel: {name}" for name in sorted(tree - built)] + [
        f"in the wheel only: {name}" for name in sorted(built - tree)
    ]


def _run(*command: str | Path, cwd: Path) -> None:
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=True)


def _build(tree: Path, into: Path, *arguments: str) -> Path:
    _run(sys.executable, "-m", "build", "--outdir", into, *arguments, cwd=tree)
    (wheel,) = into.glob("*.whl")
    return wheel


def check(scratch: Path) -> list[str]:
    """Build in `scratch`, compare, install, use.

    Returns:
        What the wheels lack or have too much; empty when they are right and the one from the sdist works.

    Raises:
        subprocess.CalledProcessError: a build, the installation or an import has failed.
    """
    # Built from a copy: what an earlier build left in the tree would find its way into the wheel.
    tree = shutil.copytree(ROOT, scratch / "tree", symlinks=True, ignore=shutil.ignore_patterns(*NO_SOURCE))
    wheel, from_tree = _build(tree, scratch / "from sdist"), _build(tree, scratch / "from tree", "--wheel")
    found = [f"{built.parent.name}: {line}" for built in (wheel, from_tree) for line in difference(tree, built)]
    if not found:
        python = scratch / "venv" / "bin" / "python"
        _run(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
        _run(python, "-m", "pip", "install", "--quiet", f"{wheel}[cpu]", cwd=scratch)
        _run(python, "-c", PROBE, cwd=scratch)
        _run(python, "-m", "forge_mlx.train", "--help", cwd=scratch)
        print(f"{wheel.name}: its {len(wheel_files(wheel))} files are those of the tree, and it works installed")
    return found


def main() -> int:
    """The command. Returns its exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            found = check(Path(scratch))
        except subprocess.CalledProcessError as error:
            found = [f"exit status {error.returncode} of {' '.join(error.cmd[:3]).splitlines()[0]}"]
    for line in found:
        print(f"[check_wheel] {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
