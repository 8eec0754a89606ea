"""From what MLX would compile to code that can be launched, with every message in terms of the user's source."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forge_mlx.metal.emulator import language
from forge_mlx.metal.emulator.comparisons import compare_as_metal
from forge_mlx.metal.emulator.declarations import TranslationError
from forge_mlx.metal.emulator.errors import CompileError, LanguageError, LimitError, Location
from forge_mlx.metal.emulator.lines import LineTable
from forge_mlx.metal.emulator.messages import explain, source_line
from forge_mlx.metal.emulator.names import users_names
from forge_mlx.metal.emulator.settings import Settings
from forge_mlx.metal.emulator.tokens import tokenize
from forge_mlx.metal.emulator.toolchain import CompilerFailure, compile_source
from forge_mlx.metal.emulator.translate import GENERATED_FILE, location_of, translate
from forge_mlx.metal.limits import MAX_BUFFERS
from forge_mlx.metal.signature import GeneratedSource


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that can be launched.

    Attributes:
        name: the name given to `metal_kernel`.
        library: the shared object with the kernel's entry and the runtime.
        generated: what it was made of.
        warnings: what of it some supported Metal may not take.
    """

    name: str
    library: Path
    generated: GeneratedSource
    warnings: tuple[str, ...] = ()

    @cached_property
    def _lines(self) -> LineTable:
        return LineTable(self.library)

    def locate(self, offset: int) -> Location | None:
        """The line of the user's source that an address in the code belongs to.

        Args:
            offset: counted from where the library is loaded.

        Returns:
            The line; None for code that is not the user's.
        """
        found = self._lines.lookup(offset)
        if found is None or found[0] == GENERATED_FILE:
            return None
        return Location(*found)


_compiled: dict[object, CompiledKernel] = {}


def compile_kernel(generated: GeneratedSource, settings: Settings) -> CompiledKernel:
    """Compile a kernel, or find it compiled.

    Args:
        generated: what MLX would compile.
        settings: which checks, definitions and preamble.

    Returns:
        The kernel. The same source and settings give the same object.

    Raises:
        CompileError: the source is not Metal.
        LanguageError: it compiles here and not on every supported Metal.
        LimitError: it has over 31 buffers.
        ToolchainError: there is no compiler, or one that does not work.
    """
    limits = "limits" in settings.checks
    checked = ("language" in settings.checks, limits)
    key = (generated, settings.instrumented, settings.mlx_preamble, settings.defines, checked)
    if key not in _compiled:
        if limits:
            _check_buffers(generated)
        _check_text(generated)
        _compiled[key] = _compile(generated, settings)
    return _compiled[key]


def _check_buffers(generated: GeneratedSource) -> None:
    count = len(generated.parameters)
    if count > MAX_BUFFERS:
        raise LimitError(
            f"uses {count} buffers, counting each shape, strides and ndim, and Metal has {MAX_BUFFERS}",
            kernel=generated.user_name,
        )


def _check_text(generated: GeneratedSource) -> None:
    """Refuse what MLX writes so that no compiler takes it, in other words than a compiler has for it."""
    last = next(reversed(tokenize(generated.header)), None)
    if not generated.kernel_name.isidentifier():
        problem = f"the name {generated.user_name!r} does not make a function's name ({generated.kernel_name})"
    elif generated.signature.count(") {\n") > 1:
        problem = (
            "MLX 0.32.4 ends the parameters after the first output when there are several outputs, a shape, strides or "
            "ndim, and no grid attribute; name one of the attributes in the body, in a comment if nowhere else"
        )
    elif last and (last.kind == "directive" or last.text.startswith("//")):
        problem = "the header needs a line break at its end: MLX writes the signature onto its last line"
    else:
        return
    raise CompileError(problem, kernel=generated.user_name)


def _compile(generated: GeneratedSource, settings: Settings) -> CompiledKernel:
    text = _translate(generated)
    try:
        text = compare_as_metal(text, preamble=settings.mlx_preamble, defines=settings.defines)
        library = compile_source(
            text,
            instrument=settings.instrumented,
            preamble=settings.mlx_preamble,
            defines=settings.defines,
        )
    except CompilerFailure as failure:
        _told(language.rejected(failure.stderr), generated)
        message, locations = explain(failure.stderr, generated)
        raise CompileError(message, kernel=generated.user_name, locations=locations) from None
    warnings: tuple[str, ...] = ()
    if "language" in settings.checks:
        found = language.check_source(text, preamble=settings.mlx_preamble, defines=settings.defines)
        warnings = _told(found, generated)
    return CompiledKernel(generated.user_name, library, generated, warnings)


def _told(findings: list[language.Finding], generated: GeneratedSource) -> tuple[str, ...]:
    """Raise what every supported Metal must take and one rejects; return the warning of what only the newest does."""
    errors = [each for each in findings if not each.is_warning]
    told = errors or findings
    # What the generated entry does follows from the signature, which is told too.
    told = [each for each in told if each.file != GENERATED_FILE] or told
    places = tuple(Location(each.file, each.line) for each in told)
    lines = [
        f"{place}: {users_names(each.message)}\n    {source_line(place, generated)}"
        for place, each in zip(places, told, strict=True)
    ]
    message = "\n".join(lines)
    if errors:
        raise LanguageError(message, kernel=generated.user_name, locations=places) from None
    return (message,) if findings else ()


def _translate(generated: GeneratedSource) -> str:
    try:
        return translate(generated)
    except TranslationError as error:
        where = location_of(generated, error.line)
        message = f"{where}: {error.message}\n    {source_line(where, generated)}"
        raise CompileError(message, kernel=generated.user_name, locations=(where,)) from None
