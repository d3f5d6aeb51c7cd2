"""The decode loop: whatever is drafted, the text is the base model's own."""

from collections.abc import Iterator

import pytest
import torch

from conftest import CONTEXT, EOS, RandomDrafter, ScriptedDrafter, tiny_base, tiny_module
from medusa_cli.config import Acceptance, FinishReason, SamplingConfig
from medusa_cli.decoding.decode import Budget, DecodeStep, decode
from medusa_cli.decoding.drafting import Drafter, StaticDrafting
from medusa_cli.decoding.sampling import Sampler
from medusa_cli.decoding.tree import ROOT_ONLY, Tree, dense_tree, load_tree, static_tree
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache

CPU = torch.device("cpu")
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
CHAIN = static_tree("chain", [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
TREES = [
    CHAIN,
    dense_tree("dense", [3, 2]),
    load_tree("mc_sim_7b_63"),
    static_tree("wide", [[0], [1], [2], [0, 0], [1, 1]]),
]
NO_EOS: frozenset[int] = frozenset()


def run(
    base: BaseModel,
    tree: Tree = ROOT_ONLY,
    drafter: Drafter | None = None,
    *,
    prompt: list[int] = PROMPT,
    cache: KVCache | None = None,
    sampling: SamplingConfig | None = None,
    limit: int | None = 40,
    eos: frozenset[int] = NO_EOS,
    context: int | None = CONTEXT,
) -> list[DecodeStep]:
    sampler = Sampler(sampling or SamplingConfig(seed=0), CPU)
    budget = Budget(limit, context, eos)
    drafting = StaticDrafting(drafter, tree, CPU)
    cache = KVCache() if cache is None else cache
    return list(decode(base, drafting, sampler, prompt, cache, budget))


def ids(steps: list[DecodeStep]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def generated(architecture: str, tokens: int) -> list[int]:
    """What transformers' own greedy generate gives."""
    module = tiny_module(architecture)
    output = module.generate(
        torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return output[0, len(PROMPT) :].tolist()


def drafters(cache: KVCache, truth: list[int]) -> Iterator[tuple[str, Drafter]]:
    yield "oracle", ScriptedDrafter(cache, truth, rank=0)
    yield "second", ScriptedDrafter(cache, truth, rank=1)
    yield "anti-oracle", ScriptedDrafter(cache, truth, rank=None)
    yield "random", RandomDrafter(torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "gpt_neox"])
def test_greedy_text_is_the_base_models_own(architecture: str) -> None:
    base = tiny_base(architecture)
    expected = generated(architecture, 40)
    assert len(set(expected)) > 5, "the tiny model must not say one thing only"
    assert ids(run(base)) == expected
    for tree in TREES:
        cache = KVCache()
        for name, drafter in drafters(cache, PROMPT + expected):
            cache.keep(0)
            steps = run(base, tree, drafter, cache=cache)
            assert ids(steps) == expected, (architecture, tree.name, name)
            lengths = [step.accept_length for step in steps[1:]]
            if name == "oracle":
                assert max(lengths) == tree.depth + 1
            if name == "anti-oracle":
                assert set(lengths) == {1}


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"repetition_penalty": 1.5}])
def test_seeded_samples_do_not_depend_on_the_tree(
    base: BaseModel, truncation: dict[str, float]
) -> None:
    for seed in range(3):
        sampling = SamplingConfig(temperature=0.8, seed=seed, **truncation)
        expected = ids(run(base, sampling=sampling))
        for tree in TREES:
            cache = KVCache()
            for name, drafter in drafters(cache, PROMPT + expected):
                cache.keep(0)
                steps = run(base, tree, drafter, cache=cache, sampling=sampling)
                assert ids(steps) == expected, (tree.name, name)


def test_greedy_with_repetition_penalty_matches_generate() -> None:
    module = tiny_module()
    expected = module.generate(
        torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, repetition_penalty=1.8,
        eos_token_id=None, pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    sampling = SamplingConfig(repetition_penalty=1.8, seed=0)
    base, cache = tiny_base(), KVCache()
    assert expected != generated("llama", 30)
    for drafter in (None, ScriptedDrafter(cache, PROMPT + expected, rank=0)):
        cache.keep(0)
        tree = ROOT_ONLY if drafter is None else CHAIN
        assert ids(run(base, tree, drafter, cache=cache, sampling=sampling, limit=30)) == expected


@pytest.mark.parametrize("position", range(8))
def test_nothing_is_emitted_after_eos_at_any_place_of_a_path(position: int) -> None:
    base = tiny_base()
    truth = ids(run(base))
    eos = truth[position]
    first = truth.index(eos)
    cache = KVCache()
    drafter = ScriptedDrafter(cache, PROMPT + truth, rank=0)
    steps = run(base, CHAIN, drafter, cache=cache, eos=frozenset({eos, EOS}))
    assert ids(steps) == truth[: first + 1]
    assert steps[-1].finish is FinishReason.EOS
    assert cache.ids == (PROMPT + truth[: first + 1])[: len(cache.ids)]


def test_every_eos_id_ends_the_answer() -> None:
    base = tiny_base()
    truth = ids(run(base))
    later = next(t for t in truth if t != truth[0])
    assert ids(run(base, eos=frozenset({later, EOS}))) == truth[: truth.index(later) + 1]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 11])
def test_limit_counts_tokens_and_verifies_no_more_than_needed(limit: int) -> None:
    base = tiny_base()
    truth = ids(run(base))
    cache = KVCache()
    drafter = ScriptedDrafter(cache, PROMPT + truth, rank=0)
    rows: list[int] = []
    handle = base.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    steps = run(base, CHAIN, drafter, cache=cache, limit=limit)
    handle.remove()
    assert ids(steps) == truth[:limit]
    assert steps[-1].finish is FinishReason.LENGTH
    assert len(rows) == len(steps), "one forward for each event: none for tokens not emitted"
    emitted = 1
    for width, step in zip(rows[1:], steps[1:], strict=True):
        assert width <= limit - emitted, "no node deeper than the tokens that may be emitted"
        emitted += len(step.token_ids)


def test_a_pending_eos_is_not_verified() -> None:
    base = tiny_base()
    truth = ids(run(base))
    steps = run(base, eos=frozenset({truth[0]}))
    assert [step.token_ids for step in steps] == [(truth[0],)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_tree_shrinks_at_the_end_of_the_context(tree: Tree, room: int) -> None:
    base = tiny_base()
    prompt = [(7 * i) % 251 for i in range(CONTEXT - room)]
    truth = ids(run(base, prompt=prompt, limit=None))
    assert len(truth) == room
    cache = KVCache()
    positions: list[int] = []
    handle = base.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: positions.append(int(kwargs["position_ids"].max())),
        with_kwargs=True,
    )
    drafter = ScriptedDrafter(cache, prompt + truth, rank=0)
    steps = run(base, tree, drafter, prompt=prompt, cache=cache, limit=None)
    handle.remove()
    assert ids(steps) == truth
    assert steps[-1].finish is FinishReason.CONTEXT
    assert max(positions) < CONTEXT


def test_the_users_limit_is_named_when_both_fall_together() -> None:
    prompt = [(7 * i) % 251 for i in range(CONTEXT - 3)]
    assert run(tiny_base(), prompt=prompt, limit=3)[-1].finish is FinishReason.LENGTH
    assert run(tiny_base(), prompt=prompt, limit=4)[-1].finish is FinishReason.CONTEXT


def test_depths_name_drafts_and_the_base_token() -> None:
    assert DecodeStep((5,), 0, 0, 0.0, None).depths == (0,)
    assert DecodeStep((5, 6, 7), 3, 8, 0.0, None).depths == (1, 2, 0)
    assert DecodeStep((5, 6), 4, 8, 0.0, FinishReason.EOS).depths == (1, 2)


def test_a_consumer_that_walks_away_leaves_a_right_cache(base: BaseModel) -> None:
    truth = ids(run(base))
    for events in range(1, 8):
        cache = KVCache()
        drafter = ScriptedDrafter(cache, PROMPT + truth, rank=0)
        sampler, budget = Sampler(SamplingConfig(seed=0), CPU), Budget(40, CONTEXT, NO_EOS)
        stream = decode(base, StaticDrafting(drafter, CHAIN, CPU), sampler, PROMPT, cache, budget)
        taken = [next(stream) for _ in range(events)]
        stream.close()
        kept = PROMPT + ids(taken)
        assert cache.ids == kept[:-1], "the pending token has no row"
        assert {layer.get_seq_length() for layer in cache.layers} == {len(cache.ids)}
        again = run(base, prompt=kept, cache=cache, limit=40 - len(ids(taken)))
        assert ids(taken) + ids(again) == truth


def test_an_interrupted_forward_leaves_a_right_cache(llama: BaseModel) -> None:
    truth = ids(run(llama))
    cache = KVCache()
    drafter = ScriptedDrafter(cache, PROMPT + truth, rank=0)
    calls = 0

    def interrupt(*_args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    handle = llama.module.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(llama, CHAIN, drafter, cache=cache)
    handle.remove()
    assert {layer.get_seq_length() for layer in cache.layers} == {len(cache.ids)}
    assert ids(run(llama, cache=cache)) == truth


def test_a_shared_prefix_is_not_prefilled_again(llama: BaseModel) -> None:
    cache = KVCache()
    first = ids(run(llama, cache=cache, limit=10))
    rows: list[int] = []
    handle = llama.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    longer = PROMPT + first + [1, 2, 3]
    reused = ids(run(llama, prompt=longer, cache=cache, limit=10))
    assert rows[0] == 4, "the last token of the answer and the three new ones"
    assert reused == ids(run(llama, prompt=longer, limit=10))
    rows.clear()
    assert ids(run(llama, cache=cache, limit=10)) == first
    handle.remove()
    assert rows[0] == 1, "one row is left to prefill"


def test_heads_are_asked_once_a_step_and_only_as_deep_as_needed(llama: BaseModel) -> None:
    truth = ids(run(llama))
    cache = KVCache()
    inner = ScriptedDrafter(cache, PROMPT + truth, rank=None)
    asked: list[tuple[tuple[int, ...], int]] = []

    class Watching:
        def propose(
            self, hidden: torch.Tensor, pending: torch.Tensor, heads: int, candidates: int
        ) -> torch.Tensor:
            asked.append((tuple(hidden.shape), heads))
            return inner.propose(hidden, pending, heads, candidates)

    steps = run(llama, CHAIN, Watching(), cache=cache, limit=7)
    assert [heads for _, heads in asked] == [4, 4, 3, 2, 1]
    assert len(steps) == 7, "the last step verifies the root alone"
    assert {shape for shape, _ in asked} == {(llama.hidden_size,)}


def test_no_tensor_is_made_without_its_device(base: BaseModel) -> None:
    """On an accelerator a tensor made on the default device would fail; here meta stands in."""
    expected = ids(run(base))
    for sampling in (
        SamplingConfig(seed=0),
        SamplingConfig(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=1),
        SamplingConfig(temperature=0.7, acceptance=Acceptance.TYPICAL, seed=1),
    ):
        cache = KVCache()
        drafter = ScriptedDrafter(cache, PROMPT + expected, rank=0)
        sampler, budget = Sampler(sampling, CPU), Budget(20, CONTEXT, NO_EOS)
        with torch.device("meta"):
            drafting = StaticDrafting(drafter, CHAIN, CPU)
            steps = list(decode(base, drafting, sampler, PROMPT, cache, budget))
        assert len(ids(steps)) == 20
        if sampling.temperature == 0:
            assert ids(steps) == expected[:20]
