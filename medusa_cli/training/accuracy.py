"""Measuring heads on text that the base model itself writes.

Each answer is written once, then read once more in chunks: every position of it tries every head.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.config import FinishReason, Limits, SamplingConfig
from medusa_cli.decoding.auto_tree import heads_subject
from medusa_cli.decoding.measured import Calibrated, Subject, heads_digest
from medusa_cli.decoding.scores import Scores
from medusa_cli.decoding.traces import MAX_RANKS, MISS, Provenance, TextTrace, Traces
from medusa_cli.errors import UsageError
from medusa_cli.models.base import ForwardOutput
from medusa_cli.models.cache import KVCache
from medusa_cli.models.heads import Heads
from medusa_cli.models.progress import Report, Stage, silent
from medusa_cli.session import Medusa
from medusa_cli.text.events import Result
from medusa_cli.text.loops import loop_period
from medusa_cli.text.prompt_files import Question, questions_sha256
from medusa_cli.training.calibrating import Evidence, evidence_of, fit, joined, log_probs

NO_TOKEN = -1  # the id of no token
ROWS = 64  # positions at a time: K x ROWS x V logits are in memory at once


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The set of prompts that the measured ones are taken from."""

    name: str
    digest: str


def prompts_digest(questions: Sequence[Question]) -> str:
    """A short name for what a set of prompts asks."""
    return questions_sha256(questions)[:12]


def measured_subject(model: Medusa) -> Subject | None:
    """What results of a loaded model belong to; None when it has no heads that lie in files."""
    return None if model.heads is None else heads_subject(model.name, model.heads)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was found out about a set of heads.

    Attributes:
        traces: which rank was right at each position.
        evidence: how sure the heads were there; None when there are no positions.
    """

    traces: Traces
    evidence: Evidence | None

    def calibrated(self) -> Calibrated | None:
        """The heads' calibration, and the scores that it makes of the evidence."""
        if self.evidence is None:
            return None
        calibration = fit(self.evidence)
        return Calibrated(calibration, Scores(log_probs(self.evidence, calibration)))


def measure_accuracy(
    model: Medusa,
    questions: Sequence[Question],
    max_new_tokens: int,
    prompts: PromptSet,
    report: Report = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> Traces:
    """The traces of `measure_heads` alone."""
    return measure_heads(model, questions, max_new_tokens, prompts, report, should_stop).traces


def measure_heads(
    model: Medusa,
    questions: Sequence[Question],
    max_new_tokens: int,
    prompts: PromptSet,
    report: Report = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> Measurement:
    """Has the model answer the questions greedily, and looks at what its heads say to each token.

    Follow-ups are asked behind the model's own answers, where there is a chat template.

    Args:
        prompts: the set that the questions are taken from.
        report: hears which question is being measured.
        should_stop: asked after each step; True ends the measurement without the answer begun.

    Raises:
        UsageError: the model has no heads, or a first prompt cannot be rendered.
    """
    if model.heads is None:
        raise UsageError("there are no heads to measure: load the model with its heads")
    for question in questions:
        model.encode_turn(question, [])  # a bad prompt shows before anything runs
    texts: list[TextTrace] = []
    evidence: list[Evidence] = []
    skipped: list[str] = []
    complete = True
    for n, question in enumerate(questions):
        report(Stage(f"prompt {n + 1} of {len(questions)}: {question.id}", n, len(questions)))
        found = list(_conversation(model, model.heads, question, max_new_tokens, should_stop))
        texts += [text for text, _ in found]
        evidence += [part for _, parts in found for part in parts]
        whole = len(found) == model.turns(question)
        if should_stop() and not (whole and question is questions[-1]):
            complete = False
            break
        if not whole:
            skipped.append(f"{question.id}/{len(found) + 1}")
    of = measured_subject(model)
    provenance = Provenance(
        heads=model.heads.info.name if of is None else of.heads,
        base=model.name if of is None else of.base,
        heads_digest="" if of is None else heads_digest(of.files),
        prompts=prompts.name,
        prompts_digest=prompts.digest,
        max_new_tokens=max_new_tokens,
        complete=complete,
        skipped=tuple(skipped),
    )
    traces = Traces(provenance, model.heads.info.num_heads, tuple(texts))
    return Measurement(traces, joined(evidence) if evidence else None)


def _conversation(
    model: Medusa,
    heads: Heads,
    question: Question,
    max_new_tokens: int,
    should_stop: Callable[[], bool],
) -> Iterator[tuple[TextTrace, list[Evidence]]]:
    """A trace of each turn; ends early when a prompt fills the context, or at an interruption."""
    cache = KVCache()
    answers: list[str] = []
    context = model.base.context_length
    for turn in range(model.turns(question)):
        ids = model.encode_turn(question, answers)
        if context is not None and len(ids) >= context:
            return
        limits = Limits(max_new_tokens)
        *_, result = model.stream(ids, limits=limits, cache=cache, should_stop=should_stop)
        assert isinstance(result, Result), "a stream ends with its result"
        if result.finish_reason is FinishReason.INTERRUPTED:
            return
        answers.append(result.text)
        ended = result.finish_reason is FinishReason.EOS
        text = [*ids, *result.token_ids]
        # What the model would write behind an end token counts in a verification that accepts it.
        if ended and heads.info.num_heads > 1 and (context is None or len(text) < context):
            text += _behind_the_end(model, text, heads.info.num_heads - 1, cache)
        ranks: list[tuple[int, ...]] = []
        evidence: list[Evidence] = []
        weight = 0.0 if loop_period(result.token_ids) is not None else 1.0
        positions = len(result.token_ids) - 1
        for rows, part in _read(model, heads, text, len(ids), positions, weight, cache):
            ranks += rows
            evidence.append(part)
        trace = TextTrace(
            id=question.id,
            category=question.category,
            turn=turn,
            ended=ended,
            limit=max_new_tokens if context is None else min(max_new_tokens, context - len(ids)),
            ranks=tuple(ranks),
        )
        yield trace, evidence


def _behind_the_end(model: Medusa, text: list[int], tokens: int, cache: KVCache) -> list[int]:
    """What the model writes behind a text whose last token ends it."""
    decoding = model.decode(text, SamplingConfig(), Limits(tokens, ignore_eos=True), cache)
    return [token for step in decoding for token in step.token_ids]


def _read(
    model: Medusa,
    heads: Heads,
    text: list[int],
    start: int,
    positions: int,
    weight: float,
    cache: KVCache,
) -> Iterator[tuple[list[tuple[int, ...]], Evidence]]:
    """Ranks and evidence at `positions` positions, the token at `start` being the first pending.

    Head k's true token at a position was chosen k rows later: the last rows of each chunk wait for
    the next one.
    """
    base, num_heads = model.base, heads.info.num_heads
    padded = text + [NO_TOKEN] * num_heads
    cache.keep(start - 1)
    waiting: list[ForwardOutput] = []
    first = start  # the position of the first waiting row
    for begin in range(start - 1, len(text) - 1, ROWS):
        read = text[begin : min(begin + ROWS, len(text) - 1)]
        waiting.append(base.extend(torch.tensor(read, device=base.device), cache))
        cache.append(read)
        hidden = torch.cat([output.hidden for output in waiting])  # [M, D]
        logits = torch.cat([output.logits for output in waiting])  # [M, V]
        at_end = begin + len(read) == len(text) - 1
        ready = len(hidden) if at_end else max(0, len(hidden) - num_heads)
        rows = min(ready, start + positions - first)
        if rows > 0:
            yield _judged(heads, hidden[:rows], logits, padded, first, len(text), weight)
        waiting = [ForwardOutput(hidden[ready:], logits[ready:])]
        first += ready


def _judged(
    heads: Heads,
    hidden: Tensor,  # [R, D]
    base_logits: Tensor,  # [M, V], M up to R + K
    padded: list[int],
    first: int,
    end: int,
    weight: float,
) -> tuple[list[tuple[int, ...]], Evidence]:
    """Ranks and evidence at R positions from `first` on, in a text that ends before `end`."""
    rows, num_heads = len(hidden), heads.info.num_heads
    device = base_logits.device
    pending = torch.tensor(padded[first : first + rows], device=device)  # [R]
    logits = heads.logits(hidden, pending, num_heads).float().to(device)  # [K, R, V']
    true = torch.tensor(
        [padded[first + 1 + k : first + 1 + k + rows] for k in range(num_heads)], device=device
    )  # [K, R]
    best = logits.topk(min(MAX_RANKS, heads.info.vocabulary), dim=-1).indices  # [K, R, C]
    if heads.draft_token_ids is not None:
        best = heads.draft_token_ids[best]
    right = best.to(device) == true[..., None]  # [K, R, C]
    ranks = torch.where(right.any(dim=-1), right.int().argmax(dim=-1), MISS)  # [K, R]
    known = [
        tuple(row[: end - t - 1]) for t, row in enumerate(ranks.T.tolist(), start=first)
    ]  # host sync
    return known, evidence_of(logits, base_logits, true, heads.draft_token_ids, weight)
