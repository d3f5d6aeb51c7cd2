"""`medusa accuracy`: how often each head is right, and traces to build trees from."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli.cli import options as opt
from medusa_cli.cli.boundary import INTERRUPTED
from medusa_cli.cli.interrupt import interruptible
from medusa_cli.cli.opening import check_conflicts, open_model
from medusa_cli.cli.streams import Streams
from medusa_cli.config import Limits
from medusa_cli.errors import ContextLengthError
from medusa_cli.text.prompt_files import BUILTIN, read_questions, spread

if TYPE_CHECKING:
    from medusa_cli.bench.tables import Table
    from medusa_cli.cli.bench_output import Findings
    from medusa_cli.decoding.head_accuracy import AccuracyTable
    from medusa_cli.decoding.traces import Traces
    from medusa_cli.decoding.tree import Tree


@opt.with_groups
def accuracy(
    *,
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE|builtin",
            help="JSONL file with `prompt`, `messages` or `turns` a line, or the shipped set.",
        ),
    ] = BUILTIN,
    limit: Annotated[
        int | None, typer.Option(help="At most so many prompts, spread over the categories.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens of an answer.")
    ] = 128,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where to write what is found. [default: beside heads of your own, else in the "
            "cache folder]",
        ),
    ] = None,
    format_: Annotated[
        opt.TableFormat, typer.Option("--format", help="What to print.")
    ] = opt.TableFormat.TABLE,
    loading: opt.ModelOptions,
) -> None:
    """Measure how often each head is right on the model's own greedy answers.

    A position is a place in an answer at which the heads guess the tokens ahead: head 1 the token
    behind the next one, head 2 the one behind that, and so on. Rank 0 is a head's best guess. Top-n
    is the share of positions at which the true token is among a head's n best. The accept length of
    a decoding step is the number of tokens that it yields, the base model's own included; replay
    tells what it would be with a tree, from the ranks alone.

    The traces (the rank of the true token at every position) are kept for `medusa tree build`, and
    the heads are calibrated for `--tree auto`: what their probabilities are worth where decoding
    would look.
    """
    streams = Streams.of_process()
    check_conflicts(loading, plain=False, tree=None)
    Limits(max_new_tokens)  # a bad value is refused before anything is loaded
    questions = read_questions(prompts)
    chosen = spread(questions, limit)
    loaded = open_model(streams, loading, plain=False, tree=None)
    from medusa_cli.cli.bench_output import show
    from medusa_cli.cli.bench_request import BenchFormat
    from medusa_cli.cli.loading import LoadProgress
    from medusa_cli.decoding.adaptive import AutoTree
    from medusa_cli.decoding.head_accuracy import accuracy_table
    from medusa_cli.decoding.measured import make_folder, results_folder, save
    from medusa_cli.training import accuracy as measuring

    of = measuring.measured_subject(loaded)
    assert of is not None, "heads that were loaded lie in files"
    folder = results_folder(of) if out is None else out.expanduser()
    make_folder(folder)
    name = prompts if prompts == BUILTIN else Path(prompts).name
    prompt_set = measuring.PromptSet(name, measuring.prompts_digest(questions))
    with (
        interruptible() as interrupts,
        LoadProgress(streams, loading.model, quiet=loading.quiet) as report,
    ):
        found = measuring.measure_heads(
            loaded, chosen, max_new_tokens, prompt_set, report, interrupts
        )
    traces = found.traces
    complete = traces.provenance.complete
    if not traces.texts and complete:
        raise ContextLengthError("no prompt fits the model's context: give shorter ones")
    if traces.texts:
        calibrated = found.calibrated()
        saved = save(folder, traces, calibrated)
        tree = loaded.tree.static if isinstance(loaded.tree, AutoTree) else loaded.tree
        show(_findings(accuracy_table(traces), traces, tree), BenchFormat(format_), streams)
        if not loading.quiet:
            beside = "traces.json, calibration.json and scores.safetensors"
            wrote = f"wrote {folder / 'accuracy.json'}, {beside}"
            kept = f"not saved: {folder} holds a complete measurement"
            streams.note(wrote if saved else kept)
    else:
        streams.note("medusa: interrupted before the first answer was measured")
    if not complete:
        raise typer.Exit(INTERRUPTED)


def _findings(table: "AccuracyTable", traces: "Traces", tree: "Tree") -> "Findings":
    from medusa_cli.cli.bench_output import Findings
    from medusa_cli.decoding.head_accuracy import to_data
    from medusa_cli.decoding.traces import MAX_RANKS, mean_accept_length, replay

    of = table.provenance
    notes = [
        f"heads {of.heads} on {of.base}",
        f"{table.positions} positions in {len(traces.texts)} answers, "
        f"prompts {of.prompts_digest} ({of.prompts})",
    ]
    replayed: dict[str, Any] = {"tree": tree.name, "nodes": tree.nodes}
    if tree.candidates <= MAX_RANKS:
        steps = sum(len(replay(tree, text)) for text in traces.texts)
        mean = mean_accept_length(tree, traces)
        replayed |= {"steps": steps, "mean_accept_length": round(mean, 4)}
        notes.append(f"mean accept length {mean:.2f} with tree {tree.name}, {steps} steps replayed")
    if of.skipped:
        notes.append(f"skipped, longer than the context: {', '.join(of.skipped)}")
    if not of.complete:
        notes.append("PARTIAL: interrupted before the last prompt")
    return Findings(
        tables=(_by_head(table, notes), _by_category(table)),
        data=to_data(table) | {"replay": replayed},
        complete=of.complete,
    )


def _by_head(table: "AccuracyTable", notes: Sequence[str]) -> "Table":
    from medusa_cli.bench.tables import Table
    from medusa_cli.decoding.head_accuracy import TOP

    overall = table.overall
    heads = range(len(overall.counts))
    rows = [("positions", *map(str, overall.counts))]
    rows += [
        (f"top-{n}", *(_percent(overall.top(head, n), 1) for head in heads))
        for n in range(1, TOP + 1)
    ]
    return Table(
        "Top-n of each head, % of positions",
        ("", *(f"head {head + 1}" for head in heads)),
        tuple(rows),
        tuple(notes),
    )


def _by_category(table: "AccuracyTable") -> "Table":
    from medusa_cli.bench.tables import Table

    heads = range(len(table.overall.counts))
    rows = [
        (name or "(none)", str(accuracy.counts[0]))
        + tuple(f"{_percent(accuracy.top(k, 1))}/{_percent(accuracy.top(k, 5))}" for k in heads)
        for name, accuracy in table.categories.items()
    ]
    columns = ("category", "positions", *(f"head {head + 1}" for head in heads))
    return Table("Top-1/top-5 by category, %", columns, tuple(rows))


def _percent(share: float | None, digits: int = 0) -> str:
    from medusa_cli.bench.tables import number

    return number(None if share is None else 100 * share, digits)
