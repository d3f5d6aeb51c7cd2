"""`medusa generate`: one prompt, or a file of prompts, to standard output."""

import time
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.cli import options as opt
from medusa_cli.cli.opening import check_conflicts, open_model
from medusa_cli.cli.prompt_input import BatchItem, read_batch, read_prompt
from medusa_cli.cli.request import Format, Request
from medusa_cli.cli.streams import Streams
from medusa_cli.config import Limits, Overflow, SamplingConfig
from medusa_cli.errors import UsageError
from medusa_cli.text.prompt_files import read_text


@opt.with_groups
def generate(
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt's text.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="PATH", help="Prompt file; -: stdin.")
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="A prompt (or messages) a line; JSON lines out."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Render the prompt with the chat template, or continue it as it is. "
            "[default: chat where there is a template]",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja chat template to use instead.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")
    ] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text (repeatable).")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")
    ] = False,
    on_overflow: Annotated[
        Overflow, typer.Option(help="What to do with a prompt longer than the context.")
    ] = Overflow.ERROR,
    format_: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.TEXT,
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
    """Generate text from a prompt given with -p, -f or on standard input.

    Standard output gets the completion's bytes and nothing else. Several tokens are accepted per
    forward; at temperature 0 and under lossless acceptance the text is the base model's own.
    The accept length of a step counts the tokens accepted by that forward, base token included.
    """
    streams = Streams.of_process()
    check_conflicts(loading, plain=plain, tree=tree, lookup=lookup)
    if chat is False and (system is not None or template is not None):
        raise UsageError("--raw continues the text as it is: drop --system and --template")
    given = sampling.given()
    if acceptance is not None:
        given["acceptance"] = acceptance
    if not sampling.model_defaults:
        SamplingConfig(**given)  # a bad value is refused before anything is loaded
    request = Request(
        limits=Limits(max_new_tokens, tuple(stop or ()), ignore_eos, on_overflow),
        given=given,
        model_defaults=sampling.model_defaults,
        chat=chat,
        system=system,
        template=None if template is None else read_text(template),
        format=format_,
        trace=trace,
        quiet=loading.quiet,
    )
    if batch is not None and (prompt is not None or file is not None):
        raise UsageError("--batch brings its own prompts: drop -p and -f")
    if batch is not None and format_ is not Format.TEXT:
        raise UsageError("--batch always prints one JSON object a line: drop --format")
    if trace and (batch is not None or format_ is not Format.TEXT):
        raise UsageError("--trace colours text on a terminal: drop --batch and --format")
    if batch is None:
        items = [BatchItem(None, read_prompt(prompt, file, streams))]
    else:
        items = read_batch(batch)
    if trace and not streams.stdout.isatty() and not loading.quiet:
        streams.note("medusa: --trace colours text on a terminal only")

    started = time.perf_counter()
    loaded = open_model(streams, loading, plain=plain, tree=tree, lookup=lookup)
    from medusa_cli.cli.answer import Answerer

    answerer = Answerer(loaded, request, streams, time.perf_counter() - started)
    code = answerer.one(items[0]) if batch is None else answerer.batch(items)
    raise typer.Exit(code)
