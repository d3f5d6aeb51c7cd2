"""How many nodes an arm's steps verified: in all, as answers go on, and by category."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from medusa_cli.bench.runner import Run

WINDOW = 16  # steps of an answer that share a mean


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes of an arm's verifications, the root included.

    Attributes:
        mean, most: over all steps.
        drafted: steps that verified more than the root.
        over_time: the mean over the steps 1 to WINDOW of each answer, the next WINDOW, ...
    """

    mean: float
    most: int
    drafted: int
    over_time: tuple[float, ...]


def node_counts(runs: Sequence[Run]) -> NodeCounts | None:
    """The node counts of an arm's runs; None where it does not tell them."""
    every = [n for run in runs for n in run.nodes]
    if not every:
        return None
    longest = max(len(run.nodes) for run in runs)
    windows = [
        [n for run in runs for n in run.nodes[first : first + WINDOW]]
        for first in range(0, longest, WINDOW)
    ]
    return NodeCounts(
        fmean(every), max(every), sum(n > 1 for n in every), tuple(map(fmean, windows))
    )


def mean_nodes(runs: Sequence[Run]) -> float | None:
    """Mean number of nodes of a step; None where the arm does not tell it."""
    found = node_counts(runs)
    return None if found is None else found.mean
