"""Growing a tree node by node, likeliest first, to the size that pays best.

A node is right if its whole path is; its probability is the product along the path. Pure Python on
numbers and token ids: a step has some dozens of nodes, and this runs at every step.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter

from medusa_cli.decoding.lookup import Guess

MOST_SURE = 0.999  # no candidate takes all of the probability from its siblings


# A child of a node: its probability if the node is right, the heads' claim of that, its token, and
# whether it is on the lookup branch. A plain tuple: at each step some dozens are made.
_Sibling = tuple[float, float, int, bool]


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


class SizeCosts:
    """What steps over 1, 2, ... nodes cost.

    Args:
        seconds: of a step over 0, 1, 2, ... nodes; they do not fall.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.most = len(seconds) - 1
        # [n], the least that a node above n costs, however many of them are taken
        self.further = [
            min(
                ((seconds[m] - seconds[n]) / (m - n) for m in range(n + 1, self.most + 1)),
                default=0.0,
            )
            for n in range(self.most + 1)
        ]


def best_plan(
    guesses: Guesses, pending: int, room: int, costs: SizeCosts, spent: float = 0.0
) -> Plan:
    """The likeliest nodes, as many of them as give the most tokens per second.

    All sizes are compared, for costs jump: nodes that do not pay may be followed by some that do.

    Args:
        room: the greatest depth.
        costs: of the sizes that come into question.
        spent: seconds that this step has taken already.
    """
    tree = Expansion([pending])
    best, tokens = 1, 1.0
    best_tokens, best_rate = 1.0, 1.0 / (spent + costs.seconds[1])
    for likely in grow(tree, guesses, room, costs.most):
        tokens += likely
        rate = tokens / (spent + costs.seconds[tree.nodes])
        if rate > best_rate:
            best, best_tokens, best_rate = tree.nodes, tokens, rate
        # Later nodes are no likelier: none of them can earn at the best rate what it costs.
        if likely < best_rate * costs.further[tree.nodes]:
            break
    tree.cut(best)
    return Plan(tree, best_tokens, spent + costs.seconds[best])


def grow(tree: Expansion, guesses: Guesses, room: int, nodes: int) -> Iterator[float]:
    """Adds the likeliest next node until there are `nodes`, yielding the probability of each.

    Ends early when there are no further candidates. Siblings hold distinct tokens.

    Args:
        tree: a root, which grows.
        room: the greatest depth.
    """
    heads, branch = guesses.heads, guesses.branch
    off_branch: dict[int, list[_Sibling]] = {}
    queue: list[tuple[float, int, int, int, list[_Sibling]]] = []
    order = count()  # of equally likely nodes the one found first comes first

    def offer(parent: int, rank: int, siblings: list[_Sibling]) -> None:
        if rank < len(siblings):
            likely = tree.likely[parent] * siblings[rank][0]
            heapq.heappush(queue, (-likely, next(order), parent, rank, siblings))

    def on_branch(node: int, depth: int) -> None:
        row = heads[depth] if depth < len(heads) else ()
        follow = branch[depth] if depth < len(branch) else None
        offer(node, 0, _beside_branch(row, guesses.trust, follow))

    if room > 0:
        on_branch(0, 0)
    while queue and tree.nodes < nodes:
        value, _, parent, rank, siblings = heapq.heappop(queue)
        _, claim, token, is_on_branch = siblings[rank]
        node, depth = tree.nodes, tree.depths[parent] + 1
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.likely.append(-value)
        tree.claims.append(tree.claims[parent] * claim)
        offer(parent, rank + 1, siblings)
        if depth < room:
            if is_on_branch:
                on_branch(node, depth)
            elif depth < len(heads):
                if depth not in off_branch:
                    off_branch[depth] = [(p, p, token, False) for p, token in heads[depth]]
                offer(node, 0, off_branch[depth])
        yield -value


def _beside_branch(row: Sequence[Guess], trust: float, follow: Guess | None) -> list[_Sibling]:
    """The children of a node on the lookup branch (the root is), likeliest first.

    The branch's token has the greater of its two probabilities, if a head proposes it too; its
    siblings share what is left as before.
    """
    found = [(min(trust * p, MOST_SURE), p, token, False) for p, token in row]
    if follow is None:
        return found
    share, token = follow
    own, claim = next(((p, claim) for p, claim, t, _ in found if t == token), (0.0, 0.0))
    likely = max(share, own)
    left = (1 - likely) / (1 - own)
    others = [(p * left, claim, t, False) for p, claim, t, _ in found if t != token]
    others.append((likely, claim, token, True))
    return sorted(others, key=itemgetter(0), reverse=True)
