"""A tree's shape as index tensors on one device: what verification and acceptance read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa_cli.decoding.tree import Tree
from medusa_cli.models.tree_mask import ancestors


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """Who hangs below whom in a tree of N nodes, level by level; a depth limit is a slice.

    Attributes:
        levels: the first node of each depth, and N: depth d holds levels[d]..levels[d + 1] - 1.
    """

    levels: tuple[int, ...]
    depths: Tensor  # [N]
    parents: Tensor  # [N], -1 at the root
    paths: Tensor  # [N, depth + 1], nodes from the root to each node, then that node repeated

    @property
    def ancestors(self) -> Tensor:  # [N, N] bool
        """True where the column's node is on the row's path, its own included."""
        return ancestors(self.paths)

    @property
    def nodes(self) -> int:
        """N, the root included."""
        return self.levels[-1]

    @property
    def depth(self) -> int:
        """Length of the longest path below the root."""
        return len(self.levels) - 2

    def level(self, depth: int) -> tuple[int, int]:
        """First node at `depth` and the first node behind that level."""
        return self.levels[depth], self.levels[depth + 1]

    def limited(self, depth: int) -> "TreeBuffers":
        """The buffers without the nodes deeper than `depth`."""
        if depth >= self.depth:
            return self
        n = self.levels[depth + 1]
        return TreeBuffers(
            self.levels[: depth + 2],
            self.depths[:n],
            self.parents[:n],
            self.paths[:n, : depth + 1],
        )


def shape_buffers(parents: Sequence[int], device: torch.device) -> TreeBuffers:
    """Index tensors on `device` for nodes given by their parents, -1 for the root.

    Nodes come level by level. This runs at every step of a tree that changes, so it is written
    for speed.
    """
    depths = [0] * len(parents)
    levels = [0]
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
        if depths[node] == len(levels):
            levels.append(node)
    assert depths == sorted(depths), "nodes come level by level"
    levels.append(len(parents))
    n = len(parents)
    paths = np.zeros((n, len(levels) - 1), dtype=np.int64)
    for node in range(1, n):
        parent = parents[node]
        paths[node] = paths[parent]
        paths[node, depths[node] :] = node
    return TreeBuffers(
        levels=tuple(levels),
        depths=torch.tensor(depths, device=device),
        parents=torch.tensor(parents, device=device),
        paths=torch.from_numpy(paths).to(device),
    )


def tree_buffers(tree: Tree, device: torch.device) -> TreeBuffers:
    """Index tensors for the shape of a tree of choices, nodes in its order."""
    number = {choice: i for i, choice in enumerate(tree.choices, start=1)} | {(): 0}
    return shape_buffers([-1, *(number[choice[:-1]] for choice in tree.choices)], device)


def token_index(tree: Tree, device: torch.device) -> Tensor:  # [N]
    """Where each node's token stands in [root, head 1's C tokens, head 2's C tokens, ...]."""
    candidates = tree.candidates
    below = [1 + (len(choice) - 1) * candidates + choice[-1] for choice in tree.choices]
    return torch.tensor([0, *below], device=device)
