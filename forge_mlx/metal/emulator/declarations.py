"""Walks through a source's scopes and rewrites the declarations that C++ for OpenCL does not take as Metal does.

Those are threadgroup variables, vectors made by `float4 v(x)`, and what classes.py and references.py are for.
"""

from dataclasses import dataclass, field
from typing import Literal

from forge_mlx.metal.emulator.classes import CLASS_WORDS, Classes
from forge_mlx.metal.emulator.names import ARRAY_TYPE
from forge_mlx.metal.emulator.references import References
from forge_mlx.metal.emulator.tokens import Code
from forge_mlx.metal.emulator.type_names import QUALIFIERS, TypeNames

Scope = Literal["namespace", "class", "kernel", "function", "list"]

_AFTER_PARAMETERS = QUALIFIERS | {"threadgroup", "noexcept", "override", "final", "mutable"}
_BEFORE_BLOCK = frozenset({")", "else", "do", "try", ";", "{", "}", ":"})


class TranslationError(Exception):
    """Source that Metal rejects and that could not be handed on.

    Attributes:
        message: what is wrong.
        line: the line of the text, counted from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


@dataclass
class _Declaration:
    """The specifiers of a simple declaration: `[[a]] alignas(8) threadgroup const T`."""

    type_begin: int = 0
    type_end: int = 0
    threadgroup: int | None = None
    dropped: list[int] = field(default_factory=list)
    end: int = 0


class Declarations:
    """Finds the statements of every function and rewrites the declarations among them.

    Args:
        code: the source, or the body of a macro.
        names: the types that are known.
        macro: the macro's parameters.
    """

    def __init__(self, code: Code, names: TypeNames, macro: frozenset[str] | None = None) -> None:
        self._code = code
        self._names = names
        self._macro = macro
        self._classes = Classes(code, names)
        self._references = References(code)
        self._arrays = 0

    def rewrite(self) -> None:
        """Change every declaration that needs it.

        Raises:
            TranslationError: a threadgroup variable with an initialiser, or outside a kernel.
        """
        code = self._code
        # Nothing tells where a macro is used.
        scopes: list[Scope] = ["namespace" if self._macro is None else "kernel"]
        index = head = 0
        while index < len(code):
            if index == head and scopes[-1] in ("kernel", "function"):
                self._statement(index, scopes[-1])
            text = code.text(index)
            if text in ("{", "}") and index not in code.partner:
                # Both branches of an #if open what is closed once.
                head = index + 1
            elif text == "{":
                scopes.append(self._open(head, index, scopes[-1]))
                head = head if scopes[-1] == "list" else index + 1
            elif text == "}":
                closed = scopes.pop() if len(scopes) > 1 else "list"
                head = head if closed in ("list", "class") else index + 1
            elif text in ("(", "["):
                index = self._group(index, head, scopes[-1])
                if text == "(" and code.text(head) in ("if", "for", "while", "switch"):
                    head = index + 1
            elif text == ";" and scopes[-1] in ("namespace", "class") and head < index:
                self._function(head, index)
                head = index + 1
            elif text == ";" or self._ends_label(head, index) or text in ("else", "do"):
                head = index + 1
            index += 1

    def _open(self, head: int, brace: int, outer: Scope) -> Scope:
        scope = self._scope_of(head, brace, outer)
        if scope == "class":
            self._make_deducible(head, brace)
            self._classes.add(head, brace)
        elif outer in ("namespace", "class") and scope in ("function", "kernel"):
            if outer == "namespace":
                self._classes.add_outside(head, brace)
            self._function(head, brace)
        return scope

    def _function(self, begin: int, end: int) -> None:
        """References among the parameters of a function that is declared from `begin` on; the end is its `{` or `;`."""
        code, function = self._code, self._classes.function(begin, end)
        if function is None:
            if code.text(begin) == "template":
                self._make_deducible(begin, end)
            return
        self._make_deducible(function.opening, code.partner[function.opening])
        own = self._names.template_parameters(code, begin)
        if own and self._references.returns_reference(begin, function.name):
            # It may hand out its parameter, which must not become a value.
            return
        # Where the parameters are named before the body, or must be constants, they stay what they become.
        is_constant = any(code.text(index) == "constexpr" for index in range(begin, function.opening))
        keeps = function.colon is not None or function.arrow is not None or is_constant
        self._references.parameters(function.opening, None if keeps else function.body, own)

    def _make_deducible(self, begin: int, end: int) -> None:
        """`vec<T, N>` -> `emu_vec<T, N>`, of which T and N can be deduced, and T cannot be bool."""
        code = self._code
        for index in range(begin, end):
            if code.text(index) == "vec" and code.text(index + 1) == "<" and code.text(index + 2) != "bool":
                code[index].out = "emu_vec"

    def _group(self, index: int, head: int, scope: Scope) -> int:
        """Pass over a bracketed group and return its end; the first part of a `for` is a statement."""
        if self._code.text(head) == "for" and scope in ("kernel", "function"):
            self._statement(index + 1, scope)
        return self._code.partner.get(index, index)

    def _ends_label(self, head: int, index: int) -> bool:
        code = self._code
        if code.text(index) != ":":
            return False
        return code.text(head) in ("case", "default", "public", "private", "protected") or index == head + 1

    def _scope_of(self, head: int, brace: int, outer: Scope) -> Scope:
        code = self._code
        words = [code.text(index) for index in range(head, brace)]
        last = words[-1] if words else ""
        if "namespace" in words or (words[:1] == ["extern"] and code.kind(brace - 1) == "string"):
            return "namespace"
        if self._is_class(head, brace):
            return "class"
        if outer == "list" or "enum" in words:
            return "list"
        if outer in ("kernel", "function"):
            return outer if last in _BEFORE_BLOCK or last in _AFTER_PARAMETERS or not words else "list"
        skipped = (code.angle_end(head + 1, surely=True) or head) + 1 - head if words[:1] == ["template"] else 0
        return self._function_scope(words[skipped:], last)

    @staticmethod
    def _function_scope(words: list[str], last: str) -> Scope:
        """A function's body or, in a namespace or class, the initialiser of a variable or member."""
        if ")" not in words:
            return "list"
        parameters_end = words.index(")")
        if "=" in words and words.index("=") < parameters_end:
            return "list"
        has_members = ":" in words[parameters_end:]
        if has_members and last not in (")", "}") and last not in _AFTER_PARAMETERS:
            return "list"
        return "kernel" if "kernel" in words else "function"

    def _is_class(self, head: int, brace: int) -> bool:
        """Whether a class's members follow: `template <...> struct alignas(8) A : B {` but not `struct A f() {`."""
        code, index = self._code, head
        if code.text(index) == "template":
            index = (code.angle_end(index + 1, surely=True) or index) + 1
        while code.text(index) in QUALIFIERS or code.text(index) in ("typedef", "threadgroup"):
            index += 1
        last = code.text(brace - 1)
        return code.text(index) in CLASS_WORDS and last != ")" and last not in _AFTER_PARAMETERS - {"final"}

    def _statement(self, begin: int, scope: Scope) -> None:
        found = self._specifiers(begin)
        if found is None:
            return
        self._constant(begin, found)
        if self._code.text(found.end) == "&" and (declarators := self._declarators(found.end)):
            self._references.local(begin, declarators[-1][1])
        elif found.threadgroup is not None:
            self._threadgroup(found, scope)
        elif self._names.kind_of(self._code, found.type_begin, found.type_end) in ("vector", "parameter"):
            self._direct(found)

    def _constant(self, begin: int, found: _Declaration) -> None:
        """`constant T x[] = ...;` in a function -> `static constant T x[] = ...;`, as C++ for OpenCL has it."""
        code = self._code
        words = {code.text(index) for index in range(begin, found.end)}
        if "constant" in words and "static" not in words and code.kind(found.end) == "name":
            code[begin].before = f"static {code[begin].before}"

    def _specifiers(self, index: int) -> _Declaration | None:
        code, found = self._code, _Declaration()
        while True:
            text = code.text(index)
            if text == "threadgroup":
                found.threadgroup = index
                index += 1
            elif text in QUALIFIERS:
                if text in ("static", "thread"):
                    found.dropped.append(index)
                index += 1
            elif text in ("alignas", "__attribute__") or (text == "[" and code.text(index + 1) == "["):
                close = code.partner.get(index if text == "[" else index + 1)
                if close is None:
                    return None
                found.dropped.extend(range(index, close + 1))
                index = close + 1
            elif found.type_end == 0:
                end = self._names.end_of_type(code, index)
                if end == index:
                    return None
                found.type_begin, found.type_end = index, end
                index = end
            else:
                found.end = index
                return found

    def _declarators(self, begin: int) -> list[tuple[int, int]] | None:
        """Ranges of the declarators that begin at `begin`; None where no `;` ends them."""
        code, end = self._code, begin
        while end < len(code) and code.text(end) != ";":
            if code.text(end) in ("}", ")"):
                return None
            end = code.partner.get(end, end) + 1
        return list(code.parts(begin, end))

    def _threadgroup(self, found: _Declaration, scope: Scope) -> None:
        """`threadgroup T a[N];` -> `typedef T A[N]; threadgroup A& a = *(threadgroup A*)emu_threadgroup(...);`.

        The typedef keeps every line break of the declaration where it was.
        """
        code = self._code
        declarators = self._declarators(found.end)
        if not declarators or any(code.kind(begin) != "name" for begin, _ in declarators):
            return
        assert found.threadgroup is not None
        keyword = code[found.threadgroup]
        element = code.spelled(found.type_begin, found.type_end)
        written = []
        for begin, end in declarators:
            name_end = begin + 1
            while code.text(name_end) == "##":
                name_end += 2
            self._check_variable(code.text(begin), name_end, end, scope)
            name = code.spelled(begin, name_end)
            alias = f"{ARRAY_TYPE}{name}" if self._macro is None else f"{ARRAY_TYPE}##{name}"
            code[begin].before = alias.removesuffix(name)
            size = f"sizeof({alias}), sizeof({element})"
            call = f"emu_threadgroup({self._next_id()}, {size}, {self._literal(begin, name_end)})"
            written.append(f" threadgroup {alias}& {name} = *(threadgroup {alias}*){call};")
        for index in found.dropped:
            code[index].blank()
        keyword.out = "typedef"
        semicolon = declarators[-1][1]
        if semicolon < len(code):
            code[semicolon].after += "".join(written)
        else:
            # The last tokens of a macro, whose use brings the semicolon.
            code[semicolon - 1].after += ";" + "".join(written).removesuffix(";")

    def _next_id(self) -> str:
        """A number for each array: from 0 up in the source, from 255 down where macros are used."""
        if self._macro is not None:
            return "255 - __COUNTER__"
        self._arrays += 1
        return str(self._arrays - 1)

    def _literal(self, begin: int, end: int) -> str:
        """The name as a string literal; in a macro of the arguments that make it."""
        parts = [self._code.text(index) for index in range(begin, end, 2)]
        return " ".join(f"#{part}" if part in (self._macro or ()) else f'"{part}"' for part in parts)

    def _check_variable(self, name: str, index: int, end: int, scope: Scope) -> None:
        code = self._code
        line = code[index - 1].line
        while index < end and code.text(index) == "[":
            index = code.partner.get(index, end) + 1
        if index < end:
            raise TranslationError(f"threadgroup variable '{name}' cannot have an initialiser", line)
        if scope == "function":
            raise TranslationError(f"threadgroup variable '{name}' is declared outside a kernel function", line)

    def _direct(self, found: _Declaration) -> None:
        """`float4 v(a, b);` -> `float4 v = emu_make<float4>(a, b);`."""
        code = self._code
        type_text = code.spelled(found.type_begin, found.type_end)
        for begin, end in self._declarators(found.end) or []:
            is_call = code.kind(begin) == "name" and code.text(begin + 1) == "(" and begin + 2 < end - 1
            if is_call and code.partner.get(begin + 1) == end - 1:
                code[begin].after = f" = emu_make<{type_text}>"
