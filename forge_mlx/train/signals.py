"""Ctrl-C and SIGTERM: finish the step, save, leave."""

import signal
from types import FrameType, TracebackType


class StopSignals:
    """Notes the first SIGINT or SIGTERM instead of dying of it; a second one acts at once.

    Attributes:
        received: the signal, or None.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        """Install the handlers."""
        for number in self._SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the earlier handlers back."""
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
