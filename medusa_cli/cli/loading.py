"""What the user sees while a model is found, fetched and loaded."""

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from medusa_cli.cli.progress_bar import ProgressBar
from medusa_cli.cli.streams import Streams
from medusa_cli.models.progress import Stage


class LoadProgress(ProgressBar):
    """A `Report` that draws on standard error: a bar on a terminal, lines elsewhere.

    Args:
        name: of the model that is loaded.
        quiet: show nothing.
    """

    def __init__(self, streams: Streams, name: str, *, quiet: bool) -> None:
        super().__init__(
            streams,
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            text=f"loading {name}",
            total=None,
            quiet=quiet,
        )

    def __call__(self, stage: Stage) -> None:
        """Shows one stage."""
        if self._progress is None:
            self._line(stage.text)
        elif stage.total is None:
            self._progress.stop()  # what follows may draw bars of its own
            self._streams.note(stage.text)
        else:
            self._progress.update(
                self._task, description=stage.text, completed=stage.done, total=stage.total
            )
