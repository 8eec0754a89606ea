"""`#line` in a text leads back to the file and line that each line came from."""

from forge_mlx.metal.emulator.line_directives import origins


def test_without_directives_lines_are_counted_from_the_first():
    assert origins(["a", "", "b"], "f", 7) == [("f", 7), ("f", 8), ("f", 9)]


def test_directives_change_file_and_line_and_have_none_themselves():
    lines = ['#line 1 "f"', "a", ' # line 30 "g/h.h"', "b", "c", "#line 5", "d"]
    expected = [None, ("f", 1), None, ("g/h.h", 30), ("g/h.h", 31), None, ("g/h.h", 5)]
    assert origins(lines, "whatever", 99) == expected


def test_other_directives_are_lines():
    assert origins(["#define line 3", "#include <line>"], "f", 1) == [("f", 1), ("f", 2)]
