"""The adaptive tree: at each step the size that pays best here and now, down to plain decoding.

Heads state probabilities; calibration corrects them beforehand, and what is accepted corrects them
while decoding goes on (`Trust`). Where drafts do not pay even so, the heads themselves are left out
for growing numbers of steps (`Pauses`), and tried again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_cli.decoding.calibration import Calibration, HeadCalibration
from medusa_cli.decoding.drafting import Draft, Drafter, to_draft
from medusa_cli.decoding.expansion import Expansion, Guesses, Plan, SizeCosts, best_plan
from medusa_cli.decoding.lookup import Guess, Lookup
from medusa_cli.decoding.step_cost import StepCosts
from medusa_cli.decoding.tree import ROOT_ONLY, Tree
from medusa_cli.decoding.tree_buffers import tree_buffers
from medusa_cli.models.heads import Candidates

AUTO = "auto"
MOST_NODES = 64
CANDIDATES = 32  # of each head

COST_ROWS = 256  # after so many tokens steps cost something else

TRUST_PRIOR = 1.0  # accepted drafts that the calibration's word is worth
TRUST_DECAY = 0.95  # of what older steps have shown, a step with heads
MOST_TRUST = 2.0

GAIN_WEIGHT = 0.4  # of the latest step in the mean that says whether heads pay
LOST_SHARE = 0.02  # of plain decoding's time that heads without use may take in the long run


class ScoringDrafter(Drafter, Protocol):
    """A drafter that knows how sure it is."""

    def score(
        self,
        hidden: Tensor,  # [D]
        pending: Tensor,  # []
        temperatures: Sequence[float],
        candidates: int,
    ) -> Candidates:
        """Best tokens and log-probabilities, [heads, candidates], one head a temperature."""
        ...


@dataclass(frozen=True, slots=True)
class AutoTree:
    """What an adaptive tree is chosen by.

    Attributes:
        calibration: of the heads.
        costs: of steps on this machine.
        heads: how many there are.
        static: the fixed tree in whose place it stands.
        nodes: most nodes of a step, the root included.
    """

    calibration: Calibration
    costs: StepCosts
    heads: int
    static: Tree
    nodes: int = MOST_NODES

    @property
    def name(self) -> str:
        """How the user calls it."""
        return AUTO

    @property
    def depth(self) -> int:
        """How deep the heads reach; a lookup branch may reach further."""
        return self.heads


AnyTree = Tree | AutoTree


class Trust:
    """How many drafts were accepted for each that was expected, lately."""

    def __init__(self) -> None:
        self._expected = self._accepted = TRUST_PRIOR

    @property
    def value(self) -> float:
        """What probabilities are to be multiplied by."""
        return min(self._accepted / self._expected, MOST_TRUST)

    def observe(self, expected: float, accepted: float) -> None:
        """Learns from one step; the prior does not fade."""
        past = TRUST_DECAY
        self._expected = TRUST_PRIOR + past * (self._expected - TRUST_PRIOR) + expected
        self._accepted = TRUST_PRIOR + past * (self._accepted - TRUST_PRIOR) + accepted


class Pauses:
    """Decides at which steps heads run at all.

    Args:
        longest: most steps between two tries.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._gap = self._left = 0
        self._gain = 0.0

    def due(self) -> bool:
        """Whether heads run at this step; asked once a step."""
        if self._left == 0:
            return True
        self._left -= 1
        return False

    def observe(self, gain: float) -> None:
        """Learns what running the heads at this step has brought, in tokens."""
        self._gain += GAIN_WEIGHT * (gain - self._gain)
        if self._gain >= 0:
            self._gap = 0
        else:
            self._gap = min(max(1, 2 * self._gap), self._longest)
        self._left = self._gap


class AdaptiveDrafting:
    """Drafts one generation with an adaptive tree.

    Args:
        tree: calibration and costs.
        sampling_temperature: of the base model.
        lookup: adds its branch where that pays.
    """

    def __init__(
        self,
        drafter: ScoringDrafter,
        tree: AutoTree,
        sampling_temperature: float,
        device: torch.device,
        lookup: Lookup | None = None,
    ) -> None:
        self._drafter, self._lookup = drafter, lookup
        self._root = tree_buffers(ROOT_ONLY, device)
        self._calibration: HeadCalibration = tree.calibration.at(sampling_temperature)
        self._all_costs, self._nodes = tree.costs, tree.nodes
        self._costs, self._costs_until = SizeCosts(tree.costs.up_to(tree.nodes)), 0
        self._head_costs = [tree.costs.drafting(heads) for heads in range(tree.heads + 1)]
        plain = self._costs.seconds[1]
        longest = round(self._head_costs[-1] / (LOST_SHARE * plain))
        self._pauses, self._trust = Pauses(max(1, longest)), Trust()
        self._tree: Expansion | None = None
        self._first: Guess | None = None

    def draft(self, hidden: Tensor, pending: Tensor, text: Sequence[int], room: int) -> Draft:
        """The tree with the most expected tokens per second."""
        if len(text) >= self._costs_until:
            self._costs_until = len(text) + COST_ROWS
            self._costs = SizeCosts(self._all_costs.up_to(self._nodes, len(text)))
        branch = self._lookup.branch(text, room) if self._lookup is not None else []
        plan = best_plan(Guesses(branch=branch), text[-1], room, self._costs)
        heads = min(len(self._calibration.temperatures), room)
        self._first = None
        if heads > 0 and self._pauses.due():
            plan = self._with_heads(hidden, pending, text[-1], room, heads, branch, plan)
        self._tree = plan.tree
        if plan.tree.nodes == 1:
            return Draft(pending[None], self._root)
        return to_draft(plan.tree, pending.device)

    def observe(self, new: Sequence[int]) -> None:
        """Lets trust and lookup learn."""
        if self._lookup is not None:
            self._lookup.observe(new)
        if self._first is None or self._tree is None:
            return
        claims = self._tree.claims
        expected = sum(claims[1:])
        accepted = sum(claims[node] > 0 for node in self._tree.path(new))
        # The first head's best guess is judged also where it was not worth verifying.
        share, token = self._first
        if not self._tree.path([token]):
            expected, accepted = expected + share, accepted + (new[0] == token)
        self._trust.observe(expected, accepted)

    def _with_heads(
        self,
        hidden: Tensor,
        pending: Tensor,
        root: int,
        room: int,
        heads: int,
        branch: Sequence[Guess],
        without: Plan,
    ) -> Plan:
        """The best plan now that the heads have run; whether they paid for that is remembered."""
        guesses = self._guesses(hidden, pending, heads)
        self._first = guesses[0][0]
        spent = self._head_costs[heads]
        plan = best_plan(
            Guesses(guesses, branch, self._trust.value), root, room, self._costs, spent
        )
        self._pauses.observe(plan.tokens - plan.seconds * without.rate)
        return plan

    def _guesses(self, hidden: Tensor, pending: Tensor, heads: int) -> list[list[Guess]]:
        temperatures = self._calibration.temperatures[:heads]
        found = self._drafter.score(hidden, pending, temperatures, CANDIDATES)
        # Ids are exact in float32, and one transfer is enough.
        both = torch.stack([found.tokens.to(found.log_probs.dtype), found.log_probs.exp()])
        tokens, shares = both.tolist()  # host sync
        return [
            [(share * coverage, int(token)) for share, token in zip(*row, strict=True)]
            for *row, coverage in zip(shares, tokens, self._calibration.coverages, strict=False)
        ]
