"""What the user sees while a model is found, fetched and loaded."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from medusa_cli.cli.streams import Streams
from medusa_cli.models.progress import Stage


class LoadProgress:
    """A `Report` that draws on standard error: a bar on a terminal, lines elsewhere.

    Args:
        name: of the model that is loaded.
        quiet: show nothing.
    """

    def __init__(self, streams: Streams, name: str, *, quiet: bool) -> None:
        self._streams, self._quiet = streams, quiet
        self._progress: Progress | None = None
        if streams.stderr.isatty() and not quiet:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                console=Console(file=streams.stderr),
                transient=True,
            )
            self._task = self._progress.add_task(f"loading {name}", total=None)

    def __enter__(self) -> "LoadProgress":
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

    def __call__(self, stage: Stage) -> None:
        """Shows one stage."""
        if self._quiet:
            return
        if self._progress is None:
            self._streams.note(f"medusa: {stage.text}")
        elif stage.total is None:
            self._progress.stop()  # what follows may draw bars of its own
            self._streams.note(stage.text)
        else:
            self._progress.update(
                self._task, description=stage.text, completed=stage.done, total=stage.total
            )
