"""The decode loop: prefill, then draft, verify, accept, compact, step by step.

It yields one event per forward and knows token ids only: text, stop strings and templates belong
to the layer above.
"""

import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.config import FinishReason
from medusa_cli.decoding.acceptance import accept
from medusa_cli.decoding.drafting import Draft, Drafting
from medusa_cli.decoding.sampling import Sampler
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache


@dataclass(frozen=True, slots=True)
class Budget:
    """How far a generation may go.

    Attributes:
        max_new_tokens: most tokens to emit, None for no limit.
        context_length: most tokens of prompt and answer together, None for no limit.
        eos_ids: tokens that end the answer.
    """

    max_new_tokens: int | None
    context_length: int | None
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What one forward emitted.

    Attributes:
        token_ids: emitted tokens, cut behind an end-of-sequence token; never empty.
        accept_length: tokens that the verification accepted, its base token included, before
            the cut; 0 for the prefill, which verifies nothing.
        nodes: of the tree that was verified, the root included; 0 for the prefill.
        seconds: wall time of the step, from drafting to the host having its tokens.
        finish: why generation ended with this step, or None.
    """

    token_ids: tuple[int, ...]
    accept_length: int
    nodes: int
    seconds: float
    finish: FinishReason | None

    @property
    def depths(self) -> tuple[int, ...]:
        """For each emitted token the tree depth it was accepted at; 0: the base model's own."""
        drafts = max(self.accept_length - 1, 0)
        return tuple(i + 1 if i < drafts else 0 for i in range(len(self.token_ids)))


def decode(
    base: BaseModel,
    drafting: Drafting,
    sampler: Sampler,
    prompt_ids: Sequence[int],
    cache: KVCache,
    budget: Budget,
) -> Generator[DecodeStep]:
    """Generates from a prompt, one event per forward; the first is the prefill's token.

    Rows that the cache shares with the prompt are reused. Whenever the consumer stops, the cache
    holds exactly rows of the prompt and of emitted tokens.

    Args:
        drafting: fresh, on the base model's device.
        prompt_ids: S token ids, S >= 1, shorter than the context.
    """
    emitted = 0
    limit, limit_reason = _limit(budget, len(prompt_ids))
    try:
        started = time.perf_counter()
        hidden, pending = _prefill(base, sampler, prompt_ids, cache)
        new = [int(pending)]  # host sync
        text = list(prompt_ids)
        accept_length = nodes = 0
        while True:
            new, ended = _up_to_eos(new, budget.eos_ids)
            emitted += len(new)
            text += new
            at_limit = limit_reason if emitted == limit else None
            finish = FinishReason.EOS if ended else at_limit
            seconds = time.perf_counter() - started
            yield DecodeStep(tuple(new), accept_length, nodes, seconds, finish)
            if finish is not None:
                return
            started = time.perf_counter()
            # A step emits one token more than it accepts drafts.
            draft = drafting.draft(hidden, pending, text, limit - emitted - 1)
            hidden, pending, new = verify(base, sampler, draft, cache)
            drafting.observe(new)
            accept_length, nodes = len(new), draft.tree.nodes
    finally:
        cache.keep(len(prompt_ids) + emitted)


def _prefill(
    base: BaseModel, sampler: Sampler, prompt_ids: Sequence[int], cache: KVCache
) -> tuple[Tensor, Tensor]:  # [D], []
    """Fills the cache with the prompt; returns the last hidden state and the first token."""
    shared = 0
    while shared < min(len(cache.ids), len(prompt_ids) - 1):  # one row is left to prefill
        if cache.ids[shared] != prompt_ids[shared]:
            break
        shared += 1
    cache.keep(shared)
    new = prompt_ids[shared:]
    output = base.prefill(torch.tensor(new, device=base.device), cache)
    cache.append(new)
    context = _context(sampler, cache, base.device)
    prefix = None if context is None else context[None]
    pending = sampler.choose(output.logits, prefix, len(prompt_ids)).to(base.device)
    return output.hidden[0], pending


def verify(
    base: BaseModel,
    sampler: Sampler,
    draft: Draft,
    cache: KVCache,
) -> tuple[Tensor, Tensor, list[int]]:  # [D], [], A accepted drafts and the base token
    """One verification: forward, acceptance, compaction.

    Returns the hidden row behind the accepted path, the next pending token, and on the host the
    accepted drafts with that token.
    """
    tokens, tree = draft.tokens, draft.tree  # [N]
    rows = len(cache.ids)  # L
    output = base.verify(tokens, tree.depths, tree.paths, cache)
    context = _context(sampler, cache, tokens.device)
    logits = output.logits.to(tokens.device)  # [N, V]
    verdict = accept(logits, tokens, tree, sampler, context, rows + 1)
    parts = [verdict.drafts[None], verdict.next_token[None], verdict.path, tokens[verdict.path]]
    drafts, next_token, *rest = torch.cat(parts).tolist()  # host sync
    path = rest[: drafts + 1]
    path_tokens = rest[len(rest) // 2 :][: drafts + 1]
    cache.accept(path, path_tokens)
    return output.hidden[path[-1]], verdict.next_token, [*path_tokens[1:], next_token]


def _context(sampler: Sampler, cache: KVCache, device: torch.device) -> Tensor | None:
    return torch.tensor(cache.ids, device=device) if sampler.needs_prefix else None


def _limit(budget: Budget, prompt_tokens: int) -> tuple[int, FinishReason]:
    """Most tokens that may be emitted, and what the answer has reached when they are."""
    unbounded = sys.maxsize
    asked = unbounded if budget.max_new_tokens is None else budget.max_new_tokens
    length = budget.context_length
    room = unbounded if length is None else length - prompt_tokens
    return (asked, FinishReason.LENGTH) if asked <= room else (room, FinishReason.CONTEXT)


def _up_to_eos(tokens: list[int], eos_ids: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens up to and with the first end-of-sequence token, and whether there is one."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1], True
    return tokens, False
