"""Check that a run has finished: its files are there, and its final bits per byte are low enough."""

import argparse
import json
from pathlib import Path
import sys
from typing import Any

FILES = ("config.yaml", "loss.png", "report.html", "final/model.safetensors")


def final_evaluation(metrics: Path) -> dict[str, Any] | None:
    """The last record of `metrics.jsonl` that is a final evaluation, None when there is none."""
    if not metrics.is_file():
        return None
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    finals = [record for record in records if record["kind"] == "eval" and record.get("final")]
    return finals[-1] if finals else None


def problems(run: Path, final: dict[str, Any] | None, limit: float) -> list[str]:
    """What is wrong with a run's folder and its final evaluation; empty when nothing is."""
    found = [f"{run / name} is missing or empty" for name in FILES if not _has_content(run / name)]
    if final is None:
        return [*found, f"{run} has no final evaluation: the run has not finished"]
    value = final.get("bits_per_byte")
    if not (isinstance(value, int | float) and value <= limit):
        found.append(f"the final bits per byte must be at most {limit} but got {value}")
    return found


def _has_content(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def main() -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--bits-per-byte", type=float, required=True, metavar="LIMIT", help="the highest allowed")
    options = parser.parse_args()
    final = final_evaluation(options.run / "metrics.jsonl")
    found = problems(options.run, final, options.bits_per_byte)
    for problem in found:
        print(f"[check_run] {problem}", file=sys.stderr)
    if final is None or found:
        return 1
    print(f"{options.run}: {final['bits_per_byte']:.4f} bits per byte (the limit: {options.bits_per_byte})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
