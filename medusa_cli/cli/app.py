"""The `medusa` command."""

import signal
import sys
from typing import Annotated

import typer

from medusa_cli import __version__
from medusa_cli.cli import models, tree
from medusa_cli.cli.accuracy import accuracy
from medusa_cli.cli.bench import bench
from medusa_cli.cli.boundary import INTERRUPTED, Boundary
from medusa_cli.cli.chat import chat
from medusa_cli.cli.generate import generate

app = typer.Typer(
    name="medusa",
    cls=Boundary,
    help="Medusa decoding for Hugging Face models: the base model's own text, "
    "several tokens per forward.",
    rich_markup_mode=None,  # plain help starts faster and looks the same everywhere
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(chat)
app.command()(generate)
app.command()(bench)
app.command()(accuracy)
app.add_typer(tree.app, name="tree")
app.add_typer(models.app, name="models")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Shows the version or, without a command, the help."""
    if version:
        typer.echo(f"medusa {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point of the console script; exits the process."""
    try:
        app(prog_name="medusa")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        # On the way out a further Ctrl-C has nothing left to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
