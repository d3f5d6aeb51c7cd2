"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopFilter:
    """Passes text through up to the first stop string, which may be split over pieces.

    Text that could be the beginning of a stop string is held back until it is known not to be.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Takes a piece and returns what can be shown; sets `stopped` at a stop string."""
        self._held += text
        found = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        hold = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - hold
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Returns the text held back at the end of an answer."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
