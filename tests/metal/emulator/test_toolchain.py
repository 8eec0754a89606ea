"""The compiler of the emulator: what it makes of a text, and the cache that keeps it."""

import ctypes
import errno
from importlib import util
import os
from pathlib import Path
import struct
import subprocess
import sys
import tempfile

from forge_mlx.metal.emulator import ToolchainError, disk_cache, toolchain
from forge_mlx.metal.emulator.macho import MachO
import numpy as np
import pytest
from tiny_toolchain import PRELUDE, RUNTIME, counter, install, load

FUNCTION = 'extern "C" float twice(float x) { return 2 * x; }\n'
# What the real runtime calls.
ENTRY = 'extern "C" void emu_entry(void* const* arguments, const emu_ids* ids) {}\n'
MACOS = ("darwin", "arm64")
LINUX_ARM = ("linux", "aarch64")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    return install(monkeypatch, tmp_path)


@pytest.fixture(scope="class")
def shared_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def own_folder():
    """A process that has not made a folder of its own yet, and makes it where the test can see it."""
    disk_cache._own_folder.cache_clear()
    yield disk_cache._own_folder
    disk_cache._own_folder.cache_clear()


def evaluate(library, name, *arguments):
    function = library[name]
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * len(arguments)
    return np.float32(function(*arguments))


def is_twice(library):
    return evaluate(library, "twice", 21.0) == 42


def refuse_to_run(*_, **__):
    raise AssertionError("the compiler was run")


@pytest.mark.usefixtures("shared_cache")
class TestCode:
    @pytest.mark.parametrize("instrument", [True, False], ids=["instrumented", "plain"])
    def test_text_becomes_a_library(self, instrument):
        library = load(FUNCTION, instrument=instrument)
        assert is_twice(library)
        assert counter(library, "steps") == 1

    def test_accesses_are_told_only_when_instrumented(self):
        text = 'extern "C" void copy(device float* x, device float* y) { y[0] = x[0]; y[1] = x[1]; }\n'
        x, y = (ctypes.c_float * 2)(1, 2), (ctypes.c_float * 2)()
        for instrument, expected in ((True, 2), (False, 0)):
            library = load(text, instrument=instrument)
            library.copy(x, y)
            assert list(y) == [1, 2]
            assert (counter(library, "reads"), counter(library, "writes")) == (expected, expected)

    def test_access_that_precedes_a_write_is_told_too(self):
        library = load('extern "C" void add(device float* x) { x[0] += 1; }\n', instrument=True)
        library.add((ctypes.c_float * 1)())
        assert (counter(library, "reads"), counter(library, "writes")) == (1, 1)

    def test_loop_of_writes_stays_one(self):
        text = 'extern "C" void clear(device uint* x) { for (uint i = 0; i < 64; i++) x[i] = 0; }\n'
        library = load(text, instrument=True)
        library.clear((ctypes.c_uint * 64)())
        assert counter(library, "writes") == 64

    def test_loop_without_an_effect_still_runs(self):
        body = "uint i = n; while (i != 1) { i = i % 2 ? 3 * i + 1 : i / 2; } return 0;"
        library = load(f'extern "C" uint spin(uint n) {{ {body} }}\n')
        library.spin(ctypes.c_uint(27))
        assert counter(library, "steps") > 111

    def test_function_of_a_constant_reaches_the_runtime(self):
        assert evaluate(load('extern "C" float f() { return expf(1.0f); }\n'), "f") == 42

    def test_literals_are_float(self):
        x = np.float32(3.3)
        got = evaluate(load('extern "C" float f(float x) { return x * 1.1; }\n'), "f", x)
        assert got == x * np.float32(1.1) != np.float32(float(x) * 1.1)

    def test_products_and_sums_round_one_by_one(self):
        a, c = np.float32(1 + 2**-12), np.float32(-1)
        got = evaluate(load('extern "C" float f(float a, float c) { return a * a + c; }\n'), "f", a, c)
        assert got == a * a + c != np.float32(float(a) * float(a) + float(c))

    def test_definitions_reach_the_text(self):
        text = 'extern "C" float f() { return SIZE; }\n'
        sizes = [evaluate(load(text, defines=(("SIZE", str(size)),)), "f") for size in (3, 4)]
        assert sizes == [3, 4]

    def test_calls_reach_the_runtime_of_the_same_library(self):
        first, second = load(FUNCTION + "// first\n"), load(FUNCTION + "// second\n")
        assert is_twice(first)
        assert (counter(first, "steps"), counter(second, "steps")) == (1, 0)


@pytest.mark.usefixtures("cache")
class TestErrors:
    def test_error_in_the_text_has_its_line(self):
        with pytest.raises(toolchain.CompilerFailure, match=r"^k body:7:\d+: error: .*'missing'") as info:
            load('#line 7 "k body"\nextern "C" float f() { return missing; }\n')
        assert info.value.stderr == str(info.value)

    def test_warnings_stay_unsaid(self):
        with pytest.raises(toolchain.CompilerFailure) as info:
            load("uint f() { }\nuint g() { return missing; }\n")
        assert "warning" not in info.value.stderr

    @pytest.mark.parametrize("name", ["helper(float)", "helper"])
    def test_function_that_nothing_defines(self, name):
        linkage = "" if "(" in name else 'extern "C" '
        text = (
            f'{linkage}float helper(float x);\n#line 5 "k body"\nextern "C" float f(float x) {{ return helper(x); }}\n'
        )
        with pytest.raises(toolchain.CompilerFailure, match=r"undefined symbol: .*helper") as info:
            load(text)
        assert f"undefined symbol: {name}\n" in info.value.stderr
        assert "k body:5" in info.value.stderr

    def test_nothing_is_kept_of_a_failure(self, cache):
        with pytest.raises(toolchain.CompilerFailure):
            load("missing")
        assert not list(cache.glob("libraries/*/*"))
        assert not list(cache.glob("building-*"))

    def test_header_that_does_not_compile(self):
        (toolchain._HEADERS / "prelude.h").write_text("missing\n")
        with pytest.raises(ToolchainError, match=r"Metal headers do not compile with ziglang \d(?s:.*)missing"):
            load(FUNCTION)

    def test_runtime_that_does_not_compile(self):
        (toolchain._RUNTIME / "tiny.c").write_text("missing\n")
        with pytest.raises(ToolchainError, match=r"runtime does not compile(?s:.*)missing"):
            load(FUNCTION)

    def test_runtime_that_is_missing(self):
        (toolchain._RUNTIME / "tiny.c").unlink()
        with pytest.raises(ToolchainError, match="runtime is missing from"):
            load(FUNCTION)

    def test_missing_compiler_has_its_install_line(self, monkeypatch):
        monkeypatch.setattr(util, "find_spec", lambda name: None if name == "ziglang" else pytest.fail(name))
        toolchain._zig.cache_clear()
        try:
            with pytest.raises(ToolchainError, match=r'pip install "forge-mlx\[emulator\]"'):
                load(FUNCTION)
        finally:
            toolchain._zig.cache_clear()

    def test_compiler_that_does_not_run(self, monkeypatch, tmp_path):
        (tmp_path / "zig").write_text("no program\n")
        monkeypatch.setattr(toolchain, "_zig", lambda: tmp_path / "zig")
        with pytest.raises(ToolchainError, match="compiler does not run"):
            load(FUNCTION)

    @pytest.mark.parametrize(
        "machine",
        [("win32", "AMD64"), ("darwin", "x86_64"), ("linux", "riscv64"), ("freebsd14", "amd64")],
        ids=["Windows", "Intel Mac", "RISC-V", "FreeBSD"],
    )
    def test_unknown_machine(self, machine):
        system, processor = machine
        with pytest.raises(ToolchainError, match=f"Linux on x86-64 or arm64 and on macOS .* {system} on {processor}"):
            toolchain._target_of(*machine)

    def test_old_processor(self, monkeypatch):
        monkeypatch.setattr(toolchain, "_processor_flags", lambda: frozenset({"sse2", "f16c"}))
        monkeypatch.setattr(toolchain, "_target_of", lambda *_: toolchain._TARGETS["linux", "x86_64"])
        toolchain.host_target.cache_clear()
        try:
            with pytest.raises(ToolchainError, match="processor with avx2, which this one lacks"):
                toolchain.host_target()
        finally:
            toolchain.host_target.cache_clear()


@pytest.mark.usefixtures("cache")
class TestCache:
    def test_environment_of_the_caller_changes_nothing(self, monkeypatch, tmp_path):
        # Where zig would look for its own files, and what clang would add to its arguments.
        monkeypatch.setenv("ZIG_LIB_DIR", str(tmp_path))
        monkeypatch.setenv("CCC_OVERRIDE_OPTIONS", "+--unknown-option")
        assert is_twice(load(FUNCTION))

    def test_second_time_nothing_runs(self, cache, monkeypatch):
        first = toolchain.compile_source(FUNCTION, instrument=True, preamble=False)
        monkeypatch.setattr(toolchain, "_run_zig", refuse_to_run)
        assert toolchain.compile_source(FUNCTION, instrument=True, preamble=False) == first
        assert first.is_relative_to(cache)

    @pytest.mark.parametrize("changed", ["text", "instrument", "defines", "header", "runtime", "ziglang", "mlx"])
    def test_any_change_compiles_again(self, monkeypatch, changed):
        arguments = {"instrument": True, "preamble": False, "defines": ()}
        text, first = FUNCTION, toolchain.compile_source(FUNCTION, **arguments)
        if changed == "text":
            text = FUNCTION.replace("2 * x", "3 * x")
        elif changed == "instrument":
            arguments["instrument"] = False
        elif changed == "defines":
            arguments["defines"] = (("A", "1"),)
        elif changed in ("header", "runtime"):
            folder, name = {"header": ("_HEADERS", "prelude.h"), "runtime": ("_RUNTIME", "tiny.c")}[changed]
            with (getattr(toolchain, folder) / name).open("a") as stream:
                stream.write("\n// changed\n")
        else:
            version = toolchain._version
            monkeypatch.setattr(toolchain, "_version", lambda name: "0" if name == changed else version(name))
        second = toolchain.compile_source(text, **arguments)
        assert second.parent != first.parent

    def test_changed_runtime_is_used(self):
        text = 'extern "C" float f() { return expf(1.0f); }\n'
        assert evaluate(load(text), "f") == 42
        (toolchain._RUNTIME / "tiny.c").write_text(RUNTIME.replace("42.0f", "43.0f"))
        assert evaluate(load(text), "f") == 43

    def test_changed_header_is_used(self):
        header = toolchain._HEADERS / "prelude.h"
        for value in (3, 4):
            header.write_text(f"{PRELUDE}#define VALUE {value}\n")
            assert evaluate(load('extern "C" float f() { return VALUE; }\n'), "f") == value

    def test_touched_header_is_no_change(self, cache):
        first = toolchain.compile_source(FUNCTION, instrument=True, preamble=False)
        os.utime(toolchain._HEADERS / "prelude.h", (0, 0))
        # The library is made anew, with the header that was precompiled before its time stamp changed.
        first.unlink()
        assert is_twice(load(FUNCTION, instrument=True))
        assert len(list(cache.glob("headers/*/*.pch"))) == 1

    @pytest.mark.parametrize("kind", ["libraries", "headers", "runtimes"])
    @pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
    def test_damaged_file_is_made_again(self, cache, kind, damage):
        library = toolchain.compile_source(FUNCTION, instrument=False, preamble=False)
        (damaged,) = cache.glob(f"{kind}/*/*")
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes({"cut": data[:100], "changed": data, "empty": b""}[damage])
        if kind != "libraries":
            library.unlink()
        again = toolchain.compile_source(FUNCTION, instrument=False, preamble=False)
        assert again == library
        assert is_twice(ctypes.CDLL(str(again)))
        assert damaged.stem == disk_cache._content_hash(damaged)

    def test_processes_at_once(self, cache):
        script = "\n".join(
            [
                "import ctypes, pathlib, sys",
                "from forge_mlx.metal.emulator import toolchain",
                "headers, runtime, text = sys.argv[1:]",
                "toolchain._HEADERS, toolchain._RUNTIME = pathlib.Path(headers), pathlib.Path(runtime)",
                "sys.stdin.readline()",
                "path = toolchain.compile_source(text, instrument=True, preamble=False)",
                "function = ctypes.CDLL(str(path)).twice",
                "function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]",
                "print(path, function(21.0))",
            ]
        )
        arguments = [sys.executable, "-c", script, str(toolchain._HEADERS), str(toolchain._RUNTIME), FUNCTION]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(arguments, **pipes) for _ in range(4)]
        # Each waits for its line, so that all have started before one begins.
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        said = {process.communicate(timeout=100)[0] for process in processes}
        (path,) = cache.glob("libraries/*/*")
        assert said == {f"{path} 42.0\n"}
        assert [process.returncode for process in processes] == [0] * 4
        assert sorted(folder.name for folder in cache.iterdir()) == ["headers", "libraries", "runtimes"]

    def test_half_written_file_is_never_seen(self, monkeypatch):
        seen = []

        def replace(source, target):
            seen.extend(Path(target).parent.iterdir())
            rename(source, target)

        rename = os.replace
        monkeypatch.setattr(os, "replace", replace)
        load(FUNCTION)
        assert seen == []

    def test_cache_that_cannot_be_written(self, monkeypatch, tmp_path, own_folder):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FORGE_MLX_CACHE", str(tmp_path / "file" / "cache"))
        path = toolchain.compile_source(FUNCTION, instrument=False, preamble=False)
        assert is_twice(ctypes.CDLL(str(path)))
        assert path.is_relative_to(own_folder())
        assert Path(own_folder()).stat().st_mode & 0o077 == 0
        monkeypatch.setattr(toolchain, "_run_zig", refuse_to_run)
        assert toolchain.compile_source(FUNCTION, instrument=False, preamble=False) == path

    def test_cache_that_can_only_be_read(self, monkeypatch, own_folder):
        kept = toolchain.compile_source(FUNCTION, instrument=False, preamble=False)
        refuse = OSError(errno.EROFS, "Read-only file system")
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: raise_(refuse))
        assert toolchain.compile_source(FUNCTION, instrument=False, preamble=False) == kept
        other = toolchain.compile_source(FUNCTION + "\n", instrument=False, preamble=False)
        assert other.is_relative_to(own_folder())

    def test_user_without_a_home(self, monkeypatch, own_folder):
        monkeypatch.setattr(disk_cache, "cache_dir", lambda: raise_(OSError("no home folder")))
        path = toolchain.compile_source(FUNCTION, instrument=False, preamble=False)
        assert path.is_relative_to(own_folder())

    def test_full_disk_is_told(self, monkeypatch):
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: raise_(full))
        with pytest.raises(ToolchainError, match=r"cannot write to the cache: .*No space left.*FORGE_MLX_CACHE"):
            load(FUNCTION)

    def test_disk_that_fills_up_is_told(self, monkeypatch):
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(os, "replace", lambda *_: raise_(full))
        with pytest.raises(ToolchainError, match=r"cannot write to the cache .*No space left.*FORGE_MLX_CACHE"):
            load(FUNCTION)

    def test_own_folder_goes_with_the_process(self, tmp_path):
        script = "from forge_mlx.metal.emulator import disk_cache; print(disk_cache._own_folder())"
        folder = tmp_path / "temporary"
        folder.mkdir()
        environment = {**os.environ, "TMPDIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert Path(done.stdout.strip()).parent == folder
        assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("shared_cache")
class TestOtherMachines:
    """Compiled and linked here, not run."""

    @pytest.fixture(params=[LINUX_ARM, MACOS], ids=["Linux arm64", "macOS arm64"])
    def library(self, request, monkeypatch):
        monkeypatch.setattr(toolchain, "host_target", lambda: toolchain._TARGETS[request.param])
        return toolchain.compile_source(FUNCTION, instrument=True, preamble=False)

    def test_library_is_of_its_format(self, library):
        image = library.read_bytes()
        if library.suffix == ".so":
            # A shared object for AArch64.
            assert (image[:4], struct.unpack_from("<2H", image, 16)) == (b"\x7fELF", (3, 183))
        else:
            # A dynamic library for arm64, signed as macOS wants it there, with its debug lines beside it.
            assert struct.unpack_from("<4I", image) == (0xFEEDFACF, 0x0100000C, 0, 6)
            assert 0x1D in [kind for kind, _ in MachO(library)._commands()]
            assert {"_twice", "_reads"} <= MachO(library).symbols.keys()
            assert "__debug_line" in MachO(library.with_suffix(".o")).sections

    def test_second_time_nothing_runs(self, library, monkeypatch):
        monkeypatch.setattr(toolchain, "_run_zig", refuse_to_run)
        assert toolchain.compile_source(FUNCTION, instrument=True, preamble=False) == library


@pytest.mark.usefixtures("shared_cache")
def test_macos_library_without_its_object_is_made_again(monkeypatch):
    monkeypatch.setattr(toolchain, "host_target", lambda: toolchain._TARGETS[MACOS])
    library = toolchain.compile_source(FUNCTION, instrument=True, preamble=False)
    library.with_suffix(".o").unlink()
    again = toolchain.compile_source(FUNCTION, instrument=True, preamble=False)
    assert again.exists()
    assert again.with_suffix(".o").exists()


def raise_(error):
    raise error


@pytest.mark.usefixtures("shared_cache")
class TestTree:
    def test_only_what_the_text_declares(self):
        tree = toolchain.dump_ast(FUNCTION, preamble=False)
        assert [node["kind"] for node in tree["inner"]] == ["LinkageSpecDecl"]
        assert tree["text"].endswith(FUNCTION)

    def test_definitions_reach_the_text(self):
        tree = toolchain.dump_ast(
            "constant int NAME = 1;\n",
            preamble=False,
            defines=(("NAME", "given"), ("constant", "__constant")),
        )
        assert [node["name"] for node in tree["inner"]] == ["given"]

    def test_text_that_does_not_compile(self):
        with pytest.raises(toolchain.CompilerFailure, match=r"^k body:7:\d+: error"):
            toolchain.dump_ast('#line 7 "k body"\nmissing\n', preamble=False)


@pytest.mark.parametrize("preamble", [True, False], ids=["MLX's header", "plain Metal"])
@pytest.mark.parametrize("instrument", [True, False], ids=["instrumented", "plain"])
def test_the_real_headers_and_runtime(preamble, instrument):
    path = toolchain.compile_source(ENTRY + FUNCTION, instrument=instrument, preamble=preamble)
    assert is_twice(ctypes.CDLL(str(path)))


def test_bfloat_sums_round_one_by_one():
    # 1 and twice half of its last place: as one sum it would be the next number, one by one it stays 1.
    text = 'extern "C" float f(float x, float y) { bfloat a = (bfloat)x, b = (bfloat)y; return (a + b) + b; }\n'
    library = ctypes.CDLL(str(toolchain.compile_source(ENTRY + text, instrument=False, preamble=False)))
    assert evaluate(library, "f", 1.0, 2.0**-8) == 1
