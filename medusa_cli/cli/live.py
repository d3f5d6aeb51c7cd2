"""Text on a terminal as it is accepted, above a one-line footer.

Append-only: text is written once, where the cursor stands; only the footer is redrawn, in the line
below it. What a model writes is text: control characters show as pictures and do nothing.
"""

import shutil
import time
from itertools import groupby
from types import TracebackType
from typing import Self, TextIO

from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.markdown import Markdown
from rich.style import Style

from medusa_cli.text.events import Result, Step

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
        thinking: whether the answer begins inside a model's thoughts, which are dimmed.
        context_used: tokens in front of the answer; with `context_length` the footer counts on.
        context_length: tokens that the context holds.
    """

    def __init__(
        self,
        stdout: TextIO,
        *,
        trace: bool,
        footer: bool,
        thinking: bool = False,
        context_used: int = 0,
        context_length: int | None = None,
    ) -> None:
        console = Console(file=stdout)
        self._out = stdout
        self._trace = trace
        self._styles = _ATTRIBUTES if console.no_color else _COLOURS
        self._footer = footer and not console.is_dumb_terminal
        self._thoughts = Thoughts(thinking)
        self._context_used, self._context_length = context_used, context_length
        self._lengths: list[int] = []
        self._tokens = 0
        self._first_token = 0.0
        self._drawn = False
        self._column = 0
        self._wrapped = False  # whether the cursor stands behind a row that we ended ourselves

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._erase_footer()
        self._finish()
        if self._column > 0:
            self._out.write("\n")
        self._out.flush()

    def show(self, step: Step) -> None:
        """Appends a step's text and redraws the footer."""
        self._first_token = self._first_token or time.perf_counter()
        self._tokens += len(step.token_ids)
        if step.accept_length > 0:
            self._lengths.append(step.accept_length)
        self._erase_footer()
        self._append(step)
        if self._footer:
            self._end_full_row()
            self._draw_footer(self._status())
        self._out.flush()

    def _append(self, step: Step) -> None:
        for piece in step.pieces:
            for text, thought in self._thoughts.split(self._placed(printable(piece.text))):
                self._out.write(self._styled(text, piece.depth, thought))

    def _placed(self, text: str) -> str:
        """The text as it continues at the cursor, whose column is kept."""
        if text and self._wrapped:
            self._wrapped = False
            text = text.removeprefix("\n")  # the row has ended already
        columns = shutil.get_terminal_size().columns
        for char in text:
            width = 8 - self._column % 8 if char == "\t" else cell_len(char)
            if char == "\n":
                self._column = 0
            elif self._column + width > columns:
                self._column = columns if char == "\t" else width
            else:
                self._column += width
        return text

    def _end_full_row(self) -> None:
        """Moves the cursor from behind a full row to the next one.

        There it waits to wrap, and not every terminal saves and restores that with the cursor.
        """
        if self._column == shutil.get_terminal_size().columns:
            self._out.write(" \b")
            self._column, self._wrapped = 0, True

    def _finish(self) -> None:
        """Writes what was kept for the end: nothing, here."""

    def _status(self) -> str:
        seconds = time.perf_counter() - self._first_token
        rate = (self._tokens - 1) / seconds if seconds > 0 and self._tokens > 1 else 0.0
        parts = [f"{rate:.1f} tokens/s"]
        if self._lengths:
            mean = sum(self._lengths) / len(self._lengths)
            parts += [f"accepted {self._lengths[-1]}", f"mean {mean:.2f}"]
        if self._context_length is None:
            parts.append(f"{self._tokens} tokens")
        else:
            parts.append(f"context {self._context_used + self._tokens}/{self._context_length}")
        return " · ".join(parts)

    def _styled(self, text: str, depth: int, thought: bool) -> str:
        if self._trace and depth > 0:
            style = self._styles[min(depth, len(self._styles)) - 1]
            style = style + _DIM if thought else style
        elif thought:
            style = _DIM
        else:
            return text
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


class MarkdownText(LiveText):
    """Renders each Markdown block when it is complete; what is printed is never redrawn."""

    _buffer = ""

    def _append(self, step: Step) -> None:
        self._buffer += printable(step.text)
        blocks, self._buffer = complete_blocks(self._buffer)
        for block in blocks:
            self._print(block)

    def _finish(self) -> None:
        if self._buffer.strip():
            self._print(self._buffer)
        self._buffer = ""

    def _print(self, block: str) -> None:
        Console(file=self._out).print(Markdown(block))


def complete_blocks(text: str) -> tuple[list[str], str]:
    """Splits Markdown at blank lines outside code fences: whole blocks, and the rest."""
    blocks: list[str] = []
    block, fence = "", ""
    *lines, rest = text.split("\n")
    for line in lines:
        block += f"{line}\n"
        mark = line.lstrip()[:3]
        if fence and line.strip() == fence:
            fence = ""
        elif not fence and mark in ("```", "~~~"):
            fence = mark
        if not fence and not line.strip():
            if block.strip():
                blocks.append(block)
            block = ""
    return blocks, block + rest


class Thoughts:
    """Tells a reasoning model's thoughts, between <think> and </think>, from its answer."""

    _OPEN, _CLOSE = "<think>", "</think>"

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._tail = ""

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Segments of a piece, each with whether it is thought; tags may be split over pieces."""
        flags = []
        for char in text:
            before = self._inside
            self._tail = (self._tail + char)[-len(self._CLOSE) :]
            if self._tail.endswith(self._OPEN):
                self._inside = True
            elif self._tail == self._CLOSE:
                self._inside = False
            flags.append(before or self._inside)
        grouped = groupby(zip(text, flags, strict=True), key=lambda pair: pair[1])
        return [("".join(char for char, _ in pairs), thought) for thought, pairs in grouped]


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
