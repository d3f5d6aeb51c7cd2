"""A progress bar on standard error, where that is a terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from medusa_cli.cli.streams import Streams


class ProgressBar:
    """Lives within a `with` block; elsewhere than on a terminal there is no bar.

    Args:
        columns: what it shows.
        text: its first description.
        total: pieces of work, None when that shows on the way.
        quiet: show nothing.
    """

    def __init__(
        self,
        streams: Streams,
        *columns: ProgressColumn,
        text: str,
        total: int | None,
        quiet: bool,
    ) -> None:
        self._streams, self._quiet = streams, quiet
        self._progress: Progress | None = None
        if streams.stderr.isatty() and not quiet:
            console = Console(file=streams.stderr)
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task(text, total=total)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _line(self, text: str) -> None:
        """Shows a line where there is no bar."""
        if not self._quiet:
            self._streams.note(f"medusa: {text}")
