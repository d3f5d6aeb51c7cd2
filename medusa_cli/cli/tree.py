"""`medusa tree`: build trees from measured heads, draw them, list the shipped ones."""

import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli.cli import options as opt
from medusa_cli.cli.opening import quiet_libraries
from medusa_cli.cli.streams import Streams
from medusa_cli.decoding.tree import MAX_NODES, Tree, load_tree, shipped_trees
from medusa_cli.errors import TreeError, UsageError
from medusa_cli.models.registry import DEFAULT_MODEL
from medusa_cli.models.storage import write_atomic

if TYPE_CHECKING:
    from medusa_cli.decoding.measured import Subject
    from medusa_cli.decoding.traces import Traces
    from medusa_cli.models.progress import Report

PLOT_SUFFIXES = (".png", ".svg")
_WEIGHT_SUFFIX = re.compile(r"\.(pt|bin|safetensors)$")

app = typer.Typer(help="Build, draw and list trees of candidates.", rich_markup_mode=None)


class Basis(StrEnum):
    """What a tree is built from."""

    TRACES = "traces"
    ACCURACY = "accuracy"


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Build, draw and list trees of candidates.

    A tree says which drafts are verified together: [0, 2] is the third-best token of head 2 behind
    the best one of head 1. Nodes count the root, which holds the pending token.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def build(
    nodes: Annotated[
        int,
        typer.Option(
            min=2, max=MAX_NODES, metavar="N", help="How many nodes at most, the root included."
        ),
    ],
    basis: Annotated[
        Basis | None,
        typer.Option(
            "--from",
            help="traces: what the heads got right together; accuracy: each head by itself. "
            "[default: traces where there are some]",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The tree's name. [default: FILE's]")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write. [default: ./NAME.json]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    model: opt.Model = DEFAULT_MODEL,
    heads: opt.Heads = None,
    revision: opt.Revision = None,
    offline: opt.Offline = False,
    quiet: opt.Quiet = False,
) -> None:
    """Build the best tree for a number of nodes from what `medusa accuracy` measured.

    The accept length of a decoding step is the number of tokens that it yields, the base model's
    own included. The expected accept length is that of a step at a random position of the measured
    answers. The replayed mean is over the steps that decoding these answers with the tree takes.
    The model itself is not loaded.
    """
    streams = Streams.of_process()
    from medusa_cli.cli.loading import LoadProgress

    with LoadProgress(streams, model, quiet=quiet) as report:
        quiet_libraries(offline=offline, progress=streams.stderr.isatty() and not quiet)
        from medusa_cli.decoding import measured
        from medusa_cli.models.sources import Finder

        source = Finder(revision, offline, report).find(model, heads)
        assert source.heads is not None, "without --plain a source has heads"
        of = measured.subject(source.heads_name or model, model, source.heads)
        traces = measured.load_traces(of, report)
        tree, expected = _built(of, traces, basis, nodes, report)
    from medusa_cli.decoding import tree_search
    from medusa_cli.decoding.traces import MAX_RANKS, replay

    heads_name = _WEIGHT_SUFFIX.sub("", of.heads)
    default = re.sub(r"[^\w.-]+", "_", f"{heads_name}_{tree.nodes}_nodes")
    name = name or (default if out is None else out.stem)
    path = Path(f"{name}.json") if out is None else out.expanduser()
    if path.exists() and not force:
        raise UsageError(f"{path} exists: choose another --out, or overwrite it with --force")
    tree = replace(tree, name=name)
    write_atomic(path, tree_search.to_json(tree), parents=True)
    lines = [f"wrote {path}: {_size(tree)}", f"expected accept length {expected:.2f}"]
    if traces is not None and traces.positions and tree.candidates <= MAX_RANKS:
        lengths = [length for text in traces.texts for length in replay(tree, text)]
        mean = sum(lengths) / len(lengths)
        lines.append(f"replayed mean {mean:.2f} over {len(lengths)} steps")
    streams.write("\n".join(lines) + "\n")


@app.command()
def show(
    tree: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH", autocompletion=opt.complete_trees,
            help="A shipped tree or a JSON file.",
        ),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw it to a .png or .svg file.")
    ] = None,
) -> None:  # fmt: skip
    """Draw a tree."""
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot takes a file that ends in {' or '.join(PLOT_SUFFIXES)}: '{plot}'")
    streams = Streams.of_process()
    loaded = load_tree(tree)
    from medusa_cli.cli.tree_view import LEGEND, tree_lines

    width = shutil.get_terminal_size().columns
    levels = [loaded.level(depth) for depth in range(loaded.depth + 1)]
    by_depth = ", ".join(str(end - start) for start, end in levels)
    lines = [f"{loaded.name}: {_size(loaded)}", f"nodes at depth 0, 1, ...: {by_depth}"]
    lines += [*textwrap.wrap(loaded.origin, width), LEGEND, "", *tree_lines(loaded, width)]
    streams.write("\n".join(lines) + "\n")
    if plot is not None:
        from medusa_cli.bench.tree_plot import save_plot

        save_plot(loaded, plot.expanduser())
        streams.note(f"wrote {plot}")


@app.command("list")
def list_trees(
    format_: Annotated[
        opt.TableFormat, typer.Option("--format", help="How to print.")
    ] = opt.TableFormat.TABLE,
) -> None:
    """List the shipped trees, with sizes and where they come from."""
    streams = Streams.of_process()
    trees = [load_tree(name) for name in shipped_trees()]
    if format_ is opt.TableFormat.JSON:
        rows = [
            {"name": tree.name, "nodes": tree.nodes, "depth": tree.depth, "origin": tree.origin}
            for tree in trees
        ]
        streams.write(json.dumps(rows, ensure_ascii=False, indent=2) + "\n")
        return
    width = shutil.get_terminal_size().columns
    for tree in trees:
        origin = textwrap.fill(tree.origin, width, initial_indent="    ", subsequent_indent="    ")
        streams.write(f"{tree.name}: {_size(tree)}\n{origin}\n")


def _built(
    of: "Subject", traces: "Traces | None", basis: Basis | None, nodes: int, report: "Report"
) -> tuple[Tree, float]:
    """The tree and its expected accept length."""
    from medusa_cli.decoding import tree_search

    if basis is Basis.TRACES and traces is None:
        raise TreeError(f"there are no traces of heads {of.heads}: {_MEASURE}")
    if traces is not None and basis is not Basis.ACCURACY:
        tree = tree_search.build_for_decoding("built", traces, nodes)
        return tree, tree_search.expected_from_traces(tree, traces)
    accuracy, source = _accuracy(of, report)
    tree = tree_search.build_from_accuracy("built", accuracy, nodes, source)
    return tree, tree_search.expected_from_accuracy(tree, accuracy)


_MEASURE = "measure them with `medusa accuracy`"


def _accuracy(of: "Subject", report: "Report") -> tuple[Sequence[Sequence[float]], str]:
    """The measured rank accuracies, else those in the heads' config, and what to call them."""
    from medusa_cli.decoding.measured import config_accuracy, load_accuracy

    table = load_accuracy(of, report)
    if table is not None:
        seen = table.provenance
        return table.overall.ranks(), (
            f"rank accuracies of heads {of.heads} at {table.positions} positions, "
            f"prompts {seen.prompts_digest} ({seen.prompts})"
        )
    stated = config_accuracy(of)
    if not stated:
        raise TreeError(f"nothing is known about how good heads {of.heads} are: {_MEASURE}")
    return stated, f"the rank accuracies that the config of heads {of.heads} states"


def _size(tree: Tree) -> str:
    return f"{tree.nodes} nodes, {tree.depth} deep"
