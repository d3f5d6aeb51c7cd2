"""Measuring heads on text that the base model itself writes.

Each answer is written once, then read once more in chunks: every position of it tries every head.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from medusa_cli.config import FinishReason, Limits, SamplingConfig
from medusa_cli.decoding.measured import Subject, heads_digest, subject
from medusa_cli.decoding.traces import MAX_RANKS, MISS, Provenance, TextTrace, Traces
from medusa_cli.errors import UsageError
from medusa_cli.models.cache import KVCache
from medusa_cli.models.heads import Heads
from medusa_cli.models.progress import Report, Stage, silent
from medusa_cli.session import Medusa
from medusa_cli.text.events import Result
from medusa_cli.text.prompt_files import Question, questions_sha256

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
    if model.heads is None or model.heads.info.files is None:
        return None
    return subject(model.heads.info.name, model.name, model.heads.info.files)


def measure_accuracy(
    model: Medusa,
    questions: Sequence[Question],
    max_new_tokens: int,
    prompts: PromptSet,
    report: Report = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> Traces:
    """Has the model answer the questions greedily, and ranks the true tokens among its heads'.

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
    skipped: list[str] = []
    complete = True
    for n, question in enumerate(questions):
        report(Stage(f"prompt {n + 1} of {len(questions)}: {question.id}", n, len(questions)))
        found = list(_conversation(model, model.heads, question, max_new_tokens, should_stop))
        texts += found
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
    return Traces(provenance, model.heads.info.num_heads, tuple(texts))


def _conversation(
    model: Medusa,
    heads: Heads,
    question: Question,
    max_new_tokens: int,
    should_stop: Callable[[], bool],
) -> Iterator[TextTrace]:
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
        yield TextTrace(
            id=question.id,
            category=question.category,
            turn=turn,
            ended=ended,
            limit=max_new_tokens if context is None else min(max_new_tokens, context - len(ids)),
            ranks=tuple(_ranks(model, heads, text, len(ids), len(result.token_ids) - 1, cache)),
        )


def _behind_the_end(model: Medusa, text: list[int], tokens: int, cache: KVCache) -> list[int]:
    """What the model writes behind a text whose last token ends it."""
    decoding = model.decode(text, SamplingConfig(), Limits(tokens, ignore_eos=True), cache)
    return [token for step in decoding for token in step.token_ids]


def _ranks(
    model: Medusa, heads: Heads, text: list[int], start: int, rows: int, cache: KVCache
) -> Iterator[tuple[int, ...]]:
    """Ranks at `rows` positions, the token at `start` being the first one pending."""
    base, num_heads = model.base, heads.info.num_heads
    candidates = min(MAX_RANKS, heads.info.vocabulary)
    padded = text + [NO_TOKEN] * num_heads
    cache.keep(start - 1)
    for first in range(start, start + rows, ROWS):
        last = min(first + ROWS, start + rows)
        read = text[first - 1 : last - 1]
        hidden = base.hidden_rows(torch.tensor(read, device=base.device), cache)  # [R, D]
        cache.append(read)
        pending = torch.tensor(text[first:last], device=base.device)  # [R]
        best = heads.propose(hidden, pending, num_heads, candidates)  # [K, R, C]
        true = [padded[first + 1 + k : last + 1 + k] for k in range(num_heads)]
        right = best == torch.tensor(true, device=base.device)[..., None]  # [K, R, C]
        ranks = torch.where(right.any(dim=-1), right.int().argmax(dim=-1), MISS)  # [K, R]
        for t, row in enumerate(ranks.T.tolist(), start=first):  # host sync
            yield tuple(row[: len(text) - t - 1])
