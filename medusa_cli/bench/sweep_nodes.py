"""Step cost, accept length and speed against the number of tree nodes.

The accept length of a tree is replayed from traces: it is exactly what greedy decoding of the
traced answers has. The step cost is timed. Their ratio is the speed. Adaptive trees are those of
all nodes above a path probability, the one at which their mean size is the number of nodes.

Source: Cai et al. 2024, arXiv 2401.10774, section 3.3 shows these curves for dense and built trees.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

import numpy as np

from medusa_cli.bench.tables import Table, number
from medusa_cli.decoding.measured import ScoredTraces
from medusa_cli.decoding.scores import Scores, at_least, replay_adaptive, threshold_for
from medusa_cli.decoding.step_timing import measure_step_seconds
from medusa_cli.decoding.traces import Traces, mean_accept_length
from medusa_cli.decoding.tree import ROOT_ONLY, Tree, dense_tree
from medusa_cli.decoding.tree_search import build_for_decoding, right_counts
from medusa_cli.session import Medusa

SCHEMA = "medusa.sweep-nodes/1"


class TreeShape(StrEnum):
    """How the tree for a number of nodes is found."""

    BUILT = "built"
    DENSE = "dense"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One tree of a sweep.

    Attributes:
        shape: how it was found.
        asked: the number of nodes that it may have.
        nodes, depth: what it has, the root included in the nodes; of adaptive trees the mean
            number and the greatest depth.
        tree: its name.
        accept_length: mean, replayed on the traces.
        step_seconds: median; of adaptive trees the mean of what the built ones of their sizes take.
    """

    shape: TreeShape
    asked: int
    nodes: float
    depth: int
    tree: str
    accept_length: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per step over seconds per step."""
        return self.accept_length / self.step_seconds


@dataclass(frozen=True, slots=True)
class NodeSweep:
    """The sweep of one model on one machine.

    Attributes:
        model, heads: names.
        where: device and precision, for a title.
        traces: which answers were replayed, in words.
        plain_seconds: of a step of plain decoding.
        points: by shape and number of nodes.
        complete: False when fewer rounds than planned were timed.
    """

    model: str
    heads: str
    where: str
    traces: str
    plain_seconds: float
    points: tuple[SweepPoint, ...]
    complete: bool = True

    def speedup(self, point: SweepPoint) -> float:
        """Over plain decoding, which yields one token a step."""
        return point.tokens_per_second * self.plain_seconds

    @property
    def best(self) -> SweepPoint:
        """The fastest point."""
        return max(self.points, key=lambda point: point.tokens_per_second)

    def of(self, shape: TreeShape) -> list[SweepPoint]:
        """The points of one shape, by nodes."""
        return sorted((p for p in self.points if p.shape is shape), key=lambda p: p.nodes)


def sweep_nodes(
    model: Medusa,
    scored: ScoredTraces,
    counts: Sequence[int],
    where: str,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
    should_stop: Callable[[], bool] = lambda: False,
) -> NodeSweep:
    """Times a step with the best built and the best dense tree for each number of nodes."""
    traces = scored.traces
    assert model.heads is not None, "a sweep needs heads"
    trees = {ROOT_ONLY.name: ROOT_ONLY}
    chosen: list[tuple[TreeShape, int, Tree]] = []
    for nodes in sorted({*counts, 1}):
        if nodes == 1:
            chosen.append((TreeShape.BUILT, 1, ROOT_ONLY))
            continue
        built = build_for_decoding(f"built_{nodes}", traces, nodes)
        dense = best_dense(traces, nodes)
        chosen += [(TreeShape.BUILT, nodes, built), (TreeShape.DENSE, nodes, dense)]
        trees |= {built.name: built, dense.name: dense}
    seconds = measure_step_seconds(model.base, model.heads, trees, report, clock, should_stop)
    points = {
        (shape, tree.choices): SweepPoint(
            shape, asked, tree.nodes, tree.depth, tree.name,
            mean_accept_length(tree, traces), seconds[tree.name],
        )
        for shape, asked, tree in chosen
    }  # fmt: skip
    swept = list(points.values())
    if scored.scores is not None:
        timed = [point for point in swept if point.shape is TreeShape.BUILT]
        swept += [
            adaptive_point(traces, scored.scores, nodes, timed) for nodes in sorted({*counts} - {1})
        ]
    origin = traces.provenance
    return NodeSweep(
        model=model.name,
        heads=model.heads.info.name,
        where=where,
        traces=f"{traces.positions} positions of {len(traces.texts)} greedy answers "
        f"(prompts {origin.prompts} {origin.prompts_digest})",
        plain_seconds=seconds[ROOT_ONLY.name],
        points=tuple(swept),
        complete=not should_stop(),
    )


def adaptive_point(
    traces: Traces, scores: Scores, nodes: int, built: Sequence[SweepPoint]
) -> SweepPoint:
    """Adaptive trees of `nodes` nodes in the mean, at most; a step's time is that of built trees.

    Args:
        built: timed points, between which times are interpolated.
    """
    share = threshold_for(traces, scores, nodes)
    steps = list(replay_adaptive(traces, scores, at_least(share)))
    timed = sorted((point.nodes, point.step_seconds) for point in built)
    sizes = [step.nodes for step in steps]
    seconds = np.interp(sizes, [n for n, _ in timed], [s for _, s in timed])
    return SweepPoint(
        shape=TreeShape.ADAPTIVE,
        asked=nodes,
        nodes=round(fmean(sizes), 2),
        depth=max(step.depth for step in steps),
        tree=f"adaptive_{nodes}",
        accept_length=fmean(step.accept_length for step in steps),
        step_seconds=float(seconds.mean()),
    )


def best_dense(traces: Traces, nodes: int) -> Tree:
    """The dense tree of at most `nodes` nodes that accepts most."""
    candidates = [
        dense_tree(f"dense_{'x'.join(map(str, widths))}", widths)
        for widths in _widths(nodes - 1, traces.num_heads)
    ]
    counts = right_counts(traces)
    return max(candidates, key=lambda t: (sum(counts[c] for c in t.choices), -t.nodes))


def _widths(choices: int, depth: int) -> Iterator[tuple[int, ...]]:
    """Widths of all dense trees with at most `choices` choices and `depth` levels."""
    if depth == 0:
        return
    for width in range(1, choices + 1):
        yield (width,)
        # Below each of `width` nodes hangs the same dense tree.
        for deeper in _widths(choices // width - 1, depth - 1):
            yield (width, *deeper)


def tables(sweep: NodeSweep) -> list[Table]:
    """One row for each tree; the fastest is marked."""
    rows = tuple(
        (
            f"{point.tree}{' *' if point is sweep.best else ''}",
            f"{point.nodes:g}",
            str(point.depth),
            number(1000 * point.step_seconds, 1),
            number(point.step_seconds / sweep.plain_seconds),
            number(point.accept_length),
            number(point.tokens_per_second),
            f"{sweep.speedup(point):.2f}x",
        )
        for shape in TreeShape
        for point in sweep.of(shape)
    )
    best = sweep.best
    verdict = f"{best.nodes:g} nodes, {sweep.speedup(best):.2f}x plain"
    if best.nodes == 1:
        verdict = "plain decoding: no tree pays"
    columns = (
        "tree", "nodes", "depth", "step ms", "cost", "tokens/step", "tokens/s", "speedup",
    )  # fmt: skip
    return [
        Table(
            f"{sweep.model}, {sweep.where}: cost and gain of tree nodes",
            columns,
            rows,
            (
                f"* best on this machine: {verdict}",
                "cost: of a step, over a plain one's; dense_2x1: the 2 best of head 1, 1 of head 2",
                *(
                    ["adaptive trees: mean nodes; their steps are timed as built ones of that size"]
                    if sweep.of(TreeShape.ADAPTIVE)
                    else []
                ),
                f"tokens per step replayed on {sweep.traces}",
                *([] if sweep.complete else ["partial: interrupted, fewer rounds were timed"]),
            ),
        )
    ]


def to_data(sweep: NodeSweep) -> dict[str, Any]:
    """The JSON object of a sweep."""
    return {
        "schema": SCHEMA,
        "complete": sweep.complete,
        "model": sweep.model,
        "heads": sweep.heads,
        "where": sweep.where,
        "traces": sweep.traces,
        "plain_step_s": sweep.plain_seconds,
        "best": {"nodes": sweep.best.nodes, "tree": sweep.best.tree},
        "points": [
            {
                **asdict(point),
                "tokens_per_s": point.tokens_per_second,
                "speedup": sweep.speedup(point),
            }
            for point in sweep.points
        ],
    }
