"""A class documents the arguments of its __init__ in its own docstring, where ruff does not check them."""

import ast
from pathlib import Path
import re

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for folder in ("forge_mlx", "kernels", "models")
    for file in (ROOT / folder).rglob("*.py")
)


def documented(docstring: str) -> list[str]:
    """The names in the Args section of a docstring without indentation; `*args` keeps its star."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)*)", docstring + "\n", re.MULTILINE)
    return re.findall(r"^ {4}(\*{0,2}\w+)(?: \(.*\))?:", section[1], re.MULTILINE) if section else []


def parameters(node: ast.ClassDef) -> list[str]:
    """The names that a class's __init__ takes after self, as a docstring writes them."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            args = item.args
            names = [arg.arg for arg in (*args.posonlyargs, *args.args)][1:]
            names += ["*" + args.vararg.arg] if args.vararg else []
            names += [arg.arg for arg in args.kwonlyargs]
            return names + (["**" + args.kwarg.arg] if args.kwarg else [])
    return []


def mistakes(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and (names := documented(ast.get_docstring(node) or "")):
            taken = parameters(node)
            found += [f"{node.name} has no argument {name}" for name in names if name not in taken]
            found += [f"{node.name} does not document {name}" for name in taken if name not in names]
    return found


@pytest.mark.parametrize("file", FILES)
def test_documented_arguments_are_those_that_exist(file):
    assert mistakes((ROOT / file).read_text(encoding="utf-8")) == []


def test_mistakes_are_found():
    source = '''
class A:
    """Do it.

    Args:
        x: The one. Note: no name is taken from here,
            nor from: here.
        old: Not there any more.
        **rest: Passed on.

    Raises:
        ValueError: Never.
    """

    def __init__(self, x, *, new=1, **rest): ...
'''
    assert mistakes(source) == ["A has no argument old", "A does not document new"]
