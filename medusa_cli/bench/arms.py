"""Arms: the ways of decoding that a benchmark compares, all with one model's weights.

An arm turns prompt ids into token ids and says after each of its steps what is new. It does not
measure anything itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from medusa_cli.config import Limits, SamplingConfig
from medusa_cli.decoding.adaptive import AnyTree, AutoTree
from medusa_cli.decoding.tree import ROOT_ONLY
from medusa_cli.models.cache import KVCache
from medusa_cli.session import Medusa

PLAIN = "plain"


class OnStep(Protocol):
    """Hears each step of an arm."""

    def __call__(self, new: Sequence[int], accept_length: int, nodes: int = 0) -> None:
        """A step has ended.

        Args:
            new: its tokens.
            accept_length: 0 where the step verified no draft.
            nodes: of the tree that it verified; 0 where there is none, or it is not told.
        """
        ...


class ArmKind(StrEnum):
    """Whose decoding an arm is."""

    PLAIN = "plain"
    MEDUSA = "medusa"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class ArmInfo:
    """What is known about an arm before it runs.

    Attributes:
        name: as reports call it.
        kind: whose decoding it is.
        about: one line for a person.
        tree: what it verifies; None for other arms.
        sampling: how it draws tokens.
        comparable: whether its tokens must be those of plain decoding.
    """

    name: str
    kind: ArmKind
    about: str
    sampling: SamplingConfig
    tree: AnyTree | None = None
    comparable: bool = True


class Arm(Protocol):
    """One way of decoding."""

    @property
    def info(self) -> ArmInfo:
        """What it is."""
        ...

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int, on_step: OnStep) -> None:
        """Decodes one prompt on an empty cache, up to an end token or the limit."""
        ...


@dataclass(frozen=True, slots=True)
class Unavailable:
    """An arm that was asked for and cannot run here.

    Attributes:
        name: as the user gave it.
        reason: why, and what to do about it.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class OwnArm:
    """Our own decode loop: plain, or with the model's heads and a tree."""

    info: ArmInfo
    model: Medusa
    ignore_eos: bool

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int, on_step: OnStep) -> None:
        """Decodes one prompt on an empty cache, up to an end token or the limit."""
        limits = Limits(max_new_tokens, ignore_eos=self.ignore_eos)
        for step in self.model.decode(prompt_ids, self.info.sampling, limits, KVCache()):
            on_step(step.token_ids, step.accept_length, step.nodes)


def plain_arm(model: Medusa, sampling: SamplingConfig, *, ignore_eos: bool) -> OwnArm:
    """The baseline: our own loop without heads."""
    info = ArmInfo(PLAIN, ArmKind.PLAIN, "medusa --plain: one token per forward", sampling)
    return OwnArm(info, replace(model, heads=None, tree=ROOT_ONLY), ignore_eos)


def tree_arm(
    model: Medusa, tree: AnyTree, sampling: SamplingConfig, *, name: str, ignore_eos: bool
) -> OwnArm:
    """The model's heads with one tree.

    Raises:
        TreeError: the heads cannot draft this tree.
    """
    assert model.heads is not None, "a tree arm needs heads"
    heads = model.heads.info
    most = "up to " if isinstance(tree, AutoTree) else ""
    if not isinstance(tree, AutoTree):
        tree.check_heads(heads.num_heads, heads.vocabulary)
    info = ArmInfo(
        name,
        ArmKind.MEDUSA,
        f"{most}{tree.nodes} nodes, {tree.depth} deep",
        sampling,
        tree,
        comparable=not sampling.lossy,
    )
    return OwnArm(info, replace(model, tree=tree), ignore_eos)
