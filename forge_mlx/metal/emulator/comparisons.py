"""Comparisons of vectors made vectors of bool, where clang has vectors of -1 and 0 for them.

Only the compiler knows which comparisons are of vectors, in a template only for each instance. So the syntax tree tells
where they stand, the text around them becomes `emu_truth(a < b)` (bool_vectors.h), and the new text is looked at again,
until no comparison of vectors is left outside such a call. A tree has no place for what a macro is made of: a text with
anything to change is preprocessed first.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
import hashlib
from pathlib import Path
import re

from forge_mlx.metal.emulator import syntax_tree
from forge_mlx.metal.emulator.disk_cache import cached
from forge_mlx.metal.emulator.syntax_tree import Json, Visit, visits
from forge_mlx.metal.emulator.tokens import tokenize
from forge_mlx.metal.emulator.toolchain import CompilerFailure, dump_ast, preprocess, source_key

# The type of one comparison may hang on that of another, through auto or a template's argument.
_ROUNDS = 16
_COMPARISONS = frozenset({"<", ">", "<=", ">=", "==", "!=", "&&", "||", "!"})
_VECTOR = re.compile(r"__attribute__\(\(ext_vector_type\(\d+\)\)\)\s*$")
_CHOICES = ("ConditionalOperator", "RecoveryExpr")


@dataclass(frozen=True)
class _Edit:
    """A call to be made of the bytes `begin` to `end` of a text; those at `commas` separate its arguments."""

    begin: int
    end: int
    function: str
    commas: tuple[int, ...] = ()


def compare_as_metal(text: str, *, preamble: bool, defines: tuple[tuple[str, str], ...] = ()) -> str:
    """Make each comparison of vectors a vector of bool, and each bool that becomes a vector 1 or 0.

    Args:
        text: as for `toolchain.compile_source`.
        preamble: as for `toolchain.compile_source`.
        defines: as for `toolchain.compile_source`.

    Returns:
        A text for `toolchain.compile_source`, line for line; the same one where nothing is to be changed. It may
        have errors that the given text has.

    Raises:
        CompilerFailure: a comparison of vectors stands where it cannot be changed.
        ToolchainError: as for `toolchain.compile_source`.
    """

    def build(folder: Path) -> Path:
        path = folder / "compared.cl"
        path.write_text(_rewritten(text, preamble, defines), encoding="utf-8")
        return path

    rules = b"".join(Path(module).read_bytes() for module in (__file__, syntax_tree.__file__))
    key = f"{source_key(text, preamble=preamble, defines=defines)}-{hashlib.sha256(rules).hexdigest()[:16]}"
    return cached("comparisons", key, ".cl", build).read_text(encoding="utf-8")


def _rewritten(text: str, preamble: bool, defines: tuple[tuple[str, str], ...]) -> str:
    is_expanded = False
    for _ in range(_ROUNDS):
        tree = dump_ast(text, preamble=preamble, defines=defines, broken=True)
        edits = set(_edits(tree))
        if not edits and tree["broken"]:
            # The instances of a template may be what has the errors, and are lost then.
            edits = set(_edits(tree, dependent=True))
        if not edits:
            return text
        if is_expanded:
            text = _changed(tree["text"], len(tree["text"]) - len(text), edits)
        else:
            text, is_expanded = preprocess(text, preamble=preamble, defines=defines), True
    raise CompilerFailure(f"no end of comparisons after {_ROUNDS} rounds")


def _edits(tree: Json, *, dependent: bool = False) -> Iterator[_Edit]:
    """What is to be changed of a text; `dependent`: where a template's arguments decide what is compared."""
    source = tree["text"].encode()
    for visit in visits(tree):
        if visit.begin is None or visit.begin.file is None:
            continue
        if visit.kind in _CHOICES and (choice := _choice(visit, source)):
            yield choice
            continue
        is_comparison = _opcode(visit) in _COMPARISONS
        if is_comparison and (("<dependent" in visit.type) if dependent else _is_vector(visit.node)):
            function = "emu_truth"
        elif visit.node.get("castKind") == "BooleanToSignedIntegral":
            function = "emu_number"
        else:
            continue
        if not _is_argument(visit, source, function):
            yield _Edit(visit.begin.offset, _end(visit.node), function)


def _opcode(visit: Visit) -> str:
    """The operator that an expression is, empty for other nodes."""
    if visit.kind in ("BinaryOperator", "UnaryOperator"):
        return str(visit.node.get("opcode", ""))
    if visit.kind == "CXXOperatorCallExpr":
        # In a template, where the operands' types decide what it calls.
        callee: Json = next(iter(visit.node.get("inner", ())), {})
        return str(callee.get("name", "")).removeprefix("operator")
    return ""


def _is_vector(node: Json) -> bool:
    spelled = node.get("type", {})
    return bool(_VECTOR.search(spelled.get("desugaredQualType", spelled.get("qualType", ""))))


def _is_argument(visit: Visit, source: bytes, function: str) -> bool:
    """Whether an expression is what a function is called with."""
    parent = visit.parent
    while parent is not None and parent.kind == "ImplicitCastExpr":
        parent = parent.parent
    if parent is None or parent.kind != "CallExpr" or parent.begin is None:
        return False
    return source.startswith(f"{function}(".encode(), parent.begin.offset)


def _end(node: Json) -> int:
    """Where the last token of a node ends, outside macros."""
    end = _outside(node["range"]["end"])
    return int(end["offset"]) + int(end["tokLen"])


def _outside(location: Json) -> Json:
    """A place in the source; in a macro's expansion, where the macro is used."""
    return dict(location.get("expansionLoc", location))


def _choice(visit: Visit, source: bytes) -> _Edit | None:
    """`m ? a : b` -> `emu_choose(m, a, b)` where m is a vector of bool."""
    parts = visit.node.get("inner", ())
    if len(parts) != 3 or visit.begin is None:
        return None
    condition = parts[0].get("type", {})
    spelled = condition.get("desugaredQualType", condition.get("qualType", ""))
    if not (_is_vector(parts[0]) or re.search(r"\bemu_bool<\d>$", spelled)):
        return None
    marks = []
    for mark, left, right in zip("?:", parts, parts[1:], strict=False):
        begin, end = _end(left), int(_outside(right["range"]["begin"])["offset"])
        place = begin
        for token in tokenize(source[begin:end].decode(errors="replace")):
            if token.kind == "mark" and token.text == mark:
                marks.append(place)
            place += len(token.text.encode())
    return _Edit(visit.begin.offset, _end(visit.node), "emu_choose", tuple(marks)) if len(marks) == 2 else None


def _changed(text: str, skipped: int, edits: set[_Edit]) -> str:
    """The text after its first `skipped` characters, with calls around the ranges."""
    source = bytearray(text.encode())
    opening: dict[int, list[_Edit]] = defaultdict(list)
    closing: dict[int, int] = defaultdict(int)
    for edit in edits:
        opening[edit.begin].append(edit)
        closing[edit.end] += 1
        for comma in edit.commas:
            source[comma : comma + 1] = b","
    for place in sorted({*opening, *closing}, reverse=True):
        # The longest range has the outermost call.
        calls = sorted(opening[place], key=lambda edit: -edit.end)
        source[place:place] = (")" * closing[place] + "".join(f"{edit.function}(" for edit in calls)).encode()
    return source.decode()[skipped:]
