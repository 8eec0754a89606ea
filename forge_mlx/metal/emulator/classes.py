"""Constructors and methods, whose address spaces C++ for OpenCL takes otherwise than Metal.

In Metal a constructor or method is for objects in thread memory, by the qualifier `thread` or by none. Here a
temporary is in no address space: with the qualifier neither `return {x, y}` nor `Sum()(x, y)` would find what they
need. So the qualifier goes, and inside the function the members are reached through a pointer to thread memory, to
which `thread T&` can be bound.

A class can be copied out of constant memory in Metal; here it gets a copy constructor and assignment that do so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from forge_mlx.metal.emulator.references import THREAD_MARK
from forge_mlx.metal.emulator.tokens import Code
from forge_mlx.metal.emulator.type_names import BUILTIN, QUALIFIERS, TypeNames

CLASS_WORDS = frozenset({"struct", "class", "union"})
_SPACES = frozenset({"thread", "device", "threadgroup", "constant"})
_NO_METHOD = frozenset({"static", "friend", "using", "typedef", "static_assert"})
_AFTER_PARAMETERS = _SPACES | {"const", "volatile", "noexcept", "override", "final", "mutable"}
_NO_TYPE = frozenset({"return", "else", "case", "do", "goto", "typename", "template", "and", "or", "not"})


@dataclass
class Function:
    """A function's declaration or definition, by the positions of its tokens.

    Attributes:
        name: the last token of its name.
        opening: the `(` of its parameters.
        words: qualifiers after the parameters.
        colon: the `:` before the members that a constructor makes.
        arrow: the `->` before its result.
        body: the `{` of its body.
    """

    name: int
    opening: int
    words: list[int]
    colon: int | None = None
    arrow: int | None = None
    body: int | None = None


@dataclass
class _Class:
    name: str
    # Data members, with where their types begin and end.
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)
    static: set[str] = field(default_factory=set)


class Classes:
    """Rewrites the constructors and methods of every class."""

    def __init__(self, code: Code, names: TypeNames) -> None:
        self._code = code
        self._names = names
        self._known: dict[str, _Class] = {}

    def add(self, head: int, brace: int) -> None:
        """A class whose declaration begins at `head` and whose members follow the `{` at `brace`."""
        code = self._code
        found = _Class(self._name(head, brace))
        self._known[found.name] = found
        functions = []
        for begin, end in self._members(brace):
            function = self.function(begin, end)
            if function is None:
                self._add_fields(found, begin)
            elif _NO_METHOD.isdisjoint(code.text(index) for index in range(begin, function.opening)):
                functions.append((begin, function))
            else:
                found.static.add(code.text(function.name))
        if found.name:
            code[brace].after += self._copies(found.name, [function for _, function in functions])
        for begin, function in functions:
            self._rewrite(found, begin, function)

    def _copies(self, name: str, functions: list[Function]) -> str:
        """Declarations of what copies an object from anywhere, unless the class declares its own."""
        code = self._code
        constructors = [each for each in functions if code.text(each.name) == name and code.text(each.name - 1) != "~"]
        written = "" if constructors else f" {name}() = default;"
        if not any(self._takes_own(name, each) for each in constructors):
            written += f" {name}(const {name}&) = default; {name}(const constant {name}&) = default;"
        if not any(code.text(each.name) == "operator" and code.text(each.name + 1) == "=" for each in functions):
            assign = f"{name}& operator="
            written += f" {assign}(const {name}&) = default;"
            if any(code.text(word) == "constant" for each in constructors for word in each.words):
                # A value converts to an object in constant memory too: both assignments would do for `object = value`.
                written += (
                    f" template <typename emu_other> EMU_FUNC metal::enable_if_t<metal::is_same_v<emu_other, {name}>>"
                    f" operator=(const constant emu_other& other) {THREAD_MARK} {{ *this = {name}(other); }}"
                )
            else:
                written += f" {assign}(const constant {name}&) = default;"
        return written

    def _takes_own(self, name: str, function: Function) -> bool:
        """Whether a constructor's first parameter is a reference to its own class."""
        code = self._code
        first = next(iter(code.parts(function.opening + 1, code.partner[function.opening])), (0, 0))
        words = [code.text(index) for index in range(*first)]
        return name in words and "&" in words

    def add_outside(self, begin: int, end: int) -> None:
        """A function defined at namespace scope: of a class where its name says so."""
        code = self._code
        function = self.function(begin, end)
        if function is None or code.text(function.name - 1) not in ("::", "~"):
            return
        index = function.name - 1 if code.text(function.name - 1) == "::" else function.name - 2
        index -= 1
        if code.text(index) == ">":
            index = (code.angle_begin(index) or begin) - 1
        found = self._known.get(code.text(index))
        if found is not None and code.text(function.name) not in found.static:
            self._rewrite(found, begin, function)

    def function(self, begin: int, end: int) -> Function | None:
        """The function that the tokens from `begin` declare; None where they declare something else."""
        code, index = self._code, begin
        while index < end:
            text = code.text(index)
            if text in ("=", "{", ";"):
                return None
            if text == "operator":
                return self._operator(index)
            if text == "template":
                index = code.angle_end(index + 1, surely=True) or index
            elif text in ("alignas", "__attribute__", "decltype", "noexcept") and code.text(index + 1) == "(":
                index = code.partner.get(index + 1, index + 1)
            elif text == "<":
                index = code.angle_end(index) or index
            elif text == "[":
                index = code.partner.get(index, index)
            elif text == "(":
                declarator = code.text(index + 1) in ("*", "&") or code.kind(index - 1) != "name"
                return None if declarator else self._after(index - 1, index)
            index += 1
        return None

    def _operator(self, index: int) -> Function | None:
        code = self._code
        opening = index + 1
        if code.text(opening) == "(" and code.text(opening + 1) == ")":
            opening += 2
        while opening < len(code) and code.text(opening) != "(":
            opening += 1
        return self._after(index, opening)

    def _after(self, name: int, opening: int) -> Function | None:
        """What follows the parameters: qualifiers, members to make, a body."""
        code = self._code
        close = code.partner.get(opening)
        if close is None:
            return None
        found = Function(name, opening, [])
        index = close + 1
        while index < len(code) and code.text(index) not in (";", "{", "=", "}"):
            text = code.text(index)
            if text in _AFTER_PARAMETERS:
                found.words.append(index)
            elif text == "(" or text == "[":
                index = code.partner.get(index, index)
            elif text == "->":
                found.arrow = index
            elif text == ":":
                found.colon = index
                index = self._end_of_initialisers(index) - 1
            index += 1
        found.body = index if code.text(index) == "{" else None
        return found

    def _initialisers(self, colon: int) -> Iterator[tuple[int, int]]:
        """The name before, and the position of, each bracket after the colon of a constructor."""
        code, index = self._code, colon + 1
        while index < len(code):
            while code.kind(index) == "name" or code.text(index) in ("::", "<"):
                index = (code.angle_end(index) or index) if code.text(index) == "<" else index
                index += 1
            if code.text(index) not in ("(", "{") or index not in code.partner:
                return
            yield index - 1, index
            index = code.partner[index] + 1
            if code.text(index) == "...":
                index += 1
            if code.text(index) != ",":
                return
            index += 1

    def _end_of_initialisers(self, colon: int) -> int:
        last = colon
        for _, bracket in self._initialisers(colon):
            last = self._code.partner[bracket]
        return last + 1

    def _name(self, head: int, brace: int) -> str:
        code = self._code
        index = head
        while index < brace and code.text(index) not in CLASS_WORDS:
            index = (code.angle_end(index, surely=True) or index) if code.text(index) == "<" else index
            index += 1
        index += 1
        while index < brace:
            if code.text(index) in ("alignas", "__attribute__") and code.text(index + 1) == "(":
                index = code.partner.get(index + 1, index + 1)
            elif code.text(index) == "[":
                index = code.partner.get(index, index)
            elif code.kind(index) == "name":
                return code.text(index)
            index += 1
        return ""

    def _members(self, brace: int) -> Iterator[tuple[int, int]]:
        """Ranges of the member declarations of a class, bodies included."""
        code = self._code
        start, end = brace + 1, self._code.partner.get(brace, brace)
        index = start
        while index < end:
            text = code.text(index)
            if text in (";", ":") and (text == ";" or index == start + 1):
                # The end of a declaration, or of `public:`.
                if text == ";" and index > start:
                    yield start, index
                start = index + 1
            elif text in ("(", "["):
                index = code.partner.get(index, index)
            elif text == "{":
                function = self.function(start, index)
                is_body = function is not None and function.body == index
                index = code.partner.get(index, end)
                if is_body:
                    yield start, index + 1
                    start = index + 1
            index += 1

    def _add_fields(self, found: _Class, begin: int) -> None:
        """The data members of a declaration: the last name of each declarator, before any bracket."""
        code = self._code
        if code.text(begin) in CLASS_WORDS | {"enum", "using", "typedef", "template"}:
            return
        stop = begin
        while stop < len(code) and code.text(stop) not in (";", "="):
            stop = code.partner.get(stop, stop) + 1
        words = [code.text(index) for index in range(begin, stop)]
        # A static member belongs to no object; macros such as STEEL_CONST say `static` in capitals.
        if "static" in words or (code.text(stop) == "=" and any(map(str.isupper, words[:2]))):
            return
        while code.text(begin) in QUALIFIERS or code.text(begin) in _SPACES:
            begin += 1
        type_end = begin
        for first, last in code.parts(begin, stop):
            end = next((index for index in range(first, last) if code.text(index) in ("[", "{", ":")), last) - 1
            if code.kind(end) == "name" and code.text(end) not in BUILTIN:
                type_end = end if first == begin else type_end
                found.fields[code.text(end)] = (begin, type_end)

    def _rewrite(self, found: _Class, begin: int, function: Function) -> None:
        code = self._code
        words = {code.text(index): index for index in function.words}
        if function.colon is not None:
            self._make_members(found, function.colon)
        if "thread" in words:
            code[words["thread"]].out = THREAD_MARK
        if "constant" in words and "const" not in words and code.text(function.name) != found.name:
            code[words["constant"]].before = "const "
        in_thread = "thread" in words or _SPACES.isdisjoint(words)
        # A constant expression takes no cast; what only gives values needs none.
        is_value = code.text(function.name - 1) not in ("&", "*")
        is_constant = any(code.text(index) == "constexpr" for index in range(begin, function.opening)) and is_value
        if in_thread and not is_constant:
            self._reach_members(found, function, "const thread" if "const" in words else "thread")

    def _make_members(self, found: _Class, colon: int) -> None:
        """`: v(a, b)` -> `: v(emu_make<float2>(a, b))` for members that are vectors."""
        code = self._code
        for name, bracket in self._initialisers(colon):
            type_range = found.fields.get(code.text(name))
            close = code.partner[bracket]
            if type_range is None or code.text(bracket) != "(" or close == bracket + 1:
                continue
            if self._names.kind_of(code, *type_range) in ("vector", "parameter"):
                code[bracket].after += f"emu_make<{code.spelled(*type_range)}>("
                code[close].before = ")" + code[close].before

    def _reach_members(self, found: _Class, function: Function, space: str) -> None:
        """`v` -> `((thread C*)this)->v` for the members of a class C, wherever no local name may hide them."""
        code = self._code
        ranges = [(bracket, code.partner[bracket]) for _, bracket in self._initialisers(function.colon or len(code))]
        if function.body is not None:
            ranges.append((function.body, code.partner.get(function.body, function.body)))
        pointer = f"(({space} {found.name}*)this)"
        hidden = self._locals(function.opening, code.partner[function.opening])
        hidden = hidden.union(*(self._locals(begin, end) for begin, end in ranges))
        for begin, end in ranges:
            for index in range(begin, end):
                text = code.text(index)
                if text == "this":
                    code[index].out = pointer
                elif text in found.fields and text not in hidden and code.text(index - 1) not in (".", "->", "::"):
                    code[index].before = f"{pointer}->" + code[index].before

    def _locals(self, begin: int, end: int) -> set[str]:
        """Names that a declaration may have taken: after a type's last token, or after a comma between declarators."""
        code, found = self._code, set()
        brackets: list[int] = []
        for index in range(begin, end):
            text, before = code.text(index), code.text(index - 1)
            if index in code.partner and code.partner[index] > index:
                brackets.append(index)
            elif brackets and code.partner.get(index) == brackets[-1]:
                brackets.pop()
            if code.kind(index) != "name" or code.text(index + 1) not in ("=", ";", ",", ")", "[", "(", "{", ":"):
                continue
            after_type = (code.kind(index - 1) == "name" and before not in _NO_TYPE) or before in (">", "*", "&")
            declares = before == "," and brackets and code.text(brackets[-1]) == "{"
            if (after_type and not self._computes(index - 1)) or declares:
                found.add(text)
        return found

    def _computes(self, index: int) -> bool:
        """Whether `*`, `&` or `>` at `index` is surely an operator: what precedes it is no type after a boundary."""
        code = self._code
        if code.text(index) not in ("*", "&", ">"):
            return False
        while code.text(index) in ("*", "&", ">", "::") or code.kind(index) == "name":
            if code.text(index) in _NO_TYPE:
                return True
            if code.text(index) == ">":
                index = code.angle_begin(index) or index
            index -= 1
        return code.text(index) not in (";", "{", "}", "(", ",")
