"""``stop_driver.py SIGNAL,MODULE:FUNCTION,N[,after] CONFIG ...``: the training command, and a signal at one place.

SIGNAL is sent to this process as it enters (``after``: leaves) the N-th call of a function, which makes a kill "in
the middle of" something repeatable. N counts from 1.
"""

from functools import wraps
import importlib
import os
import signal
import sys

from forge_mlx.train.__main__ import main


def install(where: str) -> None:
    """Replace the function by one that sends the signal."""
    name, place, number, *after = where.split(",")
    module, _, path = place.partition(":")
    *parents, last = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, last)
    calls = 0

    @wraps(original)
    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == int(number) and not after:
            os.kill(os.getpid(), signal.Signals[name])
        result = original(*args, **kwargs)
        if calls == int(number) and after:
            os.kill(os.getpid(), signal.Signals[name])
        return result

    setattr(owner, last, counted)


if __name__ == "__main__":
    install(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
