"""Places in clang's syntax tree are those of the user's source."""

from forge_mlx.metal.emulator import language, syntax_tree
from forge_mlx.metal.emulator.translate import translate
from kernel_trees import generated, tree_of
from language_cases import CLEAN
import pytest


def names_with_lines(tree):
    """Places of the variables named v_<line>, by line."""
    found = {}
    for visit in syntax_tree.visits(tree):
        if visit.name.startswith("v_") and visit.kind in ("VarDecl", "ParmVarDecl", "FieldDecl"):
            assert visit.place is not None
            found.setdefault(int(visit.name[2:]), set()).add((visit.place.file, visit.place.line))
    return found


def test_places_are_those_of_the_source():
    # Lines of header and body coincide, macros of the text and of the Metal headers are used, some lines are long.
    header = "#define DECLARE(type, number) type v_##number\n" + "".join(
        f"template <typename T> T f{line}(const device T* v_{line},\n    T v_{line + 1}) {{ return v_{line}[0]; }}\n"
        for line in range(2, 30, 2)
    )
    lines = []
    for line in range(1, 60):
        form = (
            "float v_{0} = 1;",
            "DECLARE(float, {0}) = M_PI_F;",
            "for (int v_{0} = 0; v_{0} < 2; v_{0}++) {{}}",
            "",
        )
        lines.append(form[line % 4].format(line))
    calls = "".join(f"out[0] = f{line}(x, 1.0f) + f{line}(b, bfloat(1));\n" for line in range(2, 30, 2))
    found = names_with_lines(tree_of("\n".join(lines) + "\n" + calls, header))
    assert set(found) == {*range(2, 30), *(line for line in range(1, 60) if line % 4 < 3)}
    for line, places in found.items():
        expected = {("k header", line)} if 2 <= line < 30 else set()
        expected |= {("k body", line)} if line < 60 and line % 4 < 3 else set()
        assert places == expected


def test_files_and_first_lines_are_the_users():
    tree = tree_of("\nfloat v_41 = 1;\n", header_file="a/b c.h", body_file="/k.metal", body_line=40)
    assert names_with_lines(tree) == {41: {("/k.metal", 41)}}


@pytest.mark.parametrize("shift", range(3))
def test_lines_may_be_those_of_the_compiled_text(shift):
    body = "\nfloat v_{0} = 1;\n\nfloat v_{1} = 2;\n"
    text = translate(generated(body.format(0, 0)))
    first = text.split("\n").index("float v_0 = 1;") + 1 + shift
    tree = tree_of(body.format(first, first + 2), body_line=first - 1)
    assert names_with_lines(tree) == {line: {("k body", line)} for line in (first, first + 2)}


def test_every_place_in_the_tree_is_read():
    """The reader must see all places in order; a key that it does not know would put the later ones out of step."""

    def places(value):
        if isinstance(value, dict) and "offset" in value and "tokLen" in value:
            yield value
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                yield from places(each)

    body = "\n".join(body for _, body in (CLEAN["deduced references in methods"], CLEAN["macros"]))
    header = "\n".join(header for header, _ in (CLEAN["deduced references in methods"], CLEAN["macros"]))
    tree = tree_of(body, header)
    read = []
    reader = syntax_tree._PlaceReader._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            syntax_tree._PlaceReader,
            "_read",
            lambda self, at, **options: (read.append(at), reader(self, at, **options))[1],
        )
        list(syntax_tree.visits(tree))
    assert [at for at in read if "offset" in at] == list(places(tree))


def test_deep_expressions_are_read():
    terms = " + ".join(f"x[{index}]" for index in range(600))
    assert language.check(tree_of(f"float value = {terms};\nfloat& p = value;\nout[0] = p;\n"))[0].line == 2
