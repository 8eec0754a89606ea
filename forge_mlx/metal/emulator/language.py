"""What compiles here and not on every Metal that MLX supports, found in clang's syntax tree of the user's code.

The emulator's compiler knows C++ for OpenCL, a larger language than Metal's. The rules are those of MSL 3.1 (macOS 14)
to 4.1 (macOS 27): pointers and references name an address space, there are no lambdas, structured bindings, recursion
or goto, and a float does not become a bfloat by itself. Only what the text itself declares is looked at, not headers.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
import hashlib
import json
from pathlib import Path
import re

from forge_mlx.metal.emulator import syntax_tree
from forge_mlx.metal.emulator.disk_cache import cached
from forge_mlx.metal.emulator.names import ARRAY_TYPE
from forge_mlx.metal.emulator.references import THREAD_MARK
from forge_mlx.metal.emulator.syntax_tree import Json, Place, Visit, visits
from forge_mlx.metal.emulator.toolchain import dump_ast, source_key
from forge_mlx.metal.emulator.translate import GENERATED_FILE

_FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl", "CXXDestructorDecl")
_METHODS = ("CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl")
_RECORDS = ("CXXRecordDecl", "ClassTemplateSpecializationDecl", "ClassTemplatePartialSpecializationDecl")
_CASTS = ("CStyleCastExpr", "CXXStaticCastExpr", "CXXReinterpretCastExpr", "CXXConstCastExpr")
# What no rule has to look at twice.
_FORBIDDEN = {
    "LambdaExpr": ("lambda", "lambdas do not compile before macOS 15; write a function"),
    "DecompositionDecl": ("structured binding", "Metal is C++14 before macOS 26, without structured bindings"),
    "GotoStmt": ("goto", "Metal has no goto"),
    "IndirectGotoStmt": ("goto", "Metal has no goto"),
    "GCCAsmStmt": ("asm", "Metal has no asm"),
}
# Classes of Metal that have constructors.
_MATRICES = frozenset({"simdgroup_matrix", "matrix"})
_SPACES = {"__global": "device", "__local": "threadgroup"}

# A vector of 32 bytes in memory that threads share: the type of an expression that stands for the object.
_TOO_WIDE = re.compile(
    r"(?P<signed>long|int64_t|ptrdiff_t|intptr_t)?(?:unsigned long|ulong|uint64_t|size_t|uintptr_t)?"
    r" __(?:global|local|constant) __attribute__\(\(ext_vector_type\((?P<size>[34])\)\)\)"
)
# What the innermost pointer or reference of a type leads to. Metal takes `device T*&`, a reference in no address space
# to a pointer into one, as in MLX's quantized.h.
_UNQUALIFIED = re.compile(r"[^*&]*\b__generic\b")
# A method's type: what follows its parameters.
_WITHOUT_SPACE = re.compile(r"\)\s*(?:const\s*)?(?:volatile\s*)?__generic\b")
_CALL_OPERATOR = re.compile(rb"operator\s*\(\s*\)")
_CAST = re.compile(rb"\([^()]*\)|\w+\s*<[^>]*>")

# What the compiler rejects by itself, in words that a writer of Metal does not know.
_REJECTED = (
    (r"virtual functions are not supported", "virtual", "Metal has no virtual functions"),
    (r"cannot use '(?:try|throw)' with exceptions", "exception", "Metal has no exceptions"),
    (r"'default (?:new|delete)' is not supported", "allocation", "Metal has no new and delete"),
    (r"'dynamic_cast' is not supported", "dynamic_cast", "Metal has no dynamic_cast"),
    (r"use of typeid requires", "typeid", "Metal has no typeid"),
    (r"use of type '(?:long )?double' ", "double", "Metal has no double"),
    (
        r"array size is not a constant|variable length array",
        "variable-length array",
        "the size of an array must be constexpr",
    ),
    (r"pointers to functions are not allowed", "function pointer", "a kernel has no pointers to functions"),
    (r"does not support the '\w+' storage class", "storage class", "Metal has no register and thread_local"),
)
_ERROR = re.compile(r"(?P<file>.*?):(?P<line>\d+):\d+: (?:fatal )?error: (?P<text>.*)")


@dataclass(frozen=True)
class Finding:
    """Something that a supported Metal does not take.

    Attributes:
        kind: the rule, in a word or two: "address space", "lambda", ...
        message: what is wrong and what to write instead.
        file: as for `Location`.
        line: as for `Location`.
        is_warning: whether Metal takes it before macOS 27.
    """

    kind: str
    message: str
    file: str
    line: int
    is_warning: bool = False


def check(tree: Json) -> list[Finding]:
    """Find what the compiler here takes and Metal does not.

    Args:
        tree: from `toolchain.dump_ast`.

    Returns:
        What was found, in the order of the source; of each kind at most one a line.
    """
    checker = _Checker(tree["text"].encode())
    for visit in visits(tree):
        checker.visit(visit)
    return checker.results()


def check_source(text: str, *, preamble: bool, defines: tuple[tuple[str, str], ...] = ()) -> list[Finding]:
    """`check` of a text, with what it found kept on disk.

    Args:
        text: as for `toolchain.compile_source`.
        preamble: as for `toolchain.compile_source`.
        defines: as for `toolchain.compile_source`.

    Returns:
        As `check`.

    Raises:
        CompilerFailure: the text does not compile.
        ToolchainError: as for `toolchain.compile_source`.
    """

    def build(folder: Path) -> Path:
        found = check(dump_ast(text, preamble=preamble, defines=defines))
        path = folder / "findings.json"
        path.write_text(json.dumps([asdict(each) for each in found]), encoding="utf-8")
        return path

    rules = b"".join(Path(module).read_bytes() for module in (__file__, syntax_tree.__file__))
    key = f"{source_key(text, preamble=preamble, defines=defines)}-{hashlib.sha256(rules).hexdigest()[:16]}"
    kept = cached("findings", key, ".json", build)
    return [Finding(**each) for each in json.loads(kept.read_text(encoding="utf-8"))]


def rejected(stderr: str) -> list[Finding]:
    """The errors of the compiler that are about the language, in Metal's words.

    Args:
        stderr: of `toolchain.CompilerFailure`.

    Returns:
        What of it breaks a rule of the language; empty where the errors are of other kinds.
    """
    found = []
    for match in filter(None, map(_ERROR.fullmatch, stderr.splitlines())):
        for pattern, kind, message in _REJECTED:
            if re.search(pattern, match["text"]):
                found.append(Finding(kind, message, match["file"], int(match["line"])))
    return found


@dataclass
class _Function:
    """A function of the user's, all its declarations together, and what it calls when it runs."""

    name: str
    visit: Visit
    calls: list[str] = field(default_factory=list)


@dataclass
class _MethodCall:
    """A call of a method on an object that is not in thread memory."""

    method: str
    name: str
    space: str
    visit: Visit


class _Checker:
    """Collects findings on one way through the tree."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._found: dict[tuple[str, str, int], Finding] = {}
        # By id of a declaration: the id of the first declaration of the same function.
        self._first: dict[str, str] = {}
        self._functions: dict[str, _Function] = {}
        self._thread_methods: set[str] = set()
        self._method_calls: list[_MethodCall] = []
        # Methods that name no address space, by class and file.
        self._unmarked: dict[tuple[str, str], list[Visit]] = {}
        # Classes whose objects do not begin as whatever was in their memory.
        self._constructed: set[str] = set()
        self._rules: dict[str, Callable[[Visit], None]] = {
            **dict.fromkeys(("VarDecl", "ParmVarDecl", "FieldDecl", "TypeAliasDecl"), self._declaration),
            **dict.fromkeys(_FUNCTIONS, self._function),
            **dict.fromkeys(_RECORDS, self._record),
            **dict.fromkeys(_CASTS, self._cast),
            "TypedefDecl": self._typedef,
            "ImplicitCastExpr": self._conversion,
            "DeclRefExpr": self._reference,
            "MemberExpr": self._member,
            "CXXOperatorCallExpr": self._operator,
        }

    def visit(self, visit: Visit) -> None:
        """Look at a node."""
        place = visit.place
        if visit.is_hidden or place is None or place.file in (None, GENERATED_FILE):
            return
        if visit.kind in _FORBIDDEN:
            self._report(visit, *_FORBIDDEN[visit.kind])
        elif visit.kind in self._rules:
            self._rules[visit.kind](visit)
        if visit.node.get("valueCategory") == "lvalue":
            self._object_of_32_bytes(visit)

    def results(self) -> list[Finding]:
        """What was found, once every node was looked at."""
        for call in self._method_calls:
            if self._first.get(call.method) in self._thread_methods:
                message = f"method '{call.name}' is for objects in thread memory and this one is in {call.space} memory"
                self._report(call.visit, "method", f"{message}; copy the object or qualify a method with {call.space}")
        for cycle in _cycles({key: function.calls for key, function in self._functions.items()}):
            functions = [self._functions[key] for key in cycle]
            if not self._runs(cycle):
                continue
            names = " -> ".join(each.name for each in [*functions, functions[0]])
            self._report(functions[0].visit, "recursion", f"Metal has no recursion: {names}")
        for (record, _), methods in self._unmarked.items():
            names = ", ".join(dict.fromkeys(method.name.split("<")[0] for method in methods))
            message = (
                f"methods of {record} without address space do not compile on macOS 27 ({names}); write `thread` after"
            )
            self._report(methods[0], "unqualified method", f"{message} the parentheses", is_warning=True)
        return sorted(self._found.values(), key=lambda finding: (finding.file, finding.line))

    def _report(self, visit: Visit, kind: str, message: str, *, is_warning: bool = False) -> None:
        place = visit.place
        if place is not None and place.file is not None:
            # Instances of a template, and the declaration with its initialiser, say the same of one line.
            key = (kind, place.file, place.line)
            self._found.setdefault(key, Finding(kind, message, place.file, place.line, is_warning))

    def _declaration(self, visit: Visit) -> None:
        if not _UNQUALIFIED.match(visit.type) or self._is_defaulted(visit.parent):
            return
        is_alias = visit.kind == "TypeAliasDecl"
        first, last = (visit.place, visit.end) if is_alias else (visit.begin, visit.place)
        if self._writes_pointer(first, last):
            self._no_space(visit, f"'{visit.name}'" if visit.name else "a parameter")

    def _object_of_32_bytes(self, visit: Visit) -> None:
        """The compiler tells the runtime of accesses of up to 16 bytes: races and bounds of larger ones would pass."""
        spelled = visit.node.get("type", {})
        found = _TOO_WIDE.fullmatch(spelled.get("desugaredQualType", visit.type).replace("const ", ""))
        if found:
            name = "long" if found["signed"] else "ulong"
            message = f"the emulator cannot watch a {name}{found['size']} in memory that threads share; use {name}2"
            self._report(visit, "vector of 32 bytes", f"{message} or {name}")

    def _no_space(self, visit: Visit, what: str) -> None:
        message = (
            f"the pointer or reference {what} names no address space; write device, threadgroup, constant or thread"
        )
        self._report(visit, "address space", message)

    def _writes_pointer(self, first: Place | None, last: Place | None) -> bool:
        """Whether a pointer or reference is spelled out between two places, not deduced or hidden in a template's T."""
        if first is None or last is None or last.offset <= first.offset:
            # Both in one macro's expansion: nothing can be read.
            return True
        # The last token of an alias is itself the `*`.
        written = self._text[first.offset : last.offset + 1]
        if THREAD_MARK.encode() in written:
            # `const thread T&`, which the translation lets bind temporaries.
            return False
        return bool(re.search(rb"[*&]", written)) and not re.search(rb"\bauto\b", written)

    def _typedef(self, visit: Visit) -> None:
        if not visit.name.startswith(ARRAY_TYPE):
            self._declaration(visit)
            return
        spelled = visit.node.get("type", {})
        element = str(spelled.get("desugaredQualType", visit.type)).split("[")[0].strip()
        name = re.sub(r"<.*>", "", element).split("::")[-1]
        if name in self._constructed or name in _MATRICES:
            variable = visit.name.removeprefix(ARRAY_TYPE)
            message = f"threadgroup variable '{variable}' is of class {element}, which has a constructor"
            self._report(visit, "threadgroup", f"{message}; use scalars or vectors")

    def _function(self, visit: Visit) -> None:
        node = visit.node
        first = self._first.get(str(node.get("previousDecl")), str(node["id"]))
        self._first[node["id"]] = first
        self._functions.setdefault(first, _Function(visit.name, visit))
        if self._is_defaulted(visit):
            return
        result = visit.type.split("(")[0]
        if _UNQUALIFIED.match(result) and self._writes_pointer(visit.begin, visit.place):
            self._no_space(visit, f"that '{visit.name}' returns")
        is_method = visit.kind in _METHODS and node.get("storageClass") != "static"
        if is_method and _WITHOUT_SPACE.search(visit.type):
            self._method(visit, first)

    @staticmethod
    def _is_defaulted(visit: Visit | None) -> bool:
        """Whether `= default` makes a function: the translation adds such ones to every class (classes.py)."""
        return visit is not None and "explicitlyDefaulted" in visit.node

    def _method(self, visit: Visit, first: str) -> None:
        self._thread_methods.add(first)
        record, place = visit.enclosing(*_RECORDS), visit.place
        if record is not None and place is not None and not self._says_thread(place):
            self._unmarked.setdefault((record.name, str(place.file)), []).append(visit)

    def _says_thread(self, name: Place) -> bool:
        """Whether `thread` stood after the parameters of the method whose name is at a place."""
        if name.is_macro:
            # The definition of the macro is elsewhere.
            return True
        operator = _CALL_OPERATOR.match(self._text, name.offset)
        start = self._text.find(b"(", operator.end() if operator else name.offset)
        depth, index = 1, start + 1
        while depth and index < len(self._text):
            depth += {b"(": 1, b")": -1}.get(self._text[index : index + 1], 0)
            index += 1
        qualifiers = re.compile(rb"[^{;:=]*").match(self._text, index)
        return qualifiers is not None and THREAD_MARK.encode() in qualifiers[0]

    def _record(self, visit: Visit) -> None:
        constructor = visit.node.get("definitionData", {}).get("defaultCtor", {})
        if constructor.get("nonTrivial"):
            self._constructed.add(visit.name)

    def _cast(self, visit: Visit) -> None:
        if not _UNQUALIFIED.match(visit.type) or visit.begin is None:
            return
        written = None if visit.begin.is_macro else _CAST.match(self._text, visit.begin.offset)
        if written is None or re.search(rb"[*&]", written[0]):
            self._no_space(visit, "of a cast")

    def _conversion(self, visit: Visit) -> None:
        node = visit.node
        spelled = node.get("type", {})
        is_bfloat = re.fullmatch(r"(?:\w+ )*__bf16", spelled.get("desugaredQualType", visit.type))
        if is_bfloat and node.get("castKind") == "FloatingCast" and "isPartOfExplicitCast" not in node:
            self._report(
                visit, "bfloat", "a float does not become a bfloat by itself; write bfloat(x) or static_cast<T>(x)"
            )

    def _reference(self, visit: Visit) -> None:
        declared = visit.node.get("referencedDecl", {})
        if declared.get("kind") in _FUNCTIONS:
            self._call(visit, declared["id"])

    def _member(self, visit: Visit) -> None:
        member = visit.node.get("referencedMemberDecl", "")
        self._call(visit, member)
        self._object(visit, member, visit.name, visit.node.get("inner", ({},))[0])

    def _operator(self, visit: Visit) -> None:
        callee, *operands = visit.node.get("inner", ({},))
        while callee.get("kind") == "ImplicitCastExpr":
            callee = callee["inner"][0]
        declared = callee.get("referencedDecl", {})
        if operands and declared.get("kind") == "CXXMethodDecl":
            self._object(visit, declared["id"], declared["name"], operands[0])

    def _object(self, visit: Visit, method: str, name: str, receiver: Json) -> None:
        if receiver.get("castKind") != "AddressSpaceConversion":
            return
        # Of a pointer, `__global M *__private`: what it points at.
        pointee = receiver["inner"][0].get("type", {}).get("qualType", "").rpartition("*")
        space = re.search(r"__global|__local", pointee[0] or pointee[2])
        if space:
            self._method_calls.append(_MethodCall(method, name.lstrip("->."), _SPACES[space[0]], visit))

    def _call(self, visit: Visit, callee: str) -> None:
        caller = visit.enclosing("ConstantExpr", *_FUNCTIONS)
        function = self._functions.get(self._first.get(caller.node["id"], "")) if caller else None
        variable = visit.enclosing("VarDecl", *_FUNCTIONS)
        is_constant = variable is not None and variable.kind == "VarDecl" and "constexpr" in variable.node
        if function is not None and not is_constant:
            function.calls.append(self._first.get(callee, callee))

    def _runs(self, cycle: list[str]) -> bool:
        """Whether functions that call each other do so when the kernel runs, not only for constants."""
        if not all("constexpr" in self._functions[key].visit.node for key in cycle):
            return True
        others = (function.calls for key, function in self._functions.items() if key not in cycle)
        return any(not set(cycle).isdisjoint(calls) for calls in others)


def _cycles(calls: dict[str, list[str]]) -> Iterator[list[str]]:
    """A way around for each function that can reach itself, unless an earlier way leads through it."""
    told: set[str] = set()
    for start in calls:
        path = _path(calls, start, start)
        if path and not told & set(path):
            told |= set(path)
            yield path


def _path(calls: dict[str, list[str]], start: str, goal: str) -> list[str]:
    """Functions on a shortest way of calls from one to another, the goal left out; empty where there is none."""
    came_from: dict[str, str] = {}
    waiting = [start]
    for caller in waiting:
        for callee in calls.get(caller, ()):
            if callee == goal:
                path = [caller]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if callee in calls and callee not in came_from:
                came_from[callee] = caller
                waiting.append(callee)
    return []
