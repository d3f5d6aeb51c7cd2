"""What changed between two reports of `bench`."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.bench.arms import PLAIN
from medusa_cli.bench.report import SCHEMA, interval_data
from medusa_cli.bench.statistics import Amount, Interval, rate_ratio, ratio_change
from medusa_cli.bench.tables import MISSING, Table, number
from medusa_cli.errors import UsageError

COMPARISON_SCHEMA = "medusa.compare/1"
_IGNORED = {"seed", "trees", "against"}


@dataclass(frozen=True, slots=True)
class ArmChange:
    """One arm that both reports have.

    Attributes:
        name: of the arm.
        rates: its tokens per second before and after.
        rate_change: after over before, paired by question.
        speedup_change: the same for its ratio to plain decoding, which a slower machine does not
            move; None for plain itself or without it.
        accept_lengths: means before and after; None without speculation.
        step_ms: means before and after.
        identical, compared: answers that are token for token the same in both.
    """

    name: str
    rates: tuple[float, float]
    rate_change: Interval | None
    speedup_change: Interval | None
    accept_lengths: tuple[float | None, float | None]
    step_ms: tuple[float, float]
    identical: int
    compared: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports side by side.

    Attributes:
        before, after: their names.
        arms: those that both have.
        only: arms that one of them lacks, in words.
        differences: settings, hashes and environment that differ, in words.
    """

    before: str
    after: str
    arms: tuple[ArmChange, ...]
    only: tuple[str, ...]
    differences: tuple[str, ...]


def read_report(path: Path) -> dict[str, Any]:
    """A report that `bench --export` or `--format json` wrote.

    Raises:
        UsageError: it cannot be read or is something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as a report: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a report of `medusa bench` ({SCHEMA})")
    return data


def compare(before: Path, after: Path, seed: int) -> Comparison:
    """Compares two reports, arm by arm, on the questions that both have.

    Raises:
        UsageError: one cannot be read, or they have no arm in common.
    """
    a, b = read_report(before), read_report(after)
    try:
        return _compare(a, b, (str(before), str(after)), seed)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{before} or {after} is damaged: {error}") from None


def _compare(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str], seed: int) -> Comparison:
    arms = [{arm["name"]: arm for arm in data["arms"] if arm.get("runs")} for data in (a, b)]
    shared = [name for name in arms[0] if name in arms[1]]
    if not shared:
        raise UsageError(f"{names[0]} and {names[1]} have no arm in common")
    amounts = [_amounts(data) for data in (a, b)]
    answers = [_answers(data) for data in (a, b)]
    changes = []
    for name in shared:
        old, new = amounts[0][name], amounts[1][name]
        plain = [amounts[i].get(PLAIN, {}) for i in (0, 1)]
        both = [q for q in old if q in new]
        relative = [q for q in both if q in plain[0] and q in plain[1]]
        quads = [(new[q], plain[1][q], old[q], plain[0][q]) for q in relative]
        keys = [key for key in answers[0][name] if key in answers[1][name]]
        x, y = arms[0][name], arms[1][name]
        changes.append(
            ArmChange(
                name=name,
                rates=(x["tokens_per_s"], y["tokens_per_s"]),
                rate_change=rate_ratio([(new[q], old[q]) for q in both], seed),
                speedup_change=None if name == PLAIN else ratio_change(quads, seed),
                accept_lengths=(x["accept"]["mean"], y["accept"]["mean"]),
                step_ms=(x["step_ms"]["mean"], y["step_ms"]["mean"]),
                identical=sum(answers[0][name][key] == answers[1][name][key] for key in keys),
                compared=len(keys),
            )
        )
    only = [f"{name} only in {names[i]}" for i in (0, 1) for name in arms[i] if name not in shared]
    return Comparison(*names, tuple(changes), tuple(only), tuple(_differences(a, b)))


def tables(comparison: Comparison) -> list[Table]:
    """One row for each arm that both reports have."""
    rows = tuple(
        (
            change.name,
            f"{change.rates[0]:.2f} > {change.rates[1]:.2f}",
            _interval(change.rate_change),
            _interval(change.speedup_change),
            f"{number(change.accept_lengths[0])} > {number(change.accept_lengths[1])}",
            f"{change.step_ms[0]:.1f} > {change.step_ms[1]:.1f}",
            f"{change.identical}/{change.compared}",
        )
        for change in comparison.arms
    )
    columns = ("arm", "tok/s", "change [95%]", "speedup [95%]", "accept", "step ms", "same")
    unmoved = [c.name for c in comparison.arms if c.rate_change and c.rate_change.includes_one]
    notes = (
        "change: tokens/s after over before, on the same questions; speedup: change of the ratio "
        "to plain decoding, which a slower or busier machine does not move; same: answers",
        *([f"no difference in tokens/s was shown for {', '.join(unmoved)}"] if unmoved else []),
        *comparison.only,
        *(f"differs: {line}" for line in comparison.differences),
    )
    return [Table(f"{comparison.before} > {comparison.after}", columns, rows, notes)]


def to_data(comparison: Comparison) -> dict[str, Any]:
    """The JSON object of a comparison."""
    return {
        "schema": COMPARISON_SCHEMA,
        "before": comparison.before,
        "after": comparison.after,
        "arms": [
            {
                "name": change.name,
                "tokens_per_s": change.rates,
                "rate_change": interval_data(change.rate_change),
                "speedup_change": interval_data(change.speedup_change),
                "accept_mean": change.accept_lengths,
                "step_ms": change.step_ms,
                "identical": change.identical,
                "compared": change.compared,
            }
            for change in comparison.arms
        ],
        "only": list(comparison.only),
        "differences": list(comparison.differences),
    }


def _interval(interval: Interval | None) -> str:
    return MISSING if interval is None else str(interval)


def _amounts(data: dict[str, Any]) -> dict[str, dict[str, Amount]]:
    """What each arm decoded, by question."""
    tokens: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for run in data["samples"]:
        arm, question = run["arm"], run["question"]
        tokens[arm][question] += len(run["token_ids"]) - run["first_tokens"]
        seconds[arm][question] += sum(run["step_s"])
    return {
        arm: {q: Amount(count, seconds[arm][q]) for q, count in questions.items()}
        for arm, questions in tokens.items()
    }


def _answers(data: dict[str, Any]) -> dict[str, dict[tuple[str, int], list[int]]]:
    """The first answer of each arm to each prompt."""
    found: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(dict)
    for run in data["samples"]:
        found[run["arm"]].setdefault((run["question"], run["turn"]), run["token_ids"])
    return found


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    lines = [] if a["model"] == b["model"] else [f"model: {a['model']} > {b['model']}"]
    for part in ("settings", "environment", "hashes"):
        for key in sorted(a[part].keys() | b[part].keys()):
            x, y = a[part].get(key), b[part].get(key)
            if x != y and key not in _IGNORED:
                lines.append(f"{key}: {_short(x)} > {_short(y)}")
    for name, data in (("first", a), ("second", b)):
        if not data["complete"]:
            lines.append(f"the {name} report is partial")
    return lines


def _short(value: Any) -> str:
    text = MISSING if value is None else str(value)
    return text[:12] if len(text) == 64 else text  # a hash
