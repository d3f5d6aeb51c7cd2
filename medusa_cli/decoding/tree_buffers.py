"""A tree's index tensors on one device, made once and sliced at each step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.decoding.tree import Tree


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """A tree's index tensors on one device; node order makes every depth limit a slice.

    Attributes:
        tree: the tree that they describe.
        candidates: C of the tree that they were built from, which `token_index` counts with.
    """

    tree: Tree
    candidates: int
    token_index: Tensor  # [N], into [root, head 1's C tokens, head 2's C tokens, ...]
    depths: Tensor  # [N]
    parents: Tensor  # [N], -1 at the root
    ancestors: Tensor  # [N, N] bool, a node's own column included
    paths: Tensor  # [N, depth + 1], nodes from the root to each node, then that node repeated

    def limited(self, depth: int) -> "TreeBuffers":
        """The buffers of `tree.limited(depth)`."""
        tree = self.tree.limited(depth)
        if tree is self.tree:
            return self
        n = tree.nodes
        return TreeBuffers(
            tree,
            self.candidates,
            self.token_index[:n],
            self.depths[:n],
            self.parents[:n],
            self.ancestors[:n, :n],
            self.paths[:n, : tree.depth + 1],
        )


def tree_buffers(tree: Tree, device: torch.device) -> TreeBuffers:
    """Index tensors for drafting and verifying `tree` on `device`."""
    number = {choice: i for i, choice in enumerate(tree.choices, start=1)}
    number[()] = 0
    candidates = tree.candidates
    index, parents, paths = [0], [-1], [[0]]
    for choice in tree.choices:
        node, parent = number[choice], number[choice[:-1]]
        index.append(1 + (len(choice) - 1) * candidates + choice[-1])
        parents.append(parent)
        paths.append([*paths[parent], node])
    depths = [0, *(len(choice) for choice in tree.choices)]
    return TreeBuffers(
        tree=tree,
        candidates=candidates,
        token_index=torch.tensor(index, device=device),
        depths=torch.tensor(depths, device=device),
        parents=torch.tensor(parents, device=device),
        ancestors=torch.tensor(
            [[n in path for n in range(tree.nodes)] for path in paths], device=device
        ),
        paths=torch.tensor(
            [path + path[-1:] * (tree.depth + 1 - len(path)) for path in paths], device=device
        ),
    )
