"""Searching the tree with the greatest expected accept length for a number of nodes.

The expected accept length is one, for the base token, and the sum of the values of all choices, the
value of a choice being how likely it is accepted. A choice is never likelier than its prefix: the
likeliest choices are prefix-closed, and they are the best tree.
"""

import heapq
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, prod

from medusa_cli.decoding.head_accuracy import head_accuracy
from medusa_cli.decoding.traces import MISS, Traces, mean_accept_length, replay
from medusa_cli.decoding.tree import MAX_NODES, Choice, Tree, static_tree
from medusa_cli.errors import TreeError, UsageError

CHOICES_A_LINE = 8
ROUNDS = 6  # of searching again; the accept length settles after two or three


def build_from_accuracy(
    name: str, accuracy: Sequence[Sequence[float]], nodes: int, source: str
) -> Tree:
    """The best tree if the heads are right independently of each other.

    Args:
        accuracy: [K][ranks], share of positions at which rank r of head k was right.
        nodes: at most, the root included; fewer when no further choice was ever right.
        source: where the accuracy comes from, for the tree's origin.

    Raises:
        UsageError: too few or too many nodes.
        TreeError: an accuracy is not in [0, 1], or none is above 0.
    """
    _check_nodes(nodes)
    for k, row in enumerate(accuracy):
        wrong = next((share for share in row if not (isfinite(share) and 0 <= share <= 1)), None)
        if wrong is not None:
            raise TreeError(
                f"the accuracy of head {k + 1} holds {wrong}, which is no share: measure it with "
                "`medusa accuracy`"
            )
    choices: list[Choice] = []
    frontier: list[tuple[float, int, Choice]] = []
    _push_children(frontier, (), 1.0, accuracy)
    while frontier and len(choices) < nodes - 1:
        value, _, choice = heapq.heappop(frontier)
        choices.append(choice)
        _push_children(frontier, choice, -value, accuracy)
    return _tree(name, choices, nodes, f"products of {source}")


def build_from_traces(name: str, traces: Traces, nodes: int) -> Tree:
    """The best tree for the positions of recorded traces, whatever the heads have in common.

    Choices that were right equally often are ordered by the product of their heads' accuracies,
    then shallow before deep.

    Args:
        nodes: at most, the root included; fewer when no further choice was ever right.

    Raises:
        UsageError: too few or too many nodes.
        TreeError: no head was right at any position.
    """
    _check_nodes(nodes)
    counts = right_counts(traces)
    return _best(name, traces, nodes, counts, counts)


def build_for_decoding(name: str, traces: Traces, nodes: int) -> Tree:
    """The tree with the longest replayed accept length that repeated searches find.

    Decoding steps over what a tree predicts well, so its steps begin more often where text is
    hard. Each round searches again for the positions at which the last round's tree stepped. The
    result is at least as good in replay as `build_from_traces` and `build_from_accuracy`.

    Args, raises: as `build_from_traces`.
    """
    everywhere = right_counts(traces)
    accuracy = head_accuracy(traces.texts, traces.num_heads).ranks()
    best = build_from_traces(name, traces, nodes)
    by_head = build_from_accuracy(name, accuracy, nodes, "")
    for tree in (best, by_head):
        for _ in range(ROUNDS):
            if mean_accept_length(tree, traces) > mean_accept_length(best, traces):
                best = replace(tree, origin=best.origin)
            stepped = _best(name, traces, nodes, _right_at_steps(tree, traces), everywhere)
            if stepped.choices == tree.choices:
                break
            tree = stepped
    return best


def expected_from_accuracy(tree: Tree, accuracy: Sequence[Sequence[float]]) -> float:
    """The expected accept length if the heads are right independently of each other."""
    return 1 + sum(_product(choice, accuracy) for choice in tree.choices)


def expected_from_traces(tree: Tree, traces: Traces) -> float:
    """The expected accept length of a step at a random position of the traces."""
    counts = right_counts(traces)
    return 1 + sum(counts[choice] for choice in tree.choices) / max(traces.positions, 1)


def to_json(tree: Tree) -> str:
    """A tree file, a few choices a line."""
    choices = [json.dumps(choice) for choice in tree.choices]
    lines = [
        ", ".join(choices[i : i + CHOICES_A_LINE]) for i in range(0, len(choices), CHOICES_A_LINE)
    ]
    name, origin = (json.dumps(text, ensure_ascii=False) for text in (tree.name, tree.origin))
    rows = ",\n    ".join(lines)
    return f'{{\n  "name": {name},\n  "origin": {origin},\n  "choices": [\n    {rows}\n  ]\n}}\n'


def _push_children(
    frontier: list[tuple[float, int, Choice]],
    choice: Choice,
    value: float,
    accuracy: Sequence[Sequence[float]],
) -> None:
    if len(choice) < len(accuracy):
        for rank, share in enumerate(accuracy[len(choice)]):
            if value * share > 0:
                heapq.heappush(frontier, (-value * share, len(choice) + 1, (*choice, rank)))


def right_counts(traces: Traces) -> Counter[Choice]:
    """At how many positions each choice was right; only those that were at least once."""
    return Counter(
        row[: k + 1] for text in traces.texts for row in text.rows() for k in range(_reach(row))
    )


def _right_at_steps(tree: Tree, traces: Traces) -> Counter[Choice]:
    """At how many of the positions at which decoding with `tree` steps each choice was right."""
    counts: Counter[Choice] = Counter()
    for text in traces.texts:
        rows, position = list(text.rows()), 0
        for length in replay(tree, text):
            row = rows[position]
            counts.update(row[: k + 1] for k in range(_reach(row)))
            position += length
    return counts


def _best(
    name: str,
    traces: Traces,
    nodes: int,
    counts: Counter[Choice],
    everywhere: Counter[Choice],
) -> Tree:
    """The choices with the greatest counts, equal ones by their counts everywhere."""
    accuracy = head_accuracy(traces.texts, traces.num_heads).ranks()

    def order(choice: Choice) -> tuple[int, int, float, int, Choice]:
        value = _product(choice, accuracy)
        return -counts[choice], -everywhere[choice], -value, len(choice), choice

    origin = traces.provenance
    source = (
        f"traces of {traces.positions} positions of heads {origin.heads}, "
        f"prompts {origin.prompts_digest} ({origin.prompts})"
    )
    return _tree(name, sorted(everywhere, key=order)[: nodes - 1], nodes, source)


def _reach(row: tuple[int, ...]) -> int:
    """How many heads in a row were right within the recorded ranks."""
    return row.index(MISS) if MISS in row else len(row)


def _product(choice: Choice, accuracy: Sequence[Sequence[float]]) -> float:
    """The value of a choice for independent heads; 0 beyond the table."""
    if len(choice) > len(accuracy):
        return 0.0
    rows = zip(choice, accuracy, strict=False)
    return prod(row[rank] if rank < len(row) else 0.0 for rank, row in rows)


def _tree(name: str, choices: Sequence[Choice], nodes: int, source: str) -> Tree:
    if not choices:
        raise TreeError(
            f"no tree can be built from {source}: no head was ever right. Measure more prompts "
            "with `medusa accuracy`"
        )
    tree = static_tree(name, choices)
    fewer = f"; {nodes} were asked for, no further choice was ever right"
    short = fewer if tree.nodes < nodes else ""
    return replace(tree, origin=f"built for {tree.nodes} nodes from {source}{short}")


def _check_nodes(nodes: int) -> None:
    if not 2 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes must be from 2 to {MAX_NODES}, the root included, not {nodes}")
