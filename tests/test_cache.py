"""The KV cache: compacted rows are those of a fresh prefill."""

import torch

from conftest import VOCAB
from medusa_cli.decoding.tree import ROOT_ONLY, static_tree
from medusa_cli.decoding.tree_buffers import tree_buffers
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import GROWTH, KVCache

CPU = torch.device("cpu")


def rows_of(cache: KVCache) -> list[torch.Tensor]:
    return [
        buffer[:, :, : layer.rows]
        for layer in cache.layers
        for buffer in (layer.keys, layer.values)
    ]


def assert_same_rows(one: KVCache, other: KVCache) -> None:
    assert one.ids == other.ids
    for a, b in zip(rows_of(one), rows_of(other), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


def prefilled(base: BaseModel, ids: list[int]) -> KVCache:
    cache = KVCache()
    base.prefill(torch.tensor(ids), cache)
    cache.append(ids)
    return cache


def test_compacted_rows_equal_a_fresh_prefill(base: BaseModel) -> None:
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(VOCAB, (17,), generator=generator).tolist()
    tree = tree_buffers(static_tree("t", [[0], [1], [2], [1, 0], [2, 0], [2, 1], [2, 1, 0]]), CPU)
    tokens = torch.randint(VOCAB, (tree.nodes,), generator=generator)
    for node in range(tree.nodes):
        cache = prefilled(base, prompt)
        base.verify(tokens, tree.depths, tree.paths, cache)
        path = tree.ancestors[node].nonzero()[:, 0].tolist()
        cache.accept(path, tokens[path].tolist())
        assert_same_rows(cache, prefilled(base, prompt + tokens[path].tolist()))
        assert cache.get_seq_length() == 17 + len(path)


def test_a_cache_is_lengthened_behind_its_rows(base: BaseModel) -> None:
    ids = [i % VOCAB for i in range(9)]
    cache, short = prefilled(base, ids), prefilled(base, ids)
    cache.lengthen(40)
    assert cache.get_seq_length() == len(cache.ids) == 49
    root = tree_buffers(ROOT_ONLY, CPU)
    base.verify(torch.tensor([1]), root.depths, root.paths, cache)
    cache.keep(9)
    assert_same_rows(cache, short)


def test_rows_survive_growth_and_overlapping_moves(llama: BaseModel) -> None:
    ids = [i % VOCAB for i in range(120)]
    cache = prefilled(llama, ids[:100])
    layer = cache.layers[0]
    assert layer.keys.shape[2] == GROWTH
    many = torch.randn(1, 2, GROWTH, 8)
    before = layer.keys[:, :, :100].clone()
    with torch.inference_mode():
        layer.update(many, many)
    assert layer.keys.shape[2] == 2 * GROWTH
    assert torch.equal(layer.keys[:, :, :100], before)
    expected = layer.keys[:, :, [101, 102, 103, 105]].clone()
    layer.move_rows([101, 102, 103, 105], 100)
    assert torch.equal(layer.keys[:, :, 100:104], expected)


def test_keep_cuts_rows_and_ids(llama: BaseModel) -> None:
    cache = prefilled(llama, list(range(20)))
    cache.keep(50)
    assert len(cache.ids) == 20
    cache.keep(7)
    assert_same_rows(cache, prefilled(llama, list(range(7))))
    cache.keep(0)
    assert cache.get_seq_length() == 0


def test_keep_drops_rows_of_an_unfinished_forward(llama: BaseModel) -> None:
    cache = prefilled(llama, list(range(20)))
    with torch.inference_mode():
        cache.layers[0].update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    cache.keep(len(cache.ids))
    assert {layer.get_seq_length() for layer in cache.layers} == {20}


def test_reset_frees_the_buffers(llama: BaseModel) -> None:
    cache = prefilled(llama, [1, 2, 3])
    cache.reset()
    assert cache.get_seq_length() == 0
    llama.prefill(torch.tensor([1, 2]), cache)
    assert cache.get_seq_length() == 2
