"""Tree attention: the mask drawn, and tree forwards equal to sequential ones."""

import pytest
import torch
from torch import Tensor

from conftest import VOCAB, WINDOW
from medusa_cli.decoding.tree import dense_tree, static_tree
from medusa_cli.decoding.tree_buffers import tree_buffers
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.tree_mask import AttentionLayout, tree_mask

CPU = torch.device("cpu")


def drawn(mask: Tensor) -> list[str]:
    return ["".join("#" if value == 0 else "." for value in row) for row in mask[0, 0]]


def test_mask_shows_cached_rows_and_ancestors() -> None:
    tree = tree_buffers(static_tree("t", [[0], [1], [0, 0]]), CPU)
    layout = AttentionLayout((), None)
    mask = tree_mask(tree.depths, tree.paths, 2, layout, torch.float32)
    assert isinstance(mask, Tensor)
    assert drawn(mask) == ["###...", "####..", "###.#.", "####.#"]
    assert mask.unique().tolist() == [torch.finfo(torch.float32).min, 0.0]


def test_window_compares_positions_not_rows() -> None:
    """Siblings share a position: the last node stands at position 5, in row 6."""
    tree = tree_buffers(static_tree("t", [[0], [1], [0, 0]]), CPU)
    layout = AttentionLayout((), 3)
    mask = tree_mask(tree.depths, tree.paths, 3, layout, torch.float32)
    assert isinstance(mask, Tensor)
    assert drawn(mask) == [".###...", "..###..", "..##.#.", "...##.#"]


def test_layer_types_get_a_mask_each() -> None:
    tree = tree_buffers(static_tree("t", [[0]]), CPU)
    layout = AttentionLayout(("full_attention", "sliding_attention"), 2)
    masks = tree_mask(tree.depths, tree.paths, 3, layout, torch.float32)
    assert isinstance(masks, dict)
    assert drawn(masks["full_attention"]) == ["####.", "#####"]
    assert drawn(masks["sliding_attention"]) == ["..##.", "...##"]


def test_lone_root_needs_no_mask() -> None:
    tree = tree_buffers(static_tree("t", []), CPU)
    layout = AttentionLayout((), None)
    assert tree_mask(tree.depths, tree.paths, 5, layout, torch.float32) is None


@pytest.mark.parametrize("rows", [1, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_tree_forward_equals_a_forward_per_path(base: BaseModel, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(VOCAB, (rows,), generator=generator)
    tree = tree_buffers(dense_tree("t", [2, 2, 1]), CPU)
    tokens = torch.randint(VOCAB, (tree.nodes,), generator=generator)
    cache = KVCache()
    base.prefill(prompt, cache)
    output = base.verify(tokens, tree.depths, tree.paths, cache)
    for node in range(tree.nodes):
        path = tree.ancestors[node].nonzero()[:, 0]
        with torch.inference_mode():
            whole = torch.cat([prompt, tokens[path]])
            expected = base.module(input_ids=whole[None], use_cache=False).logits[0, -1]
            from_hidden = base.lm_head(output.hidden[node])
        torch.testing.assert_close(output.logits[node], expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(from_hidden, expected, atol=2e-4, rtol=1e-4)
