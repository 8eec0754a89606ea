"""What compiles in the emulator and not on every Metal is found, and what compiles there is not accused."""

import re

from forge_mlx.metal.emulator import LanguageError, language, toolchain
from forge_mlx.metal.emulator.compile import compile_kernel
from forge_mlx.metal.emulator.settings import CHECKS, Settings
from forge_mlx.metal.emulator.translate import translate
from forge_mlx.metal.signature import Input, Output, generate
from kernel_trees import generated, tree_of
from language_cases import ADDRESS_SPACES, CLEAN, CONSTRUCTS, CONVERSIONS, REJECTED, Case
import mlx.core as mx
import pytest

CASES = (*ADDRESS_SPACES, *CONSTRUCTS, *CONVERSIONS)


def findings(*arguments, **options):
    return language.check(tree_of(*arguments, **options))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_mistake_is_found(case):
    found = findings(case.body, case.header, case.template)
    assert [(each.kind, each.file, each.line, each.is_warning) for each in found] == [(case.kind, *case.place(), False)]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_corrected_twin_is_not_accused(case):
    body, header = case.twin()
    assert findings(body, header, case.template) == []


@pytest.mark.parametrize(("header", "body"), CLEAN.values(), ids=CLEAN.keys())
def test_metal_is_not_accused(header, body):
    assert findings(body, header) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_what_the_translation_adds_is_not_accused(dtype, atomic):
    if atomic and dtype != mx.float32:
        dtype = mx.int32
    source = generate(
        "k",
        [Input("x", dtype, 64, 2), Input("few", dtype, 3, 1), Input("scalar", dtype, 1, 0)],
        [Output("out", dtype)],
        "threadgroup T shared[32], other;\nshared[0] = x[0];\nother = few[0] + scalar;\n"
        + ("atomic_store_explicit(&out[0], 1, memory_order_relaxed);\n" if atomic else "out[0] = shared[0] + other;\n"),
        template=[("T", dtype), ("N", 4), ("FLAG", True)],
        atomic_outputs=atomic,
    )
    assert language.check(toolchain.dump_ast(translate(source), preamble=True)) == []


class TestUnqualifiedMethods:
    HEADER = (
        "struct Point {\n  float a;\n\n  Point(float y) : a(y) {}\n  float get() const { return a; }\n"
        "  float twice() const thread { return 2 * a; }\n};\n"
    )
    BODY = "Point point(x[0]);\nout[0] = point.get() + point.twice();\n"

    def test_one_warning_for_each_class(self):
        (found,) = findings(self.BODY, self.HEADER)
        assert (found.kind, found.file, found.line, found.is_warning) == ("unqualified method", "k header", 4, True)
        assert "Point without address space do not compile on macOS 27 (Point, get)" in found.message

    def test_definition_outside_the_class_is_not_told_again(self):
        header = "struct Point {\n  float a;\n  float get() const;\n};\ninline float Point::get() const { return a; }\n"
        (found,) = findings("Point point = {x[0]};\nout[0] = point.get();\n", header)
        assert (found.kind, found.line) == ("unqualified method", 3)

    def test_kernel_can_be_launched(self):
        (warning,) = compile_kernel(generated(self.BODY, self.HEADER), Settings()).warnings
        assert re.search(r"k header:4: methods of Point(?s:.*)Point\(float y\) : a\(y\)", warning)


@pytest.mark.parametrize(("kind", "header", "body"), REJECTED.values(), ids=REJECTED.keys())
def test_what_the_compiler_rejects_is_told_in_metals_words(kind, header, body):
    source = generated(body, header)
    with pytest.raises(toolchain.CompilerFailure) as failure:
        toolchain.dump_ast(translate(source), preamble=True)
    found = language.rejected(failure.value.stderr)[0]
    where = Case("", kind, body, {}, header).place()
    assert (found.kind, found.file, found.line, found.is_warning) == (kind, *where, False)
    with pytest.raises(LanguageError, match=re.escape(found.message)) as info:
        compile_kernel(source, Settings())
    assert (info.value.locations[0].file, info.value.locations[0].line) == where
    assert "OpenCL" not in str(info.value)


def test_other_errors_are_not_about_the_language():
    assert language.rejected("k body:1:2: error: use of undeclared identifier 'y'\nk body:1:2: note: double\n") == []


class TestCompileKernel:
    BODY = "float value = x[0];\n  float* p = &value;\nout[0] = *p;\n"

    def test_error_tells_line_and_source(self):
        with pytest.raises(LanguageError, match="address space") as info:
            compile_kernel(generated(self.BODY), Settings())
        assert [(each.file, each.line) for each in info.value.locations] == [("k body", 2)]
        assert info.value.kernel == "k"
        assert "k body:2: " in str(info.value)
        assert "    float* p = &value;" in str(info.value)

    def test_check_can_be_left_out(self):
        assert compile_kernel(generated(self.BODY), Settings(checks=frozenset(CHECKS) - {"language"})).library.exists()

    def test_definitions_count(self):
        body = "float value = x[0];\nSPACE float* p = &value;\nout[0] = *p;\n"
        assert compile_kernel(generated(body), Settings(defines=(("SPACE", "thread"),))).library.exists()
        with pytest.raises(LanguageError):
            compile_kernel(generated(body), Settings(defines=(("SPACE", ""),)))

    def test_what_was_found_is_kept(self, monkeypatch):
        text = translate(generated(self.BODY))
        first = language.check_source(text, preamble=True)
        monkeypatch.setattr(language, "dump_ast", lambda *_, **__: pytest.fail("the tree was made again"))
        assert [each.kind for each in first] == ["address space"]
        assert language.check_source(text, preamble=True) == first
