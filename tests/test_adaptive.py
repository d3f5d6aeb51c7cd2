"""The adaptive tree and lookup: the base model's own text, and no loss where drafts are useless."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from conftest import CONTEXT, RandomDrafter, ScriptedDrafter
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.adaptive import AdaptiveDrafting, AutoTree, Pauses, ScoringDrafter, Trust
from medusa_cli.decoding.calibration import uncalibrated
from medusa_cli.decoding.decode import Budget, DecodeStep, decode
from medusa_cli.decoding.drafting import Drafting, StaticDrafting, plain_drafting
from medusa_cli.decoding.lookup import Lookup
from medusa_cli.decoding.sampling import Sampler
from medusa_cli.decoding.step_cost import CostKey, StepCosts
from medusa_cli.decoding.tree import ROOT_ONLY, load_tree, static_tree
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.heads import Candidates

CPU = torch.device("cpu")
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 72, 101, 108]
KEY = CostKey("tiny", "heads", "cpu", "float32", "torch", 1)
FREE = StepCosts(KEY, {1: 1.0, 64: 1.001}, (0.001,) * 4)
LAPTOP = StepCosts(KEY, {1: 1.0, 8: 1.2, 16: 1.5, 32: 2.2, 64: 3.5}, (0.15, 0.17, 0.18, 0.2))
DEAR = StepCosts(KEY, {1: 1.0, 2: 3.0, 64: 90.0}, (0.5,) * 4)
CHAIN = static_tree("chain", [[0], [0, 0], [0, 0, 0]])


def auto(costs: StepCosts, heads: int = 4) -> AutoTree:
    return AutoTree(uncalibrated(heads), costs, heads, ROOT_ONLY)


def run(
    base: BaseModel,
    drafting: Drafting,
    *,
    sampling: SamplingConfig | None = None,
    prompt: list[int] = PROMPT,
    cache: KVCache | None = None,
    limit: int | None = 40,
    context: int = CONTEXT,
) -> list[DecodeStep]:
    sampler, budget = (
        Sampler(sampling or SamplingConfig(seed=0), CPU),
        Budget(limit, context, frozenset()),
    )
    cache = KVCache() if cache is None else cache
    return list(decode(base, drafting, sampler, prompt, cache, budget))


def ids(steps: Sequence[DecodeStep]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def drafters(cache: KVCache, truth: list[int]) -> Iterator[tuple[str, ScoringDrafter]]:
    yield "oracle", ScriptedDrafter(cache, truth, rank=0)
    yield "second", ScriptedDrafter(cache, truth, rank=1)
    yield "anti-oracle", ScriptedDrafter(cache, truth, rank=None)
    yield "random", RandomDrafter(torch.Generator().manual_seed(0))


def draftings(cache: KVCache, truth: list[int]) -> Iterator[tuple[str, Drafting]]:
    for name, drafter in drafters(cache, truth):
        for costs in (FREE, LAPTOP, DEAR):
            for lookup in (None, Lookup()):
                drafting = AdaptiveDrafting(drafter, auto(costs), 0.0, CPU, lookup)
                yield f"{name} {lookup is not None}", drafting
        yield f"static {name}", StaticDrafting(drafter, CHAIN, CPU, Lookup())
        yield f"wide {name}", StaticDrafting(drafter, load_tree("mc_sim_7b_63"), CPU, Lookup())


def test_greedy_text_is_plain_decodings(base: BaseModel) -> None:
    expected = ids(run(base, plain_drafting(CPU)))
    cache = KVCache()
    for name, drafting in draftings(cache, PROMPT + expected):
        cache.keep(0)
        steps = run(base, drafting, cache=cache)
        assert ids(steps) == expected, name


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.8, "repetition_penalty": 1.3}])
def test_seeded_samples_are_plain_decodings(base: BaseModel, extra: dict[str, float]) -> None:
    sampling = SamplingConfig(temperature=0.8, seed=3, **extra)
    expected = ids(run(base, plain_drafting(CPU), sampling=sampling))
    cache = KVCache()
    for name, drafting in draftings(cache, PROMPT + expected):
        cache.keep(0)
        steps = run(base, drafting, sampling=sampling, cache=cache)
        assert ids(steps) == expected, name


def test_typical_acceptance_reads_trees_that_change(llama: BaseModel) -> None:
    sampling = SamplingConfig(temperature=0.8, seed=3, acceptance=Acceptance.TYPICAL)
    cache = KVCache()
    for _, drafting in draftings(cache, PROMPT):
        cache.keep(0)
        assert len(ids(run(llama, drafting, sampling=sampling, cache=cache))) == 40


def test_good_drafts_make_deep_trees_and_bad_ones_none(llama: BaseModel) -> None:
    truth = PROMPT + ids(run(llama, plain_drafting(CPU), limit=100))
    cache = KVCache()
    found = {}
    for name, drafter in drafters(cache, truth):
        cache.keep(0)
        drafting = AdaptiveDrafting(drafter, auto(LAPTOP), 0.0, CPU)
        found[name] = run(llama, drafting, cache=cache, limit=100)
    mean = {name: sum(s.nodes for s in steps[1:]) / len(steps[1:]) for name, steps in found.items()}
    assert max(step.accept_length for step in found["oracle"]) >= 4
    assert len(found["oracle"]) < 40
    assert mean["oracle"] > 4
    assert sum(step.nodes for step in found["anti-oracle"][-30:]) <= 33, "but for a few tries"


def test_trees_shrink_where_a_long_context_makes_nodes_dear() -> None:
    growth = {1: 0.0001, 8: 0.001, 64: 0.01}
    costs = replace(LAPTOP, context=64, growth=growth)
    drafting = AdaptiveDrafting(Talker(0.6, [True]), auto(costs), 0.0, CPU)
    text, nodes = list(range(64)), []
    for length in (64, 256, 1024, 4096):
        text += range(len(text), length)
        draft = drafting.draft(torch.zeros(2), torch.tensor(text[-1]), text, 100)
        nodes.append(draft.tree.nodes)
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > nodes[-1]


def test_a_text_in_a_loop_is_drafted_by_lookup() -> None:
    """Deeper than there are heads, which are useless here and soon left out."""
    text = [*range(30), *range(9)]
    talker = Talker(0.3, [False])
    drafting = AdaptiveDrafting(talker, auto(LAPTOP), 0.0, CPU, Lookup())
    depths = []
    for step in range(40):
        talker.step = step
        draft = drafting.draft(torch.zeros(2), torch.tensor(text[-1]), text, 100)
        depths.append(draft.tree.depth)
        new = [(text[-1] + 1 + i) % 30 for i in range(draft.tree.depth + 1)]
        drafting.observe(new)
        text += new
    assert max(depths[:5]) > 4
    assert len(talker.asked) < 12


@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_no_node_is_deeper_than_may_be_emitted(llama: BaseModel, room: int) -> None:
    prompt = [(7 * (i % 20)) % 251 for i in range(CONTEXT - room)]
    truth = ids(run(llama, plain_drafting(CPU), prompt=prompt, limit=None))
    cache = KVCache()
    positions: list[int] = []
    handle = llama.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: positions.append(int(kwargs["position_ids"].max())),
        with_kwargs=True,
    )
    for _, drafting in draftings(cache, prompt + truth):
        cache.keep(0)
        assert ids(run(llama, drafting, prompt=prompt, cache=cache, limit=None)) == truth
    handle.remove()
    assert max(positions) < CONTEXT


@dataclass
class Talker:
    """States probabilities as told; what it proposes is right or not as told."""

    share: float
    right: Sequence[bool]
    asked: list[int] = field(default_factory=list)
    step: int = 0

    def propose(self, *_arguments: object) -> Tensor:
        raise AssertionError("an adaptive tree asks for probabilities")

    def score(
        self, hidden: Tensor, pending: Tensor, temperatures: Sequence[float], candidates: int
    ) -> Candidates:
        del hidden, pending
        self.asked.append(self.step)
        first = 1 if self.right[self.step % len(self.right)] else 1000
        tokens = torch.arange(first, first + candidates).expand(len(temperatures), -1)
        rest = (0.99 - self.share) / candidates
        shares = torch.tensor([self.share] + [rest] * (candidates - 1))
        return Candidates(tokens, shares.log().expand(len(temperatures), -1))


def seconds_of(talker: Talker, costs: StepCosts, tokens: int) -> float:
    """Time by the cost table to emit `tokens` tokens, all of which are token 1."""
    drafting = AdaptiveDrafting(talker, auto(costs), 0.0, CPU)
    text, spent = [5], 0.0
    while len(text) <= tokens:
        before = len(talker.asked)
        draft = drafting.draft(torch.zeros(2), torch.tensor(text[-1]), text, tokens - len(text))
        heads = min(4, tokens - len(text))
        spent += costs.at(draft.tree.nodes)
        spent += costs.drafting(heads) if len(talker.asked) > before else 0.0
        accepted, node = 0, 0
        parents, held = draft.tree.parents.tolist(), draft.tokens.tolist()
        while True:
            child = [n for n in range(len(held)) if parents[n] == node and held[n] == 1]
            if not child:
                break
            node, accepted = child[0], accepted + 1
        new = [1] * (accepted + 1)
        drafting.observe(new)
        text += new
        talker.step += 1
    return spent


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("costs", [LAPTOP, DEAR], ids=["laptop", "dear"])
def test_useless_heads_cost_at_most_a_twentieth(share: float, costs: StepCosts) -> None:
    """However sure they are of themselves; over the 128 tokens that a benchmark has."""
    for tokens, most in ((128, 1.05), (512, 1.03)):
        talker = Talker(share, [False])
        assert seconds_of(talker, costs, tokens) < most * tokens * costs.at(1)


def test_good_heads_are_asked_at_every_step() -> None:
    talker = Talker(0.7, [True])
    assert seconds_of(talker, LAPTOP, 128) < 0.45 * 128
    assert talker.asked == list(range(len(talker.asked)))


def test_heads_come_back_when_they_are_right_again() -> None:
    """Useless for a long time, then right: after one longest pause they draft at every step."""
    talker = Talker(0.6, [False] * 100 + [True] * 1000)
    seconds_of(talker, LAPTOP, 600)
    late = [step for step in talker.asked if step >= 130]
    assert late == list(range(130, late[-1] + 1))
    assert len([step for step in talker.asked if 40 <= step < 100]) <= 7


def test_pauses_double_up_to_the_longest() -> None:
    pauses, asked = Pauses(longest=8), []
    for step in range(60):
        if pauses.due():
            asked.append(step)
            pauses.observe(-0.2)
    assert [b - a - 1 for a, b in zip(asked, asked[1:], strict=False)][:6] == [1, 2, 4, 8, 8, 8]
    pauses.observe(+3.0)
    assert pauses.due()
    assert pauses.due()


def test_trust_goes_where_the_figures_go() -> None:
    trust = Trust()
    assert trust.value == 1
    for _ in range(50):
        trust.observe(expected=1.0, accepted=0.5)
    assert trust.value == pytest.approx(0.5, abs=0.06)
    for _ in range(50):
        trust.observe(expected=1.0, accepted=1.0)
    assert trust.value == pytest.approx(1.0, abs=0.06)


def test_static_trees_take_the_branch_in(llama: BaseModel) -> None:
    drafter = ScriptedDrafter(KVCache(), PROMPT, rank=None)
    drafting = StaticDrafting(drafter, CHAIN, CPU, Lookup())
    text = [1, 2, 77, 78, 79, 1, 2]
    hidden = torch.zeros(llama.hidden_size)
    draft = drafting.draft(hidden, torch.tensor(2), text, 6)
    alone = StaticDrafting(drafter, CHAIN, CPU).draft(hidden, torch.tensor(2), text, 6)
    assert draft.tree.depth == 6
    assert draft.tree.nodes == alone.tree.nodes + 6
    assert set(alone.tokens.tolist()) <= set(draft.tokens.tolist())
    same = StaticDrafting(
        ScriptedDrafter(KVCache(), [0, 77, 78, 79, 1], rank=0), CHAIN, CPU, Lookup()
    )
    merged = same.draft(hidden, torch.tensor(2), text, 3)
    assert merged.tokens.tolist() == [2, 77, 78, 79], "tokens that coincide share their nodes"
