"""Ctrl-C, SIGTERM and a closed terminal: when a run may be broken off, and when it finishes the step first."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
import os
import signal
import threading
from types import FrameType, TracebackType


class StopRequested(KeyboardInterrupt):
    """A signal asks to stop now. ``signal`` is which."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class StopSignals:
    """Turns SIGINT, SIGTERM and SIGHUP into `StopRequested`, or inside ``deferred()`` into a note.

    A signal that was ignored before (``nohup``, a shell's background job) stays ignored. Outside the main thread,
    where Python allows no handlers, the block changes nothing.

    Attributes:
        received: the signal noted inside ``deferred()``, or None.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._deferred = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                # None: a handler that Python cannot put back.
                if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._previous[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the earlier handlers back."""
        self._restore()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside this block the first signal is only noted in ``received``; the second raises.

        Raises:
            StopRequested: at the end of the block, if a signal was noted and the block did not act on it.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.received is not None:
            raise StopRequested(self.received)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._deferred and self.received is None:
            self.received = signal.Signals(number)
            # Not print: the handler may run in the middle of another print, which forbids one inside it.
            with suppress(OSError):
                os.write(2, b"\nfinishing this step, then saving; once more stops at once\n")
            return
        # Whoever asks a third time gets what the signal does without a trainer.
        self._restore()
        raise StopRequested(signal.Signals(number))

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
