"""A benchmark's result as tables for a terminal, Markdown and CSV."""

from collections.abc import Sequence
from statistics import fmean

from medusa_cli.bench.arms import PLAIN, ArmKind
from medusa_cli.bench.equality import Divergence, Equality
from medusa_cli.bench.honesty import break_even
from medusa_cli.bench.node_tables import nodes_tables
from medusa_cli.bench.report import BenchReport, TokenText
from medusa_cli.bench.summary import ArmSummary, CategorySummary
from medusa_cli.bench.tables import MISSING, Table, number
from medusa_cli.models.storage import human_bytes

SHOWN_DIVERGENCES = 3
LONGEST = 8  # accept lengths from here on share a column
_COLUMNS = ("arm", "tok/s", "speedup [95%]", "accept", "step ms", "cost", "same")


def tables(report: BenchReport, token_text: TokenText) -> list[Table]:
    """All tables of a report, the most important first."""
    found = [_arms(report, token_text)]
    drafting = [arm for arm in report.arms if arm.accept_lengths]
    if any(row.category for arm in report.arms for row in arm.categories):
        found.append(_categories(report.arms))
    if drafting:
        found.append(_lengths(drafting))
    if any(arm.accepted_by_depth for arm in drafting):
        found.append(_depths(drafting))
    found += nodes_tables(report.arms)
    if any(arm.over for arm in report.arms):
        found.append(_over(report.arms))
    found.append(_beyond(report.arms))
    return found


def _arms(report: BenchReport, token_text: TokenText) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            arm.info.name,
            number(arm.tokens_per_second),
            str(arm.speedup) if arm.speedup else ("1" if arm.info.name == PLAIN else MISSING),
            number(arm.mean_accept_length),
            number(1000 * fmean(arm.step_seconds) if arm.step_seconds else None, 1),
            number(arm.step_ratio),
            _same(arm.equality, reference=arm.info.comparable),
        )
        for arm in report.arms
    ]
    ran = {arm.info.name for arm in report.arms}
    absent = [arm for arm in report.unavailable if arm.name not in ran]
    rows += [(arm.name, *[MISSING] * (len(_COLUMNS) - 2), "cannot run") for arm in absent]
    notes = [
        "accept: mean accept length; cost: of a step, over a plain one's; same: answers with the "
        "reference's tokens"
    ]
    notes += [line for arm in report.arms if (line := break_even(arm)) is not None]
    notes += [f"{arm.name}: {arm.reason}" for arm in report.unavailable]
    for arm in report.arms:
        if arm.equality is not None:
            shown = arm.equality.divergences[:SHOWN_DIVERGENCES]
            notes += [f"{arm.info.name}: {_divergence(d, token_text)}" for d in shown]
    notes += [f"warning: {warning}" for warning in report.warnings]
    title = report.model if report.complete else f"{report.model} (partial)"
    return Table(f"{title}, {_conditions(report)}", _COLUMNS, tuple(rows), tuple(notes))


def _conditions(report: BenchReport) -> str:
    environment, runs = report.environment, report.runs
    prompts = len({(run.question, run.turn) for run in runs})
    return (
        f"{environment['dtype']} on {environment['device_name']}, {environment['threads']} "
        f"threads, {prompts} prompts, {report.settings['max_new_tokens']} new tokens, "
        f"temperature {report.settings['temperature']:g}"
    )


def _same(equality: Equality | None, *, reference: bool) -> str:
    if equality is None:
        return "reference" if reference else "lossy"
    return f"{equality.identical}/{equality.compared}"


def _divergence(d: Divergence, token_text: TokenText) -> str:
    def token(token_id: int | None) -> str:
        return "the end" if token_id is None else repr(token_text(token_id))

    gap = "" if d.top2_gap is None else f", top-2 logit gap {d.top2_gap:.2g}"
    return (
        f"{d.question}/{d.turn + 1} differs first at token {d.index + 1}: {token(d.got)} for "
        f"{token(d.expected)}{gap}"
    )


def _categories(arms: Sequence[ArmSummary]) -> Table:
    """One row for each category; every arm has a column of speed and accept length."""
    categories = dict.fromkeys(row.category for arm in arms for row in arm.categories)
    rows = []
    for category in categories:
        found = [next((r for r in a.categories if r.category == category), None) for a in arms]
        questions = max((row.questions for row in found if row is not None), default=0)
        rows.append((category or MISSING, str(questions), *map(_category, found)))
    columns = ("category", "questions", *(f"{arm.info.name}" for arm in arms))
    note = "speedup over plain decoding and mean accept length"
    return Table("By category", columns, tuple(rows), (note,))


def _category(row: CategorySummary | None) -> str:
    if row is None:
        return MISSING
    rate = f"{row.tokens_per_second:.1f} tok/s"
    parts = [rate if row.speedup is None else f"{row.speedup.value:.2f}x"]
    if row.mean_accept_length is not None:
        parts.append(f"{row.mean_accept_length:.2f}")
    return " · ".join(parts)


def _lengths(arms: Sequence[ArmSummary]) -> Table:
    found = max(length for arm in arms for length in arm.accept_lengths)
    longest = min(found, LONGEST)
    rows = []
    for arm in arms:
        steps = sum(arm.accept_lengths.values())
        shares = [arm.accept_lengths.get(length, 0) / steps for length in range(1, longest)]
        shares.append(1 - sum(shares))
        rows.append((arm.info.name, str(steps), *(f"{share:.0%}" for share in shares)))
    last = f"{longest}+" if found > longest else str(longest)
    columns = ("arm", "steps", *map(str, range(1, longest)), last)
    note = "accept length: tokens accepted by one verification, the base token included"
    return Table("Share of steps with each accept length", columns, tuple(rows), (note,))


def _depths(arms: Sequence[ArmSummary]) -> Table:
    deepest = min(max(len(arm.accepted_by_depth) for arm in arms), LONGEST - 1)
    rows = []
    for arm in arms:
        reached = [f"{share:.0%}" for share in arm.accepted_by_depth[:deepest]]
        rows.append((arm.info.name, *reached, *[MISSING] * (deepest - len(reached))))
    columns = ("arm", *(f"depth {depth}" for depth in range(1, deepest + 1)))
    return Table("Share of steps that accept a draft at each depth", columns, tuple(rows))


def _over(arms: Sequence[ArmSummary]) -> Table:
    peers = [arm.info.name for arm in arms if arm.info.kind is ArmKind.PEER]
    own = [arm for arm in arms if arm.info.kind is not ArmKind.PEER]
    rows = tuple(
        (arm.info.name, *(str(arm.over[p]) if p in arm.over else MISSING for p in peers))
        for arm in own
    )
    columns = ("arm", *(f"over {peer}" for peer in peers))
    return Table("Ratio of tokens/s to other decoders", columns, rows)


def _beyond(arms: Sequence[ArmSummary]) -> Table:
    rows = tuple(
        (
            arm.info.name,
            number(arm.ttft_seconds),
            number(arm.prefill_tokens_per_second, 0),
            human_bytes(arm.peak_bytes),
            f"{arm.ended}/{arm.runs}",
            f"{arm.looping}/{arm.runs}",
        )
        for arm in arms
    )
    columns = ("arm", "TTFT s", "prefill tok/s", "peak memory", "ended early", "looping")
    note = "TTFT: to the end of the first step; peak memory of the whole process on a CPU"
    return Table("Prompts, memory and answers", columns, rows, (note,))
