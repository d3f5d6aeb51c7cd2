"""Lossless against typical acceptance over temperatures: accept length, speed, and divergence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from medusa_cli.bench.report import interval_data
from medusa_cli.bench.runner import Run
from medusa_cli.bench.summary import ArmSummary
from medusa_cli.bench.tables import Table, number
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.sampling import Sampler, typical_set
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache

SCHEMA = "medusa.sweep-temperature/1"
ROWS = 64  # positions read in one forward


@dataclass(frozen=True, slots=True)
class TemperaturePoint:
    """One acceptance rule at one temperature.

    Attributes:
        temperature: at 0 there is only one rule.
        rule: lossless or typical.
        arm: what was measured.
        divergence: mean KL to the base model's distribution, in nats per token; 0 for lossless,
            which draws from that very distribution.
    """

    temperature: float
    rule: Acceptance
    arm: ArmSummary
    divergence: float


@dataclass(frozen=True, slots=True)
class TemperatureSweep:
    """The sweep of one model and tree.

    Attributes:
        model, heads, tree: names.
        where: device and precision, for a title.
        points: by temperature.
        warnings: what to know.
        complete: False when it was interrupted.
    """

    model: str
    heads: str
    tree: str
    where: str
    points: tuple[TemperaturePoint, ...]
    warnings: tuple[str, ...]
    complete: bool

    def of(self, rule: Acceptance) -> list[TemperaturePoint]:
        """The points of one rule, by temperature."""
        return sorted((p for p in self.points if p.rule is rule), key=lambda p: p.temperature)


def mean_divergence(base: BaseModel, runs: Sequence[Run], sampling: SamplingConfig) -> float:
    """Mean KL(q || p) over all tokens of answers made under typical acceptance, in nats.

    p is the base model's distribution at the temperature, before truncation; q the distribution
    that the rule draws the token from, given all before it. An accepted draft is no draw: heads and
    path are fixed by what came before, so q is a point and KL(q || p) = -log p(draft). The token
    behind the path comes from p cut to the typical set S: KL(q || p) = -log p(S), or -log p of the
    argmax with a greedy root.
    """
    sampler = Sampler(sampling, base.device)
    values = [value for run in runs for value in _divergences(base, run, sampler)]
    return sum(values) / len(values) if values else 0.0


@torch.inference_mode()
def _divergences(base: BaseModel, run: Run, sampler: Sampler) -> list[float]:
    start = len(run.prompt_ids)
    ids = torch.tensor([*run.prompt_ids, *run.token_ids], device=base.device)
    drafted = list(_drafted(run))
    cache = KVCache()
    if start > 1:
        base.prefill(ids[: start - 1], cache)
    values: list[float] = []
    for first in range(start - 1, len(ids) - 1, ROWS):
        last = min(first + ROWS, len(ids) - 1)
        logits = base.extend(ids[first:last], cache).logits  # [R, V]
        for row in range(last - first):
            position = first + row + 1  # of the token that this row tells of
            prefix = ids[None, :position] if sampler.needs_prefix else None
            warped = sampler.warp(logits[row : row + 1], prefix)
            log_p = warped.scores[0].log_softmax(dim=-1)  # [V]
            if drafted[position - start] or sampler.config.greedy_root:
                values.append(-float(log_p[ids[position]]))
            else:
                kept = typical_set(warped, sampler.config)[0]
                values.append(-float(log_p[kept].logsumexp(dim=-1)))
    return values


def _drafted(run: Run) -> Sequence[bool]:
    """For each token of an answer whether it was an accepted draft."""
    flags = [False] * run.first_tokens
    for length in run.accept_lengths:
        flags += [True] * (length - 1) + [False]
    return list(islice(flags, len(run.token_ids)))


def tables(sweep: TemperatureSweep) -> list[Table]:
    """One row for each temperature and rule."""
    rows = tuple(
        (
            f"{point.temperature:g}",
            "greedy" if point.temperature == 0 else str(point.rule),
            number(point.arm.mean_accept_length),
            number(point.arm.tokens_per_second),
            str(point.arm.speedup) if point.arm.speedup else number(None),
            number(point.divergence, 3),
        )
        for point in sorted(sweep.points, key=lambda p: (p.temperature, p.rule))
    )
    columns = ("temperature", "rule", "accept", "tok/s", "speedup [95%]", "KL, nats/token")
    notes = (
        "speedup over plain decoding at the same temperature; accept: mean accept length",
        "KL to the base model's distribution: 0 for lossless, which draws from it",
        *(f"warning: {warning}" for warning in sweep.warnings),
    )
    title = f"{sweep.model}, {sweep.where}, tree {sweep.tree}"
    return [Table(title if sweep.complete else f"{title} (partial)", columns, rows, notes)]


def to_data(sweep: TemperatureSweep) -> dict[str, Any]:
    """The JSON object of a sweep."""
    return {
        "schema": SCHEMA,
        "complete": sweep.complete,
        "model": sweep.model,
        "heads": sweep.heads,
        "tree": sweep.tree,
        "where": sweep.where,
        "points": [
            {
                "temperature": point.temperature,
                "rule": point.rule,
                "accept_mean": point.arm.mean_accept_length,
                "tokens_per_s": point.arm.tokens_per_second,
                "speedup": interval_data(point.arm.speedup),
                "kl_nats_per_token": point.divergence,
                "runs": point.arm.runs,
                "tokens": point.arm.tokens,
            }
            for point in sweep.points
        ],
        "warnings": list(sweep.warnings),
    }
