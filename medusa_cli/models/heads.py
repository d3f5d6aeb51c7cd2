"""Medusa heads: small modules that guess the tokens behind the pending one.

They run on one hidden row a step, on many when they are measured. This module knows the
arithmetic of each head kind; files and their layouts are `checkpoint`'s job.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from medusa_cli.models.checkpoint import HeadsFiles


class HeadKind(StrEnum):
    """What a head reads besides the last hidden state."""

    MEDUSA = "medusa"
    CONDITIONED = "conditioned"


class ResidualLayer(nn.Module):
    """x + SiLU(linear(x)). Source: Cai et al. 2024, arXiv 2401.10774, section 2.1.1."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        return x + functional.silu(self.linear(x))


class Head(nn.Module):
    """One head: an optional input layer, residual layers, an optional LM head of its own."""

    def __init__(
        self, hidden_size: int, num_layers: int, conditioned: bool, lm_head_rows: int | None
    ) -> None:
        super().__init__()
        self.input = nn.Linear(2 * hidden_size, hidden_size) if conditioned else None
        self.layers = nn.ModuleList(ResidualLayer(hidden_size) for _ in range(num_layers))
        self.lm_head = (
            None if lm_head_rows is None else nn.Linear(hidden_size, lm_head_rows, bias=False)
        )

    def forward(
        self,
        hidden: Tensor,  # [..., D]
        embedding: Tensor | None,  # [..., D], of the pending token; read by conditioned heads
    ) -> Tensor:  # [..., D], the state that an LM head reads
        x = hidden
        if self.input is not None:
            both = torch.cat([hidden, cast(Tensor, embedding)], dim=-1)  # [..., 2D]
            x = x + functional.silu(self.input(both))
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class HeadsInfo:
    """What is known about a set of heads beside their weights.

    Attributes:
        name: how the user calls them.
        kind, num_heads, num_layers: read off the tensors.
        vocabulary: V', how many tokens they can draft.
        rank_accuracy: [K][ranks], share of positions at which rank r of head k was right.
        tree: the tree that their config recommends.
        warnings: what their config says wrongly.
        files: what they were read from; None for heads that were not.
    """

    name: str
    kind: HeadKind
    num_heads: int
    num_layers: int
    vocabulary: int
    rank_accuracy: tuple[tuple[float, ...], ...] = ()
    tree: str | None = None
    warnings: tuple[str, ...] = field(default=())
    files: "HeadsFiles | None" = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of some heads, best first."""

    tokens: Tensor  # [heads, ..., C]
    log_probs: Tensor  # [heads, ..., C]


class Heads:
    """K heads bound to their base model's embedding and LM head.

    Args:
        info: what they are.
        heads: K modules on one device.
        embedding: the base model's token embedding, read by conditioned heads.
        shared_lm_head: maps [..., D] to logits [..., V']; read by heads without one of their own.
        draft_token_ids: [V'], the token that each logit stands for, None for the identity.
    """

    def __init__(
        self,
        info: HeadsInfo,
        heads: nn.ModuleList,
        embedding: nn.Module,
        shared_lm_head: Callable[[Tensor], Tensor],
        draft_token_ids: Tensor | None,
    ) -> None:
        self.info = info
        self.heads = heads
        self.draft_token_ids = draft_token_ids
        self._embedding = embedding
        self._shared_lm_head = shared_lm_head

    @torch.inference_mode()
    def logits(
        self,
        hidden: Tensor,  # [..., D]
        pending: Tensor,  # [...], the token behind each hidden row
        heads: int,
    ) -> Tensor:  # [heads, ..., V']
        """Logits of the first `heads` heads."""
        embedding = None
        if self.info.kind is HeadKind.CONDITIONED:
            embedding = self._embedding(pending).to(hidden.device)  # [..., D]
        used = [cast(Head, self.heads[k]) for k in range(heads)]
        states = [head(hidden, embedding) for head in used]
        if used[0].lm_head is None:
            return self._shared_lm_head(torch.stack(states))
        return torch.stack(
            [cast(nn.Linear, h.lm_head)(x) for h, x in zip(used, states, strict=True)]
        )

    def propose(
        self,
        hidden: Tensor,  # [..., D]
        pending: Tensor,  # [...]
        heads: int,
        candidates: int,
    ) -> Tensor:  # [heads, ..., candidates]
        """The best tokens of the first `heads` heads, best first."""
        best = self.logits(hidden, pending, heads).topk(candidates, dim=-1).indices
        if self.draft_token_ids is not None:
            best = self.draft_token_ids[best]
        return best.to(pending.device)

    @torch.inference_mode()
    def score(
        self,
        hidden: Tensor,  # [..., D]
        pending: Tensor,  # [...]
        temperatures: Sequence[float],
        candidates: int,
    ) -> Candidates:
        """The best tokens of the first heads, one for each temperature, with log-probabilities.

        A head's logits are divided by its temperature; the softmax is over its draft vocabulary.
        """
        logits = self.logits(hidden, pending, len(temperatures)).float()
        shape = (-1, *[1] * (logits.dim() - 1))
        logits /= torch.tensor(temperatures, device=logits.device).view(shape)
        best = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
        log_probs = best.values - logits.logsumexp(dim=-1, keepdim=True)
        tokens = best.indices
        if self.draft_token_ids is not None:
            tokens = self.draft_token_ids[tokens]
        return Candidates(tokens.to(pending.device), log_probs.to(pending.device))
