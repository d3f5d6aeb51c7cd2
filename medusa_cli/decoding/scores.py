"""Scores: how sure heads were at each position of their traces, kept to replay adaptive trees.

With the ranks of the traces they tell what any adaptive tree would have accepted on those texts,
without the model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from medusa_cli.decoding.expansion import Expansion, Guesses, grow
from medusa_cli.decoding.lookup import Guess
from medusa_cli.decoding.traces import MISS, TextTrace, Traces, damaged

FORMAT = "medusa-scores/1"
STEPS = 16  # of a byte, to a log-probability of -1: kept probabilities are right to 3%
MOST_NODES = 256  # of a replayed tree
HALVINGS = 20

Grower = Callable[[Sequence[Sequence[Guess]], int], Expansion]
"""Makes a tree of what the heads say and how deep it may go; its tokens are ranks."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the heads said at each position of some traces, text after text."""

    log_probs: Tensor  # [P, K, C], calibrated for greedy decoding, not rising along C


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step of a replay.

    Attributes:
        text: which one of the traces.
        nodes, depth: of the tree, the root included in the nodes.
        accept_length: tokens that the step yields.
    """

    text: int
    nodes: int
    depth: int
    accept_length: int


def replay_adaptive(traces: Traces, scores: Scores, grower: Grower) -> Iterator[ReplayedStep]:
    """The steps that greedy decoding of the traced texts has with the trees that `grower` makes."""
    assert len(scores.log_probs) == traces.positions, "scores belong to these traces"
    first = 0
    shares = scores.log_probs.float().exp()
    for number, text in enumerate(traces.texts):
        rows = shares[first : first + len(text.ranks)].tolist()
        first += len(text.ranks)
        yield from _replay(number, text, rows, grower)


def at_least(share: float) -> Grower:
    """Trees of all nodes whose path is at least this probable."""

    def grower(heads: Sequence[Sequence[Guess]], room: int) -> Expansion:
        tree = Expansion([0])
        for likely in grow(tree, Guesses(heads), room, MOST_NODES):
            if likely < share:
                tree.cut(tree.nodes - 1)
                break
        return tree

    return grower


def threshold_for(traces: Traces, scores: Scores, mean_nodes: float) -> float:
    """The path probability whose trees have `mean_nodes` nodes a step, or a little fewer."""
    low, high = 0.0, 1.0  # low gives more nodes
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5 if low > 0 else high / 4
        steps = list(replay_adaptive(traces, scores, at_least(middle)))
        if sum(step.nodes for step in steps) > mean_nodes * len(steps):
            low = middle
        else:
            high = middle
        if low > 0 and high / low < 1.01:
            break
    return high


def to_bytes(scores: Scores) -> bytes:
    """A safetensors file of format `medusa-scores/1`, to lie beside its traces."""
    log_probs = (-STEPS * scores.log_probs).round().clamp(0, 255).to(torch.uint8).contiguous()
    return save({"log_probs": log_probs}, {"format": FORMAT})


def from_bytes(content: bytes, traces: Traces, where: str) -> Scores:
    """Reads what `to_bytes` wrote for the same traces.

    Raises:
        CheckpointError: it is damaged, or belongs to other traces.
    """
    try:
        tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise damaged(where, str(error)) from None
    log_probs = tensors.get("log_probs")
    if log_probs is None or log_probs.dim() != 3 or log_probs.dtype != torch.uint8:
        raise damaged(where, "it holds no scores")
    if log_probs.shape[:2] != (traces.positions, traces.num_heads):
        raise damaged(where, "its scores belong to other traces")
    return Scores(-log_probs.float() / STEPS)


def _replay(
    number: int, text: TextTrace, rows: list[list[list[float]]], grower: Grower
) -> Iterator[ReplayedStep]:
    emitted = 1  # the prefill's token
    while emitted < min(text.limit, text.tokens):
        room = text.limit - emitted - 1
        heads = [[(share, rank) for rank, share in enumerate(row)] for row in rows[emitted - 1]]
        tree = grower(heads, room)
        ranks = text.ranks[emitted - 1]
        true = ranks[: ranks.index(MISS)] if MISS in ranks else ranks
        drafts = len(tree.path(true[:room]))
        yield ReplayedStep(number, tree.nodes, max(tree.depths), drafts + 1)
        emitted += drafts + 1
