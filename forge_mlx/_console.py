"""How the commands write to the terminal, and how they end."""

import argparse
from collections.abc import Callable
import sys


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the description as usual and keeps the lines of an epilog, which are commands to copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:\n"):
            return text.rstrip()
        return super()._fill_text(text, width, indent)


def print_what_fits() -> None:
    """Let the standard streams replace characters that their encoding lacks.

    A sample holds any character; under a C locale the first one outside ASCII would end a whole run with an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def to_stderr(line: str) -> None:
    """Write a line for people, at once: what a command gives goes to standard output.

    Args:
        line: without its end.
    """
    print(line, file=sys.stderr, flush=True)


def run_command(work: Callable[[], None]) -> int:
    """Do the work of a command, and say in one line why it cannot be done.

    Args:
        work: raises ValueError or OSError for what a person can put right.

    Returns:
        The exit status: 0 done, 2 bad input, 130 interrupted.
    """
    print_what_fits()
    try:
        work()
        return 0
    except BrokenPipeError:
        # The reader has had enough, as `head` does.
        return 0
    except (ValueError, OSError) as error:
        to_stderr(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print()
        return 130
