"""References to constants in thread memory, to which Metal binds temporaries and C++ for OpenCL does not."""

from forge_mlx.metal.emulator.names import REFERENCE
from forge_mlx.metal.emulator.tokens import Code

# What tells the check of the language that `thread` stood in the source.
THREAD_MARK = "/*th*/"


class References:
    """Makes parameters and variables of type `const thread T&` take temporaries.

    `f(const thread A& x) {` -> `f(const A& emu_ref_x) { const thread A& x = *(const thread A*)&emu_ref_x;`. Where a
    function's own template parameter is part of the type it would be deduced with an address space in it: there the
    parameter becomes a value, `f(const T x)`.
    """

    def __init__(self, code: Code) -> None:
        self._code = code

    def parameters(self, opening: int, body: int | None, deduced: frozenset[str]) -> None:
        """The parameters in the parentheses at `opening`.

        Args:
            opening: the parenthesis.
            body: the brace after which their names are made; None where they keep their names.
            deduced: the function's own template parameters.
        """
        code = self._code
        for begin, end in code.parts(opening + 1, code.partner[opening]):
            words, reference = self._declarator(begin, end)
            if reference is None:
                continue
            if deduced.isdisjoint(words):
                made = self._unbound(begin, reference, words, rename=body is not None)
                if body is not None:
                    code[body].after += made
            elif "..." not in words:
                code[words["thread"]].blank()
                code[reference].blank()

    def local(self, begin: int, end: int) -> None:
        """A variable declared by the tokens from `begin` to the `;` at `end`."""
        words, reference = self._declarator(begin, end)
        if reference is not None and "auto" not in words and self._code.text(reference + 2) == "=":
            self._code[end].after += self._unbound(begin, reference, words, rename=True)

    def returns_reference(self, begin: int, name: int) -> bool:
        """Whether a function from `begin` with its name at `name` hands out a reference or pointer."""
        return any(self._code.text(index) in ("&", "*") for index in range(begin, name))

    def _declarator(self, begin: int, end: int) -> tuple[dict[str, int], int | None]:
        """The words before the `&` of `const thread T& x`, with their positions, and its own; None for others."""
        code, index = self._code, begin
        words: dict[str, int] = {}
        while index < end and code.text(index) not in ("&", "*", "&&", "(", "=", "["):
            words[code.text(index)] = index
            index += 1
        found = code.text(index) == "&" and index < end and {"const", "thread"} <= words.keys()
        return words, index if found else None

    def _unbound(self, begin: int, reference: int, words: dict[str, int], *, rename: bool) -> str:
        """Drop `thread` and return the declaration of the name in thread memory."""
        code, name = self._code, reference + 1
        code[words["thread"]].blank()
        code[reference].before = THREAD_MARK
        left = [each for each in range(begin, reference) if each not in (words["const"], words["thread"])]
        if not rename or code.kind(name) != "name" or left != list(range(left[0], left[-1] + 1)):
            return ""
        target, spelled = code.spelled(left[0], left[-1] + 1), code.text(name)
        code[name].out = REFERENCE + spelled
        return f" const thread {target}& {spelled} = *(const thread {target}*)&{REFERENCE}{spelled};"
