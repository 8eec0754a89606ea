"""Which BLAS is loaded on Linux, what MLX makes of it, and what happens when it cannot be loaded."""

from dataclasses import dataclass
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

from forge_mlx import _cache, blas
from forge_mlx._elf import export_only
import platformdirs
import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="on macOS forge_mlx loads no BLAS")

# Runs before anything else in a child process: hides the BLAS libraries that the machine may have.
HIDE_SYSTEM = """
import ctypes
class Hidden(ctypes.CDLL):
    def __init__(self, name=None, *rest, **more):
        if name in {hidden!r}:
            raise OSError(f"{{name}} is hidden")
        super().__init__(name, *rest, **more)
ctypes.CDLL = Hidden
"""
HIDE_EXTRA = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "scipy_openblas32" else find_spec(name)
"""
REPORT = """
import ctypes, json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import forge_mlx
    forge_mlx.load_blas()
from forge_mlx import blas
def names_exported():
    everything = ctypes.CDLL(None)
    names = ["cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "cblas_sgemv", "sgemm_", "dlaqz0_", "scipy_dgemm_"]
    return [name for name in names if hasattr(everything, name)]
choice = forge_mlx.blas_choice()
used = blas._global_blas()
print(json.dumps({
    "origin": choice.origin,
    "path": None if choice.path is None else str(choice.path),
    "reason": choice.reason,
    "warnings": [str(w.message) for w in caught if w.category is forge_mlx.SlowBlasWarning],
    "used": None if used is None else str(used),
    "exported": names_exported(),
}))
"""


@dataclass(frozen=True)
class Report:
    """What a child process said about its BLAS, and what the dynamic linker did.

    Attributes:
        bound: the file that libmlx.so's cblas_sgemm was bound to.
    """

    origin: str
    path: str | None
    reason: str
    warnings: list[str]
    used: str | None
    exported: list[str]
    bound: str

    @property
    def reference(self) -> bool:
        """Whether MLX runs on the library that its wheel brings."""
        return Path(self.bound).parent.name == "mlx_cpu.libs"


class Child:
    """A Python process with its own cache folder, watched by the dynamic linker's log."""

    def __init__(self, code: str, cache: Path, **environment: str):
        inherited = {key: value for key, value in os.environ.items() if key not in ("FORGE_MLX_BLAS", "LD_PRELOAD")}
        self.log = tempfile.TemporaryDirectory()
        own = {
            "FORGE_MLX_CACHE": str(cache),
            "LD_DEBUG": "bindings",
            "LD_DEBUG_OUTPUT": f"{self.log.name}/log",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=inherited | own | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str, str]:
        """Exit status, standard output, standard error, the linker's log."""
        with self.log:
            out, err = self.process.communicate(timeout=120)
            log = Path(f"{self.log.name}/log.{self.process.pid}").read_text()
        return self.process.returncode, out, err, log

    def report(self) -> Report:
        status, out, err, log = self.finish()
        assert status == 0, err
        line = r"binding file \S*/libmlx\.so \[0\] to (\S+) \[0\]: normal symbol `cblas_sgemm'"
        (bound,) = re.findall(line, log)
        return Report(**json.loads(out), bound=bound)


def report(cache: Path, before: str = "", **environment: str) -> Report:
    return Child(before + REPORT, cache, **environment).report()


def refused(cache: Path, **environment: str) -> str:
    """The last line of the error with which `import forge_mlx` ends."""
    status, _, err, _ = Child("import forge_mlx", cache, **environment).finish()
    assert status == 1
    return err.strip().splitlines()[-1]


def hide_system(*keep: str) -> str:
    return HIDE_SYSTEM.format(hidden=[name for name in blas._SYSTEM_LIBRARIES if name not in keep])


def extra_library() -> Path:
    library = blas._extra_library()
    assert library is not None, 'these tests need pip install -e ".[cpu,test]"'
    return library


def write_library(path: Path, *names: str) -> Path:
    """A library at `path` with `names` as its only exports, made from the `cpu` extra's."""
    image = bytearray(extra_library().read_bytes())
    export_only(image, {f"scipy_{name}": name for name in names})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the tests that do not look into it: the copy is made once."""
    return tmp_path_factory.mktemp("cache")


@linux
def test_extra_is_used_and_mlx_is_fast(cache):
    result = report(cache)
    assert (result.origin, result.warnings) == ("cpu extra", [])
    assert result.path == result.used
    assert Path(result.used).parent == cache / "blas"
    assert result.bound == result.path


@linux
def test_copy_exports_three_names_only(cache):
    assert report(cache).exported == ["cblas_sgemm", "cblas_dgemm", "cblas_cgemm"]


@linux
def test_products_agree_with_numpy(cache):
    code = """
import forge_mlx, numpy as np, mlx.core as mx
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
for kind, dtype, rtol in (("f", mx.float32, 1e-5), ("d", mx.float64, 1e-12), ("F", mx.complex64, 1e-5)):
    parts = rng.standard_normal((4, 67, 67))
    a, b = parts[:2].astype(kind), parts[2:].astype(kind)
    a, b = (x[0] + x[1] * (1j if kind == "F" else 1) for x in (a, b))
    for left, right in ((a, b), (a.T, b), (a, b.T)):
        got = np.array(mx.array(left, dtype=dtype) @ mx.array(right, dtype=dtype))
        want = left @ right
        assert got.dtype == want.dtype
        assert np.abs(got - want).max() <= rtol * np.abs(want).max(), kind
"""
    status, _, err, _ = Child(code, cache).finish()
    assert status == 0, err


@linux
def test_off_leaves_mlx_alone_without_a_warning(cache):
    result = report(cache, FORGE_MLX_BLAS="off")
    assert (result.origin, result.path, result.used, result.warnings) == ("mlx", None, None, [])
    assert "FORGE_MLX_BLAS=off" in result.reason
    assert result.reference


@linux
def test_named_library_is_used(cache, tmp_path):
    library = write_library(tmp_path / "mine.so", *blas._NAMES)
    result = report(cache, FORGE_MLX_BLAS=str(library))
    assert (result.origin, result.path, result.used) == ("FORGE_MLX_BLAS", str(library), str(library))
    assert result.bound == result.path


@linux
def test_named_library_with_the_prefix_is_renamed(tmp_path):
    result = report(tmp_path, FORGE_MLX_BLAS=str(extra_library()))
    assert result.origin == "FORGE_MLX_BLAS"
    assert result.path == result.used
    assert Path(result.used).parent == tmp_path / "blas"
    assert result.bound == result.path


@linux
@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("/no/such/library.so", "there is no such file"),
        ("libno-such-blas.so.0", "libno-such-blas.so.0"),
        (__file__, "invalid ELF header"),
        ("libm.so.6", "neither cblas_sgemm nor scipy_cblas_sgemm"),
    ],
    ids=["missing file", "missing name", "not a library", "no BLAS in it"],
)
def test_bad_setting_is_an_error(cache, setting, problem):
    line = refused(cache, FORGE_MLX_BLAS=setting)
    assert line.startswith("ImportError: [blas] FORGE_MLX_BLAS must be 'off' or a BLAS library")
    assert repr(setting) in line
    assert problem in line


@linux
def test_named_library_that_comes_second_is_an_error(cache, tmp_path):
    first, second = (write_library(tmp_path / name, *blas._NAMES) for name in ("first.so", "second.so"))
    line = refused(cache, FORGE_MLX_BLAS=str(second), LD_PRELOAD=str(first))
    assert f"already has cblas_sgemm from {first}" in line


@linux
@pytest.mark.parametrize("before", ["", "import mlx.core\n"], ids=["forge_mlx first", "mlx first"])
def test_preloaded_library_is_kept(cache, tmp_path, before):
    library = write_library(tmp_path / "preloaded.so", *blas._NAMES)
    result = report(cache, before, LD_PRELOAD=str(library))
    assert (result.origin, result.path, result.warnings) == ("preloaded", str(library), [])
    assert result.bound == result.path


@linux
def test_mlx_first_warns_once_and_its_remedy_works(cache):
    result = report(cache, "import mlx.core\n")
    assert (result.origin, result.path) == ("mlx", None)
    (warning,) = result.warnings
    assert "mlx.core was imported before forge_mlx" in warning
    assert result.reference
    preload = warning.split("LD_PRELOAD=")[1].removesuffix(".")
    assert report(cache, "import mlx.core\n", LD_PRELOAD=preload).bound == preload


@linux
def test_system_library_is_used_without_the_extra(cache, tmp_path):
    library = write_library(tmp_path / "libopenblas.so.0", *blas._NAMES, "openblas_get_config")
    before = HIDE_EXTRA + hide_system("libopenblas.so.0")
    result = report(cache, before, LD_LIBRARY_PATH=str(tmp_path))
    assert (result.origin, result.path, result.warnings) == ("system", str(library), [])
    assert "the cpu extra is not installed" in result.reason
    assert result.bound == result.path


@linux
def test_unknown_blas_under_a_known_name_is_passed_over(cache, tmp_path):
    write_library(tmp_path / "libopenblas.so.0", *blas._NAMES)
    before = HIDE_EXTRA + hide_system("libopenblas.so.0")
    result = report(cache, before, LD_LIBRARY_PATH=str(tmp_path))
    assert (result.origin, result.used) == ("mlx", None)


@linux
@pytest.mark.parametrize("before", ["", "import mlx.core\n"], ids=["forge_mlx first", "mlx first"])
def test_without_any_library_it_warns_once(cache, before):
    result = report(cache, before + HIDE_EXTRA + hide_system())
    assert (result.origin, result.path) == ("mlx", None)
    (warning,) = result.warnings
    assert 'pip install "forge-mlx[cpu]"' in warning
    assert result.reference


def keep_half(image: bytes) -> bytes:
    return image[: len(image) // 2]


def spoil_hash_table(image: bytes) -> bytes:
    """Without the section that the exports are found by."""
    return image[:60] + b"\0\0" + image[62:]


@linux
@pytest.mark.parametrize("damage", [keep_half, spoil_hash_table, lambda _: b"no library"])
def test_unusable_extra_falls_to_the_next_and_says_why(cache, tmp_path, damage):
    library = tmp_path / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "scipy_openblas32" / "__init__.py").touch()
    library.write_bytes(damage(extra_library().read_bytes()))
    result = report(cache, hide_system(), PYTHONPATH=str(tmp_path))
    assert result.origin == "mlx"
    assert "the cpu extra's library is unusable" in result.reason
    assert len(result.warnings) == 1


@linux
def test_unusable_cache_folder_is_replaced_by_a_copy_for_the_process(tmp_path):
    (tmp_path / "file").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = report(tmp_path / "file" / "cache", TMPDIR=str(temporary))
    assert (result.origin, result.warnings) == ("cpu extra", [])
    assert "the cache folder is unusable" in result.reason
    assert Path(result.bound).is_relative_to(temporary)
    assert list(temporary.iterdir()) == []


@linux
@pytest.mark.parametrize("damage", [keep_half, lambda image: bytes(len(image))], ids=["half", "zeros"])
def test_damaged_copy_is_made_again(tmp_path, damage):
    report(tmp_path)
    (copy,) = (tmp_path / "blas").iterdir()
    good = copy.read_bytes()
    copy.write_bytes(damage(good))
    result = report(tmp_path)
    assert (result.origin, result.used) == ("cpu extra", str(copy))
    assert result.bound == result.path
    assert list((tmp_path / "blas").iterdir()) == [copy]
    assert copy.read_bytes() == good


@linux
def test_good_copy_is_not_made_again(tmp_path):
    report(tmp_path)
    (copy,) = (tmp_path / "blas").iterdir()
    before = copy.stat()
    report(tmp_path)
    after = copy.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@linux
def test_newer_library_gets_its_own_copy(tmp_path):
    library = tmp_path / "libscipy_openblas.so"
    library.write_bytes(extra_library().read_bytes())
    first = report(tmp_path / "cache", FORGE_MLX_BLAS=str(library)).path
    os.utime(library, (1, 1))
    assert report(tmp_path / "cache", FORGE_MLX_BLAS=str(library)).path != first


@linux
def test_four_processes_share_an_empty_cache(tmp_path):
    results = [child.report() for child in [Child(REPORT, tmp_path) for _ in range(4)]]
    assert {result.origin for result in results} == {"cpu extra"}
    (path,) = {result.used for result in results}
    assert [str(file) for file in (tmp_path / "blas").iterdir()] == [path]


@linux
def test_copy_does_not_stand_in_for_the_original(cache):
    """A library linked to libscipy_openblas.so by name must still be given that one, with all its names."""
    code = "import forge_mlx, ctypes; assert ctypes.CDLL('libscipy_openblas.so').scipy_cblas_sgemm"
    status, _, err, _ = Child(code, cache, LD_LIBRARY_PATH=str(extra_library().parent)).finish()
    assert status == 0, err


def test_macos_loads_nothing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("FORGE_MLX_BLAS", "/no/such/library.so")
    choice = blas._choose()
    assert (choice.origin, choice.path) == ("accelerate", None)


def test_slow_blas_warns_for_the_cpu_build_only(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("FORGE_MLX_BLAS", raising=False)
    monkeypatch.setattr(blas, "_global_blas", lambda: None)
    monkeypatch.setattr(blas, "_load_found", lambda: blas.BlasChoice("mlx", None, "nothing found"))
    monkeypatch.setattr(blas, "_mlx_build", lambda: "cuda")
    assert blas._choose().origin == "mlx"
    monkeypatch.setattr(blas, "_mlx_build", lambda: "cpu")
    with pytest.warns(blas.SlowBlasWarning, match="nothing found"):
        blas._choose()


@pytest.mark.parametrize(
    ("files", "build"),
    [
        (["mlx/lib/libmlx.so", "mlx_cpu-0.32.4.dist-info"], "cpu"),
        (["mlx/lib/libmlx.so", "mlx_cuda_13-0.32.4.dist-info"], "cuda"),
        (["mlx/core.so"], None),
    ],
    ids=["cpu", "cuda", "none"],
)
def test_build_is_told_without_importing_mlx(monkeypatch, tmp_path, files, build):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "mlx")])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert blas._mlx_build() == build


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FORGE_MLX_CACHE", str(tmp_path))
    assert _cache.cache_dir() == tmp_path
    monkeypatch.setenv("FORGE_MLX_CACHE", "~/kept")
    assert _cache.cache_dir() == Path.home() / "kept"
    monkeypatch.delenv("FORGE_MLX_CACHE")
    assert _cache.cache_dir() == Path(platformdirs.user_cache_dir("forge-mlx", appauthor=False))
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: "~/.cache/forge-mlx")
    with pytest.raises(OSError, match="Set FORGE_MLX_CACHE"):
        _cache.cache_dir()
