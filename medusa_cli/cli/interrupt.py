"""Ctrl-C ends an answer at the next step; a second one ends the program at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether Ctrl-C was pressed since the last `clear`; called, it tells."""

    def __init__(self) -> None:
        self._pressed = False

    def __call__(self) -> bool:
        return self._pressed

    def clear(self) -> None:
        """What was pressed before does not count for what comes now."""
        self._pressed = False

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        """Notes a first SIGINT; raises `KeyboardInterrupt` at a second one."""
        if self._pressed:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing disturbs the cleaning up
            raise KeyboardInterrupt
        self._pressed = True


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Within the block a first SIGINT only sets a flag."""
    interrupts = Interrupts()
    previous = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
