"""A benchmark's result as one value, and as the JSON of schema `medusa.bench/1`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from medusa_cli.bench.arms import Unavailable
from medusa_cli.bench.equality import Equality
from medusa_cli.bench.machine import tree_sha256
from medusa_cli.bench.node_counts import WINDOW, NodeCounts
from medusa_cli.bench.runner import Run
from medusa_cli.bench.statistics import LEVEL, Interval
from medusa_cli.bench.summary import ArmSummary
from medusa_cli.decoding.adaptive import AnyTree
from medusa_cli.text.events import step_milliseconds

SCHEMA = "medusa.bench/1"

TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a benchmark found.

    Attributes:
        model, heads: names as the user gave them; heads None when none were loaded.
        hashes: SHA-256 of weights, heads and prompts.
        settings: what was asked for.
        environment: what it ran on.
        arms: a summary of each arm that ran.
        unavailable: arms that could not.
        runs: the raw samples.
        warnings: why the figures may mislead.
        complete: False when it was interrupted.
    """

    model: str
    heads: str | None
    hashes: dict[str, str]
    settings: dict[str, Any]
    environment: dict[str, Any]
    arms: tuple[ArmSummary, ...]
    unavailable: tuple[Unavailable, ...]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...]
    complete: bool


def to_data(report: BenchReport, token_text: TokenText) -> dict[str, Any]:
    """The JSON object of a report; `tests/schemas/bench.json` is its schema."""
    failed = {arm.name: arm.reason for arm in report.unavailable}
    arms = [_arm(arm, failed.get(arm.info.name), token_text) for arm in report.arms]
    known = {arm.info.name for arm in report.arms}
    arms += [
        {"name": name, "status": "unavailable", "reason": reason}
        for name, reason in failed.items()
        if name not in known
    ]
    return {
        "schema": SCHEMA,
        "complete": report.complete,
        "model": report.model,
        "heads": report.heads,
        "hashes": report.hashes,
        "settings": report.settings,
        "environment": report.environment,
        "confidence_level": LEVEL,
        "arms": arms,
        "samples": [_sample(run) for run in report.runs],
        "warnings": list(report.warnings),
    }


def tree_data(tree: AnyTree | None) -> dict[str, Any] | None:
    """A tree's identity."""
    if tree is None:
        return None
    return {
        "name": tree.name,
        "nodes": tree.nodes,
        "depth": tree.depth,
        "sha256": tree_sha256(tree),
    }


def interval_data(interval: Interval | None) -> dict[str, Any] | None:
    """A ratio with its bounds."""
    return None if interval is None else asdict(interval)


def _arm(arm: ArmSummary, failure: str | None, token_text: TokenText) -> dict[str, Any]:
    return {
        "name": arm.info.name,
        "status": "ok" if failure is None else "failed",
        "reason": failure,
        "kind": arm.info.kind,
        "about": arm.info.about,
        "tree": tree_data(arm.info.tree),
        "acceptance": arm.info.sampling.acceptance if arm.info.tree else None,
        "lossy": arm.info.sampling.lossy and arm.info.tree is not None,
        "runs": arm.runs,
        "tokens": arm.tokens,
        "steps": arm.steps,
        "tokens_per_s": round(arm.tokens_per_second, 3),
        "speedup": interval_data(arm.speedup),
        "over": {name: interval_data(ratio) for name, ratio in arm.over.items()},
        "accept": {
            "mean": arm.mean_accept_length,
            "histogram": arm.accept_lengths,
            "by_depth": arm.accepted_by_depth,
        },
        "nodes": _nodes(arm.nodes),
        "step_ms": step_milliseconds(arm.step_seconds),
        "step_ratio": arm.step_ratio,
        "break_even_step_ratio": arm.mean_accept_length,
        "pays": arm.pays,
        "ttft_s": round(arm.ttft_seconds, 4),
        "prefill_tokens_per_s": round(arm.prefill_tokens_per_second, 2),
        "peak_bytes": arm.peak_bytes,
        "equality": _equality(arm.equality, token_text),
        "categories": [
            {
                "category": row.category,
                "questions": row.questions,
                "tokens_per_s": round(row.tokens_per_second, 3),
                "speedup": interval_data(row.speedup),
                "accept_mean": row.mean_accept_length,
                "nodes_mean": row.mean_nodes,
            }
            for row in arm.categories
        ],
        "looping": arm.looping,
        "ended_early": arm.ended,
        "outliers": arm.outliers,
    }


def _nodes(nodes: NodeCounts | None) -> dict[str, Any] | None:
    if nodes is None:
        return None
    return {
        "mean": round(nodes.mean, 3),
        "max": nodes.most,
        "drafted_steps": nodes.drafted,
        "window": WINDOW,
        "over_time": [round(mean, 3) for mean in nodes.over_time],
    }


def _equality(equality: Equality | None, token_text: TokenText) -> dict[str, Any] | None:
    if equality is None:
        return None

    def token(token_id: int | None) -> dict[str, Any] | None:
        return None if token_id is None else {"id": token_id, "text": token_text(token_id)}

    return {
        "reference": equality.reference,
        "compared": equality.compared,
        "identical": equality.identical,
        "divergences": [
            {
                "question": d.question,
                "turn": d.turn,
                "index": d.index,
                "expected": token(d.expected),
                "got": token(d.got),
                "top2_gap": d.top2_gap,
            }
            for d in equality.divergences
        ],
    }


def _sample(run: Run) -> dict[str, Any]:
    return {
        "arm": run.arm,
        "question": run.question,
        "category": run.category,
        "turn": run.turn,
        "repeat": run.repeat,
        "order": run.order,
        "prompt_tokens": len(run.prompt_ids),
        "token_ids": run.token_ids,
        "first_tokens": run.first_tokens,
        "accept_lengths": run.accept_lengths,
        "nodes": run.nodes,
        "ttft_s": round(run.ttft_seconds, 6),
        "step_s": [round(seconds, 6) for seconds in run.step_seconds],
        "peak_bytes": run.peak_bytes,
        "ended_early": run.ended,
        "loop_period": run.loop_period,
    }
