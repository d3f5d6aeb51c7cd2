"""`medusa bench`: honest measurements, interleaved and with intervals."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.cli import options as opt
from medusa_cli.cli.bench_request import (
    BenchFormat,
    BenchRequest,
    check_files,
    parse_nodes,
    parse_temperatures,
)
from medusa_cli.cli.boundary import INTERRUPTED
from medusa_cli.cli.opening import check_conflicts, open_model
from medusa_cli.cli.streams import Streams
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.errors import UsageError

DEFAULT_LIMIT = 16
_LOADING = {field.name for field in fields(opt.ModelOptions)}
_OUTPUT = {"format_", "export", "quiet"}
_TEXTS = {"prompts", "limit", "max_new_tokens"}
_RUNS = {"tree", "lookup", "warmup", "repeats", "ignore_eos"}
_SAMPLING = {field.name for field in fields(opt.SamplingOptions)}
# What each experiment reads. Anything else on the command line would be ignored: it is refused.
_READS = {
    "compare": _OUTPUT | {"seed"},
    "roofline": _LOADING | _OUTPUT | {"plot", "plain"},
    "sweep_nodes": _LOADING | _OUTPUT | _TEXTS | {"plot"},
    "sweep_temperature": _LOADING | _OUTPUT | _TEXTS | _RUNS | {"plot"}
    | (_SAMPLING - {"temperature", "model_defaults"}),
    "contest": _LOADING | _OUTPUT | _TEXTS | _RUNS | _SAMPLING
    | {"plain", "acceptance", "baseline", "against"},
}  # fmt: skip


@opt.with_groups
def bench(
    *,
    context: typer.Context,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|PATH|auto",
            autocompletion=opt.complete_drafted,
            help="Tree to measure (repeatable). [default: the model's own]",
        ),
    ] = None,
    lookup: opt.LookupBranch = None,
    acceptance: Annotated[
        list[Acceptance] | None,
        typer.Option(help="Acceptance rule to measure (repeatable). [default: lossless]"),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DECODER",
            help="Another decoder on the same weights (repeatable): hf, hf-compile, prompt-lookup, "
            "assisted:MODEL, llama-cpp[:FILE.gguf].",
        ),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Measure plain decoding too.")
    ] = True,
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE.jsonl|builtin",
            help="Lines with `prompt`, `messages` or `turns`; optionally `id` and `category`.",
        ),
    ] = "builtin",
    limit: Annotated[
        int, typer.Option(help="Most questions, spread over the categories; 0: all.")
    ] = DEFAULT_LIMIT,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens of an answer.")
    ] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")
    ] = False,
    warmup: Annotated[int, typer.Option(help="Untimed short runs of each arm.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed runs of each arm on each prompt.")] = 1,
    sweep_nodes: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4,...,128",
            help="Step cost, accept length and speed against the number of tree nodes, for built "
            "and for dense trees.",
        ),
    ] = None,
    sweep_temperature: Annotated[
        str | None,
        typer.Option(
            metavar="0,0.3,0.7,1.0",
            help="Accept length and speed of lossless and typical acceptance against temperature.",
        ),
    ] = None,
    roofline: Annotated[
        bool,
        typer.Option(
            "--roofline", help="Where memory bandwidth and where arithmetic limits a step."
        ),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="What changed between two reports."),
    ] = None,
    format_: Annotated[
        BenchFormat, typer.Option("--format", help="What to print.")
    ] = BenchFormat.TABLE,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write to a file: .md, .csv or .json."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a sweep or the roofline: .png, .svg or .pdf."),
    ] = None,
    plain: opt.Plain = False,
    loading: opt.ModelOptions,
    sampling: opt.SamplingOptions,
) -> None:
    """Measure speed: plain decoding, trees and other decoders, interleaved prompt by prompt.

    Speedup is the ratio of tokens per second to plain decoding's on the same questions, with a
    95% bootstrap interval. The accept length of a step counts the tokens accepted by that forward,
    base token included; the mean is over all steps. Answers of arms that must agree are compared
    token by token.
    """
    streams = Streams.of_process()
    asked = {
        "compare": compare is not None,
        "roofline": roofline,
        "sweep_nodes": sweep_nodes is not None,
        "sweep_temperature": sweep_temperature is not None,
    }
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(map(_flag, chosen))} are separate runs: give one of them")
    experiment = chosen[0] if chosen else "contest"
    _refuse_unread(context, experiment)
    check_conflicts(loading, plain=plain, tree=tree[0] if tree else None, lookup=lookup)
    for name, value, least in (
        ("limit", limit, 0),
        ("max-new-tokens", max_new_tokens, 1),
        ("warmup", warmup, 0),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise UsageError(f"--{name} must be at least {least}, not {value}")
    given = sampling.given()
    SamplingConfig(**{"temperature": 1.0, **given})  # bad values are refused before loading
    swept_nodes = [] if sweep_nodes is None else parse_nodes(sweep_nodes)
    swept_temperatures = [] if sweep_temperature is None else parse_temperatures(sweep_temperature)
    check_files(export, plot)
    request = BenchRequest(
        trees=tuple(tree or ()),
        acceptance=tuple(acceptance or ()),
        against=tuple(against or ()),
        baseline=baseline,
        prompts=prompts,
        limit=limit or None,
        max_new_tokens=max_new_tokens,
        own_texts=any(_was_given(context, name) for name in _TEXTS),
        ignore_eos=ignore_eos,
        warmup=warmup,
        repeats=repeats,
        given=given,
        plot=plot,
        loading=loading,
    )
    from medusa_cli.cli import experiments
    from medusa_cli.cli.bench_output import show, write

    if compare is not None:
        findings = experiments.compare(*compare, seed=sampling.seed or 0)
    else:
        experiments.check(request, defaults=sampling.model_defaults)
        loaded = open_model(streams, loading, plain=plain, tree=None, lookup=lookup)
        if sampling.model_defaults:
            request = replace(request, given=loaded.sampling_defaults() | given)
        match experiment:
            case "roofline":
                findings = experiments.roofline(loaded, request, streams)
            case "sweep_nodes":
                findings = experiments.sweep_nodes(loaded, swept_nodes, request, streams)
            case "sweep_temperature":
                findings = experiments.sweep_temperature(
                    loaded, swept_temperatures, request, streams
                )
            case _:
                findings = experiments.contest(loaded, request, streams)
    show(findings, format_, streams)
    if export is not None:
        write(findings, export)
    raise typer.Exit(0 if findings.complete else INTERRUPTED)


def _refuse_unread(context: typer.Context, experiment: str) -> None:
    """Raises `UsageError` for an option that this experiment would ignore."""
    reads = _READS[experiment] | {experiment}
    unread = [name for name in context.params if name not in reads and _was_given(context, name)]
    if unread:
        what = "a plain benchmark" if experiment == "contest" else _flag(experiment)
        raise UsageError(f"{_flag(unread[0])} means nothing to {what}: drop it")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_").replace("_", "-")
