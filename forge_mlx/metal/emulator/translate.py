"""Metal source -> C++ for OpenCL, line for line, and the entry that calls the kernel."""

from fractions import Fraction
import re

from forge_mlx.metal.emulator.convergence import Convergence
from forge_mlx.metal.emulator.conversions import Conversions
from forge_mlx.metal.emulator.declarations import Declarations
from forge_mlx.metal.emulator.errors import Location
from forge_mlx.metal.emulator.line_directives import origins
from forge_mlx.metal.emulator.names import RENAMED
from forge_mlx.metal.emulator.tokens import Code, Token, tokenize
from forge_mlx.metal.emulator.type_names import TypeNames
from forge_mlx.metal.signature import ATTRIBUTES, GeneratedSource, Parameter

GENERATED_FILE = "<generated>"

_BFLOAT = re.compile(
    r"(?:0[xX](?P<hex>[0-9a-fA-F.]+)[pP](?P<power>[+-]?\d+)|(?P<decimal>[\d.]+(?:[eE][+-]?\d+)?))(?:bf|BF)"
)
# A number with a point or an exponent and nothing after it.
_FLOAT = re.compile(r"0[xX][0-9a-fA-F.']+[pP][+-]?\d+|(?:[\d']+\.[\d']*|\.[\d']+)(?:[eE][+-]?\d+)?|[\d']+[eE][+-]?\d+")
# Ordinary names in Metal, and types or functions that OpenCL has built in. Its keywords are renamed by language.h.
_BUILT_IN = re.compile(
    r"event_t|clk_event_t|sampler_t|queue_t|reserve_id_t|image[123]d\w*_t|addrspace_cast"
    r"|to_(?:global|local|private)|(?:\w+_)?(?:read|write)_pipe|get_pipe_\w+_packets"
)
_DEFINE = re.compile(r"(?P<head>#\s*define\s+\w+(?P<parameters>\([^)]*\))?)(?P<body>.*)", re.DOTALL)


def translate_header(text: str) -> str:
    """Translate Metal source without a kernel, such as one of MLX's headers.

    Args:
        text: Metal source.

    Returns:
        C++ for OpenCL, line for line.

    Raises:
        TranslationError: source that Metal rejects.
    """
    return _rewrite(text)


def translate(generated: GeneratedSource) -> str:
    """Translate a kernel and add the entry that calls it.

    Args:
        generated: what MLX would compile.

    Returns:
        C++ for OpenCL, with `#line` directives that lead back to the user's lines.

    Raises:
        TranslationError: source that Metal rejects; its line counts from the beginning of `generated.text`.
    """
    # The instantiation at the end is what the entry does.
    source = f"{generated.header}{generated.signature}{generated.body}\n}}\n"
    # What a template's parameter stands for is known, and needs help where it is half or bfloat alone.
    hidden = {name for name, argument in generated.template if argument not in ("float16_t", "bfloat16_t")}
    hidden |= {each.name for each in generated.parameters}
    text = _rewrite(source, frozenset(hidden), 1 + generated.header.count("\n"), marked=True)
    lines = text.split("\n")
    written: list[str] = []
    for start, (file, line) in _origins(generated).items():
        while len(written) < start:
            written.append(lines[len(written)])
        lines[start] = f"#line {line} {_quoted(file)}\n{lines[start]}"
    text = "\n".join([*written, *lines[len(written) :]])
    return text + _entry(generated)


def location_of(generated: GeneratedSource, line: int) -> Location:
    """Where a line of `generated.text` came from.

    Args:
        generated: what MLX would compile.
        line: counted from 1.

    Returns:
        File and line.
    """
    start, (file, first) = next((s, o) for s, o in reversed(_origins(generated).items()) if s < line)
    found = origins(generated.text.split("\n")[start:line], file, first)[-1]
    return Location(*found) if found else Location(file, first)


def _origins(generated: GeneratedSource) -> dict[int, tuple[str, int]]:
    """Lines of the text, counted from 0, at which another file goes on, with that file and its line."""
    body = generated.header.count("\n") + generated.signature.count("\n")
    origins = {0: (generated.header_file, generated.header_line)}
    if generated.header and not generated.header.endswith("\n"):
        # The signature begins on the header's last line.
        origins[generated.header.count("\n") + 1] = (f"{generated.user_name} signature", 2)
    else:
        origins[generated.header.count("\n")] = (f"{generated.user_name} signature", 1)
    origins[body] = (generated.body_file, generated.body_line)
    return origins


def _quoted(file: str) -> str:
    return '"' + file.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _rewrite(text: str, hidden: frozenset[str] = frozenset(), hidden_from: int = 0, *, marked: bool = False) -> str:
    """Translate all tokens; `hidden` names are no types from line `hidden_from` on that conversions must know.

    With `marked` the source also tells where it stands, see convergence.py.
    """
    tokens = tokenize(text)
    code = Code(tokens)
    names = TypeNames(code, hidden, hidden_from)
    for token in tokens:
        if token.kind == "directive":
            _directive(token, names)
    _change(code, names)
    if marked:
        Convergence(code, [token for token in tokens if token.kind == "directive"]).rewrite()
    return "".join(token.rendered() for token in tokens)


def _change(code: Code, names: TypeNames, macro: frozenset[str] | None = None) -> None:
    for token in code.tokens:
        if token.kind == "number":
            token.out = _number(token.text)
        elif token.kind == "name" and _BUILT_IN.fullmatch(token.text):
            token.out = f"{RENAMED}{token.text}"
    _drop_kernel_marks(code)
    _make_constants_const(code)
    Declarations(code, names, macro).rewrite()
    Conversions(code, names).rewrite()


def _directive(token: Token, names: TypeNames) -> None:
    """The body of a macro is translated like other source."""
    match = _DEFINE.fullmatch(token.text)
    if match:
        tokens = tokenize(match["body"], token.line)
        _change(Code(tokens), names, frozenset(re.findall(r"\w+", match["parameters"] or "")))
        token.out = match["head"] + "".join(each.rendered() for each in tokens)


def _drop_kernel_marks(code: Code) -> None:
    """Leave out `[[kernel]]` and `kernel`, and Metal's way to export one: `template [[host_name("a")]] ...;`."""
    index = 0
    while index < len(code):
        if code.text(index) == "[" and code.text(index + 1) == "[" and code.text(index - 1) != "operator":
            close = code.partner.get(index, index)
            exports = code.text(index - 1) == "template"
            while exports and close < len(code) and code.text(close) != ";":
                close += 1
            if exports or code.text(index + 2) == "kernel":
                for each in range(index - 1 if exports else index, min(close + 1, len(code))):
                    code[each].blank()
                index = close
        elif code.text(index) == "kernel":
            code[index].blank()
        index += 1


def _make_constants_const(code: Code) -> None:
    """`constant T*` -> `const constant T*`: what lies in constant memory is const without being called so."""
    for index in range(len(code)):
        if code.text(index) == "constant" and code.text(index - 1) not in (")", "const", "noexcept"):
            code[index].before = "const "


def _number(text: str) -> str:
    """A bfloat literal as the nearest bfloat, halves to even; `1.5` as `1.5f`; any other number as it is.

    The compiler's option for literals of float is lost on the instances of a template.
    """
    if _FLOAT.fullmatch(text):
        return f"{text}f"
    match = _BFLOAT.fullmatch(text)
    if match is None:
        return text
    if match["hex"]:
        digits, _, fraction = match["hex"].partition(".")
        value = Fraction(int(digits + fraction or "0", 16)) * Fraction(2) ** (int(match["power"]) - 4 * len(fraction))
    else:
        value = Fraction(
            match["decimal"].rstrip(".") if not match["decimal"].startswith(".") else "0" + match["decimal"]
        )
    return f"((bfloat){_nearest_bfloat(value)}f)"


def _nearest_bfloat(value: Fraction) -> str:
    """A hexadecimal literal of the nearest number with 8 significant bits and bfloat's exponents."""
    if value == 0:
        return "0x0p0"
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    unit = max(exponent, -126) - 7
    return f"{round(value / Fraction(2) ** unit):#x}p{unit}"


def _entry(generated: GeneratedSource) -> str:
    """The function that the runtime calls: casts the buffers and passes the attributes, in the signature's order."""
    arguments = [_argument(each, index) for index, each in enumerate(generated.parameters)]
    arguments += [_attribute(name) for name in generated.attributes]
    template = f"<{', '.join(spelling for _, spelling in generated.template)}>" if generated.template else ""
    call = f"{generated.kernel_name}{template}(" + ", ".join(arguments) + ");"
    head = 'extern "C" void emu_entry(void* const* emu_arguments, const emu_ids* emu_thread_ids)'
    return f"#line 1 {_quoted(GENERATED_FILE)}\n{head} {{\n  {call}\n}}\n"


def _argument(parameter: Parameter, index: int) -> str:
    element = f"atomic<{parameter.type}>" if parameter.atomic else parameter.type
    const = "const " if parameter.is_const else ""
    # By way of an integer: OpenCL's generic pointers, which these are, never point at constants.
    pointer = f"({const}{parameter.space} {element}*)(emu_ulong)emu_arguments[{index}]"
    return f"*{pointer}" if parameter.is_reference else pointer


def _attribute(name: str) -> str:
    member = f"emu_thread_ids->{name}"
    if ATTRIBUTES[name] == "uint":
        return member
    return f"uint3({member}[0], {member}[1], {member}[2])"
