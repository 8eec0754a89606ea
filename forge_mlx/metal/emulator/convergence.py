"""Tells the runtime where each thread stands, so that the lanes of a simdgroup meet as they do on a GPU.

Lanes that took different branches or left a loop early wait at different calls. Machine addresses do not say which of
them comes first: the compiler moves blocks, and two iterations of one loop share an address. So the source itself says
it: each call that waits for other lanes is told its place in the source, each loop with such a call its iteration, and
each function with one that it was entered. Lanes are together where all of that agrees, and the lanes at the earliest
place go on first: those behind a branch or a loop wait there for the rest, as with a GPU's reconvergence.
"""

import re

from forge_mlx.metal.emulator.tokens import Code, Token

_WAITING = re.compile(
    r"(?:simd|quad)_\w+|simdgroup_(?:barrier|load|store|multiply\w*)|make_filled_simdgroup_matrix|threadgroup_barrier"
)
_QUALIFIERS = frozenset({"const", "thread", "device", "constant", "threadgroup", "noexcept", "override", "final"})
_CONTROL = frozenset({"if", "for", "while", "switch", "catch", "constexpr", "return", "sizeof", "decltype", "alignas"})
# Names after which a name begins an expression; after any other it is what a declaration declares.
_BEFORE_EXPRESSION = frozenset({"return", "else", "do", "case", "and", "or", "not"})
_DEFINE = re.compile(r"#\s*define\s+(?P<name>\w+)(?P<body>.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_STATEMENT_BEGINS = frozenset({";", "{", "}"})


class Convergence:
    """Marks the places of a source where lanes wait for each other.

    Args:
        code: the source, every other change to it made.
        directives: its directives, for macros whose use waits.
    """

    def __init__(self, code: Code, directives: list[Token]) -> None:
        self._code = code
        self._bodies = [body for body in map(self._function, range(len(code))) if body]
        self._macros = {m["name"]: m["body"] for m in map(_DEFINE.match, (d.text for d in directives)) if m}
        self._waiting = self._names_that_wait()

    def rewrite(self) -> None:
        """Set the changes on the tokens."""
        for name, begin, end in self._bodies:
            # Bodies of a class's functions stand in no other function's body: local classes are not looked into.
            if name and self._waits(begin, end):
                if not self._is_constexpr(begin):
                    self._code[begin - 1].after += " emu_frame emu_entered;"
                self._block(begin, end, 0)

    def _function(self, index: int) -> tuple[str, int, int] | None:
        """Name and range of the function body that begins at a brace, if one does."""
        code = self._code
        end = code.partner.get(index)
        if code.text(index) != "{" or end is None:
            return None
        close = index - 1
        while code.text(close) in _QUALIFIERS:
            close -= 1
        name = code.text(code.partner.get(close, 0) - 1) if code.text(close) == ")" else ""
        return (name, index + 1, end) if name and name not in _CONTROL and _NAME.fullmatch(name) else None

    def _is_constexpr(self, begin: int) -> bool:
        """Whether a function is constexpr: such a one holds no variable of a class with a destructor."""
        index = begin - 2
        while index >= 0 and self._code.text(index) not in _STATEMENT_BEGINS:
            if self._code.text(index) == "constexpr":
                return True
            index = self._code.partner[index] - 1 if self._code.text(index) == ")" else index - 1
        return False

    def _names_that_wait(self) -> set[str]:
        """Functions and macros of the source that wait themselves or use one that does."""
        waiting: set[str] = set()
        uses = {name: set(_NAME.findall(body)) for name, body in self._macros.items()}
        for name, begin, end in self._bodies:
            uses.setdefault(name, set()).update(token.text for token in self._code.tokens[begin:end])
        while True:
            more = {name for name, used in uses.items() if any(map(_WAITING.fullmatch, used)) or used & waiting}
            if more <= waiting:
                return waiting
            waiting |= more

    def _is_waiting(self, index: int) -> bool:
        token = self._code[index]
        return token.kind == "name" and (token.text in self._waiting or _WAITING.fullmatch(token.text) is not None)

    def _waits(self, begin: int, end: int) -> bool:
        return any(map(self._is_waiting, range(begin, end)))

    def _block(self, begin: int, end: int, depth: int) -> None:
        """Mark the calls of a range and the loops in it. `depth`: loops around it in its function."""
        index = begin
        while index < end:
            text = self._code.text(index)
            if text in ("for", "while") and self._code.text(index + 1) == "(":
                index = self._loop(index, depth)
            elif text == "do" and self._code.text(index + 1) == "{":
                index = self._do(index, depth)
            else:
                if self._is_waiting(index):
                    self._call(index, depth)
                index += 1

    def _loop(self, index: int, depth: int) -> int:
        """Mark a `for` or a `while`; returns where its statement ends."""
        code = self._code
        close = code.partner[index + 1]
        end = self._statement_end(close + 1)
        if not self._waits(index, end):
            return end
        begin, condition_end = index + 2, close
        if code.text(index) == "for":
            stops = [at for at in self._top_level(index + 2, close) if code.text(at) == ";"]
            if len(stops) != 2:
                self._block(index + 2, end, depth)
                return end
            self._block(index + 2, stops[0], depth)
            begin, condition_end = stops[0] + 1, stops[1]
        step = f"emu_iterate({depth}, {index + 1})"
        if begin == condition_end:
            code[begin - 1].after += f" ({step}, true)"
        elif not (code.kind(begin) == "name" and code.kind(begin + 1) == "name"):
            code[begin].before = f"({step}, ({code[begin].before}"
            code[condition_end - 1].after += "))"
        self._block(begin, end, depth + 1)
        return end

    def _do(self, index: int, depth: int) -> int:
        end = self._statement_end(index)
        if self._waits(index, end):
            self._code[index + 1].after += f" emu_iterate({depth}, {index + 1});"
            # The `while` behind the body is no loop of its own.
            close = self._code.partner[index + 1]
            self._block(index + 2, close, depth + 1)
            for each in range(close + 2, end):
                if self._is_waiting(each):
                    self._call(each, depth + 1)
        return end

    def _top_level(self, begin: int, end: int) -> list[int]:
        """The tokens of a range that stand in no bracket."""
        found, index = [], begin
        while index < end:
            found.append(index)
            index = max(self._code.partner.get(index, index), index) + 1
        return found

    def _statement_end(self, index: int) -> int:
        """One past the last token of the statement that begins at a token."""
        code = self._code
        while index < len(code):
            text = code.text(index)
            if text == ";":
                return index + 1
            if text == "{":
                return code.partner.get(index, index) + 1
            if text in ("for", "while", "switch", "if"):
                paren = index + 2 if code.text(index + 1) == "constexpr" else index + 1
                end = self._statement_end(code.partner.get(paren, paren) + 1)
                return self._statement_end(end + 1) if text == "if" and code.text(end) == "else" else end
            if text == "do":
                # do statement while (condition);
                end = self._statement_end(index + 1)
                return code.partner.get(end + 1, end) + 2
            index = max(code.partner.get(index, index), index) + 1
        return index

    def _call(self, name: int, depth: int) -> None:
        """Mark a call, if it is one: `f(x)` -> `(emu_stand(place, depth), f(x))`."""
        code = self._code
        paren = name + 1
        if code.text(paren) == "<":
            paren = (code.angle_end(paren) or paren) + 1
        close = code.partner.get(paren)
        if code.text(paren) != "(" or close is None or code.text(close + 1) == "{":
            return
        start = self._expression_begin(name)
        before = code.text(start - 1)
        declares = code.kind(start - 1) == "name" and before not in _BEFORE_EXPRESSION
        if declares or (before == ">" and code.angle_begin(start - 1) is not None):
            return
        mark = f"emu_stand({name + 1}, {depth})"
        if code.text(name) in self._macros and code.text(close + 1) == ";" and self._begins_statement(start):
            # It may stand for statements.
            code[start].before = f"{{ {mark}; {code[start].before}"
            code[close + 1].after += " }"
            return
        code[start].before = f"({mark}, {code[start].before}"
        code[close].after += ")"

    def _begins_statement(self, index: int) -> bool:
        before = self._code.text(index - 1)
        if before == ")":
            return self._code.text(self._code.partner.get(index - 1, 0) - 1) in _CONTROL
        return before in _STATEMENT_BEGINS or before in ("else", "do", ":")

    def _expression_begin(self, name: int) -> int:
        """Where the expression begins that names a called function: at `a` in `a[i].b::f(x)`."""
        code, start = self._code, name
        while code.text(start - 1) in ("::", ".", "->", "template"):
            start -= 1
            if code.text(start) == "template":
                continue
            while code.text(start - 1) in (")", "]"):
                start = code.partner.get(start - 1, start - 1)
            if code.text(start - 1) == ">":
                start = code.angle_begin(start - 1) or start
            if code.kind(start - 1) == "name" and code.text(start - 1) not in _BEFORE_EXPRESSION:
                start -= 1
        return start
