"""From a kernel's translated text to a shared object, by the clang and lld in the PyPI package `ziglang`.

Three steps, each kept by `disk_cache`: the runtime in C becomes an object once, the Metal headers become a precompiled
header once for each set of flags, a text becomes a library once. No other compiler and no header of the system is used.

Targets: Linux x86-64 has been run. Linux arm64 and macOS arm64 exist in code: a test compiles and links for them on
Linux x86-64, and nothing has been run on such machines.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
import hashlib
from importlib import metadata, util
import json
from pathlib import Path
import platform
import re
import subprocess
import sys
import tempfile
from typing import Any

from forge_mlx.metal.emulator.disk_cache import cached, digest_of
from forge_mlx.metal.emulator.errors import ToolchainError
from forge_mlx.metal.emulator.preamble import preamble_text
from forge_mlx.metal.emulator.vector_memory import split_components

INSTALL = 'pip install "forge-mlx[emulator]"'

# The tree names the file and the line of a `#line` directive only where they differ from the real ones and from those
# last named. With no real line as low as any that a directive names, nothing is left out but repetitions.
AST_FILE = "kernel.cl"
AST_PREFIX = "\n" * 200_000 + '#line 1 "<text>"\n'
# What follows the headers in a preprocessed text.
_TEXT_BEGINS = "#pragma emu text"

_HERE = Path(__file__).parent
_HEADERS = _HERE / "msl"
_RUNTIME = _HERE / "runtime"

# Metal as C++ for OpenCL. Every half and bfloat operation rounds to its own type, nothing is contracted, and literals
# are float. A call of a mathematical function stays that call (-fno-builtin): the compiler would otherwise fold
# expf(1.0f) with other digits, and turn loops into memcpy and memset, which move the accesses to other lines.
_LANGUAGE = (
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-single-precision-constant", "-D__METAL__", "-fno-rtti", "-fno-builtin"),
    # The first two are on for x86-64 without being named, and not for arm64.
    "-cl-ext=+cl_khr_fp16,+__opencl_c_generic_address_space,"
    "-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_program_scope_global_variables,-__opencl_c_device_enqueue",
    *("-ffp-contract=off", "-ffloat16-excess-precision=none", "-fbfloat16-excess-precision=none", "-w"),
    # A float beyond an integer type becomes its nearest value and NaN becomes 0, instead of anything.
    "-fno-strict-float-cast-overflow",
)
# Frame pointers and calls that stay calls make the chain of return addresses readable; loops without effect must still
# end by themselves; a frame larger than the guard below a stack must not jump over it.
_CODE = (
    *("-O2", "-mrelocation-model", "pic", "-pic-level", "2", "-mframe-pointer=all", "-fno-finite-loops"),
    *("-fno-optimize-sibling-calls", "-fstack-clash-protection"),
    # Every function looks whether its frame has been overwritten, by a word that the runtime defines.
    *("-stack-protector", "3", "-mstack-protector-guard=global"),
    *("-debug-info-kind=line-tables-only", "-dwarf-version=4", "-fdebug-compilation-dir=."),
    *("-main-file-name", "kernel.cl"),
)
# Always on, so that no kernel takes the process down: private arrays, division, and a call at each branch.
_GUARDS = ("integer-divide-by-zero", "array-bounds", "local-bounds")
# Of _LANGUAGE, what the optimiser must know too.
_REPEATED = ("-fno-builtin", "-ffp-contract=off")
_STEPS = ("-fsanitize-coverage-type=3", "-fsanitize-coverage-trace-pc", "-fsanitize-coverage-no-prune")
# A call before each access of memory that other threads can see.
_HOOKS = (
    *("-mllvm", "-tsan-instrument-read-before-write"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    # It splits the load of a vector whose elements are used one by one: alignment and counts are those of the vector.
    *("-mllvm", "-disable-vector-combine"),
)
_RUNTIME_FLAGS = (
    *("-O2", "-g0", "-fPIC", "-std=c11", "-fvisibility=hidden", "-fno-sanitize=all", "-ffp-contract=off"),
    *("-fno-omit-frame-pointer", "-fno-stack-protector", "-Werror=implicit-function-declaration"),
)


class CompilerFailure(Exception):
    """The compiler refused a text.

    Attributes:
        stderr: what it said, with the file names and lines of the text's `#line` directives.
    """

    def __init__(self, stderr: str) -> None:
        super().__init__(stderr)
        self.stderr = stderr


@dataclass(frozen=True)
class Target:
    """What code is made for.

    Attributes:
        triple: for kernels; `zig_triple` and `zig_cpu` are the same machine as `zig cc` names it, for the runtime.
        features: of the processor, for kernels.
        needs: flags of /proc/cpuinfo without which the code would not run.
        suffix: of a shared library.
    """

    triple: str
    features: tuple[str, ...]
    zig_triple: str
    zig_cpu: str
    needs: tuple[str, ...] = ()
    suffix: str = ".so"

    @property
    def is_macos(self) -> bool:
        """Whether libraries are Mach-O rather than ELF."""
        return self.suffix == ".dylib"


_TARGETS = {
    ("linux", "x86_64"): Target(
        "x86_64-unknown-linux-gnu",
        ("-target-feature", "+avx2", "-target-feature", "+f16c"),
        "x86_64-linux-gnu",
        "x86_64+avx2+f16c",
        ("avx2", "f16c"),
    ),
    ("linux", "aarch64"): Target("aarch64-unknown-linux-gnu", (), "aarch64-linux-gnu", "generic"),
    ("darwin", "arm64"): Target(
        "arm64-apple-macosx14.0.0", ("-target-cpu", "apple-m1"), "aarch64-macos.14.0", "apple_m1", (), ".dylib"
    ),
}


def compile_source(text: str, *, instrument: bool, preamble: bool, defines: tuple[tuple[str, str], ...] = ()) -> Path:
    """Compile a translated kernel and link it with the runtime.

    Args:
        text: C++ for OpenCL, as `translate` writes it.
        instrument: call the runtime before every access of memory that other threads can see.
        preamble: the text sees MLX's own Metal header.
        defines: preprocessor definitions, `(name, value)`.

    Returns:
        The shared object, in the cache. It is complete and undamaged.

    Raises:
        CompilerFailure: the text does not compile.
        ToolchainError: no compiler for this machine, or one that does not work, or nowhere to write.
    """
    target = host_target()
    flags = (*_flags(target, preamble), *_code_flags(instrument))
    definitions = _definitions(defines)
    key = _key("library", flags, definitions, text, _header_key(preamble), digest_of(_RUNTIME))

    def build(folder: Path) -> Path:
        header = _precompiled_header(flags, preamble)
        compiled, library = folder / "kernel.o", folder / f"kernel{target.suffix}"
        arguments = ("-emit-llvm", "-disable-llvm-passes", "-include-pch", str(header), *definitions, "-o", "-", "-")
        code = split_components(_run_zig(("clang", "-cc1", *flags, *arguments), text).stdout)
        machine = ("-triple", target.triple, *target.features, *_code_flags(instrument), *_REPEATED)
        _run_zig(("clang", "-cc1", *machine, "-x", "ir", "-emit-obj", "-o", str(compiled), "-"), code)
        _link(target, (compiled, _runtime_object(target)), library)
        return library

    # On macOS the debug lines stay in the object file.
    return cached("libraries", key, target.suffix, build, beside=".o" if target.is_macos else "")


def dump_ast(
    text: str, *, preamble: bool, defines: tuple[tuple[str, str], ...] = (), broken: bool = False
) -> dict[str, Any]:
    """Clang's syntax tree of what a text itself declares, as its `-ast-dump=json` writes it.

    Args:
        text: as for `compile_source`.
        preamble: as for `compile_source`.
        defines: as for `compile_source`.
        broken: of a text with errors give what could be understood.

    Returns:
        The translation unit, what the precompiled header declares left out. Under the key "text" is what was compiled:
        `AST_PREFIX` and the text; offsets of the tree count its bytes. Under the key "broken" is whether it has errors.

    Raises:
        CompilerFailure: the text does not compile.
        ToolchainError: as for `compile_source`.
    """
    tree, said = _dumped(text, preamble, defines)
    if said.failed and not (broken and tree):
        raise CompilerFailure(said.stderr)
    return {**tree, "text": AST_PREFIX + text, "broken": said.failed}


@lru_cache(maxsize=1)
def _dumped(text: str, preamble: bool, defines: tuple[tuple[str, str], ...]) -> tuple[dict[str, Any], "_Said"]:
    """A text's tree, empty where there is none: one step after the other asks for the same."""
    target = host_target()
    # Of no weight for the tree, but the header precompiled for instrumented code serves again.
    flags = (*_flags(target, preamble), *_code_flags(instrument=True))
    definitions = _definitions(defines)
    header = _precompiled_header(flags, preamble)
    with tempfile.TemporaryDirectory(prefix="forge-mlx-") as folder:
        source = Path(folder) / AST_FILE
        source.write_text(AST_PREFIX + text, encoding="utf-8")
        arguments = ("-ast-dump=json", "-include-pch", str(header), *definitions, AST_FILE)
        said = _run_zig(("clang", "-cc1", *flags, *arguments), cwd=source.parent, may_fail=True)
    return _parse(said.stdout) if said.stdout else {}, _Said("", said.stderr, said.failed)


def preprocess(text: str, *, preamble: bool, defines: tuple[tuple[str, str], ...] = ()) -> str:
    """A text after the preprocessor, with `#line` directives and comments in it.

    Args:
        text: as for `compile_source`.
        preamble: as for `compile_source`.
        defines: as for `compile_source`.

    Returns:
        A text that means the same to `compile_source`.

    Raises:
        CompilerFailure: the preprocessor refuses it.
        ToolchainError: as for `compile_source`.
    """
    flags = (*_flags(host_target(), preamble), "-E", "-CC", "-fuse-line-directives")
    # The compiler preprocesses the text of a header even where it has it precompiled.
    whole = f"{_header_text(preamble)}\n{_TEXT_BEGINS}\n{text}"
    expanded = _run_zig(("clang", "-cc1", *flags, *_definitions(defines), "-o", "-", "-"), whole).stdout
    return expanded.partition(f"{_TEXT_BEGINS}\n")[2]


def _parse(written: str) -> dict[str, Any]:
    """A tree that may be as deep as a sum of a few thousand terms."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))
    try:
        tree: dict[str, Any] = json.loads(written)
    finally:
        sys.setrecursionlimit(limit)
    return tree


def source_key(text: str, *, preamble: bool, defines: tuple[tuple[str, str], ...] = ()) -> str:
    """A hash of all that decides what a text means.

    Args:
        text: as for `compile_source`.
        preamble: as for `compile_source`.
        defines: as for `compile_source`.

    Returns:
        A key for `disk_cache.cached`.
    """
    return _key("source", _flags(host_target(), preamble), _definitions(defines), text, _header_key(preamble))


@lru_cache(maxsize=1)
def host_target() -> Target:
    """What this machine needs.

    Returns:
        The target of the running interpreter.

    Raises:
        ToolchainError: the emulator has no code for it.
    """
    target = _target_of(sys.platform, platform.machine())
    missing = sorted(set(target.needs) - (_processor_flags() if target.needs else frozenset()))
    if missing:
        raise ToolchainError(f"the emulator needs a processor with {' and '.join(missing)}, which this one lacks.")
    return target


def _target_of(system: str, machine: str) -> Target:
    target = _TARGETS.get((system, machine))
    if target is None:
        known = "Linux on x86-64 or arm64 and on macOS on arm64"
        raise ToolchainError(f"the emulator runs on {known} but this is {system} on {machine}.")
    return target


def _processor_flags() -> frozenset[str]:
    """The flags of this processor in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ToolchainError(f"cannot see what this processor can do: {error}.") from error
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


@lru_cache(maxsize=1)
def _zig() -> Path:
    """The one executable of `ziglang`: clang, a driver for C and ld.lld, by its first argument."""
    spec = util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError(f"the emulator needs the package ziglang, which is not installed: {INSTALL}")
    path = Path(next(iter(spec.submodule_search_locations))) / "zig"
    if not path.is_file():
        raise ToolchainError(f"the package ziglang has no {path}. Install it again: {INSTALL}")
    return path


@lru_cache(maxsize=1)
def _mlx_include() -> Path:
    """The folder that `#include "mlx/..."` is relative to."""
    spec = util.find_spec("mlx")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / "include/mlx/backend/metal/kernels").is_dir():
            return Path(folder) / "include"
    raise ToolchainError("the installed MLX has no Metal headers (mlx/include/mlx/backend/metal/kernels).")


@lru_cache(maxsize=8)
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # Not installed by pip: found on the path only.
        return "unknown"


def _flags(target: Target, preamble: bool) -> tuple[str, ...]:
    """Flags that the precompiled header and the text must share."""
    mlx = ("-DEMU_MLX_PREAMBLE", "-I", str(_mlx_include())) if preamble else ()
    # The headers that a Metal source may include by name lie in a folder of their own.
    folders = (_HEADERS, _HEADERS / "include", _RUNTIME)
    own = tuple(flag for folder in folders for flag in ("-I", str(folder)))
    return ("-triple", target.triple, *target.features, *_LANGUAGE, *mlx, *own)


def _definitions(defines: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in defines)


def _code_flags(instrument: bool) -> tuple[str, ...]:
    checks = ("thread", *_GUARDS) if instrument else _GUARDS
    return (*_CODE, f"-fsanitize={','.join(checks)}", *_STEPS, *(_HOOKS if instrument else ()))


@lru_cache(maxsize=2)
def _header_text(preamble: bool) -> str:
    return '#include "prelude.h"\n' + (preamble_text(_mlx_include()) if preamble else "")


def _header_key(preamble: bool) -> str:
    return _key(_header_text(preamble), digest_of(_HEADERS), digest_of(_RUNTIME))


def _precompiled_header(flags: tuple[str, ...], preamble: bool) -> Path:
    def build(folder: Path) -> Path:
        output = folder / "prelude.pch"
        # Without time stamps: the key holds the headers' contents, and a checkout changes times alone.
        arguments = ("-emit-pch", "-fno-pch-timestamp", "-o", str(output), "-")
        try:
            _run_zig(("clang", "-cc1", *flags, *arguments), _header_text(preamble))
        except CompilerFailure as failure:
            using = f"ziglang {_version('ziglang')}, MLX {_version('mlx')}"
            message = f"the emulator's Metal headers do not compile with {using}:\n{failure.stderr}"
            raise ToolchainError(message) from failure
        return output

    return cached("headers", _key(flags, _header_key(preamble)), ".pch", build)


def _runtime_object(target: Target) -> Path:
    machine = ("-target", target.zig_triple, f"-mcpu={target.zig_cpu}")

    def build(folder: Path) -> Path:
        output = folder / "runtime.o"
        objects = [folder / f"part-{source.stem}.o" for source in _runtime_sources()]
        try:
            for source, compiled in zip(_runtime_sources(), objects, strict=True):
                flags = (*machine, *_RUNTIME_FLAGS, "-I", str(_RUNTIME))
                _run_zig(("cc", "-c", *flags, str(source), "-o", str(compiled)), work=folder)
            # For macOS zig's linker keeps one object of several with -r.
            join = ("ar", "rcs", str(output)) if target.is_macos else ("ld.lld", "-r", "-o", str(output))
            _run_zig((*join, *map(str, objects)), work=folder)
        except CompilerFailure as failure:
            raise ToolchainError(f"the emulator's own runtime does not compile:\n{failure.stderr}") from failure
        return output

    key = _key("runtime", machine, _RUNTIME_FLAGS, digest_of(_RUNTIME))
    return cached("runtimes", key, ".o", build)


def _runtime_sources() -> list[Path]:
    sources = sorted(_RUNTIME.glob("*.c"))
    if not sources:
        raise ToolchainError(f"the emulator's runtime is missing from {_RUNTIME}. Install forge-mlx again.")
    return sources


def _link(target: Target, objects: tuple[Path, ...], library: Path) -> None:
    """Link a kernel with the runtime.

    Raises:
        CompilerFailure: the kernel calls a function that nothing defines.
    """
    inputs = (*map(str, objects), "-o", str(library))
    if target.is_macos:
        macos = ("-target", target.zig_triple, "-shared", "-nostdlib", "-lSystem")
        _run_zig(("cc", *macos, *inputs), work=library.parent)
        return
    # -Bsymbolic: the kernel's calls reach this library's runtime, whatever else the process has loaded.
    # Functions of the C library and its mathematics are found when the library is loaded, as Python has them loaded.
    flags = ("-shared", "-Bsymbolic", "--build-id=none", "-z", "defs", "--warn-unresolved-symbols")
    said = _run_zig(("ld.lld", *flags, *inputs)).stderr
    if undefined_functions(said):
        raise CompilerFailure(said)


def undefined_functions(said: str) -> list[str]:
    """The functions that a linker's message calls undefined and that this process does not have, each once.

    Args:
        said: what the linker wrote; it names those of the C library too.
    """
    process = ctypes.CDLL(None)
    undefined = dict.fromkeys(re.findall(r"undefined symbol: (.*)", said))
    return [name for name in undefined if not (name.isidentifier() and hasattr(process, name))]


@dataclass(frozen=True)
class _Said:
    stdout: str
    stderr: str
    failed: bool


def _run_zig(
    arguments: tuple[str, ...],
    text: str = "",
    work: Path | None = None,
    cwd: Path | None = None,
    *,
    may_fail: bool = False,
) -> _Said:
    """Run one of the tools in `zig`, on `text` as its standard input; `work` takes the files that `zig cc` leaves."""
    # Nothing of the caller's environment: CPATH and its like would change what is compiled.
    names = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR") if work else ()
    environment = {name: str(Path(work or "") / "zig") for name in names}
    try:
        done = subprocess.run(
            [str(_zig()), *arguments], input=text.encode(), capture_output=True, env=environment, cwd=cwd
        )
    except OSError as error:
        raise ToolchainError(f"the compiler does not run: {error}. Install it again: {INSTALL}") from error
    output, errors = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    said = _Said(output, errors, failed=done.returncode != 0)
    if said.failed and not may_fail:
        raise CompilerFailure(said.stderr or f"the compiler ended with status {done.returncode} and said nothing")
    return said


def _key(*parts: object) -> str:
    versions = (_version("ziglang"), _version("mlx"))
    # A precompiled header names the files that it was made of.
    everything = json.dumps([versions, str(_HEADERS), [repr(part) for part in parts]])
    return hashlib.sha256(everything.encode()).hexdigest()[:32]
