"""From runs to what a report says of each arm. Pure functions; nothing here reads a clock."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from medusa_cli.bench.arms import PLAIN, ArmInfo, ArmKind
from medusa_cli.bench.equality import Equality, Gap, compare
from medusa_cli.bench.node_counts import NodeCounts, mean_nodes, node_counts
from medusa_cli.bench.runner import Run
from medusa_cli.bench.statistics import Amount, Interval, outliers, rate_ratio


@dataclass(frozen=True, slots=True)
class CategorySummary:
    """One arm on the questions of one category.

    Attributes:
        category: '' where the prompts name none.
        questions: how many.
        tokens_per_second: pooled.
        speedup: over plain decoding; None without it.
        mean_accept_length: pooled over steps; None where the arm does not speculate.
        mean_nodes: of a step; None where the arm does not speculate with trees.
    """

    category: str
    questions: int
    tokens_per_second: float
    speedup: Interval | None
    mean_accept_length: float | None
    mean_nodes: float | None = None


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """What a benchmark says of one arm.

    Attributes:
        info: the arm.
        runs, tokens, steps: counts; tokens are all that were emitted.
        tokens_per_second: tokens behind each answer's first step over the time that they took.
        speedup: ratio to plain decoding's rate, paired by question; None for plain itself.
        accept_lengths: how many steps had which accept length; empty without speculation.
        step_seconds: of all steps behind the first.
        step_ratio: mean step time over plain decoding's.
        ttft_seconds: mean over runs, from the start to the end of the first step.
        prefill_tokens_per_second: prompt tokens over that time, pooled.
        peak_bytes: most memory in use at the end of a step.
        equality: None where tokens need not be the same.
        categories: in the order of the prompts.
        looping, ended, outliers: how many runs loop, end before the token limit, were disturbed.
        over: ratios to each peer's rate, by name.
        nodes: how many its steps verified; None without trees.
    """

    info: ArmInfo
    runs: int
    tokens: int
    steps: int
    tokens_per_second: float
    speedup: Interval | None
    accept_lengths: dict[int, int]
    step_seconds: tuple[float, ...]
    step_ratio: float | None
    ttft_seconds: float
    prefill_tokens_per_second: float
    peak_bytes: int
    equality: Equality | None
    categories: tuple[CategorySummary, ...]
    looping: int
    ended: int
    outliers: int
    over: dict[str, Interval]
    nodes: NodeCounts | None = None

    @property
    def mean_accept_length(self) -> float | None:
        """Sum of accept lengths over the number of steps; None without speculation."""
        return _mean_length(self.accept_lengths)

    @property
    def accepted_by_depth(self) -> tuple[float, ...]:
        """Share of steps in which a draft at depth 1, 2, ... was accepted."""
        steps = sum(self.accept_lengths.values())
        deepest = max(self.accept_lengths, default=1)
        return tuple(
            sum(n for length, n in self.accept_lengths.items() if length > depth) / steps
            for depth in range(1, deepest)
        )

    @property
    def pays(self) -> bool | None:
        """Whether more tokens per step outweigh dearer steps; None where it cannot be told."""
        if self.step_ratio is None or self.mean_accept_length is None:
            return None
        return self.mean_accept_length > self.step_ratio


def summarise(
    infos: Sequence[ArmInfo], runs: Sequence[Run], gap: Gap, seed: int
) -> list[ArmSummary]:
    """One summary for each arm that has runs, in the order given.

    Args:
        gap: tells the top-2 logit gap where an arm diverges.
        seed: of the bootstrap.
    """
    by_arm: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_arm[run.arm].append(run)
    present = [info for info in infos if by_arm[info.name]]
    comparable = [info for info in present if info.comparable]
    reference = by_arm[comparable[0].name] if comparable else []
    peers = [info.name for info in present if info.kind is ArmKind.PEER]
    plain = by_arm[PLAIN]
    summaries = []
    for info in present:
        own = by_arm[info.name]
        check = info.comparable and own is not reference
        steps = tuple(seconds for run in own for seconds in run.step_seconds)
        plain_steps = [seconds for run in plain for seconds in run.step_seconds]
        ratio = fmean(steps) / fmean(plain_steps) if steps and plain_steps else None
        ratios = (
            {peer: _ratio(own, by_arm[peer], seed) for peer in peers if peer != info.name}
            if info.kind is not ArmKind.PEER
            else {}
        )
        summaries.append(
            ArmSummary(
                info=info,
                runs=len(own),
                tokens=sum(len(run.token_ids) for run in own),
                steps=len(steps),
                tokens_per_second=_rate(own),
                speedup=None if info.name == PLAIN else _ratio(own, plain, seed),
                accept_lengths=_lengths(info, own),
                step_seconds=steps,
                step_ratio=None if info.name == PLAIN else ratio,
                ttft_seconds=fmean(run.ttft_seconds for run in own),
                prefill_tokens_per_second=sum(len(run.prompt_ids) for run in own)
                / sum(run.ttft_seconds for run in own),
                peak_bytes=max(run.peak_bytes for run in own),
                equality=compare(own, reference, gap) if check else None,
                categories=_categories(info, own, plain, seed),
                looping=sum(run.loop_period is not None for run in own),
                ended=sum(run.ended for run in own),
                # Steps of a peer that speculates differ by nature.
                outliers=0
                if info.kind is ArmKind.PEER
                else len(outliers([run.step_seconds for run in own])),
                over={peer: ratio for peer, ratio in ratios.items() if ratio is not None},
                nodes=node_counts(own) if info.kind is ArmKind.MEDUSA else None,
            )
        )
    return summaries


def amounts(runs: Sequence[Run]) -> dict[str, Amount]:
    """What an arm decoded, by question: its turns and repeats belong together."""
    tokens: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for run in runs:
        tokens[run.question] += run.decoded.tokens
        seconds[run.question] += run.decoded.seconds
    return {question: Amount(tokens[question], seconds[question]) for question in tokens}


def _ratio(runs: Sequence[Run], reference: Sequence[Run], seed: int) -> Interval | None:
    own, other = amounts(runs), amounts(reference)
    return rate_ratio([(own[q], other[q]) for q in own if q in other], seed)


def _rate(runs: Sequence[Run]) -> float:
    seconds = sum(run.decoded.seconds for run in runs)
    return sum(run.decoded.tokens for run in runs) / seconds if seconds > 0 else 0.0


def _lengths(info: ArmInfo, runs: Sequence[Run]) -> dict[int, int]:
    if info.kind is ArmKind.PLAIN:
        return {}
    return dict(sorted(Counter(n for run in runs for n in run.accept_lengths).items()))


def _mean_length(lengths: dict[int, int]) -> float | None:
    steps = sum(lengths.values())
    return sum(length * n for length, n in lengths.items()) / steps if steps else None


def _categories(
    info: ArmInfo, runs: Sequence[Run], plain: Sequence[Run], seed: int
) -> tuple[CategorySummary, ...]:
    summaries = []
    for category in dict.fromkeys(run.category for run in runs):
        own = [run for run in runs if run.category == category]
        summaries.append(
            CategorySummary(
                category,
                len({run.question for run in own}),
                _rate(own),
                None if info.name == PLAIN else _ratio(own, plain, seed),
                _mean_length(_lengths(info, own)),
                mean_nodes(own) if info.kind is ArmKind.MEDUSA else None,
            )
        )
    return tuple(summaries)
