"""Trees: order, buffers, files, and what is refused."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from medusa_cli.decoding.tree import (
    MAX_NODES,
    ROOT_ONLY,
    dense_tree,
    load_tree,
    shipped_trees,
    static_tree,
)
from medusa_cli.decoding.tree_buffers import token_index, tree_buffers
from medusa_cli.errors import TreeError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "vicuna_7b_stage2.json").read_text())
PUBLISHED = [
    "mc_sim_7b_63",
    "vicuna_13b_stage1",
    "vicuna_13b_stage2",
    "vicuna_33b_stage1",
    "vicuna_33b_stage2",
    "vicuna_7b_stage1",
    "vicuna_7b_stage1_ablation",
    "vicuna_7b_stage2",
    "zephyr_stage2",
]
CPU = torch.device("cpu")


def test_buffers_are_those_published() -> None:
    tree = static_tree("golden", GOLDEN["choices"])
    buffers = tree_buffers(tree, CPU)
    assert [list(choice) for choice in tree.choices] == GOLDEN["node_order"]
    assert tree.candidates == GOLDEN["candidates_per_head"]
    assert token_index(tree, CPU).tolist() == GOLDEN["token_index"]
    assert buffers.depths.tolist() == GOLDEN["depth"]
    assert buffers.ancestors[:, 0].all()
    assert buffers.ancestors.sum(dim=1).tolist() == [depth + 1 for depth in GOLDEN["depth"]]
    ours = {tuple(path) for path in buffers.paths.tolist()}
    for published in GOLDEN["paths"]:
        path = [node for node in published if node >= 0]
        padded = path + [path[-1]] * (len(published) - len(path))
        assert tuple(padded) in ours
        assert buffers.ancestors[path[-1]].nonzero()[:, 0].tolist() == path
        for parent, node in pairwise(path):
            assert buffers.parents[node] == parent


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees_have_63_choices(name: str) -> None:
    tree = load_tree(name)
    assert (tree.name, len(tree.choices), tree.nodes) == (name, 63, 64)
    assert tree.origin
    assert load_tree(str(shipped_trees()[name])) == tree


def test_shipped_stage2_tree_is_the_golden_one() -> None:
    assert [list(c) for c in load_tree("vicuna_7b_stage2").choices] == GOLDEN["node_order"]


def test_dense_tree_mask_drawn() -> None:
    tree = dense_tree("dense", [2, 3])
    assert (tree.nodes, tree.depth, tree.candidates) == (9, 2, 3)
    drawing = """
        #........
        ##.......
        #.#......
        ##.#.....
        ##..#....
        ##...#...
        #.#...#..
        #.#....#.
        #.#.....#
    """
    drawn = [[char == "#" for char in row] for row in drawing.split()]
    assert tree_buffers(tree, CPU).ancestors.tolist() == drawn


def test_depth_limit_is_a_slice_of_the_buffers() -> None:
    buffers = tree_buffers(load_tree("mc_sim_7b_63"), CPU)
    for depth in range(5):
        sliced, tree = buffers.limited(depth), load_tree("mc_sim_7b_63").limited(depth)
        fresh = tree_buffers(tree, CPU)
        assert sliced.nodes == tree.nodes
        assert sliced.depth == tree.depth == depth
        assert sliced.levels == fresh.levels
        for name in ("depths", "parents", "ancestors", "paths"):
            assert torch.equal(getattr(sliced, name), getattr(fresh, name))


def test_levels_are_contiguous() -> None:
    tree = load_tree("mc_sim_7b_63")
    depths = tree_buffers(tree, CPU).depths.tolist()
    for depth in range(tree.depth + 1):
        start, end = tree.level(depth)
        assert tree_buffers(tree, CPU).level(depth) == (start, end)
        assert [i for i, d in enumerate(depths) if d == depth] == list(range(start, end))


def test_root_only_tree_has_no_depth() -> None:
    assert (ROOT_ONLY.nodes, ROOT_ONLY.depth, ROOT_ONLY.candidates) == (1, 0, 0)


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ([[0], [1, 0]], "[1, 0] lacks its prefix [1]"),
        ([[0], [0]], "[0] stands there twice"),
        ([[0], [-1]], "[-1] is not a path"),
        ([[0], []], "[] is not a path"),
        ([[0], [True]], "[True] is not a path"),
        ([[0], [0.5]], "[0.5] is not a path"),
        ([[r] for r in range(MAX_NODES)], "at most"),
    ],
)
def test_bad_choices_are_named(choices: list[list[int]], named: str) -> None:
    with pytest.raises(TreeError) as caught:
        static_tree("bad", choices)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "3",
        '{"choices": 3}',
        '{"choices": [3]}',
        '{"dense": [0]}',
        '{"dense": [100, 100, 100]}',
        "[" * 100_000,
        "[[0], [NaN]]",
    ],
)
def test_damaged_tree_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(TreeError):
        load_tree(str(file))


def test_plain_list_and_dense_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("[[0], [0, 0]]")
    assert load_tree(str(tmp_path / "mine.json")).choices == ((0,), (0, 0))
    (tmp_path / "wide.json").write_text('{"name": "wide", "dense": [2, 3]}')
    assert load_tree(str(tmp_path / "wide.json")) == dense_tree("wide", [2, 3])


def test_missing_tree_lists_the_shipped_ones() -> None:
    with pytest.raises(TreeError, match="mc_sim_7b_63"):
        load_tree("no-such-tree")


def test_tree_beyond_the_heads_is_refused_by_path() -> None:
    tree = load_tree("mc_sim_7b_63")
    with pytest.raises(TreeError, match=r"4 deep at \[0, 0, 0, 0\], but there are 3 heads"):
        tree.check_heads(3, 100)
    with pytest.raises(TreeError, match="rank 9"):
        tree.check_heads(4, 9)
    tree.check_heads(4, 10)
