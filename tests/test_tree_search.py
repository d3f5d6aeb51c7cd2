"""Tree search: no other tree of that many nodes has a greater expected accept length."""

import random
from collections.abc import Iterator
from itertools import product
from math import inf, nan
from pathlib import Path

import pytest

from medusa_cli.decoding.head_accuracy import head_accuracy
from medusa_cli.decoding.traces import MISS, Provenance, TextTrace, Traces, mean_accept_length
from medusa_cli.decoding.tree import MAX_NODES, Choice, Tree, load_tree, static_tree
from medusa_cli.decoding.tree_search import (
    build_for_decoding,
    build_from_accuracy,
    build_from_traces,
    expected_from_accuracy,
    expected_from_traces,
    to_json,
)
from medusa_cli.errors import TreeError, UsageError

PROVENANCE = Provenance("some-heads", "base", "", "mine.jsonl", "0123456789ab", 48)


def trees(heads: int, ranks: int, nodes: int) -> Iterator[Tree]:
    """Every prefix-closed tree with that many nodes."""
    paths = [p for depth in range(1, heads + 1) for p in product(range(ranks), repeat=depth)]

    def grown(chosen: tuple[Choice, ...], start: int) -> Iterator[tuple[Choice, ...]]:
        if len(chosen) == nodes - 1:
            yield chosen
            return
        for i in range(start, len(paths)):  # shallow paths first: a prefix comes before its path
            if len(paths[i]) == 1 or paths[i][:-1] in chosen:
                yield from grown((*chosen, paths[i]), i + 1)

    for chosen in grown((), 0):
        yield static_tree("any", chosen)


def table(generator: random.Random, heads: int, ranks: int) -> list[list[float]]:
    """Shares in any order: a later rank may be right more often than an earlier one."""
    rows = []
    for _ in range(heads):
        weights = [generator.choice([0.0, 0.1, 0.5, generator.random()]) for _ in range(ranks)]
        rows.append([w / max(sum(weights), 1.0) for w in weights])
    return rows


def traces(rows: list[tuple[int, ...]], heads: int) -> Traces:
    """Texts of two tokens each would cut the rows: each row stands in an ended text of its own."""
    filler = (MISS,) * heads
    texts = tuple(
        TextTrace(str(i), "", 0, True, 99, (row, *[filler] * (heads - 1)))
        for i, row in enumerate(rows)
    )
    return Traces(PROVENANCE, heads, texts)


@pytest.mark.parametrize(("heads", "ranks"), [(1, 4), (2, 3), (3, 2)])
def test_independent_search_is_exact(heads: int, ranks: int) -> None:
    generator = random.Random(heads)
    for _ in range(25):
        accuracy = table(generator, heads, ranks)
        for nodes in range(2, 6):
            if all(share == 0 for share in accuracy[0]):
                continue
            built = build_from_accuracy("b", accuracy, nodes, "x")
            best = max(expected_from_accuracy(t, accuracy) for t in trees(heads, ranks, nodes))
            assert expected_from_accuracy(built, accuracy) == pytest.approx(best)
            assert built.nodes <= nodes
            assert built.depth <= heads


@pytest.mark.parametrize(("heads", "ranks"), [(1, 4), (2, 3), (3, 2)])
def test_joint_search_is_exact(heads: int, ranks: int) -> None:
    generator = random.Random(heads)
    for _ in range(25):
        values = [MISS, *range(ranks)]
        rows = [tuple(generator.choices(values, k=heads)) for _ in range(12)]
        recorded = traces(rows, heads)
        for nodes in range(2, 6):
            built = build_from_traces("b", recorded, nodes)
            best = max(expected_from_traces(t, recorded) for t in trees(heads, ranks, nodes))
            assert expected_from_traces(built, recorded) == pytest.approx(best)
            assert built.depth <= heads


def test_expected_accept_length_by_hand() -> None:
    tree = static_tree("t", [[0], [1], [0, 0], [1, 2]])
    assert expected_from_accuracy(tree, [[0.5, 0.25], [0.4]]) == pytest.approx(1 + 0.75 + 0.2)
    rows = [(0, 0), (0, 1), (1, 2), (MISS, 0)]
    filled = traces(rows, 2)
    assert filled.positions == 8, "each text has one more position, at which no head was right"
    assert expected_from_traces(tree, filled) == pytest.approx(1 + (2 + 1 + 1 + 1) / 8)
    assert expected_from_traces(tree, Traces(PROVENANCE, 2, ())) == 1


def test_expectation_of_a_step_at_every_position_is_what_replay_has() -> None:
    """Where each text is one step long, the mean over steps is the mean over positions."""
    generator = random.Random(0)
    texts = tuple(
        TextTrace(str(i), "", 0, True, 99, ((generator.randrange(3),),)) for i in range(40)
    )
    recorded = Traces(PROVENANCE, 1, texts)
    tree = static_tree("t", [[0], [2]])
    assert mean_accept_length(tree, recorded) == pytest.approx(expected_from_traces(tree, recorded))


def test_heads_that_are_right_together_get_another_tree() -> None:
    """Head 2's rank 1 is right exactly when head 1's rank 1 is: products do not see that."""
    rows = [(1, 1)] * 4 + [(0, 0)] * 4 + [(0, 2)] * 4 + [(2, 0)]
    recorded = traces(rows, 2)
    accuracy = head_accuracy(recorded.texts, 2).ranks()
    joint = build_from_traces("j", recorded, 6)
    independent = build_from_accuracy("i", accuracy, 6, "x")
    assert (1, 1) in joint.choices
    assert (1, 1) not in independent.choices
    assert expected_from_traces(joint, recorded) > expected_from_traces(independent, recorded)
    assert mean_accept_length(joint, recorded) > mean_accept_length(independent, recorded)


def test_a_search_for_decoding_is_never_worse_than_the_others_in_replay() -> None:
    generator = random.Random(3)
    for _ in range(20):
        texts = tuple(
            TextTrace(str(i), "", 0, False, 31, tuple(
                tuple(generator.choice([0, 0, 1, 2, MISS]) for _ in range(min(3, 30 - t)))
                for t in range(30)
            ))
            for i in range(3)
        )  # fmt: skip
        recorded = Traces(PROVENANCE, 3, texts)
        accuracy = head_accuracy(texts, 3).ranks()
        built = mean_accept_length(build_for_decoding("d", recorded, 6), recorded)
        assert built >= mean_accept_length(build_from_traces("t", recorded, 6), recorded)
        assert built >= mean_accept_length(build_from_accuracy("a", accuracy, 6, ""), recorded)


def test_positions_that_decoding_steps_over_do_not_count() -> None:
    """In one text a chain of rank 0 is always right, and decoding is through with it in a few
    steps. In the others only rank 1 of head 1 is, and every step begins in them.
    """
    easy = TextTrace("easy", "", 0, False, 41, tuple((0,) * min(4, 40 - t) for t in range(40)))
    hard = [
        TextTrace(
            str(i), "", 0, False, 19, tuple((1, MISS, MISS, MISS)[: 18 - t] for t in range(18))
        )
        for i in range(2)
    ]
    recorded = Traces(PROVENANCE, 4, (easy, *hard))
    everywhere = build_from_traces("t", recorded, 4)
    assert everywhere.choices == ((0,), (0, 0), (0, 0, 0))
    decoding = build_for_decoding("d", recorded, 4)
    assert (1,) in decoding.choices
    assert mean_accept_length(decoding, recorded) > mean_accept_length(everywhere, recorded)


def test_equal_counts_are_ordered_by_products_then_depth() -> None:
    """(2,) and (3,) were right once each; head 2's rank 4 is often right elsewhere."""
    rows = [(0, 4), (1, 4), (2, 4), (3, 5)]
    recorded = traces(rows, 2)
    assert build_from_traces("t", recorded, 6).choices == ((0,), (1,), (2,), (3,), (0, 4))
    assert (3, 5) not in build_from_traces("t", recorded, 8).choices
    assert (3, 5) in build_from_traces("t", recorded, 9).choices


def test_what_stands_behind_the_end_does_not_count() -> None:
    """The second rank of a text's last position is of a token that is never emitted."""
    recorded = Traces(PROVENANCE, 2, (TextTrace("q", "", 0, True, 99, ((0, 0),)),))
    assert build_from_traces("t", recorded, 9).choices == ((0,),)


def test_a_tree_is_smaller_when_nothing_more_was_ever_right() -> None:
    built = build_from_traces("t", traces([(0, 1), (MISS, 1)], 2), 7)
    assert built.choices == ((0,), (0, 1))
    assert "3 nodes" in built.origin
    assert "7 were asked for" in built.origin
    fewer = build_from_accuracy("t", [[0.5, 0.0, 0.1], [0.0]], 9, "a table")
    assert fewer.choices == ((0,), (2,))
    assert "9 were asked for" in fewer.origin
    assert "asked for" not in build_from_accuracy("t", [[0.5, 0.0, 0.1]], 3, "a table").origin


def test_the_origin_names_heads_positions_and_prompts() -> None:
    built = build_from_traces("t", traces([(0, 1), (1, 1)], 2), 3)
    assert built.origin == (
        "built for 3 nodes from traces of 4 positions of heads some-heads, "
        "prompts 0123456789ab (mine.jsonl)"
    )


@pytest.mark.parametrize("nodes", [-1, 0, 1, MAX_NODES + 1])
def test_too_few_or_too_many_nodes_are_refused(nodes: int) -> None:
    with pytest.raises(UsageError, match="--nodes must be from 2 to 4096"):
        build_from_accuracy("t", [[0.5]], nodes, "x")
    with pytest.raises(UsageError, match="--nodes must be from 2 to 4096"):
        build_from_traces("t", traces([(0,)], 1), nodes)


def test_the_largest_tree_can_be_built() -> None:
    built = build_from_accuracy("t", [[1 / 64] * 64] * 4, MAX_NODES, "x")
    assert built.nodes == MAX_NODES
    assert built.depth == 2


@pytest.mark.parametrize("share", [nan, inf, -0.1, 1.1])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(TreeError, match="accuracy of head 2"):
        build_from_accuracy("t", [[0.5], [share]], 3, "x")


def test_heads_that_were_never_right_give_no_tree() -> None:
    with pytest.raises(TreeError, match="no head was ever right"):
        build_from_traces("t", traces([(MISS, 0)], 2), 3)
    with pytest.raises(TreeError, match="no head was ever right"):
        build_from_accuracy("t", [[0.0], [0.5]], 3, "x")


def test_a_written_tree_is_read_again(tmp_path: Path) -> None:
    tree = static_tree('a "name"', [[i] for i in range(9)] + [[0, 3]], "größer")
    (tmp_path / "t.json").write_text(to_json(tree), encoding="utf-8")
    assert load_tree(str(tmp_path / "t.json")) == tree
