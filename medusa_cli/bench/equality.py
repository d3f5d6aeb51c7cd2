"""Checks that arms which must give the same tokens do, and shows where they do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_cli.bench.runner import Run

NEAR_TIE = 1e-4  # a top-2 logit gap below which float32 rounding decides

Gap = Callable[[Run, int], float | None]
"""The base model's top-2 logit gap at token `i` of a run's answer."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which an arm differs from the reference.

    Attributes:
        question, turn: where.
        index: of the token in the answer.
        expected, got: token ids; None behind the end of an answer.
        top2_gap: between the base model's two best logits there; None where it was not computed.
    """

    question: str
    turn: int
    index: int
    expected: int | None
    got: int | None
    top2_gap: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.top2_gap is not None and self.top2_gap < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Equality:
    """How an arm's answers compare with the reference's.

    Attributes:
        reference: the arm compared with.
        compared: number of answers.
        divergences: one for each answer that differs.
    """

    reference: str
    compared: int
    divergences: tuple[Divergence, ...]

    @property
    def identical(self) -> int:
        """Answers that are token for token the same."""
        return self.compared - len(self.divergences)


def compare(arm: Sequence[Run], reference: Sequence[Run], gap: Gap) -> Equality:
    """Compares each of an arm's runs with the reference's first run of the same prompt."""
    expected: dict[tuple[str, int], Run] = {}
    for run in reference:
        expected.setdefault((run.question, run.turn), run)
    compared, divergences = 0, []
    for run in arm:
        other = expected.get((run.question, run.turn))
        if other is None:
            continue
        compared += 1
        index = first_difference(run.token_ids, other.token_ids)
        if index is not None:
            divergences.append(
                Divergence(
                    run.question,
                    run.turn,
                    index,
                    _at(other.token_ids, index),
                    _at(run.token_ids, index),
                    gap(other, index),
                )
            )
    name = reference[0].arm if reference else ""
    return Equality(name, compared, tuple(divergences))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
