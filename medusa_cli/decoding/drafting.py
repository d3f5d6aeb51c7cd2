"""Drafting: what the pending token's tree is at each step of one generation.

A *drafting* is made fresh for each generation and may learn while it goes on. The decode loop asks
it for a draft, verifies that, and tells it what was accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_cli.decoding.expansion import Expansion
from medusa_cli.decoding.lookup import Lookup
from medusa_cli.decoding.tree import ROOT_ONLY, Tree
from medusa_cli.decoding.tree_buffers import (
    TreeBuffers,
    shape_buffers,
    token_index,
    tree_buffers,
)

STATIC_BRANCH = 8  # most tokens that lookup adds to a static tree, which has no costs to weigh


class Drafter(Protocol):
    """What proposes candidates: trained heads, or a scripted one in a test."""

    def propose(
        self,
        hidden: Tensor,  # [D]
        pending: Tensor,  # []
        heads: int,
        candidates: int,
    ) -> Tensor:  # [heads, candidates]
        """Token ids for the `heads` positions behind `pending`, best first, distinct in a row."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """One tree to verify.

    Attributes:
        tokens: of each node; the root's is the pending one.
        tree: its shape.
    """

    tokens: Tensor  # [N]
    tree: TreeBuffers


class Drafting(Protocol):
    """Drafts the steps of one generation."""

    def draft(
        self,
        hidden: Tensor,  # [D], what the LM head read when it gave the pending token
        pending: Tensor,  # []
        text: Sequence[int],
        room: int,
    ) -> Draft:
        """The tree of the next step.

        Args:
            text: all tokens so far, the pending one last; the same text, longer, at each call.
            room: the greatest depth that could still be emitted.
        """
        ...

    def observe(self, new: Sequence[int]) -> None:
        """Hears which tokens truly follow the pending one of the last draft, as far as is known."""
        ...


class StaticDrafting:
    """The same tree at every step; the root alone is plain decoding and runs no heads.

    Args:
        drafter: may be None for the root-only tree.
        lookup: adds its branch to the tree.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        tree: Tree,
        device: torch.device,
        lookup: Lookup | None = None,
    ) -> None:
        assert drafter is not None or tree.depth == 0, "a tree needs heads"
        self._drafter, self._tree, self._lookup = drafter, tree, lookup
        self._buffers = tree_buffers(tree, device)
        self._token_index = token_index(tree, device)

    def draft(self, hidden: Tensor, pending: Tensor, text: Sequence[int], room: int) -> Draft:
        """The tree, as deep as there is room, and the lookup branch."""
        buffers = self._buffers.limited(room)
        draft = Draft(self._tokens(hidden, pending, buffers), buffers)
        branch = self._lookup.branch(text, min(room, STATIC_BRANCH)) if self._lookup else []
        if not branch:
            return draft
        return with_branch(draft, [token for _, token in branch])

    def observe(self, new: Sequence[int]) -> None:
        """Lets lookup learn."""
        if self._lookup is not None:
            self._lookup.observe(new)

    def _tokens(self, hidden: Tensor, pending: Tensor, tree: TreeBuffers) -> Tensor:  # [N]
        if self._drafter is None or tree.depth == 0:
            return pending[None]
        # [depth, C]
        candidates = self._drafter.propose(hidden, pending, tree.depth, self._tree.candidates)
        flat = torch.cat([pending[None], candidates.flatten()])
        return flat[self._token_index[: tree.nodes]]


def plain_drafting(device: torch.device) -> StaticDrafting:
    """Plain decoding: the root alone."""
    return StaticDrafting(None, ROOT_ONLY, device)


def with_branch(draft: Draft, branch: Sequence[int]) -> Draft:
    """A draft with one more path below the root, sharing the nodes that hold its tokens already."""
    tree = Expansion(draft.tokens.tolist())  # host sync
    tree.parents = draft.tree.parents.tolist()
    tree.depths = draft.tree.depths.tolist()
    shared = tree.path(branch)
    node = shared[-1] if shared else 0
    for token in branch[len(shared) :]:
        tree.tokens.append(token)
        tree.parents.append(node)
        tree.depths.append(tree.depths[node] + 1)
        node = len(tree.tokens) - 1
    return to_draft(tree, draft.tokens.device)


def to_draft(tree: Expansion, device: torch.device) -> Draft:
    """Tensors of an expansion on `device`, its nodes sorted into levels."""
    order = sorted(range(tree.nodes), key=tree.depths.__getitem__)
    place = {node: i for i, node in enumerate(order)} | {-1: -1}
    parents = [place[tree.parents[node]] for node in order]
    tokens = torch.tensor([tree.tokens[node] for node in order], device=device)
    return Draft(tokens, shape_buffers(parents, device))
