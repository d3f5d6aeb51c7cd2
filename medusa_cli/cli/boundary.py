"""The one place where errors become messages and exit codes.

0 ok, 1 runtime error, 2 usage, 3 model, heads or tree, 4 context, 130 interrupted. A traceback
shows only with `MEDUSA_DEBUG=1`.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from medusa_cli import errors

INTERRUPTED = 130
_EXIT_CODES: tuple[tuple[type[errors.MedusaError], int], ...] = (
    (errors.UsageError, 2),
    (errors.ModelNotFoundError, 3),
    (errors.UnsupportedModelError, 3),
    (errors.CheckpointError, 3),
    (errors.TreeError, 3),
    (errors.ContextLengthError, 4),
)
_NO_MEMORY = "use --quantize int8, a smaller model, or a shorter prompt"


def exit_code(error: errors.MedusaError) -> int:
    """The exit code of an error of ours."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


class Boundary(TyperGroup):
    """A command group whose commands never end in a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: ARG002  # typer's parameter; we always exit
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the command line and exits the process with the code of its outcome."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "medusa"
            message = error.format_message().replace("\n", " ")
            _complain(f"{command}: {message}\nTry '{command} --help' for help.")
            code = 2
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Runs the chosen command and translates what it raises."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            _abandon_stdout()
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise
        except Exception as error:  # noqa: BLE001  # the boundary: nothing leaves as a traceback
            if os.environ.get("MEDUSA_DEBUG") == "1":
                raise
            if isinstance(error, OSError):
                _abandon_stdout()
            code, message = explain(error)
            _complain(f"medusa: {message}")
            raise typer.Exit(code) from None


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and message for anything that may come out of a command."""
    if isinstance(error, errors.MedusaError):
        return exit_code(error), str(error)
    text = (str(error) or type(error).__name__).splitlines()[0]
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return 1, f"out of memory: {_NO_MEMORY}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        return 1, f"out of GPU memory: {_NO_MEMORY}, or --device cpu"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return 1, f"the disk is full ({error.filename or 'output'}): make room and try again"
    return 1, f"{text} (MEDUSA_DEBUG=1 shows where)"


def _abandon_stdout() -> None:
    """Sends what is still buffered nowhere: it must not fail once more at exit."""
    with contextlib.suppress(OSError):  # a stream of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    print(message, file=sys.stderr)
