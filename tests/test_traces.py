"""Traces: replaying a text with any tree gives the accept lengths of really decoding it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from conftest import HIDDEN, VOCAB, byte_tokenizer, make_head, tiny_base
from medusa_cli.config import FinishReason, Limits
from medusa_cli.decoding import traces as files
from medusa_cli.decoding.head_accuracy import accuracy_table, head_accuracy
from medusa_cli.decoding.head_accuracy import from_json as accuracy_from_json
from medusa_cli.decoding.head_accuracy import to_json as accuracy_to_json
from medusa_cli.decoding.traces import (
    MISS,
    Provenance,
    TextTrace,
    Traces,
    mean_accept_length,
    replay,
)
from medusa_cli.decoding.tree import ROOT_ONLY, Tree, dense_tree, load_tree, static_tree
from medusa_cli.errors import CheckpointError, TreeError
from medusa_cli.models.cache import KVCache
from medusa_cli.models.heads import Head, HeadKind, Heads, HeadsInfo
from medusa_cli.session import Medusa
from medusa_cli.text.prompt_files import Question
from medusa_cli.training.accuracy import PromptSet, measure_accuracy

HEADS = 4
PROMPTS = PromptSet("test", "0123456789ab")
PROVENANCE = Provenance("heads", "base", "", "test", "0123456789ab", 48)
QUESTIONS = [Question(str(i), "", text) for i, text in enumerate(["Hello", "(x y)", "One, two"])]
TREES = [
    ROOT_ONLY,
    static_tree("chain", [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]),
    static_tree("gaps", [[3], [1], [1, 2], [0], [0, 5], [0, 5, 0], [0, 0]]),
    dense_tree("dense", [6, 4, 3]),
    dense_tree("flat", [40]),
    load_tree("mc_sim_7b_63"),
]


def fitted_heads(architecture: str) -> Heads:
    """Heads that are right at many positions of the answers to QUESTIONS, and wrong at many."""
    base = tiny_base(architecture)
    plain = Medusa("tiny", base, byte_tokenizer(), None, ROOT_ONLY)
    inputs: list[list[torch.Tensor]] = [[] for _ in range(HEADS)]
    targets: list[list[int]] = [[] for _ in range(HEADS)]
    for question in QUESTIONS:
        limits = Limits(30, ignore_eos=True)
        prompt = plain.encode(str(question.first))
        text = [*prompt, *plain.generate(prompt, limits=limits).token_ids]
        hidden = base.extend(torch.tensor(text), KVCache()).hidden
        for k in range(HEADS):
            for row in range(len(prompt) - 1, len(text) - k - 2):
                inputs[k].append(hidden[row])
                targets[k].append(text[row + k + 2])
    heads = []
    for k in range(HEADS):
        head = make_head(rows=VOCAB)
        nn.init.zeros_(head.layers[0].linear.weight)
        nn.init.zeros_(head.layers[0].linear.bias)
        wanted = nn.functional.one_hot(torch.tensor(targets[k]), VOCAB).float()
        head.lm_head.weight = nn.Parameter(torch.linalg.lstsq(
            torch.stack(inputs[k]), wanted, driver="gelsd"
        ).solution.T.contiguous())  # fmt: skip
        heads.append(head)
    return bound(heads)


def random_heads() -> Heads:
    """Heads that know nothing."""
    return bound([Head(HIDDEN, 1, False, VOCAB) for _ in range(HEADS)])


def bound(heads: list[Head]) -> Heads:
    info = HeadsInfo("test", HeadKind.MEDUSA, len(heads), 1, VOCAB)
    modules = nn.ModuleList(heads).requires_grad_(False)
    return Heads(info, modules, nn.Embedding(VOCAB, HIDDEN), nn.Identity(), None)


def medusa(architecture: str, heads: Heads, tree: Tree = TREES[1]) -> Medusa:
    return Medusa("tiny", tiny_base(architecture), byte_tokenizer(), heads, tree)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("fitted", [True, False])
def test_replay_is_decoding(architecture: str, fitted: bool) -> None:
    """For answers that end at the limit, also at a smaller one than they were traced under."""
    torch.manual_seed(1)
    heads = fitted_heads(architecture) if fitted else random_heads()
    traces = measure_accuracy(medusa(architecture, heads), QUESTIONS, 30, PROMPTS)
    seen = set()
    for tree in TREES:
        model = medusa(architecture, heads, tree)
        for question, text in zip(QUESTIONS, traces.texts, strict=True):
            for limit in (30, 17, 2, 1):
                result = model.generate(str(question.first), limits=Limits(limit))
                assert replay(tree, text, limit) == result.accept_lengths, (tree.name, limit)
                seen |= set(result.accept_lengths)
            assert replay(tree, text) == replay(tree, text, 30) == replay(tree, text, 99)
    assert {1, 2} <= seen
    assert not fitted or max(seen) > 3, "deep paths must have been accepted"


def test_replay_is_decoding_up_to_every_end_token() -> None:
    """A verification may accept drafts behind an end token, which the trace must know of."""
    torch.manual_seed(1)
    heads = fitted_heads("llama")
    question = QUESTIONS[0]
    model = medusa("llama", heads)
    whole = model.generate("Hello", limits=Limits(30, ignore_eos=True)).token_ids
    beyond = 0
    for position in sorted({whole.index(token) for token in whole})[:14]:
        model.base.eos_ids = frozenset({whole[position]})
        (text,) = measure_accuracy(model, [question], 30, PROMPTS).texts
        assert text.ended
        assert text.tokens == position + 1
        for tree in (TREES[1], TREES[3]):
            # Close behind the end the limit cuts the tree of the last steps.
            for limit in (30, position + 3, position + 2, max(position, 1)):
                result = replace(model, tree=tree).generate("Hello", limits=Limits(limit))
                ended = result.finish_reason is FinishReason.EOS
                assert ended == (limit > position)
                assert replay(tree, text, limit) == result.accept_lengths, (tree.name, position)
                beyond += sum(result.accept_lengths) > len(result.token_ids) - 1
    assert beyond > 0, "some verification must have accepted drafts behind the end"


def trace(*ranks: tuple[int, ...], ended: bool = False, category: str = "") -> TextTrace:
    limit = 99 if ended else len(ranks) + 1
    return TextTrace("q", category, 0, ended, limit, ranks)


def test_replay_by_hand() -> None:
    """Six tokens: the first step takes two drafts, the next none, the last is cut to depth 0."""
    text = trace((0, 1), (5, 0), (0, 0), (3, 3), (0,))
    tree = static_tree("t", [[0], [0, 1]])
    assert replay(tree, text) == (3, 1, 1)
    assert replay(tree, text, 3) == (2,), "a tree of depth 2 would emit a token too many"
    assert replay(ROOT_ONLY, text) == (1, 1, 1, 1, 1)
    assert replay(tree, trace()) == ()
    traces = Traces(PROVENANCE, 2, (text, trace((0,))))
    assert mean_accept_length(tree, traces) == pytest.approx(6 / 4)
    assert mean_accept_length(tree, Traces(PROVENANCE, 2, ())) == 0


def test_a_tree_of_unknown_ranks_cannot_be_replayed() -> None:
    with pytest.raises(TreeError, match="asks for rank 64"):
        replay(dense_tree("wide", [65]), trace((0,)))
    assert replay(dense_tree("wide", [64]), trace((63,), (MISS,))) == (2,)


def test_accuracy_is_hits_over_counts() -> None:
    """Positions that do not exist are not counted, nor is what stands behind the end."""
    texts = [trace((0, 2), (1, MISS), (0,)), trace((MISS, 0), (0, 0), ended=True, category="c")]
    accuracy = head_accuracy(texts, 2)
    assert accuracy.counts == (5, 3)
    assert accuracy.hits[0][:3] == (3, 1, 0)
    assert accuracy.hits[1][:3] == (1, 0, 1)
    assert accuracy.top(0, 1) == pytest.approx(3 / 5)
    assert accuracy.top(1, 10) == pytest.approx(2 / 3)
    assert accuracy.ranks()[1][2] == pytest.approx(1 / 3)
    assert head_accuracy([], 2).top(0, 1) is None
    table = accuracy_table(Traces(PROVENANCE, 2, tuple(texts)))
    assert table.overall == accuracy
    assert {name: one.counts for name, one in table.categories.items()} == {"": (3, 2), "c": (2, 1)}


def test_files_give_back_what_was_written() -> None:
    provenance = replace(PROVENANCE, prompts="größer", complete=False, skipped=("q/2",))
    texts = (trace((0, 2), (1, MISS), (0,)), trace(), trace((MISS, 0), (0, 0), ended=True))
    traces = Traces(provenance, 2, texts)
    assert files.from_json(files.to_json(traces), "x") == traces
    assert files.from_json(files.to_json(Traces(provenance, 2, ())), "x").texts == ()
    table = accuracy_table(traces)
    assert accuracy_from_json(accuracy_to_json(table), "x") == table
    data = json.loads(accuracy_to_json(table))
    assert data["overall"]["top"][0][:2] == [0.6, 0.8]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), []),
        (("format",), "medusa-traces/2"),
        (("num_heads",), 0),
        (("num_heads",), True),
        (("num_heads",), 1),
        (("texts",), {}),
        (("texts", 0), []),
        (("texts", 0, "ended"), 0),
        (("texts", 0, "limit"), 9),
        (("texts", 0, "limit"), 2),
        (("texts", 0, "more"), 2),
        (("texts", 0, "ranks"), [[0, 0], [0, 0], [0, 0]]),
        (("texts", 0, "ranks", 0), [0]),
        (("texts", 0, "ranks", 0), 0),
        (("texts", 0, "ranks", 0, 0), 64),
        (("texts", 0, "ranks", 0, 0), -2),
        (("texts", 0, "ranks", 0, 0), 1.0),
        (("texts", 0, "ranks", 0, 0), True),
        (("provenance",), None),
        (("provenance", "base"), 3),
        (("provenance", "skipped"), [3]),
        (("provenance", "more"), 3),
    ],
)
def test_damage_is_refused(path: tuple[str | int, ...], value: object) -> None:
    """One wrong value anywhere."""
    good = files.to_json(Traces(PROVENANCE, 2, (trace((0, 2), (1, MISS), (0,)),)))
    files.from_json(good, "x")
    data = json.loads(good)
    where = data
    for key in path[:-1]:
        where = where[key]
    if path:
        where[path[-1]] = value
    with pytest.raises(CheckpointError, match="t.json is damaged"):
        files.from_json(json.dumps(data if path else value), "t.json")


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '{"format": "medusa-traces/1"}'])
def test_what_is_no_trace_file_is_refused(content: str) -> None:
    with pytest.raises(CheckpointError, match="measure again with `medusa accuracy`"):
        files.from_json(content, "t.json")


@pytest.mark.parametrize(
    ("key", "value"), [("hits", []), ("hits", [[1]]), ("counts", []), ("counts", [0, 0])]
)
def test_a_damaged_accuracy_is_refused(key: str, value: object) -> None:
    table = accuracy_table(Traces(PROVENANCE, 2, (trace((0, 2), (1, MISS), (0,)),)))
    data = json.loads(accuracy_to_json(table))
    data["overall"][key] = value
    with pytest.raises(CheckpointError, match="a.json is damaged"):
        accuracy_from_json(json.dumps(data), "a.json")
