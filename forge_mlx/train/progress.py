"""What a training run shows while it works: a live bar on a terminal, plain lines elsewhere."""

from dataclasses import dataclass
import math
import os
import sys
import time
from types import TracebackType
from typing import TextIO

from forge_mlx._text import visible_controls
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Seconds over which the speed behind the ETA forgets: an evaluation is spread over the steps between two.
_MEMORY = 60.0
# Columns between two parts of the live line, and of the shortest bar worth drawing.
_GAP, _NARROWEST_BAR = 2, 6


class Progress:
    """Context manager that shows steps, loss, bits per byte, tokens/s and the time left.

    On a terminal this is one live line; elsewhere a plain line without control characters at the first step
    seen, whenever a multiple of ``log_every`` is passed, and at the last step. When the reader goes away (a
    closed pipe or terminal), the run goes on in silence.

    Args:
        total_steps: Steps of the whole run.
        start_step: Steps done before this process, which the ETA does not count.
        stream: Where to write.
        interactive: Whether to draw the live line; None decides: a terminal, and TERM is not "dumb".
        log_every: Steps between two plain lines, at least 1.

    Raises:
        ValueError: For a negative step or ``log_every`` under 1.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        interactive: bool | None = None,
        log_every: int = 10,
    ) -> None:
        """Prepares the display; nothing is written before the block is entered."""
        if total_steps < 0 or start_step < 0:
            raise ValueError(f"[progress] steps must be 0 or more but got {total_steps=}, {start_step=}.")
        if log_every < 1:
            raise ValueError(f"[progress] log_every must be at least 1 but got {log_every}.")
        self._stream = sys.stdout if stream is None else stream
        self._log_every = log_every
        self._bar = _Bar(total_steps, start_step)
        self._printed = -1
        self._gone = False
        self._live: Live | None = None
        if _is_terminal(self._stream) if interactive is None else interactive:
            console = Console(file=self._stream, force_terminal=True, highlight=False)
            self._live = Live(
                self._bar,
                console=console,
                refresh_per_second=4,
                # Other prints go above the bar, but what was sent to a file stays there.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )

    def __enter__(self) -> "Progress":
        """Shows the bar and starts the clock."""
        self._bar.started = time.monotonic()
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the last state of the bar on the screen and shows the cursor again."""
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:
                self._reader_gone()

    def update(
        self,
        step: int,
        *,
        loss: float,
        bits_per_byte: float | None,
        tokens_per_second: float,
        lr: float,
        accuracy: float | None = None,
    ) -> None:
        """Shows the state after ``step`` optimizer steps.

        Args:
            step: Steps done, those before a resume included.
            loss: Training loss, nats a token, or a pair.
            bits_per_byte: The same loss as bits per byte of text; None of pairs.
            tokens_per_second: Training speed.
            lr: Learning rate.
            accuracy: Share of the pairs whose chosen answer is preferred, shown without bits per byte.
        """
        measure = ("", "")
        if bits_per_byte is not None:
            measure = (f"{bits_per_byte:.3f}", "bits/byte")
        elif accuracy is not None:
            measure = (f"{100 * accuracy:.1f} %", "preferred")
        self._bar.show(_State(step, loss, measure, tokens_per_second, lr))
        if self._live is not None:
            return
        passed = step // self._log_every > self._printed // self._log_every
        if passed or step == self._bar.total:
            self._write(self._bar.plain())
            self._printed = step

    def line(self, text: str) -> None:
        """Prints ``text`` for good, above the bar where there is one."""
        self._write(visible_controls(text))

    def _write(self, text: str) -> None:
        if self._gone:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            if self._live is None:
                self._stream.write(text + "\n")
                self._stream.flush()
            else:
                self._live.console.print(Text(text), soft_wrap=True)
        except OSError:
            self._reader_gone()

    def _reader_gone(self) -> None:
        """Points the stream at nothing: the log has the numbers, and a reader must not end a long run."""
        self._gone = True
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            return
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@dataclass(frozen=True)
class _State:
    step: int
    loss: float
    measure: tuple[str, str]
    tokens_per_second: float
    lr: float


class _Bar:
    """The state shown, the speed behind the ETA, and the live line, which fits itself to a width."""

    def __init__(self, total: int, start: int) -> None:
        self.total = total
        self.step = start
        self.started = time.monotonic()
        self._state: _State | None = None
        self._seen = self.started
        self._weighted_steps = 0.0
        self._weighted_seconds = 0.0

    def show(self, state: _State) -> None:
        now = time.monotonic()
        # The first step also compiles the graph, so the clock of the speed starts after it.
        if self._state is not None and state.step > self.step:
            seconds = now - self._seen
            decay = math.exp(-seconds / _MEMORY)
            self._weighted_steps = self._weighted_steps * decay + state.step - self.step
            self._weighted_seconds = self._weighted_seconds * decay + seconds
        self.step, self._seen, self._state = state.step, now, state

    def eta(self) -> str:
        now = time.monotonic()
        if self.step >= self.total:
            return f"took {format_duration(now - self.started)}"
        if not self._weighted_steps:
            return "ETA --:--"
        left = (self.total - self.step) * self._weighted_seconds / self._weighted_steps
        return f"ETA {format_duration(left - (now - self._seen))}"

    def plain(self) -> str:
        state = self._state
        assert state is not None
        width = len(str(self.total))
        return (
            f"step {state.step:>{width}}/{self.total}  loss {state.loss:.4f}  "
            f"{' '.join(state.measure)}  {state.tokens_per_second:,.0f} tok/s  "
            f"lr {state.lr:.2e}  {self.eta()}"
        )

    def _parts(self) -> list[tuple[int, Text | None]]:
        """The line's parts in order (None: the bar), each with a rank: the highest are dropped first."""
        state = self._state
        count = Text(f"{self.step:>{len(str(self.total))}}/{self.total}", style="bold")
        if state is None:
            return [(0, count), (2, None), (1, Text("starting", style="dim"))]
        return [
            (0, count),
            (3, None),
            (1, Text.assemble("loss ", (f"{state.loss:.4f}", "bold cyan"))),
            (4, Text.assemble((state.measure[0], "bold cyan"), f" {state.measure[1]}")),
            (5, Text.assemble((f"{state.tokens_per_second:,.0f}", "bold"), " tok/s")),
            (6, Text(f"lr {state.lr:.2e}")),
            (2, Text(self.eta(), style="magenta")),
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the line, without the parts that the width has no room for."""
        parts = self._parts()
        # One column stays free: some terminals wrap a line that fills the last one.
        room = options.max_width - 1
        while (spare := room - _width(parts)) < 0 and len(parts) > 1:
            parts.remove(max(parts, key=lambda part: part[0]))
        bar_width = min(40, _NARROWEST_BAR + spare)
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        for _ in parts:
            grid.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, self.total), completed=self.step, width=bar_width)
        grid.add_row(*(bar if text is None else text for _, text in parts))
        yield grid


def _width(parts: list[tuple[int, Text | None]]) -> int:
    return sum(_GAP + (_NARROWEST_BAR if text is None else text.cell_len) for _, text in parts) - _GAP


def format_duration(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds: 2:05, 1:02:05."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
