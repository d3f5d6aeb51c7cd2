"""A tree drawn with characters: one line for each inner node, leaves side by side."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from medusa_cli.decoding.tree import Choice, Tree

LEGEND = "Ranks, 0 the head's best; siblings side by side, behind ─ a node's children."


def tree_lines(tree: Tree, width: int) -> Iterator[str]:
    """Lines of at most `width` columns, unless the tree is deeper than they can show."""
    children: dict[Choice, list[Choice]] = {(): [], **{choice: [] for choice in tree.choices}}
    for choice in tree.choices:
        children[choice[:-1]].append(choice)
    yield "root"
    yield from _below((), "", children, width)


def _below(
    choice: Choice, indent: str, children: Mapping[Choice, Sequence[Choice]], width: int
) -> Iterator[str]:
    groups = _groups(children[choice], children)
    for i, group in enumerate(groups):
        last = i == len(groups) - 1
        corner, bar = ("└─ ", "   ") if last else ("├─ ", "│  ")
        label = " ".join(str(child[-1]) for child in group)
        below = _groups(children[group[0]], children)
        if len(below) == 1 and not children[below[0][0]]:
            leaves = " ".join(str(child[-1]) for child in below[0])
            hanging = " " * (len(label) + 3)
            yield from _wrapped(f"{label} ─ {leaves}", indent, corner, bar, hanging, width)
        else:
            yield from _wrapped(label, indent, corner, bar, "", width)
            yield from _below(group[0], indent + bar, children, width)


def _groups(
    siblings: Sequence[Choice], children: Mapping[Choice, Sequence[Choice]]
) -> list[list[Choice]]:
    """Siblings in order; leaves that follow each other share a group."""
    groups: list[list[Choice]] = []
    for child in siblings:
        if groups and not children[child] and not children[groups[-1][0]]:
            groups[-1].append(child)
        else:
            groups.append([child])
    return groups


def _wrapped(
    text: str, indent: str, corner: str, bar: str, hanging: str, width: int
) -> Iterator[str]:
    room = max(width - len(indent) - len(corner), len(hanging) + 8)
    rows = textwrap.wrap(text, room, subsequent_indent=hanging, break_long_words=False)
    for i, row in enumerate(rows):
        yield indent + (bar if i else corner) + row
