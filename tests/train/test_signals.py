import os
import signal
import threading

from forge_mlx.train.signals import StopRequested, StopSignals
import pytest

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _send_deferred(
    stop: StopSignals,
    *numbers: signal.Signals,
    noted: list[signal.Signals | None] | None = None,
    error: Exception | None = None,
) -> None:
    """Send signals inside ``deferred()``, ``noted`` being what was received before and after each, then raise."""
    noted = [] if noted is None else noted
    with stop.deferred():
        noted.append(stop.received)
        for number in numbers:
            _send(number)
            noted.append(stop.received)
        if error is not None:
            raise error


@pytest.mark.parametrize("number", _SIGNALS, ids=lambda number: number.name)
def test_signal_asks_to_stop_at_once(number: signal.Signals) -> None:
    with pytest.raises(StopRequested) as caught, StopSignals():
        _send(number)
    assert caught.value.signal is number
    # Code that lets Ctrl-C pass, as `except Exception` does, lets this pass too.
    assert isinstance(caught.value, KeyboardInterrupt)


@pytest.mark.parametrize("number", _SIGNALS, ids=lambda number: number.name)
def test_first_signal_is_only_noted_where_it_is_deferred(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    noted: list[signal.Signals | None] = []
    with StopSignals() as stop, pytest.raises(StopRequested):
        _send_deferred(stop, number, noted=noted)
    assert noted == [None, number]
    assert capfd.readouterr().err == "\nfinishing this step, then saving; once more stops at once\n"


def test_second_signal_stops_at_once() -> None:
    with StopSignals() as stop:
        noted: list[signal.Signals | None] = []
        with pytest.raises(StopRequested) as caught:
            _send_deferred(stop, signal.SIGTERM, signal.SIGINT, noted=noted)
        assert caught.value.signal is signal.SIGINT
        assert noted == [None, signal.SIGTERM]


def test_third_signal_does_what_it_does_without_a_trainer() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        with StopSignals() as stop:
            with pytest.raises(StopRequested):
                _send_deferred(stop, signal.SIGTERM, signal.SIGTERM)
            _send(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_noted_signal_is_not_lost_when_the_block_ends_without_acting_on_it() -> None:
    with StopSignals() as stop, pytest.raises(StopRequested, match="SIGTERM"):
        _send_deferred(stop, signal.SIGTERM)


def test_error_inside_the_deferred_block_is_not_replaced() -> None:
    with StopSignals() as stop, pytest.raises(ZeroDivisionError):
        _send_deferred(stop, signal.SIGTERM, error=ZeroDivisionError())


def test_earlier_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in _SIGNALS]
    with StopSignals():
        assert [signal.getsignal(number) for number in _SIGNALS] != before
    assert [signal.getsignal(number) for number in _SIGNALS] == before
    with pytest.raises(ZeroDivisionError), StopSignals():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in _SIGNALS] == before


def test_signal_that_was_ignored_stays_ignored() -> None:
    """As ``nohup`` does with SIGHUP, and a shell with SIGINT for a job in the background."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            _send(signal.SIGHUP)
            assert stop.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_other_threads_may_train_without_handlers() -> None:
    errors: list[BaseException] = []

    def use() -> None:
        try:
            with StopSignals() as stop, stop.deferred():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == []
