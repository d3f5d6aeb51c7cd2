"""Best-first trees: the order, the size that pays, and the lookup branch, against brute force."""

import random
from itertools import product

import pytest

from medusa_cli.decoding.expansion import Expansion, Guesses, SizeCosts, best_plan, grow

Path = tuple[int, ...]


def random_heads(generator: random.Random, depth: int, width: int) -> list[list[tuple[float, int]]]:
    """Falling shares that sum to less than 1, of distinct tokens."""
    rows = []
    for _ in range(depth):
        shares = sorted((generator.random() for _ in range(width)), reverse=True)
        total = sum(shares) / generator.uniform(0.3, 0.99)
        tokens = generator.sample(range(100), width)
        rows.append([(share / total, token) for share, token in zip(shares, tokens, strict=True)])
    return rows


def paths_of(tree: Expansion) -> list[Path]:
    """The tokens of each node's path, the root's left out."""
    found: list[Path] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        found.append((*found[parent], token))
    return found


def all_paths(heads: list[list[tuple[float, int]]], room: int) -> dict[Path, float]:
    """Every path of the heads with its probability."""
    found = {}
    for depth in range(1, min(len(heads), room) + 1):
        for picked in product(*heads[:depth]):
            share = 1.0
            for p, _ in picked:
                share *= p
            found[tuple(token for _, token in picked)] = share
    return found


def grown(guesses: Guesses, room: int, nodes: int) -> Expansion:
    tree = Expansion([7])
    assert list(grow(tree, guesses, room, nodes)) == tree.likely[1:]
    return tree


@pytest.mark.parametrize("room", [0, 1, 2, 3, 9])
def test_nodes_come_likeliest_first(room: int) -> None:
    generator = random.Random(1)
    for _ in range(40):
        heads = random_heads(generator, 3, 4)
        every = all_paths(heads, room)
        tree = grown(Guesses(heads), room, 1000)
        paths = paths_of(tree)
        assert set(paths[1:]) == set(every), "each candidate once, no deeper than there is room"
        assert tree.likely[1:] == pytest.approx(sorted(every.values(), reverse=True))
        assert [every[path] for path in paths[1:]] == pytest.approx(tree.likely[1:])
        assert tree.claims == pytest.approx(tree.likely), "without trust and branch the claim holds"
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert tree.depths == [len(path) for path in paths]


def test_the_size_is_the_best_of_all_trees() -> None:
    """Of every prefix-closed set of nodes; costs jump, so a longer tree may pay where none did."""
    generator = random.Random(2)
    sizes = set()
    for _ in range(200):
        heads = random_heads(generator, 3, 2)
        costs = [0.0, 1.0]
        while len(costs) < 15:
            costs.append(costs[-1] + generator.choice([0, 0, 0.02, 0.3]))
        spent = generator.choice([0.0, 0.2])
        every = all_paths(heads, 3)
        best = 0.0
        for n in range(1, 15):
            # The likeliest n - 1 nodes are prefix-closed, so no other set of that size has more.
            likeliest = sorted(every.values(), reverse=True)[: n - 1]
            best = max(best, (1 + sum(likeliest)) / (spent + costs[n]))
        plan = best_plan(Guesses(heads), 7, 3, SizeCosts(costs), spent)
        assert plan.rate == pytest.approx(best)
        assert plan.tokens == pytest.approx(plan.tree.expected)
        assert plan.seconds == spent + costs[plan.tree.nodes]
        sizes.add(plan.tree.nodes)
    assert {1, 14} <= sizes, "from the root alone to all candidates"


def test_a_jump_in_cost_is_looked_beyond() -> None:
    heads = [[(0.2, token) for token in range(5)]]
    dear, cheap_after = [0.0, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5], [0.0, 1.0, 1.1, 2.0, 2.0, 2.0, 2.0]
    assert best_plan(Guesses(heads), 7, 1, SizeCosts(dear)).tree.nodes == 6
    assert best_plan(Guesses(heads), 7, 1, SizeCosts(cheap_after)).tree.nodes == 2


def test_a_branch_grows_beyond_the_heads_and_shares_their_nodes() -> None:
    heads = [[(0.5, 1), (0.3, 2)], [(0.6, 3), (0.2, 4)]]
    branch = [(0.9, 2), (0.8, 5), (0.7, 6)]
    tree = grown(Guesses(heads, branch), 9, 1000)
    paths = paths_of(tree)
    share = dict(zip(paths, tree.likely, strict=True))
    assert len(set(paths)) == len(paths), "siblings hold distinct tokens"
    assert tree.likely == sorted(tree.likely, reverse=True)
    assert share[2,] == pytest.approx(0.9), "the likelier of two sources"
    assert share[1,] == pytest.approx(0.5 * 0.1 / 0.7), "the others share what is left"
    assert share[2, 5] == pytest.approx(0.9 * 0.8)
    assert share[2, 3] == pytest.approx(0.9 * 0.6 * 0.2), "heads go on beside the branch"
    assert share[2, 5, 6] == pytest.approx(0.9 * 0.8 * 0.7), "deeper than there are heads"
    claims = dict(zip(paths, tree.claims, strict=True))
    assert claims[2,] == pytest.approx(0.3)
    assert claims[2, 5] == claims[2, 5, 6] == 0, "the heads say nothing of these"
    below = sum(p for path, p in share.items() if len(path) == 1)
    assert below <= 1
    assert max(grown(Guesses(heads, branch), 2, 1000).depths) == 2
    assert paths_of(grown(Guesses((), branch), 9, 1000)) == [(), (2,), (2, 5), (2, 5, 6)]


def test_trust_counts_once_a_path() -> None:
    heads = [[(0.5, 1), (0.3, 2)], [(0.6, 3)]]
    tree = grown(Guesses(heads, trust=0.5), 9, 1000)
    share = dict(zip(paths_of(tree), tree.likely, strict=True))
    assert share[1,] == pytest.approx(0.25)
    assert share[1, 3] == pytest.approx(0.15)
    assert grown(Guesses(heads, trust=9.0), 9, 1000).likely[1] < 1


def test_the_path_of_tokens() -> None:
    tree = grown(Guesses([[(0.5, 1), (0.3, 2)], [(0.6, 3)]]), 9, 1000)
    paths = paths_of(tree)
    assert [paths[node] for node in tree.path([2, 3, 9])] == [(2,), (2, 3)]
    assert tree.path([5]) == tree.path([]) == []
