"""From addresses in a library to lines of the source."""

import ctypes

from forge_mlx.metal.emulator import lines, toolchain
from forge_mlx.metal.emulator.lines import LineTable
from forge_mlx.metal.emulator.macho import MachO
import pytest
from tiny_toolchain import install

NOINLINE = "__attribute__((noinline))"
# One function after another, each call and each access on a line of its own.
TEXT = f"""#line 1 "k header"
extern "C" {{
{NOINLINE} float inner(device float* x) {{
  float first = 1;

  return first + x[0];
}}
#line 70 "k body"
{NOINLINE} float outer(device float* x) {{
  return 2 *
      inner(x);
}}
float entry(device float* x) {{
  return outer(x);
}}
}}
"""


@pytest.fixture(scope="module", autouse=True)
def tiny_tools(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("tiny"))


def compiled(text, **options):
    return toolchain.compile_source(text, **{"instrument": True, "preamble": False, **options})


class _Information(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def base_of(library):
    """Where a library is loaded."""
    information = _Information()
    address = ctypes.cast(library.entry, ctypes.c_void_p)
    assert ctypes.CDLL(None).dladdr(address, ctypes.byref(information))
    return information.base


def address_of(library, name):
    return ctypes.cast(library[name], ctypes.c_void_p).value


def test_chain_of_calls_leads_to_its_lines():
    path = compiled(TEXT)
    library = ctypes.CDLL(str(path))
    library.entry((ctypes.c_float * 1)())
    chain = (ctypes.c_size_t * 3).in_dll(library, "chain")
    table = LineTable(path)
    # An address that is returned to belongs to what follows the call.
    found = [table.lookup(address - base_of(library) - 1) for address in chain]
    assert found == [("k header", 5), ("k body", 72), ("k body", 75)]


@pytest.mark.parametrize("instrument", [True, False], ids=["instrumented", "plain"])
def test_functions_begin_at_their_lines(instrument):
    path = compiled(TEXT, instrument=instrument)
    library = ctypes.CDLL(str(path))
    table = LineTable(path)
    found = [table.lookup(address_of(library, name) - base_of(library)) for name in ("inner", "outer", "entry")]
    assert found == [("k header", 2), ("k body", 70), ("k body", 74)]


@pytest.mark.parametrize(
    "file",
    [
        "soft max<float> body",
        "/home/me/my kernels/forward.metal",
        "kernels/norms/rms_norm_forward.metal",
        "./forward.metal",
        "../forward.metal",
        "kernel.cl",
        'a "quoted" name',
        "C:\\kernels\\forward.metal",
        "Ünïcode.metal",
    ],
)
def test_names_come_through_unchanged(file):
    quoted = file.replace("\\", "\\\\").replace('"', '\\"')
    path = compiled(f'#line 7 "{quoted}"\nextern "C" float entry(device float* x) {{ return x[0]; }}\n')
    library = ctypes.CDLL(str(path))
    assert LineTable(path).lookup(address_of(library, "entry") - base_of(library)) == (file, 7)


def test_code_of_the_runtime_has_no_line():
    path = compiled(TEXT)
    library = ctypes.CDLL(str(path))
    assert LineTable(path).lookup(address_of(library, "expf") - base_of(library)) is None


@pytest.mark.parametrize("offset", [-1, 0, 1 << 40], ids=["before", "at the beginning", "after"])
def test_addresses_outside_the_code(offset):
    assert LineTable(compiled(TEXT)).lookup(offset) is None


def test_lines_end_with_the_code():
    path = compiled('#line 1 "k body"\nextern "C" float entry(device float* x) { return x[0]; }\n')
    library = ctypes.CDLL(str(path))
    table = LineTable(path)
    start = address_of(library, "entry") - base_of(library)
    found = [table.lookup(offset) for offset in range(start, start + 400)]
    length = found.index(None)
    assert 0 < length < 200
    assert found == [("k body", 1)] * length + [None] * (400 - length)


def test_code_without_a_line_counts_to_the_line_before():
    # Line 0 is how the compiler marks what it made up itself.
    text = '#line 5 "k body"\nextern "C" float entry(device float* x) { x[1] = 3;\n#line 0 "k body"\nreturn x[0]; }\n'
    path = compiled(text)
    library = ctypes.CDLL(str(path))
    table = LineTable(path)
    start = address_of(library, "entry") - base_of(library)
    assert {table.lookup(offset) for offset in range(start, start + 400)} == {("k body", 5), None}


def test_library_is_read_once_and_at_the_first_question(monkeypatch):
    path = compiled(TEXT)
    opened = []
    monkeypatch.setattr(
        lines, "_elf_rows", lambda library: opened.append(library) or iter([lines._Row(8, "k body", 3)])
    )
    table = LineTable(path)
    assert opened == []
    assert [table.lookup(offset) for offset in range(6, 10)] == [None, None, ("k body", 3), ("k body", 3)]
    assert opened == [path]


class TestMacOS:
    """Libraries that were compiled and linked for macOS here; they cannot be loaded."""

    @pytest.fixture
    def library(self, monkeypatch):
        monkeypatch.setattr(toolchain, "host_target", lambda: toolchain._TARGETS["darwin", "arm64"])
        return compiled(TEXT)

    def test_functions_begin_at_their_lines(self, library):
        symbols, table = MachO(library).symbols, LineTable(library)
        # The header lies where the image begins, at address 0.
        found = [table.lookup(symbols[f"_{name}"]) for name in ("inner", "outer", "entry")]
        assert found == [("k header", 2), ("k body", 70), ("k body", 74)]

    def test_lines_lie_in_the_library_not_in_the_object(self, library):
        distance = MachO(library).symbols["_inner"] - MachO(library.with_suffix(".o")).symbols["_inner"]
        assert distance > 0
        assert LineTable(library).lookup(MachO(library).symbols["_inner"] - 4) is None

    def test_code_of_the_runtime_has_no_line(self, library):
        assert LineTable(library).lookup(MachO(library).symbols["_expf"]) is None

    def test_other_formats_are_refused(self, tmp_path):
        for data in (b"", b"\x7fELF" + bytes(60)):
            (tmp_path / "kernel.o").write_bytes(data)
            with pytest.raises(ValueError, match="is not a 64-bit little-endian Mach-O file"):
                MachO(tmp_path / "kernel.o")
