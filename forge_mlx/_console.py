"""How the commands write to the terminal."""

import sys


def print_what_fits() -> None:
    """Let the standard streams replace characters that their encoding lacks.

    A sample holds any character; under a C locale the first one outside ASCII would end a whole run with an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
