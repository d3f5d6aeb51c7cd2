"""What the user sees while a benchmark runs: a bar on a terminal, a line per run elsewhere."""

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from medusa_cli.cli.progress_bar import ProgressBar
from medusa_cli.cli.streams import Streams


class BenchProgress(ProgressBar):
    """Counts finished pieces of work on standard error.

    Args:
        total: how many pieces there are, None when that shows on the way.
        quiet: show nothing.
    """

    def __init__(self, streams: Streams, total: int | None, *, quiet: bool) -> None:
        super().__init__(
            streams,
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            text="warming up",
            total=total,
            quiet=quiet,
        )

    def advance(self, text: str) -> None:
        """One piece more is done."""
        self._show(text, 1)

    def note(self, text: str) -> None:
        """Something else to know."""
        self._show(text, 0)

    def _show(self, text: str, pieces: int) -> None:
        if self._progress is None:
            self._line(text)
        else:
            self._progress.update(self._task, advance=pieces, description=text)
