"""The base model's own choice of a next token, from one row of logits.

Randomness is keyed: the noise of a token depends on (seed, absolute position, token id) alone, so
a seeded text is a function of seed and prompt, whatever tree was verified on the way.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_cli.config import Acceptance, SamplingConfig

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

# SplitMix64's increment and mixing constants, as signed 64-bit integers.
# Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def keyed_gumbel(
    seed: int,
    position: int | Tensor,  # []
    vocab_size: int,
    device: torch.device,
) -> Tensor:  # [V]
    """Standard Gumbel noise, a pure function of (seed, position, token id)."""
    at = torch.as_tensor(position, device=device)
    state = _mix(_mix(torch.tensor(seed, device=device)) + at * _GAMMA)  # []
    tokens = torch.arange(1, vocab_size + 1, device=device)
    bits = _mix(state + tokens * _GAMMA) >> 11 & (1 << 53) - 1  # [V], 53 uniform bits
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-53
    # An exponential variate near 0 wins the argmax, and there log1p keeps full precision.
    exponential = -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))
    return -torch.log(exponential)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX_1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX_2
    return x ^ (x >> 31 & (1 << 33) - 1)


@dataclass(frozen=True, slots=True)
class Warped:
    """Scores of R rows before and after truncation.

    Attributes:
        scores: [R, V], after prefix processors and temperature.
        truncated: [R, V], the same after top-k, top-p, ...: -inf where a token is cut.
    """

    scores: Tensor
    truncated: Tensor


class Sampler:
    """Chooses tokens as a `SamplingConfig` says, with transformers' own warpers.

    Attributes:
        config: what it was made from.
        needs_prefix: whether the choice depends on the tokens before it.
    """

    def __init__(self, config: SamplingConfig, device: torch.device) -> None:
        self.config = config
        self._processors = _prefix_processors(config)
        self._warpers = _truncation_warpers(config, device)
        self.needs_prefix = len(self._processors) > 0

    def warp(
        self,
        logits: Tensor,  # [R, V]
        prefixes: Tensor | None,  # [R, T], the tokens before each row; None unless needed
    ) -> Warped:
        """Applies prefix processors, temperature and truncation in transformers' order."""
        scores = self._processors(prefixes, logits.float())
        if self.config.temperature == 0:
            return Warped(scores, scores)
        scores = scores / self.config.temperature
        # None of the truncating warpers looks at the prefix.
        return Warped(scores, self._warpers(prefixes, scores))

    def choose(
        self,
        logits: Tensor,  # [1, V]
        prefix: Tensor | None,  # [1, T]
        position: int | Tensor,  # []
    ) -> Tensor:  # []
        """The token for absolute position `position`: the argmax, or a keyed Gumbel-max sample."""
        if self.config.temperature == 0 and not self.needs_prefix:
            return logits[0].argmax()
        warped = self.warp(logits, prefix)
        if self.config.temperature == 0:
            return warped.scores[0].argmax()
        truncated = warped.truncated[0]
        if self.config.acceptance is Acceptance.TYPICAL:
            if self.config.greedy_root:
                return warped.scores[0].argmax()
            kept = typical_set(warped, self.config)[0]
            truncated = warped.scores[0].masked_fill(~kept, -torch.inf)
        noise = keyed_gumbel(self.config.seed, position, truncated.shape[0], truncated.device)
        return (truncated + noise).argmax()


def typical_set(warped: Warped, config: SamplingConfig) -> Tensor:  # [R, V] bool
    """Tokens x with p(x) > min(epsilon, delta * exp(-H(p))), less those that truncation cut.

    p and its entropy H are taken before truncation. As delta < 1 the most likely token always
    passes; where truncation cuts all that pass, the threshold alone decides.

    Source: Cai et al. 2024, arXiv 2401.10774, section 2.3.1.
    """
    log_p = warped.scores.log_softmax(dim=-1)
    entropy = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(dim=-1, keepdim=True)  # [R, 1]
    threshold = (config.delta * torch.exp(-entropy)).clamp(max=config.epsilon)
    typical = log_p.exp() > threshold
    kept = typical & (warped.truncated > -torch.inf)
    return torch.where(kept.any(dim=-1, keepdim=True), kept, typical)


def _prefix_processors(config: SamplingConfig) -> "LogitsProcessorList":
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    processors = LogitsProcessorList()
    if config.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    return processors


def _truncation_warpers(config: SamplingConfig, device: torch.device) -> "LogitsProcessorList":
    import transformers as tf

    warpers = tf.LogitsProcessorList()
    if config.top_k > 0:
        warpers.append(tf.TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        warpers.append(tf.TopPLogitsWarper(config.top_p))
    if config.min_p > 0:
        warpers.append(tf.MinPLogitsWarper(config.min_p))
    if config.typical_p < 1:
        warpers.append(tf.TypicalLogitsWarper(config.typical_p))
    if config.epsilon_cutoff > 0:
        warpers.append(tf.EpsilonLogitsWarper(config.epsilon_cutoff))
    if config.eta_cutoff > 0:
        warpers.append(tf.EtaLogitsWarper(config.eta_cutoff, device=str(device)))
    return warpers
