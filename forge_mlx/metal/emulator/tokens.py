"""Metal source as a list of tokens that can be changed one by one without moving a line."""

from collections.abc import Iterator
from dataclasses import dataclass, field
import re
from typing import Literal

Kind = Literal["space", "comment", "directive", "name", "number", "string", "mark"]

# A closing angle bracket is always a token of its own, so that `>>` can close two argument lists.
_PATTERN = re.compile(
    r"""
      (?P<space>    (?: \s | \\\r?\n )+ )
    | (?P<comment>  //(?: \\\r?\n | [^\n] )* | /\*.*?(?: \*/ | \Z ) )
    | (?P<name>     [A-Za-z_$]\w* )
    | (?P<number>   \.?[0-9](?: [eEpP][+-] | '(?=\w) | [\w.] )* )
    | (?P<string>   "(?: \\. | [^"\\\n] )*"? | '(?: \\. | [^'\\\n] )*'? )
    | (?P<mark>     :: | -> | <<=? | <= | && | \|\| | \+\+ | -- | [-+*/%&|^!=]= | \.\.\. | \#\# | . )
    """,
    re.VERBOSE | re.DOTALL,
)
# To the end of the line, past line splices and over comments that go on for lines.
_DIRECTIVE = re.compile(r"\#(?: \\\r?\n | /\*.*?\*/ | //(?: \\\r?\n | [^\n] )* | [^\n] )*", re.VERBOSE | re.DOTALL)

_OPENING = {"(": ")", "[": "]", "{": "}"}
_CLOSING = {close: opening for opening, close in _OPENING.items()}
_NO_LIST = frozenset({";", "{", "}"})
_RARE_IN_LIST = frozenset({"&&", "||"})


@dataclass(eq=False)
class Token:
    """A piece of the source.

    Attributes:
        kind: what it is; directives are whole logical lines.
        text: as it stands in the source.
        line: the line on which it begins, counted from 1.
        out: what is written in its place.
        before: what is written before it.
        after: what is written after it.
    """

    kind: Kind
    text: str
    line: int
    out: str = field(default="")
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        self.out = self.text

    def blank(self) -> None:
        """Leave it out: what remains are its line breaks."""
        self.out = "\n" * self.text.count("\n")

    def rendered(self) -> str:
        """The text with its changes."""
        return self.before + self.out + self.after


def tokenize(text: str, line: int = 1) -> list[Token]:
    """Split a text into tokens whose texts, joined, are that text.

    Args:
        text: Metal source.
        line: the number of its first line.

    Returns:
        All tokens, spaces, comments and directives included.
    """
    tokens: list[Token] = []
    position, starts_line = 0, True
    while position < len(text):
        directive = _DIRECTIVE.match(text, position) if starts_line else None
        if directive:
            token = Token("directive", directive[0], line)
        else:
            match = _PATTERN.match(text, position)
            assert match is not None
            assert match.lastgroup is not None
            token = Token(match.lastgroup, match[0], line)  # type: ignore[arg-type]
        tokens.append(token)
        position += len(token.text)
        breaks = token.text.count("\n")
        line += breaks
        if token.kind == "space":
            starts_line = starts_line or breaks > 0
        elif token.kind != "comment":
            starts_line = False
    return tokens


class Code:
    """The tokens that the compiler's grammar sees: no spaces, comments or directives."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = [token for token in tokens if token.kind not in ("space", "comment", "directive")]
        self.partner = _pair(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Token:
        return self.tokens[index]

    def text(self, index: int) -> str:
        """The token's text, and nothing past either end."""
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def kind(self, index: int) -> str:
        """The token's kind, and nothing past either end."""
        return self.tokens[index].kind if 0 <= index < len(self.tokens) else ""

    def spelled(self, begin: int, end: int) -> str:
        """Tokens `begin` to `end - 1` as text on one line."""
        text = ""
        for token in self.tokens[begin:end]:
            joins_words = text[-1:].isalnum() and token.kind in ("name", "number")
            text += f" {token.text}" if joins_words or text.endswith((",", "_")) else token.text
        return text

    def angle_end(self, index: int, *, surely: bool = False) -> int | None:
        """The `>` that closes the template list opened at `index`, if it is one.

        What is `surely` one, as after `template`, may hold `&&` and `||`.
        """
        depth = 0
        while index < len(self.tokens):
            text = self.tokens[index].text
            if text in _NO_LIST or (text in _RARE_IN_LIST and not surely):
                return None
            if text in _OPENING:
                close = self.partner.get(index)
                if close is None:
                    return None
                index = close
            elif text in _CLOSING:
                return None
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return index
            index += 1
        return None

    def angle_begin(self, index: int) -> int | None:
        """The `<` of the template argument list that the `>` at `index` closes, if it is one."""
        start = index
        while start > 0 and self.tokens[start - 1].text not in _NO_LIST:
            start -= 1
            if self.tokens[start].text == "<" and self.angle_end(start) == index:
                return start
        return None

    def parts(self, begin: int, end: int, separator: str = ",") -> Iterator[tuple[int, int]]:
        """Ranges between separators that stand outside all brackets and argument lists."""
        start = index = begin
        while index < end:
            text = self.tokens[index].text
            if text == separator:
                yield start, index
                start = index + 1
            elif text in _OPENING:
                index = self.partner.get(index, index)
            elif text == "<":
                index = self.angle_end(index) or index
            index += 1
        if start < end:
            yield start, end


def _pair(tokens: list[Token]) -> dict[int, int]:
    """Each bracket's partner, in both directions; a bracket without one is left out."""
    partner: dict[int, int] = {}
    stack: list[int] = []
    for index, token in enumerate(tokens):
        if token.kind != "mark":
            continue
        if token.text in _OPENING:
            stack.append(index)
        elif token.text in _CLOSING:
            # Only a closing bracket of the same sort closes: branches of an #if may open one brace twice.
            while stack and tokens[stack[-1]].text != _CLOSING[token.text]:
                stack.pop()
            if stack:
                opening = stack.pop()
                partner[opening], partner[index] = index, opening
    return partner
