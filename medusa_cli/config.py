"""What a user may choose about one generation, validated once, shared by all layers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from medusa_cli.errors import UsageError


class Acceptance(StrEnum):
    """How drafts are accepted when the temperature is above zero."""

    LOSSLESS = "lossless"
    TYPICAL = "typical"


class FinishReason(StrEnum):
    """Why an answer ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    INTERRUPTED = "interrupted"


class Overflow(StrEnum):
    """What to do with a prompt that is longer than the context."""

    ERROR = "error"
    TRUNCATE_LEFT = "truncate-left"


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """The distribution that tokens are drawn from, and the rule that accepts drafts.

    Attributes:
        temperature: 0 is greedy decoding; above 0 samples.
        top_p: nucleus mass in (0, 1]; 1 switches it off.
        top_k: number of tokens kept; 0 switches it off.
        min_p: least probability relative to the best token, in [0, 1]; 0 switches it off.
        typical_p: locally typical mass in (0, 1]; 1 switches it off (arXiv 2202.00666).
        eta_cutoff: entropy-dependent cut-off in [0, 1); 0 switches it off (arXiv 2210.15191).
        epsilon_cutoff: absolute cut-off in [0, 1); 0 switches it off (arXiv 2210.15191).
        repetition_penalty: above 0; 1 switches it off. It also acts at temperature 0.
        seed: the text is a function of seed and prompt; chosen at random when not given.
        acceptance: `lossless` keeps the base model's distribution; `typical` does not.
        epsilon: typical acceptance's hard threshold, in (0, 1].
        delta: typical acceptance's entropy factor, in (0, 1).
        greedy_root: under typical acceptance, take the argmax at the root instead of a sample.

    Raises:
        UsageError: a value is out of range, or typical acceptance is asked for at temperature 0.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    eta_cutoff: float = 0.0
    epsilon_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = field(default_factory=lambda: int.from_bytes(os.urandom(4)))
    acceptance: Acceptance = Acceptance.LOSSLESS
    epsilon: float = 0.09
    delta: float = 0.3
    greedy_root: bool = False

    def __post_init__(self) -> None:
        try:  # a plain string will do in Python
            object.__setattr__(self, "acceptance", Acceptance(self.acceptance))
        except ValueError:
            raise UsageError(
                f"--acceptance must be lossless or typical, not '{self.acceptance}'"
            ) from None
        inf = float("inf")
        _check("temperature", self.temperature, 0 <= self.temperature < inf, "at least 0")
        _check("top-p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check("top-k", self.top_k, self.top_k >= 0, "at least 0 (0: off)")
        _check("min-p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _check("typical-p", self.typical_p, 0 < self.typical_p <= 1, "in (0, 1]")
        _check("eta-cutoff", self.eta_cutoff, 0 <= self.eta_cutoff < 1, "in [0, 1)")
        _check("epsilon-cutoff", self.epsilon_cutoff, 0 <= self.epsilon_cutoff < 1, "in [0, 1)")
        penalty = self.repetition_penalty
        _check("repetition-penalty", penalty, 0 < penalty < inf, "above 0")
        _check("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2^63)")
        _check("epsilon", self.epsilon, 0 < self.epsilon <= 1, "in (0, 1]")
        _check("delta", self.delta, 0 < self.delta < 1, "in (0, 1)")
        if self.acceptance is Acceptance.TYPICAL and self.temperature == 0:
            raise UsageError(
                "typical acceptance needs a temperature above 0: "
                "add --temperature, or use --acceptance lossless"
            )

    @property
    def lossy(self) -> bool:
        """Whether speculation changes the output distribution."""
        return self.acceptance is Acceptance.TYPICAL

    def ineffective(self, given: Mapping[str, object]) -> list[str]:
        """The names in `given` that change nothing under this configuration."""
        names: set[str] = set()
        if self.temperature == 0:
            names |= {"top_p", "top_k", "min_p", "typical_p", "eta_cutoff", "epsilon_cutoff"}
        if self.acceptance is Acceptance.LOSSLESS:
            names |= {"epsilon", "delta", "greedy_root"}
        return sorted(names & given.keys())


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an answer ends.

    Attributes:
        max_new_tokens: most tokens emitted, EOS included; None means up to the context's end.
        stop: strings that end the answer; they are not part of it.
        ignore_eos: treat end-of-sequence ids as ordinary tokens.
        on_overflow: what to do with a prompt longer than the context.

    Raises:
        UsageError: a limit below 1 or an empty stop string.
    """

    max_new_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    on_overflow: Overflow = Overflow.ERROR

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _check("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1")
        if "" in self.stop:
            raise UsageError("--stop must not be empty")


def _check(flag: str, value: float, ok: bool, wanted: str) -> None:
    if not ok:
        raise UsageError(f"--{flag} must be {wanted}, not {value}")
