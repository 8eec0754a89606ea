"""The run's log: ``metrics.jsonl``, one JSON record a line.

Every record holds ``kind``, ``step`` (optimizer steps done) and ``time`` (seconds the run has worked), then:

======  =============================================================================================
kind    fields
======  =============================================================================================
setup   facts of one start: corpus (sizes, gzip_bits_per_byte ...), packing (kind, rows, fill: the share of
        their positions that are targets; how many documents were cut, into how many pieces), parameters,
        trained_parameters (where they are not all), active_parameters (those that a token meets in an MoE),
        total_steps, tokens_per_step, device, dtype, blas, and the version of each package by its name; qat: with
        quantisation-aware training mode, bits, group_size,
        granularity (of all modules but those of overrides), start_step, end_step, modules (how many) ...
train   loss (nats a token, or a pair), bits_per_byte (not of pairs), lr (AdamW's), grad_norm (before clipping),
        tokens_per_second, tokens (so far), peak_memory (bytes); moe: see below
eval    loss, bits_per_byte, tokens (evaluated), of pairs as below, final (whether training was over); with
        quantisation-aware training fake_quant (whether the weights were fake-quantised), and after a run that ended
        with them deployed: loss of the converted model, trained_loss of the one in training, tokens (of both)
sample  prompt, text; of examples expected (what the data have there)
event   message
======  =============================================================================================

Of preference pairs ``train`` and ``eval`` have ``pairs`` (how many), ``accuracy`` (the share whose chosen answer has
the greater reward), ``chosen_reward``, ``rejected_reward`` (means) and ``margin`` (their difference) instead of bits
per byte.

``moe`` says what the L MoE layers, of E experts each, did in the steps since the training record before it:

=============  ======================================================================================
field          value
=============  ======================================================================================
layers         their indices in the model, ``[L]``
load           tokens sent to each expert, ``[L][E]``
max_over_mean  the highest load over the mean load, ``[L]``
entropy        of the router's distribution, nats, mean over the tokens, ``[L]``; ln E when it is uniform
dropped        places at experts that tokens asked for and did not get
bias_range     lowest and highest selection bias at the record's step, ``[L][2]``; null without a bias
aux_loss       Switch loss before its weight, ``[L]``; 1 when balanced
z_loss         router z-loss before its weight, ``[L]``
=============  ======================================================================================

With them a record takes about 1.2 kB for 4 layers of 16 experts and 36 kB for 48 layers of 128, most of it loads.

JSON has no NaN or infinity, and Python's own spelling of them stops strict readers (jq, DuckDB, JavaScript).
Such a value is written as ``null``, so that its column stays numeric for every reader, and ``nonfinite``
names it: ``{"loss": null, "nonfinite": {"loss": "nan"}}``. `read_metrics` puts the value back.
"""

from collections.abc import Callable
import json
import math
import numbers
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args
import warnings

from forge_mlx.train.checkpoint import UNFINISHED

Kind = Literal["setup", "train", "eval", "sample", "event"]
Record = dict[str, Any]
Notify = Callable[[str], None]


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


class MetricsLog:
    """Append-only log of one run.

    Opening an existing file repairs its end: a record that was cut off when the process was killed is
    removed, with a notice. Each record is flushed to the operating system when it is written, so that killing
    the process loses none.

    Args:
        path: The file, created when missing. Its folder must exist.
        notify: Called with each notice; by default a notice is a Python warning.
    """

    def __init__(self, path: str | os.PathLike[str], notify: Notify = _warn) -> None:
        """Opens the log, after removing a record that was cut off."""
        self._path = Path(path)
        self._notify = notify
        if self._path.exists():
            self._repair()
        self._file = self._path.open("ab")

    def _repair(self) -> None:
        data = self._path.read_bytes()
        _, torn = _split(data)
        if torn:
            self._notify(_torn_notice(self._path, torn, "removed"))
            os.truncate(self._path, len(data) - len(torn))
        elif data and not data.endswith(b"\n"):
            with self._path.open("ab") as file:
                file.write(b"\n")

    def log(self, kind: Kind, step: int, *, time: float, **fields: Any) -> None:
        """Writes one record and flushes it.

        Args:
            kind: "setup", "train", "eval", "sample" or "event".
            step: Optimizer steps done, 0 or more.
            time: Seconds the run has worked, earlier starts included.
            fields: JSON values (text, numbers, booleans, None, lists, dicts with text keys), NumPy numbers.

        Raises:
            ValueError: For an unknown kind, a step that is not a whole number of 0 or more, a time that is
                not finite and 0 or more, or a field named "nonfinite".
            TypeError: For a value that JSON cannot hold; nothing is written then.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"[metrics] kind must be one of {', '.join(get_args(Kind))} but got {kind!r}.")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"[metrics] step must be a whole number of 0 or more but got {step!r}.")
        if not 0 <= time < math.inf:
            raise ValueError(f"[metrics] time must be finite and 0 or more but got {time!r}.")
        if "nonfinite" in fields:
            raise ValueError("[metrics] a field must not be named 'nonfinite', which the log writes. Rename it.")
        nonfinite: dict[str, str] = {}
        record: Record = {"kind": kind, "step": step, "time": round(time, 3)}
        record.update((name, _strict(value, _escape(name), nonfinite)) for name, value in fields.items())
        if nonfinite:
            record["nonfinite"] = nonfinite
        # ASCII with escapes: some readers of lines also split at U+2028, and a lone surrogate has no UTF-8.
        self._file.write(json.dumps(record, allow_nan=False).encode("ascii") + b"\n")
        self._file.flush()

    def truncate_after(self, step: int, *, without: Kind | None = None) -> int:
        """Removes the records of steps later than ``step``, so that a run resumed there logs each step once.

        The rest is written to a temporary file that then takes the log's name: a kill leaves one of the two.

        Args:
            step: The last that stays.
            without: A kind of records of which none stays; None: no such kind.

        Returns:
            How many records were removed.
        """
        self._file.close()
        kept, removed, broken = [], 0, 0
        for line in _split(self._path.read_bytes())[0]:
            record = _parse(line)
            if record is None:
                broken += 1
            elif record["step"] <= step and record["kind"] != without:
                kept.append(line)
            else:
                removed += 1
        if broken:
            self._notify(f"[metrics] {self._path}: removed {broken} line(s) that are not records.")
        if removed or broken:
            replace_file(self._path, b"".join(line + b"\n" for line in kept))
        self._file = self._path.open("ab")
        return removed

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        """Returns itself; leaving the block closes the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        self.close()


def read_metrics(path: str | os.PathLike[str], notify: Notify = _warn) -> list[Record]:
    """Reads a log, of a run that ended, was killed or is still writing.

    Args:
        path: The file.
        notify: Called with a notice for lines that are left out (a last line that was cut off, lines that
            are not records); by default a notice is a Python warning.

    Returns:
        The records in the order of the file, with NaN and infinities as floats.

    Raises:
        FileNotFoundError: When there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"[metrics] a run's log must exist but found no file {path}.")
    lines, torn = _split(path.read_bytes())
    if torn:
        notify(_torn_notice(path, torn, "left out"))
    parsed = [_parse(line) for line in lines]
    if broken := [number for number, record in enumerate(parsed, 1) if record is None]:
        notify(f"[metrics] {path}: left out {len(broken)} line(s) that are not records, first line {broken[0]}.")
    return [_restore(record) for record in parsed if record is not None]


def replace_file(path: Path, data: bytes) -> None:
    """Writes ``data`` under a temporary name beside ``path`` and renames it: no reader sees half a file."""
    temporary = path.with_name(f"{UNFINISHED}{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """The file's lines, and what was cut off at its end (empty when the last line is whole)."""
    *lines, tail = data.split(b"\n")
    if tail and _parse(tail) is not None:
        return [*lines, tail], b""
    return lines, tail


def _torn_notice(path: Path, torn: bytes, what: str) -> str:
    return f"[metrics] {path}: {what} the last line, {len(torn)} bytes of a record not written to its end."


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int:
        return record
    return None


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _strict(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    """``value`` as strict JSON: a NaN or infinity becomes None, ``nonfinite`` maps its path (a/b/0) to it."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number):
            return number
        nonfinite[path] = str(number)
        return None
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _strict(item, f"{path}/{_escape(key)}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item, f"{path}/{index}", nonfinite) for index, item in enumerate(value)]
    raise TypeError(
        f"[metrics] the field {path} must be text, a number, a boolean, None, a list or a dict with text "
        f"keys but got {type(value).__name__}. Convert it first, an array with .item()."
    )


def _restore(record: Record) -> Record:
    for path, text in record.pop("nonfinite", {}).items():
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/"))
        place: Any = record
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        place[int(last) if isinstance(place, list) else last] = float(text)
    return record
