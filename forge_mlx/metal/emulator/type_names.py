"""Which spellings in a source name a vector type, or a type that only the template's arguments decide."""

from typing import Literal

from forge_mlx.metal.emulator.tokens import Code

# vector: certainly one. parameter: a template's type parameter. member: `typename A::b`, which may be anything.
# scalar: half or bfloat, between which C++ for OpenCL has no conversion.
TypeKind = Literal["vector", "parameter", "member", "scalar"]

_SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
VECTORS = frozenset(f"{packed}{scalar}{n}" for packed in ("", "packed_") for scalar in _SCALARS for n in (2, 3, 4))
BUILTIN = frozenset(
    {*_SCALARS, "void", "double", "unsigned", "signed", "size_t", "ptrdiff_t", "float16_t", "bfloat16_t"}
    | {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_HALVES = frozenset({"half", "bfloat", "float16_t", "bfloat16_t"})
QUALIFIERS = frozenset({"const", "volatile", "constexpr", "static", "inline", "thread", "device", "constant"})


class TypeNames:
    """The type names that a source declares, wherever it declares them.

    Scopes are not kept apart: what is done for a name that may be a vector is also right for one that is not. But from
    line `hidden_from` on, which is the kernel, the names in `hidden` are its parameters and nothing else.
    """

    def __init__(self, code: Code, hidden: frozenset[str] = frozenset(), hidden_from: int = 0) -> None:
        self._kinds: dict[str, TypeKind] = {}
        self._template_kinds: dict[str, TypeKind] = {}
        self._hidden = hidden
        self._hidden_from = hidden_from
        classes: set[str] = set()
        for index in range(len(code)):
            match code.text(index):
                case "template":
                    for name in self.template_parameters(code, index):
                        self._add(self._kinds, name, "parameter")
                case "using":
                    self._add_alias(code, index)
                case "typedef":
                    self._add_typedef(code, index)
                case "struct" | "class" | "union" if code.text(index + 2) in ("{", ":", "final"):
                    classes.add(code.text(index + 1))
        # Of a class and a parameter of one name the class counts: its constructors must stay what they are.
        self._kinds = {name: kind for name, kind in self._kinds.items() if name not in classes}

    def kind_of(self, code: Code, begin: int, end: int) -> TypeKind | None:
        """What the tokens `begin` to `end - 1` name, where a conversion to it needs help; None for any other type."""
        while begin < end and code.text(begin) in QUALIFIERS:
            begin += 1
        while begin < end and code.text(end - 1) in QUALIFIERS:
            end -= 1
        if begin >= end or self.end_of_type(code, begin) != end:
            return None
        is_member = code.text(begin) == "typename"
        last = self._last_name(code, begin, end)
        name = code.text(last)
        if last == begin and name in self._hidden and code[begin].line >= self._hidden_from:
            return None
        if last == end - 1:
            kind = "vector" if name in VECTORS else "scalar" if name in _HALVES else self._kinds.get(name)
            # A member of another class may share its name with a template parameter here.
            if kind in ("vector", "scalar") or (kind is not None and last == begin):
                return kind
        elif name == "vec":
            return "vector"
        elif name in self._template_kinds:
            return self._template_kinds[name]
        return "member" if is_member else None

    def end_of_type(self, code: Code, index: int) -> int:
        """The token after the type name that begins at `index`; `index` itself where there is none.

        A type name is a builtin of one or more words, or a qualified name with its template arguments.
        """
        begin = index
        if code.text(index) in ("typename", "struct", "class", "union"):
            index += 1
        if code.text(index) in BUILTIN:
            while code.text(index) in BUILTIN:
                index += 1
            return index
        if code.text(index) in ("decltype", "typeof", "__typeof__") and code.text(index + 1) == "(":
            return code.partner.get(index + 1, begin - 1) + 1
        if code.text(index) == "::":
            index += 1
        while code.kind(index) == "name" and code.text(index) not in QUALIFIERS:
            index += 1
            if code.text(index) == "<":
                close = code.angle_end(index, surely=code.text(begin) == "typename")
                if close is None:
                    return index
                index = close + 1
            if code.text(index) != "::":
                return index
            index += 1
            if code.text(index) == "template":
                index += 1
        return begin

    @staticmethod
    def _last_name(code: Code, begin: int, end: int) -> int:
        """The name of `a::b<c>::name<d>` outside its arguments."""
        last = index = begin
        while index < end:
            if code.text(index) == "<":
                index = code.angle_end(index) or index
            elif code.kind(index) == "name":
                last = index
            index += 1
        return last

    @staticmethod
    def template_parameters(code: Code, index: int) -> frozenset[str]:
        """Names of the type parameters where `template <...>` stands at `index`; none otherwise."""
        is_list = code.text(index) == "template" and code.text(index + 1) == "<"
        close = code.angle_end(index + 1, surely=True) if is_list else None
        found = set()
        for begin, end in code.parts(index + 2, close or index):
            if code.text(begin) not in ("typename", "class"):
                continue
            name = begin + 2 if code.text(begin + 1) == "..." else begin + 1
            # `typename A::b = x` declares a value.
            if name < end and code.kind(name) == "name" and code.text(name + 1) != "::":
                found.add(code.text(name))
        return frozenset(found)

    def _add_alias(self, code: Code, index: int) -> None:
        if code.text(index + 2) != "=":
            return
        name, end = code.text(index + 1), index + 3
        while end < len(code) and code.text(end) != ";":
            end += 1
        is_template = code.text(index - 1) == ">"
        self._add(self._template_kinds if is_template else self._kinds, name, self.kind_of(code, index + 3, end))

    def _add_typedef(self, code: Code, index: int) -> None:
        begin = index + 1
        while code.text(begin) in QUALIFIERS:
            begin += 1
        end = self.end_of_type(code, begin)
        if code.kind(end) == "name" and code.text(end + 1) == ";":
            self._add(self._kinds, code.text(end), self.kind_of(code, begin, end))

    def _add(self, kinds: dict[str, TypeKind], name: str, kind: TypeKind | None) -> None:
        # The most certain of several declarations of one name counts.
        order: tuple[TypeKind, ...] = ("vector", "parameter", "member", "scalar")
        if kind is None:
            return
        known = kinds.get(name)
        if known is None or order.index(kind) < order.index(known):
            kinds[name] = kind
