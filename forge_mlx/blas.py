"""A fast BLAS for MLX on Linux, loaded before `mlx.core` is first imported.

MLX's CPU wheel for Linux links the reference BLAS, which multiplies matrices 20 to 50 times slower than
OpenBLAS does. The dynamic linker binds `libmlx.so` to the first *global* definition of `cblas_sgemm`,
`cblas_dgemm` and `cblas_cgemm` (all that MLX's matmul calls), so a library loaded with `RTLD_GLOBAL` before
replaces them. Afterwards is too late: Python loads extension modules with every symbol bound at once.

The order: `FORGE_MLX_BLAS` (a library, or `off`), a BLAS that the process already has globally, the `cpu`
extra, a system library, MLX's own. The `cpu` extra brings `scipy-openblas32`, the self-contained OpenBLAS
build (x86-64 and aarch64, 8 MB to download) from the people who make NumPy's. Its names begin with `scipy_`,
so a copy with plain names is kept in the cache folder. The copy exports the three names above and nothing
else: with more, NumPy's and SciPy's own OpenBLAS would bind to it as well, NumPy's with integers of another
size.

MKL is never picked on its own: `libmkl_rt` ends the process when it cannot find its helper libraries. It
works when `FORGE_MLX_BLAS` names it. OpenBLAS's own settings (`OPENBLAS_NUM_THREADS` ...) are the user's.
"""

import ctypes
from dataclasses import dataclass
import importlib.util
import os
from pathlib import Path
import struct
import sys
import tempfile
from typing import Literal
import warnings

from forge_mlx._cache import cache_dir
from forge_mlx._elf import export_only

_NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_PREFIX = "scipy_"
# A symbol that only this implementation has: a system may let a reference BLAS stand in under another's name.
_SYSTEM_LIBRARIES = {
    "libopenblas.so.0": "openblas_get_config",
    "libopenblasp.so.0": "openblas_get_config",
    "libblis.so.4": "bli_info_get_version_str",
    "libblis-mt.so.4": "bli_info_get_version_str",
}
_INSTALL = 'pip install "forge-mlx[cpu]" (in a checkout pip install -e ".[cpu]")'

Origin = Literal["FORGE_MLX_BLAS", "preloaded", "cpu extra", "system", "mlx", "accelerate"]


class SlowBlasWarning(RuntimeWarning):
    """MLX multiplies matrices on the CPU with its own slow BLAS."""


@dataclass(frozen=True)
class BlasChoice:
    """Which BLAS MLX's CPU back end uses, and why.

    Attributes:
        origin: `"FORGE_MLX_BLAS"` (named by the user), `"preloaded"` (the process had one globally, from
            LD_PRELOAD for example), `"cpu extra"`, `"system"`, `"mlx"` (what libmlx.so links, the reference
            in the mlx-cpu wheel) or `"accelerate"` (macOS).
        path: the library's file, None for `"mlx"` and `"accelerate"`.
        reason: one line for people.
    """

    origin: Origin
    path: Path | None
    reason: str


_choice: BlasChoice | None = None


def load_blas() -> BlasChoice:
    """Load the BLAS that MLX will use on Linux, once; later calls return the first result.

    The CUDA build is treated alike, as its CPU streams call a BLAS too, but without the warning when there is
    none.

    Returns:
        What was chosen, and why.

    Raises:
        ImportError: `FORGE_MLX_BLAS` names a library that cannot take over `cblas_sgemm`.
    """
    global _choice
    if _choice is None:
        _choice = _choose()
    return _choice


def blas_choice() -> BlasChoice:
    """The BLAS in use: the result of `load_blas`, which runs now if it has not."""
    return load_blas()


def _choose() -> BlasChoice:
    if sys.platform == "darwin":
        return BlasChoice("accelerate", None, "MLX uses Apple's Accelerate; FORGE_MLX_BLAS has no effect")
    if sys.platform != "linux":
        return BlasChoice("mlx", None, f"no BLAS is loaded on {sys.platform}")
    setting = os.environ.get("FORGE_MLX_BLAS", "")
    if setting.lower() == "off":
        return BlasChoice("mlx", None, "FORGE_MLX_BLAS=off: MLX's own BLAS")
    before = _global_blas()
    if before is not None and not setting:
        return BlasChoice("preloaded", before, "cblas_sgemm was already global in this process")
    # Bound already, and for good; the library is still found, so that the remedy can name it.
    too_late = before is None and "mlx.core" in sys.modules
    choice = _load_named(setting, before) if setting else _load_found()
    if too_late and choice.path is not None:
        return _imported_too_late(choice)
    if choice.origin == "mlx" and _mlx_build() == "cpu":
        warnings.warn(
            f"MLX's own BLAS is in use and matrix products on the CPU will be slow ({choice.reason}). "
            f"{_INSTALL} brings a fast one; FORGE_MLX_BLAS=off silences this.",
            SlowBlasWarning,
            stacklevel=3,
        )
    return choice


def _imported_too_late(choice: BlasChoice) -> BlasChoice:
    remedy = "Import forge_mlx before mlx"
    # A copy made for this process only is gone by the time a next one could preload it.
    if choice.path is not None and choice.path == _global_blas():
        remedy += f", or start Python with LD_PRELOAD={choice.path}"
    if _mlx_build() == "cpu":
        warnings.warn(
            f"mlx.core was imported before forge_mlx, so MLX keeps its own, slow BLAS. {remedy}.",
            SlowBlasWarning,
            stacklevel=4,
        )
    return BlasChoice("mlx", None, f"mlx.core was imported before forge_mlx. {remedy}")


def _load_named(setting: str, before: Path | None) -> BlasChoice:
    """Load the library that `FORGE_MLX_BLAS` names; the user asked for it, so every failure is an error."""

    def error(problem: str) -> ImportError:
        return ImportError(
            "[blas] FORGE_MLX_BLAS must be 'off' or a BLAS library that exports cblas_sgemm "
            f"but got {setting!r}: {problem}. Correct it, or unset it to let forge_mlx choose."
        )

    file = Path(setting).expanduser()
    if "/" in setting and not file.exists():
        raise error("there is no such file")
    name = str(file.absolute()) if file.exists() else setting
    try:
        library = ctypes.CDLL(name)
        if hasattr(library, "cblas_sgemm"):
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            path, note = _file_of(library.cblas_sgemm), ""
        elif hasattr(library, _PREFIX + "cblas_sgemm"):
            path, note = _load_plain_copy(_file_of(library[_PREFIX + "cblas_sgemm"]), "named")
        else:
            raise error(f"it has neither cblas_sgemm nor {_PREFIX}cblas_sgemm")
        if before is not None and not before.samefile(path):
            raise error(f"this process already has cblas_sgemm from {before}, which comes first")
    except OSError as cause:
        raise error(str(cause)) from cause
    return BlasChoice("FORGE_MLX_BLAS", path, f"FORGE_MLX_BLAS={setting}{note}")


def _load_found() -> BlasChoice:
    """Load the `cpu` extra's library, else a system library, else leave MLX's own."""
    source = _extra_library()
    why_not = "the cpu extra is not installed"
    if source is not None:
        try:
            version = _extra_version(source)
            path, note = _load_plain_copy(source, version)
        except OSError as error:
            why_not = f"the cpu extra's library is unusable: {error}"
        else:
            return BlasChoice("cpu extra", path, f"scipy-openblas32 {version}{note}")
    for name, marker in _SYSTEM_LIBRARIES.items():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "cblas_sgemm") and hasattr(library, marker):
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            return BlasChoice("system", _file_of(library.cblas_sgemm), f"system library {name}; {why_not}")
    return BlasChoice("mlx", None, f"{why_not}; no system OpenBLAS or BLIS was found")


def _extra_library() -> Path | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            return file
    return None


def _extra_version(source: Path) -> str:
    # importlib.metadata would take longer to import than everything else here takes together.
    for info in source.parents[2].glob("scipy_openblas32-*.dist-info"):
        return info.name.split("-")[1].removesuffix(".dist")
    return "of unknown version"


def _mlx_build() -> Literal["cpu", "cuda"] | None:
    """Which MLX build is installed, read from file names: importing mlx.core here would be too early."""
    spec = importlib.util.find_spec("mlx")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if any(any(folder.parent.glob("mlx_cuda*")) for folder in folders):
        return "cuda"
    return "cpu" if any((folder / "lib" / "libmlx.so").exists() for folder in folders) else None


class _SymbolInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _file_of(function: object) -> Path:
    """The file of the library that defines a foreign function."""
    info = _SymbolInfo()
    address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) or not info.file:
        raise OSError("the dynamic linker does not know the library's file")
    return Path(os.fsdecode(info.file))


def _global_blas() -> Path | None:
    """The file whose cblas_sgemm a library loaded now would be bound to, None when only its own."""
    function = getattr(ctypes.CDLL(None), "cblas_sgemm", None)
    return None if function is None else _file_of(function)


def _load_plain_copy(source: Path, version: str) -> tuple[Path, str]:
    """Load a copy of `source` with plain names, from the cache folder if it is there.

    Returns:
        The copy's path, and a remark for the reason (empty when there is nothing to say).
    """
    stat = source.stat()
    name = f"{source.stem}-{version}-{os.uname().machine}-{stat.st_size:x}-{stat.st_mtime_ns:x}.so"
    try:
        copy = cache_dir() / "blas" / name
        # The copy is as long as its source. A shorter one is not opened: it would be mapped past its end.
        if copy.exists() and copy.stat().st_size == stat.st_size:
            try:
                ctypes.CDLL(str(copy), ctypes.RTLD_GLOBAL)
                return copy, ""
            except OSError:
                pass  # Damaged, or on a file system that runs nothing: the copy made next will show which.
        copy.parent.mkdir(parents=True, exist_ok=True)
        _write_plain_copy(source, copy)
        ctypes.CDLL(str(copy), ctypes.RTLD_GLOBAL)
        return copy, ""
    except OSError as error:
        problem = str(error)
    # Removed at once: a file that stayed in a shared folder could be replaced by another user.
    with tempfile.TemporaryDirectory(prefix="forge-mlx-") as folder:
        copy = Path(folder, name)
        _write_plain_copy(source, copy)
        ctypes.CDLL(str(copy), ctypes.RTLD_GLOBAL)
    return source, f"; copied for this process only, as the cache folder is unusable: {problem}"


def _write_plain_copy(source: Path, copy: Path) -> None:
    """Write `source` with plain names to `copy`: complete, or not at all."""
    image = bytearray(source.read_bytes())
    try:
        export_only(image, {_PREFIX + name: name for name in _NAMES})
    except (struct.error, ValueError, IndexError) as error:
        raise OSError(f"{source} is damaged or laid out in an unknown way") from error
    handle, temporary = tempfile.mkstemp(dir=copy.parent, prefix=f".{copy.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(image)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o755)
        os.replace(temporary, copy)
    except BaseException:
        os.unlink(temporary)
        raise
