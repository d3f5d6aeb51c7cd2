"""Text on a terminal as it is accepted, above a one-line footer.

Append-only: text is written once, where the cursor stands; only the footer is redrawn, in the line
below it. What a model writes is text: control characters show as pictures and do nothing.
"""

import shutil
import time
from types import TracebackType
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from medusa_cli.text.events import Piece, Result, Step

# Depth 0, the base model's own token, stays plain; the last style serves all deeper ones.
_COLOURS = tuple(Style(color=name) for name in ("green", "cyan", "magenta", "yellow", "red"))
_ATTRIBUTES = (Style(underline=True), Style(underline=True, bold=True), Style(reverse=True))
_DIM = Style(dim=True)

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_MAKE_ROOM_BELOW = "\x1bD\x1bM"  # one line down, scrolling if need be, and up: same column
_LINE_BELOW, _ERASE_LINE = "\x1b[B\r", "\x1b[2K"


def printable(text: str) -> str:
    """Text in which control characters show as pictures, or not at all where there is none."""
    return text.translate(_PICTURES)


_PICTURES: dict[int, int | None] = {
    code: 0x2400 + code for code in range(32) if code not in (9, 10)
}
_PICTURES |= {127: 0x2421} | dict.fromkeys(range(128, 160))


class LiveText:
    """Shows an answer while it grows. Use as a context manager: leaving removes the footer.

    Args:
        stdout: a terminal.
        trace: colour each token by the tree depth it was accepted at.
        footer: keep the line with speed and accept lengths below the text.
    """

    def __init__(self, stdout: TextIO, *, trace: bool, footer: bool) -> None:
        console = Console(file=stdout)
        self._out = stdout
        self._trace = trace
        self._styles = _ATTRIBUTES if console.no_color else _COLOURS
        self._footer = footer and not console.is_dumb_terminal
        self._lengths: list[int] = []
        self._tokens = 0
        self._first_token = 0.0
        self._drawn = False

    def __enter__(self) -> "LiveText":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._erase_footer()
        self._out.flush()

    def show(self, step: Step) -> None:
        """Appends a step's text and redraws the footer."""
        self._first_token = self._first_token or time.perf_counter()
        self._tokens += len(step.token_ids)
        if step.accept_length > 0:
            self._lengths.append(step.accept_length)
        self._erase_footer()
        for piece in step.pieces:
            self._out.write(self._styled(piece))
        if self._footer:
            self._draw_footer(self._status())
        self._out.flush()

    def _status(self) -> str:
        seconds = time.perf_counter() - self._first_token
        rate = (self._tokens - 1) / seconds if seconds > 0 and self._tokens > 1 else 0.0
        if not self._lengths:
            return f"{rate:.1f} tokens/s"
        mean = sum(self._lengths) / len(self._lengths)
        last = self._lengths[-1]
        return f"{rate:.1f} tokens/s · accepted {last} · mean {mean:.2f} · {self._tokens} tokens"

    def _styled(self, piece: Piece) -> str:
        text = printable(piece.text)
        if not self._trace or piece.depth == 0 or not text:
            return text
        style = self._styles[min(piece.depth, len(self._styles)) - 1]
        return style.render(text, color_system=ColorSystem.STANDARD)

    def _draw_footer(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        if cell_len(text) >= columns:
            text = set_cell_size(text, columns - 1)
        line = _DIM.render(text, color_system=ColorSystem.STANDARD)
        self._out.write(f"{_MAKE_ROOM_BELOW}{_SAVE}{_LINE_BELOW}{_ERASE_LINE}{line}{_RESTORE}")
        self._drawn = True

    def _erase_footer(self) -> None:
        if self._drawn:
            self._out.write(f"{_SAVE}{_LINE_BELOW}{_ERASE_LINE}{_RESTORE}")
            self._drawn = False


def summary(result: Result) -> str:
    """One line about a finished answer."""
    parts = [f"{len(result.token_ids)} tokens", f"{result.tokens_per_second:.1f} tokens/s"]
    if result.tree is not None:
        parts.append(f"accept length {result.mean_accept_length:.2f}")
    if result.sampling.temperature > 0:
        parts.append(f"seed {result.sampling.seed}")
    if result.sampling.lossy and result.tree is not None:
        parts.append("lossy")
    return " · ".join([*parts, f"{result.finish_reason}"])
