"""Growing a tree node by node, likeliest first, to the size that pays best.

A node is right if its whole path is; its probability is the product along the path. Pure Python on
numbers and token ids: a step has some dozens of nodes, and this runs at every step.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from medusa_cli.decoding.lookup import Guess

MOST_SURE = 0.999  # no candidate takes all of the probability from its siblings


class _Sibling(NamedTuple):
    """One child of a node: its probability if the node is right, the heads' claim of that."""

    share: float
    claim: float
    token: int
    on_branch: bool


@dataclass(frozen=True, slots=True)
class Guesses:
    """What is known about the tokens behind the pending one.

    Attributes:
        heads: for each depth the candidates of its head, likeliest first; empty without heads.
        branch: the lookup continuation, one token for each depth; empty without one.
        trust: what the heads' probabilities are multiplied by, once a path.
    """

    heads: Sequence[Sequence[Guess]] = ()
    branch: Sequence[Guess] = ()
    trust: float = 1.0


@dataclass(slots=True)
class Expansion:
    """A tree in the order in which it grew: node 0 is the root, parents come before children.

    Attributes:
        tokens: of each node; the root's is the pending one.
        parents, depths: of each node; the root's parent is -1.
        likely: the probability of each node's path.
        claims: the same as the heads alone claim it, untrusted; 0 where they do not propose it.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    likely: list[float] = field(default_factory=lambda: [1.0])
    claims: list[float] = field(default_factory=lambda: [1.0])

    @property
    def nodes(self) -> int:
        """N, the root included."""
        return len(self.tokens)

    @property
    def expected(self) -> float:
        """The expected accept length, the base token included."""
        return sum(self.likely)

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes below the root that hold the first of `tokens` in turn."""
        below = {(p, t): n for n, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True))}
        found: list[int] = []
        node = 0
        for token in tokens:
            child = below.get((node, token))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def cut(self, nodes: int) -> None:
        """Keeps the first `nodes` nodes."""
        for column in (self.tokens, self.parents, self.depths, self.likely, self.claims):
            del column[nodes:]


@dataclass(frozen=True, slots=True)
class Plan:
    """A tree and what it should bring.

    Attributes:
        tree: what to verify.
        tokens: expected accept length.
        seconds: expected time of the step.
    """

    tree: Expansion
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def best_plan(
    guesses: Guesses, pending: int, room: int, costs: Sequence[float], spent: float = 0.0
) -> Plan:
    """The likeliest nodes, as many of them as give the most tokens per second.

    All sizes are compared, for costs jump: nodes that do not pay may be followed by some that do.

    Args:
        room: the greatest depth.
        costs: seconds of a step over 0, 1, 2, ... nodes; they do not fall.
        spent: seconds that this step has taken already.
    """
    most = len(costs) - 1
    tree = Expansion([pending])
    best, tokens = 1, 1.0
    best_tokens, best_rate = 1.0, 1.0 / (spent + costs[1])
    for likely in grow(tree, guesses, room, most):
        tokens += likely
        seconds = spent + costs[tree.nodes]
        if tokens / seconds > best_rate:
            best, best_tokens, best_rate = tree.nodes, tokens, tokens / seconds
        # No later node is likelier, and none costs less.
        elif tokens + likely * (most - tree.nodes) < best_rate * seconds:
            break
    tree.cut(best)
    return Plan(tree, best_tokens, spent + costs[best])


def grow(tree: Expansion, guesses: Guesses, room: int, nodes: int) -> Iterator[float]:
    """Adds the likeliest next node until there are `nodes`, yielding the probability of each.

    Ends early when there are no further candidates. Siblings hold distinct tokens.

    Args:
        tree: a root, which grows.
        room: the greatest depth.
    """
    heads, branch = guesses.heads, guesses.branch
    off_branch = [[_Sibling(p, p, token, False) for p, token in row] for row in heads]
    queue: list[tuple[float, int, int, int, list[_Sibling]]] = []
    order = count()  # of equally likely nodes the one found first comes first

    def offer(parent: int, rank: int, siblings: list[_Sibling]) -> None:
        if rank < len(siblings):
            likely = tree.likely[parent] * siblings[rank].share
            heapq.heappush(queue, (-likely, next(order), parent, rank, siblings))

    def on_branch(node: int, depth: int) -> None:
        row = heads[depth] if depth < len(heads) else ()
        follow = branch[depth] if depth < len(branch) else None
        offer(node, 0, _beside_branch(row, guesses.trust, follow))

    if room > 0:
        on_branch(0, 0)
    while queue and tree.nodes < nodes:
        value, _, parent, rank, siblings = heapq.heappop(queue)
        sibling, node, depth = siblings[rank], tree.nodes, tree.depths[parent] + 1
        tree.tokens.append(sibling.token)
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.likely.append(-value)
        tree.claims.append(tree.claims[parent] * sibling.claim)
        offer(parent, rank + 1, siblings)
        if depth < room:
            if sibling.on_branch:
                on_branch(node, depth)
            elif depth < len(heads):
                offer(node, 0, off_branch[depth])
        yield -value


def _beside_branch(row: Sequence[Guess], trust: float, follow: Guess | None) -> list[_Sibling]:
    """The children of a node on the lookup branch (the root is), likeliest first.

    The branch's token has the greater of its two probabilities, if a head proposes it too; its
    siblings share what is left as before.
    """
    found = [_Sibling(min(trust * p, MOST_SURE), p, token, False) for p, token in row]
    if follow is None:
        return found
    share, token = follow
    own = next((s for s in found if s.token == token), _Sibling(0.0, 0.0, token, True))
    likely = max(share, own.share)
    left = (1 - likely) / (1 - own.share)
    others = [s._replace(share=s.share * left) for s in found if s.token != token]
    others.append(_Sibling(likely, own.claim, token, True))
    return sorted(others, key=lambda sibling: -sibling.share)
