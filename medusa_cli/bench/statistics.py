"""Statistics of timed runs: paired ratios with bootstrap intervals, outliers.

Pure functions of numbers; nothing here knows where they come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
OUTLIER_FACTOR = 1.5  # a run this much slower than its arm's usual step time was disturbed


@dataclass(frozen=True, slots=True)
class Amount:
    """What one arm did on one question: the two sides of a rate.

    Attributes:
        tokens: emitted behind the first step.
        seconds: that took.
    """

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bootstrap interval.

    Attributes:
        value: over all pairs.
        low, high: bounds at `LEVEL`; None with fewer than two pairs, which tell no spread.
        pairs: how many questions it rests on.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def includes_one(self) -> bool:
        """Whether the data are consistent with no difference."""
        return self.low is not None and self.high is not None and self.low <= 1 <= self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def rate_ratio(
    pairs: Sequence[tuple[Amount, Amount]],  # (this arm, reference) for each question
    seed: int,
) -> Interval | None:
    """Ratio of this arm's tokens per second to the reference's, over the same questions.

    Rates are pooled (all tokens over all seconds); the interval resamples questions, each with
    both its amounts, so that easy and hard questions do not count as noise. None where a side
    has no tokens.

    Source: Efron 1979, percentile bootstrap.
    """
    return _bootstrap(pairs, _ratio, seed)


def ratio_change(
    quads: Sequence[tuple[Amount, Amount, Amount, Amount]],
    seed: int,
) -> Interval | None:
    """How the ratio of two arms changed: (arm / reference) now over the same before.

    Args:
        quads: for each question (arm, reference) now and (arm, reference) before.
    """
    return _bootstrap(quads, lambda t: _ratio(t[..., :4]) / _ratio(t[..., 4:]), seed)


def outliers(step_seconds: Sequence[Sequence[float]]) -> list[int]:
    """Which of an arm's runs took much longer than its usual step time explains."""
    usual = median([s for run in step_seconds for s in run] or [0.0])
    return [
        i
        for i, run in enumerate(step_seconds)
        if run and sum(run) > OUTLIER_FACTOR * usual * len(run)
    ]


def _bootstrap(
    amounts: Sequence[tuple[Amount, ...]],
    statistic: Callable[[np.ndarray], np.ndarray],  # sums of tokens and seconds [..., M] -> [...]
    seed: int,
) -> Interval | None:
    used = [row for row in amounts if all(a.tokens > 0 for a in row)]
    if not used:
        return None
    table = np.array([[x for a in row for x in (a.tokens, a.seconds)] for row in used])  # [Q, M]
    value = float(statistic(table.sum(axis=0)))
    if len(used) < 2:
        return Interval(value, None, None, len(used))
    draws = np.random.default_rng(seed).integers(len(used), size=(RESAMPLES, len(used)))
    values = statistic(table[draws].sum(axis=1))  # [RESAMPLES]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(value, float(low), float(high), len(used))


def _ratio(totals: np.ndarray) -> np.ndarray:  # [..., 4] -> [...]
    tokens_a, seconds_a, tokens_b, seconds_b = np.moveaxis(totals, -1, 0)
    return np.asarray(tokens_a / seconds_a / (tokens_b / seconds_b))
