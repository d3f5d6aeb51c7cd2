"""`medusa chat`: a conversation on a terminal, or line by line on pipes."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.cli import options as opt
from medusa_cli.cli.opening import check_conflicts, open_model
from medusa_cli.cli.streams import Streams
from medusa_cli.config import Limits, SamplingConfig
from medusa_cli.errors import UsageError
from medusa_cli.text.prompt_files import read_text


@opt.with_groups
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja chat template to use instead.")
    ] = None,
    continue_: Annotated[
        bool, typer.Option("--continue", help="Resume the last chat on a terminal.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Render each Markdown block when it is complete.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", "-n", help="Most tokens of an answer. [default: to its end]"
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End an answer before this text (repeatable).")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Colour tokens by the depth they were accepted at.")
    ] = False,
    tree: opt.TreeName = None,
    lookup: opt.LookupBranch = None,
    plain: opt.Plain = False,
    acceptance: opt.AcceptanceRule = None,
    loading: opt.ModelOptions,
    sampling: opt.SamplingOptions,
) -> None:
    """Chat with a model. /help lists commands and keys; Ctrl-D leaves.

    Standard input that is not a terminal is read line by line, a message a line.
    """
    streams = Streams.of_process()
    check_conflicts(loading, plain=plain, tree=tree, lookup=lookup)
    given = sampling.given()
    if acceptance is not None:
        given["acceptance"] = acceptance
    if not sampling.model_defaults:
        SamplingConfig(**given)  # a bad value is refused before anything is loaded
    limits = Limits(max_new_tokens, tuple(stop or ()))
    terminal = streams.stdin.isatty() and streams.stdout.isatty()
    if not terminal and (trace or markdown or continue_):
        raise UsageError("--trace, --markdown and --continue need a terminal")
    if trace and markdown:
        raise UsageError("--trace colours tokens, --markdown renders blocks: choose one")
    own_template = None if template is None else read_text(template)
    from medusa_cli.cli import session_file
    from medusa_cli.cli.chat_input import PipedInput, TerminalInput, keys_unseen

    resumed = session_file.load_json(session_file.last_session()) if continue_ else None
    piped = PipedInput(streams)
    if not terminal and piped.is_empty():
        return
    with keys_unseen(streams) if terminal else contextlib.nullcontext():
        loaded = open_model(streams, loading, plain=plain, tree=tree, lookup=lookup)
        from dataclasses import replace

        from medusa_cli.chat import Chat
        from medusa_cli.cli.commands import COMMAND_NAMES
        from medusa_cli.cli.repl import Repl

        if own_template is not None:
            loaded = replace(loaded, template=own_template)
        if not loaded.has_template:
            raise UsageError(
                f"'{loaded.name}' has no chat template: give one with --template FILE, "
                "or continue text with `medusa generate --raw`"
            )
        defaults = loaded.sampling_defaults() if sampling.model_defaults else {}
        talk = Chat(loaded, SamplingConfig(**(defaults | given)), limits, system, plain=plain)
        if resumed is not None:
            talk.restore(resumed)
        source = TerminalInput(session_file.history_file(), COMMAND_NAMES) if terminal else piped
        repl = Repl(
            talk,
            source,
            streams,
            terminal=terminal,
            trace=trace,
            markdown=markdown,
            quiet=loading.quiet,
        )
        if terminal and not loading.quiet:
            repl.greet()
        raise typer.Exit(repl.run())
