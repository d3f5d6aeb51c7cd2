"""`medusa chat`: a conversation on a terminal, or line by line on pipes."""

from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.cli import options as opt
from medusa_cli.cli.opening import check_conflicts, open_model
from medusa_cli.cli.streams import Streams
from medusa_cli.config import Limits, SamplingConfig
from medusa_cli.errors import UsageError
from medusa_cli.models.registry import DEFAULT_MODEL
from medusa_cli.text.prompt_files import read_text


def chat(
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
    model: opt.Model = DEFAULT_MODEL,
    heads: opt.Heads = None,
    tree: opt.TreeName = None,
    plain: opt.Plain = False,
    device: opt.Device = "auto",
    device_map: opt.DeviceMap = None,
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    offline: opt.Offline = False,
    quiet: opt.Quiet = False,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    typical_p: opt.TypicalP = None,
    eta_cutoff: opt.EtaCutoff = None,
    epsilon_cutoff: opt.EpsilonCutoff = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    acceptance: opt.AcceptanceRule = None,
    epsilon: opt.Epsilon = None,
    delta: opt.Delta = None,
    greedy_root: opt.GreedyRoot = None,
    model_defaults: opt.ModelDefaults = False,
) -> None:
    """Chat with a model. /help lists commands and keys; Ctrl-D leaves.

    Standard input that is not a terminal is read line by line, a message a line.
    """
    streams = Streams.of_process()
    check_conflicts(plain=plain, heads=heads, tree=tree, device=device, device_map=device_map)
    given = opt.given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        typical_p=typical_p,
        eta_cutoff=eta_cutoff,
        epsilon_cutoff=epsilon_cutoff,
        repetition_penalty=repetition_penalty,
        seed=seed,
        acceptance=acceptance,
        epsilon=epsilon,
        delta=delta,
        greedy_root=greedy_root,
    )
    if not model_defaults:
        SamplingConfig(**given)  # a bad value is refused before anything is loaded
    limits = Limits(max_new_tokens, tuple(stop or ()))
    terminal = streams.stdin.isatty() and streams.stdout.isatty()
    if not terminal and (trace or markdown or continue_):
        raise UsageError("--trace, --markdown and --continue need a terminal")
    if trace and markdown:
        raise UsageError("--trace colours tokens, --markdown renders blocks: choose one")
    own_template = None if template is None else read_text(template)
    from medusa_cli.cli import session_file
    from medusa_cli.cli.chat_input import PipedInput, TerminalInput

    resumed = session_file.load_json(session_file.last_session()) if continue_ else None
    piped = PipedInput(streams)
    if not terminal and piped.is_empty():
        return
    loaded = open_model(
        streams,
        quiet=quiet,
        model=model,
        heads=heads,
        tree=tree,
        plain=plain,
        device=device,
        device_map=device_map,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        offline=offline,
    )
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
    defaults = loaded.sampling_defaults() if model_defaults else {}
    talk = Chat(loaded, SamplingConfig(**(defaults | given)), limits, system, plain=plain)
    if resumed is not None:
        talk.restore(resumed)
    source = TerminalInput(session_file.history_file(), COMMAND_NAMES) if terminal else piped
    repl = Repl(
        talk, source, streams, terminal=terminal, trace=trace, markdown=markdown, quiet=quiet
    )
    if terminal and not quiet:
        repl.greet()
    raise typer.Exit(repl.run())
