"""MLX's own Metal header, as the emulator's compiler reads it.

MLX puts one header before every kernel: bf16.h, bf16_math.h, complex.h, defines.h, logging.h and utils.h in a row. They
are taken from the installed package, so a kernel sees the overloads that it will meet on a Mac. What they call of
Apple's compiler is in msl/mlx_preamble.h.
"""

from pathlib import Path
import re

from forge_mlx.metal.emulator.translate import translate_header

# In the order in which MLX joins them: each after those that it includes.
HEADERS = ("bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h", "utils.h")

_KERNELS = "mlx/backend/metal/kernels"
_LEFT_OUT = re.compile(r"^[ \t]*#[ \t]*(?:include\b|pragma[ \t]+once).*", re.MULTILINE)

# What the header's functions do belongs to the line of the user's source that called them.
_BEGIN = (
    "#pragma clang attribute push(__attribute__((always_inline)), apply_to = function)\n"
    "#pragma clang attribute push(__attribute__((nodebug)), apply_to = hasType(functionType))\n"
)
_END = "#pragma clang attribute pop\n" * 2


def preamble_text(include: Path) -> str:
    """What follows `#include "prelude.h"` in a source that sees MLX's header.

    Args:
        include: the folder that `mlx/backend/metal/kernels` lies in.

    Returns:
        C++ for OpenCL. `#line` directives name MLX's headers and their lines.

    Raises:
        OSError: a header is missing or cannot be read.
    """
    parts = []
    for name in HEADERS:
        text = (include / _KERNELS / name).read_text(encoding="utf-8")
        parts.append(f'#line 1 "{_KERNELS}/{name}"\n{translate_header(_LEFT_OUT.sub("", text))}\n')
    return _BEGIN + "".join(parts) + _END
