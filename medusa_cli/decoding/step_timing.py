"""Timing decode steps: any trees side by side, or quickly the table that choosing needs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from medusa_cli.config import SamplingConfig
from medusa_cli.decoding.adaptive import ScoringDrafter
from medusa_cli.decoding.decode import verify
from medusa_cli.decoding.drafting import Draft, Drafter, StaticDrafting
from medusa_cli.decoding.sampling import Sampler
from medusa_cli.decoding.step_cost import CostKey, StepCosts
from medusa_cli.decoding.tree import Tree
from medusa_cli.decoding.tree_buffers import shape_buffers
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache

CONTEXT = 256  # valid KV rows at which trees are timed
ROUNDS = 7
TABLE_CONTEXT = 64  # of the quick table: its prefill counts, too
TABLE_SECONDS = 3.0
TABLE_ROUNDS = 15  # at most; fast steps are noisy and have time for many
# The order in which counts are timed, so that time that runs out leaves a coarse table.
TABLE_NODES = (1, 8, 32, 4, 16, 64, 2, 12, 24, 48, 6, 40)
FEWEST_COUNTS = 3
FAR_CONTEXT = 1024  # where the same steps are timed again: what attention costs grows with it
FAR_NODES = (1, 8, 32)
FAR_SHARE = 0.3  # of the budget, on top


def measure_step_seconds(
    base: BaseModel,
    drafter: Drafter | None,
    trees: Mapping[str, Tree],
    report: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.perf_counter,
    should_stop: Callable[[], bool] = lambda: False,
    rounds: int = ROUNDS,
    context: int = CONTEXT,
) -> dict[str, float]:
    """Median seconds of a greedy step with each tree, on `context` rows of made-up text.

    Rounds go over all trees forwards and backwards in turn, so that drift hits all alike; the
    first one is not counted. Every step reads its tokens back to the host, which waits for the
    device. When `should_stop` says so after the first counted round, the rounds made so far count.
    """
    bench = _Bench(base, context)
    draftings = {
        name: StaticDrafting(drafter if tree.depth else None, tree, base.device)
        for name, tree in trees.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(rounds + 1):
        if turn > 1 and should_stop():
            break
        report(f"timing steps, round {turn} of {rounds}" if turn else "warming up")
        order = list(draftings) if turn % 2 else list(draftings)[::-1]
        for name in order:
            drafting = draftings[name]
            started = clock()
            bench.verify(drafting.draft(bench.hidden, bench.pending, (), context))
            if turn:
                taken[name].append(clock() - started)
            bench.rewind()
    return {name: median(seconds) for name, seconds in taken.items()}


def measure_costs(
    base: BaseModel,
    drafter: ScoringDrafter,
    num_heads: int,
    candidates: int,
    key: CostKey,
    clock: Callable[[], float] = time.perf_counter,
    budget: float = TABLE_SECONDS,
) -> StepCosts:
    """Times the heads and steps over more and more nodes, for about `budget` seconds.

    Of each the fastest time counts: what disturbs a step only makes it slower. A slow model is
    timed on fewer counts. Some steps are timed once more on a longer context, if the model has one.
    """
    bench = _Bench(base, TABLE_CONTEXT)
    drafts = {n: _flat_draft(bench.pending, n) for n in TABLE_NODES}
    verified: dict[int, float] = {}
    drafted: dict[int, float] = {}
    bench.verify(drafts[1])  # what is done once is not counted
    bench.rewind()
    deadline = clock() + budget
    for turn in range(TABLE_ROUNDS):
        for heads in range(1, num_heads + 1):
            started = clock()
            drafter.score(
                bench.hidden, bench.pending, (1.0,) * heads, candidates
            ).log_probs.tolist()  # host sync
            _keep_fastest(drafted, heads, clock() - started, first=turn == 0)
        for n, draft in drafts.items():
            enough = turn > 0 or len(verified) >= FEWEST_COUNTS
            if enough and clock() > deadline:
                break
            started = clock()
            bench.verify(draft)
            _keep_fastest(verified, n, clock() - started, first=turn == 0)
            bench.rewind()
        if clock() > deadline:
            break
    costs = StepCosts(
        key, dict(sorted(verified.items())), tuple(drafted.values()), context=TABLE_CONTEXT
    )
    depth = max(int(draft.tree.depths.max()) for draft in drafts.values())
    far = min(FAR_CONTEXT, (base.context_length or FAR_CONTEXT) - depth - 1)
    if far <= TABLE_CONTEXT:
        return costs
    bench.lengthen(far - TABLE_CONTEXT)
    later = _far_seconds(bench, drafts, clock, budget * FAR_SHARE)
    growth = {
        n: max(0.0, seconds - costs.at(n)) / (far - TABLE_CONTEXT) for n, seconds in later.items()
    }
    return replace(costs, growth=growth)


def _far_seconds(
    bench: "_Bench", drafts: Mapping[int, Draft], clock: Callable[[], float], budget: float
) -> dict[int, float]:
    """Fastest seconds of a step over each of `FAR_NODES` nodes."""
    seconds: dict[int, float] = {}
    bench.verify(drafts[1])
    bench.rewind()
    deadline = clock() + budget
    for turn in range(TABLE_ROUNDS):
        for n in FAR_NODES:
            started = clock()
            bench.verify(drafts[n])
            _keep_fastest(seconds, n, clock() - started, first=turn == 0)
            bench.rewind()
        if clock() > deadline:
            break
    return seconds


class _Bench:
    """A model in the middle of some made-up text."""

    def __init__(self, base: BaseModel, context: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(base.vocab_size, (context,), generator=generator).to(base.device)
        self._base, self._context, self._cache = base, context, KVCache()
        self._sampler = Sampler(SamplingConfig(seed=0), base.device)
        output = base.prefill(ids, self._cache)
        self._cache.append(ids.tolist())
        self.hidden, self.pending = output.hidden[0], output.logits[0].argmax()

    def lengthen(self, rows: int) -> None:
        """Adds rows of zeros to the context: time does not depend on what they hold."""
        self._cache.lengthen(rows)
        self._context += rows

    def verify(self, draft: Draft) -> None:
        """One verification, up to its tokens on the host."""
        verify(self._base, self._sampler, draft, self._cache)

    def rewind(self) -> None:
        """Takes the last verification back."""
        self._cache.keep(self._context)


def _flat_draft(pending: Tensor, nodes: int) -> Draft:
    """A tree of `nodes` nodes, two levels deep as typical ones are."""
    tokens = torch.arange(nodes, device=pending.device)
    tokens[0] = pending
    first = (nodes - 1) // 2
    parents = [-1, *[0] * (nodes - 1 - first), *range(1, 1 + first)]
    return Draft(tokens, shape_buffers(parents, pending.device))


def _keep_fastest(found: dict[int, float], key: int, seconds: float, *, first: bool) -> None:
    found[key] = seconds if first or key not in found else min(found[key], seconds)
