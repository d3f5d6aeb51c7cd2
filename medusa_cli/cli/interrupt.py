"""Ctrl-C ends an answer at the next step; a second one ends the program at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within the block the first SIGINT only sets a flag, which the yielded function reads."""
    interrupted = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing disturbs the cleaning up
            raise KeyboardInterrupt
        interrupted = True

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
