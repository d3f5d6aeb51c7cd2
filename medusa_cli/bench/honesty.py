"""What a report must say against its own figures."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.bench.arms import ArmKind
from medusa_cli.bench.runner import Run
from medusa_cli.bench.summary import ArmSummary

BUSY_SHARE = 0.1  # of the machine, by others
EARLY_SHARE = 0.25  # of the answers
SILENT_STEPS = 16  # steps without one accepted draft that say the heads do not fit


@dataclass(frozen=True, slots=True)
class Conditions:
    """What went on around the runs.

    Attributes:
        other_load: share of the machine's cores that others used, 0 to 1.
        random_prompts: ids of questions that read like noise to the model.
        trained_on: names of trees that were built from the very prompts that are run.
        skipped: prompts that do not fit the context.
        complete: False when the measurement was interrupted.
    """

    other_load: float
    random_prompts: Sequence[str] = ()
    trained_on: Sequence[str] = ()
    skipped: Sequence[str] = ()
    complete: bool = True


def warnings(arms: Sequence[ArmSummary], runs: Sequence[Run], around: Conditions) -> list[str]:
    """Reasons for which a reader may be misled, the gravest first."""
    found: list[str] = []
    if not around.complete:
        found.append("partial: interrupted before everything was measured")
    for arm in arms:
        found += _about_arm(arm)
    found += _about_answers(arms, runs)
    if around.other_load >= BUSY_SHARE:
        found.append(
            f"other processes used {around.other_load:.0%} of this machine meanwhile: "
            "times are noisy; ratios suffer less"
        )
    if around.random_prompts:
        found.append(
            f"{len(around.random_prompts)} prompts read like random tokens to this model "
            f"({', '.join(around.random_prompts[:3])}): accept lengths on them mean nothing"
        )
    for tree in around.trained_on:
        found.append(f"tree {tree} was built from these very prompts: its figures flatter it")
    if around.skipped:
        found.append(f"{len(around.skipped)} prompts do not fit the context and were left out")
    return found


def break_even(arm: ArmSummary) -> str | None:
    """One line on whether an arm's longer steps pay; None where there is nothing to compare."""
    length, ratio = arm.mean_accept_length, arm.step_ratio
    if length is None or ratio is None or arm.info.kind is not ArmKind.MEDUSA:
        return None
    verdict = "it pays" if arm.pays else "speculation does not pay here"
    return (
        f"{arm.info.name}: a step costs {ratio:.2f}x a plain one; "
        f"break-even at {length:.2f}x, its accept length: {verdict}"
    )


def _about_arm(arm: ArmSummary) -> list[str]:
    name, found = arm.info.name, []
    if arm.equality is not None and arm.equality.divergences:
        ties = sum(d.near_tie for d in arm.equality.divergences)
        found.append(
            f"{name} gives other tokens than {arm.equality.reference} on "
            f"{len(arm.equality.divergences)} of {arm.equality.compared} answers ({ties} at a "
            "near-tie): speeds are of different texts"
        )
    if arm.speedup is not None and arm.speedup.low is None:
        found.append(f"{name}: one question gives no interval; run more")
    elif arm.speedup is not None and arm.speedup.includes_one:
        found.append(f"{name}: the interval {arm.speedup} includes 1: no difference was shown")
    steps = sum(arm.accept_lengths.values()) if arm.nodes is None else arm.nodes.drafted
    if arm.info.kind is ArmKind.MEDUSA and steps >= SILENT_STEPS and max(arm.accept_lengths) == 1:
        found.append(
            f"{name}: no draft was accepted in {steps} steps: do the heads fit this model?"
        )
    if arm.info.sampling.lossy and arm.info.tree is not None:
        found.append(f"{name}: typical acceptance is lossy, its text is not the base model's")
    if arm.outliers:
        found.append(f"{name}: {arm.outliers} of {arm.runs} runs were disturbed (slow steps)")
    return found


def _about_answers(arms: Sequence[ArmSummary], runs: Sequence[Run]) -> list[str]:
    found = []
    looping = sorted({run.question for run in runs if run.loop_period is not None})
    if looping:
        names = ", ".join(looping[:5]) + (", ..." if len(looping) > 5 else "")
        found.append(
            f"answers to {len(looping)} questions run in circles ({names}): "
            "loops are easy to draft and inflate accept lengths"
        )
    total, ended = sum(arm.runs for arm in arms), sum(arm.ended for arm in arms)
    if total and ended / total >= EARLY_SHARE:
        found.append(f"{ended} of {total} answers ended before the token limit")
    return found
