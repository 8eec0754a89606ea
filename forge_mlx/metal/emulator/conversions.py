"""Metal's conversions between vectors, which C++ for OpenCL spells otherwise or takes for copies of bits."""

from forge_mlx.metal.emulator.tokens import Code
from forge_mlx.metal.emulator.type_names import BUILTIN, QUALIFIERS, VECTORS, TypeNames

_PREFIX = frozenset({"-", "+", "!", "~", "*", "&", "++", "--"})
# Names after which a parenthesis opens an expression, not a list of parameters or arguments.
_BEFORE_EXPRESSION = frozenset({"return", "case", "else", "do", "and", "or", "not", "throw"})


class Conversions:
    """Rewrites constructors and casts of vector and dependent types to calls of `emu_make` and `emu_cast`."""

    def __init__(self, code: Code, names: TypeNames) -> None:
        self._code = code
        self._names = names

    def rewrite(self) -> None:
        """Change every constructor and cast that needs it."""
        code = self._code
        for index in range(len(code)):
            text = code.text(index)
            if text == "static_cast":
                self._static_cast(index)
            elif text == "(":
                self._c_style_cast(index)
            elif code.kind(index) == "name" and self._begins_type(index):
                self._constructor(index)

    def _begins_type(self, index: int) -> bool:
        """Whether a type's whole name may begin here: not in the middle of `a::b` or after `typename`."""
        code, previous = self._code, self._code.text(index - 1)
        if previous == "::" and code.kind(index - 2) != "name" and code.text(index - 2) != ">":
            return True
        return previous not in ("::", "typename", ".", "->", "template", "struct", "class", "union", "using")

    def _constructor(self, begin: int) -> None:
        code = self._code
        end = self._names.end_of_type(code, begin)
        if end == begin or code.text(end) != "(" or self._names.kind_of(code, begin, end) is None:
            return
        declares = self._is_declarator(end) or code.text(begin - 1) == "operator"
        # A leading `::` belongs to the name.
        first = begin - 1 if code.text(begin - 1) == "::" else begin
        if code.text(end - 1) in VECTORS:
            # Macros of the Metal headers make these constructors; a declarator must not look like one.
            if declares and not code.text(end - 1).startswith("packed_"):
                code[end - 1].out = f"vec<{code.text(end - 1)[:-1]}, {code.text(end - 1)[-1]}>"
            return
        if declares or self._is_function_type(begin, end):
            return
        code[first].before = "emu_make<" + code[first].before
        code[end - 1].after += ">"

    def _is_declarator(self, opening: int) -> bool:
        """Whether `(` begins the declarator of a reference or pointer to an array or function: `(&x)[4]`."""
        code = self._code
        close = code.partner.get(opening)
        if close is None or code.text(close + 1) not in ("[", "("):
            return False
        index = opening + 1
        while code.text(index) in QUALIFIERS or code.text(index) == "threadgroup":
            index += 1
        if code.text(index) not in ("*", "&"):
            return False
        # One name at most: `T(*p + 1)[0]` is no declaration.
        return index + 2 >= close and code.kind(close - 1) in ("name", "mark")

    def _is_function_type(self, begin: int, opening: int) -> bool:
        """Whether `T(A, B)` is a template argument that names a function's type."""
        code = self._code
        close = code.partner.get(opening)
        if code.text(begin - 1) != "<" or close is None:
            return False
        return all(self._is_type(*part) for part in code.parts(opening + 1, close))

    def _is_type(self, begin: int, end: int) -> bool:
        """Whether the tokens are surely a type: a builtin, a vector or a dependent name, or a pointer to anything."""
        code = self._code
        while begin < end and code.text(end - 1) in ("*", "&", "...", *QUALIFIERS, "threadgroup"):
            if code.text(end - 1) in ("*", "&") and begin < end - 1:
                return (
                    code.text(begin) in QUALIFIERS or code.text(begin) == "threadgroup" or self._is_type(begin, end - 1)
                )
            end -= 1
        if begin < end and all(code.text(index) in BUILTIN | QUALIFIERS for index in range(begin, end)):
            return True
        return self._names.kind_of(code, begin, end) is not None

    def _static_cast(self, index: int) -> None:
        code = self._code
        close = code.angle_end(index + 1) if code.text(index + 1) == "<" else None
        if close is not None and self._names.kind_of(code, index + 2, close) is not None:
            code[index].out = "emu_cast"

    def _c_style_cast(self, opening: int) -> None:
        code = self._code
        close = code.partner.get(opening)
        if close is None or self._names.kind_of(code, opening + 1, close) is None:
            return
        if not self._may_be_cast(opening, close):
            return
        end = self._operand_end(close + 1)
        code[opening].out = "emu_cast<"
        code[close].out = ">("
        code[end].after += ")"

    def _may_be_cast(self, opening: int, close: int) -> bool:
        """Whether a type in parentheses stands where an expression may begin, before something to convert."""
        code = self._code
        previous = opening - 1
        if code.kind(previous) == "name" and code.text(previous) not in _BEFORE_EXPRESSION:
            return False
        if code.text(previous) in ("]", ">"):
            return False
        if code.text(previous) == ")":
            before = code.partner.get(previous, previous)
            if not self._is_type(before + 1, previous) or code.kind(before - 1) == "name":
                return False
        return code.kind(close + 1) in ("name", "number") or code.text(close + 1) in ("(", *_PREFIX)

    def _operand_end(self, index: int) -> int:
        """The last token of the operand of a cast: prefix operators and casts, a primary, what follows it."""
        code = self._code
        while code.text(index) in _PREFIX:
            index += 1
        if code.text(index) == "(":
            close = code.partner.get(index, index)
            if self._is_type(index + 1, close) and self._may_be_cast(index, close):
                return self._operand_end(close + 1)
            index = close + 1
        elif code.kind(index) == "name":
            index = self._name_end(index)
        else:
            index += 1
        return self._postfix_end(index) - 1

    def _name_end(self, index: int) -> int:
        """The token after a qualified name; `a < b` is an argument list only before `(`, `::` or `{`."""
        code = self._code
        while True:
            index += 1
            if code.text(index) == "<":
                close = code.angle_end(index)
                if close is not None and code.text(close + 1) in ("(", "::", "{"):
                    index = close + 1
            if code.text(index) != "::":
                return index
            index += 1

    def _postfix_end(self, index: int) -> int:
        code = self._code
        while True:
            text = code.text(index)
            if text in ("(", "[", "{") and index in code.partner:
                index = code.partner[index] + 1
            elif text in (".", "->"):
                index = self._name_end(index + 1)
            elif text in ("++", "--"):
                index += 1
            else:
                return index
