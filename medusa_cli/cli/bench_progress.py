"""What the user sees while a benchmark runs: a bar on a terminal, a line per prompt elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from medusa_cli.cli.streams import Streams


class BenchProgress:
    """Counts finished pieces of work on standard error.

    Args:
        total: how many pieces there are, None when that shows on the way.
        quiet: show nothing.
    """

    def __init__(self, streams: Streams, total: int | None, *, quiet: bool) -> None:
        self._streams, self._quiet = streams, quiet
        self._progress: Progress | None = None
        if streams.stderr.isatty() and not quiet:
            self._progress = Progress(
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("<"),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(file=streams.stderr),
                transient=True,
            )
            self._task = self._progress.add_task("warming up", total=total)

    def __enter__(self) -> "BenchProgress":
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

    def advance(self, text: str) -> None:
        """One piece more is done."""
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=text)
        elif not self._quiet:
            self._streams.note(f"medusa: {text}")

    def note(self, text: str) -> None:
        """Something else to know."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)
        elif not self._quiet:
            self._streams.note(f"medusa: {text}")
