"""Names that the emulator puts into a source in the place of the user's own, and the way back."""

import re
from typing import Final

# The type of a threadgroup variable, which is declared apart from it.
ARRAY_TYPE: Final = "emu_type_"
# A name that OpenCL keeps for itself and Metal does not: `local`, `global`, `pipe`.
RENAMED: Final = "emu_name_"
# A parameter that binds a temporary.
REFERENCE: Final = "emu_ref_"

_PREFIXED = re.compile(rf"\b(?:{ARRAY_TYPE}|{RENAMED}|{REFERENCE})+(\w+)")


def users_names(text: str) -> str:
    """A message with the names that the user wrote.

    Args:
        text: a message about the translated source.

    Returns:
        The same message without the emulator's prefixes.
    """
    return _PREFIXED.sub(r"\1", text)
