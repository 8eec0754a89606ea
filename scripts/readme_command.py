"""Print one of README.md's bash blocks, so that what is tested is what a reader is told to run."""

import argparse
from pathlib import Path
import re
import sys

README = Path(__file__).parents[1] / "README.md"


def bash_blocks(text: str) -> list[str]:
    """The contents of the fenced bash blocks of a Markdown text, in their order."""
    return re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def main() -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, help="1: the command that trains, 2: the one that runs the tests")
    number = parser.parse_args().number
    blocks = bash_blocks(README.read_text(encoding="utf-8"))
    if not 1 <= number <= len(blocks):
        print(
            f"[readme_command] the number must be from 1 to {len(blocks)}, the bash blocks in {README}, "
            f"but got {number}.",
            file=sys.stderr,
        )
        return 1
    print(blocks[number - 1], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
