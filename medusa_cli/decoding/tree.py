"""Trees of draft candidates: static choices, their order, their files.

A *choice* is a path of ranks below the root: element r at depth k means the r-th best token of
head k. *Nodes* are the choices and the root, in the order (depth, path); the root is node 0.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from medusa_cli.errors import TreeError

Choice = tuple[int, ...]
MAX_NODES = 4096


@dataclass(frozen=True, slots=True)
class Tree:
    """A prefix-closed set of choices in node order.

    Attributes:
        name: how the user calls it.
        choices: the paths below the root, sorted by (depth, path).
        origin: where it comes from.
    """

    name: str
    choices: tuple[Choice, ...]
    origin: str = ""

    @property
    def nodes(self) -> int:
        """N: the choices and the root."""
        return 1 + len(self.choices)

    @property
    def depth(self) -> int:
        """Length of the longest choice; 0 for the root alone."""
        return len(self.choices[-1]) if self.choices else 0

    @property
    def candidates(self) -> int:
        """C: how many ranks of each head the tree asks for."""
        return 1 + max((rank for choice in self.choices for rank in choice), default=-1)

    def level(self, depth: int) -> tuple[int, int]:
        """First node at `depth` and the first node behind that level: a level is contiguous."""
        shallower = sum(len(choice) < depth for choice in self.choices)
        upto = sum(len(choice) <= depth for choice in self.choices)
        return (1 + shallower if depth else 0), 1 + upto

    def limited(self, depth: int) -> "Tree":
        """The tree without the choices deeper than `depth`."""
        kept = tuple(choice for choice in self.choices if len(choice) <= depth)
        return self if len(kept) == len(self.choices) else Tree(self.name, kept, self.origin)

    def check_heads(self, heads: int, vocabulary: int) -> None:
        """Raises `TreeError` when `heads` heads over `vocabulary` tokens cannot draft this tree."""
        for choice in self.choices:
            if len(choice) > heads:
                raise TreeError(
                    f"tree '{self.name}' goes {len(choice)} deep at {list(choice)}, "
                    f"but there are {heads} heads: choose a shallower tree"
                )
            if max(choice) >= vocabulary:
                raise TreeError(
                    f"tree '{self.name}' asks for rank {max(choice)} at {list(choice)}, "
                    f"but the heads know {vocabulary} tokens: choose a narrower tree"
                )


ROOT_ONLY = Tree("plain", ())


def static_tree(name: str, choices: Sequence[Sequence[int]], origin: str = "") -> Tree:
    """Builds a tree from choices in any order.

    Raises:
        TreeError: naming the first choice that is empty, negative, repeated, or without its prefix.
    """
    seen: set[Choice] = set()
    for raw in choices:
        choice = tuple(raw)
        if not choice or any(type(rank) is not int or rank < 0 for rank in choice):
            raise TreeError(f"tree '{name}': {list(raw)} is not a path of ranks 0, 1, 2, ...")
        if choice in seen:
            raise TreeError(f"tree '{name}': {list(choice)} stands there twice")
        seen.add(choice)
    if len(seen) >= MAX_NODES:
        raise TreeError(f"tree '{name}' has {len(seen)} choices; at most {MAX_NODES - 1} are read")
    ordered = sorted(seen, key=lambda choice: (len(choice), choice))
    for choice in ordered:
        if len(choice) > 1 and choice[:-1] not in seen:
            raise TreeError(
                f"tree '{name}': {list(choice)} lacks its prefix {list(choice[:-1])}: add it"
            )
    return Tree(name, tuple(ordered), origin)


def dense_tree(name: str, widths: Sequence[int], origin: str = "") -> Tree:
    """The full product of the `widths[k]` best tokens of each head k: [2, 3] gives 9 nodes."""
    if not widths or any(type(width) is not int or width < 1 for width in widths):
        raise TreeError(f"tree '{name}': dense widths {list(widths)} must be whole numbers above 0")
    nodes, level = 1, 1
    for width in widths:
        level *= width
        nodes += level
        if nodes > MAX_NODES:
            raise TreeError(f"tree '{name}': dense {list(widths)} has more than {MAX_NODES} nodes")
    ranges = [range(width) for width in widths]
    choices = [path for depth in range(1, len(ranges) + 1) for path in product(*ranges[:depth])]
    return static_tree(name, choices, origin)


def load_tree(source: str) -> Tree:
    """Reads a tree by the name of a shipped one or by path.

    The file holds `{"name", "origin", "choices": [[0], [0, 0], ...]}`, the same with
    `"dense": [2, 3]` instead of choices, or the plain list of choices.

    Raises:
        TreeError: no such tree, not JSON, or not a tree.
    """
    shipped = shipped_trees()
    path = shipped.get(source) or Path(source)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TreeError(
            f"no tree '{source}': give a JSON file or one of {', '.join(shipped)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise TreeError(f"tree file {path} cannot be read as JSON: {error}") from None
    if isinstance(data, list):
        data = {"choices": data}
    if not isinstance(data, dict):
        raise TreeError(f"tree file {path} holds neither a list of choices nor an object")
    name, origin = str(data.get("name", path.stem)), str(data.get("origin", ""))
    kind = "dense" if "dense" in data else "choices"
    rows = data.get(kind)
    if not isinstance(rows, list):
        raise TreeError(f"tree file {path} has no list of 'choices' or 'dense' widths")
    if kind == "dense":
        return dense_tree(name, rows, origin)
    wrong = next((row for row in rows if not isinstance(row, list)), None)
    if wrong is not None:
        raise TreeError(f"tree '{name}': {wrong!r} is not a list of ranks")
    return static_tree(name, rows, origin)


def shipped_trees() -> dict[str, Path]:
    """Trees that come with the package, by name."""
    package = Path(__file__).parents[1]
    # The wheel carries the folder inside the package; a checkout has it beside the package.
    folder = package / "trees" if (package / "trees").is_dir() else package.parent / "trees"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
