"""The events of one answer, and how token steps become text events."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from medusa_cli.config import FinishReason, SamplingConfig
from medusa_cli.decoding.adaptive import AnyTree
from medusa_cli.decoding.decode import DecodeStep
from medusa_cli.text.detokenizer import Detokenizer
from medusa_cli.text.stops import StopFilter


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token made whole.

    Attributes:
        text: to show; '' while a character or a possible stop string is incomplete.
        depth: tree depth at which the token was accepted; 0: the base model's own token.
    """

    text: str
    depth: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is encoded, and the prefill begins."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward's tokens.

    Attributes:
        token_ids: emitted tokens, cut behind EOS or the token that completes a stop string.
        pieces: their text, in order.
        accept_length: tokens accepted by the verification, the base token included, before
            that cut; 0 for the prefill, which verifies nothing.
        nodes: of the tree that was verified, the root included; 0 for the prefill.
        seconds: wall time of the forward and what belongs to it.
        finish: why the answer ends with this step, or None.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    accept_length: int
    nodes: int
    seconds: float
    finish: FinishReason | None

    @property
    def text(self) -> str:
        """The step's text."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer.

    Attributes:
        text: the answer without special tokens and stop string.
        token_ids: what was emitted, EOS included.
        finish_reason: why it ended.
        prompt_tokens: tokens in front of the answer.
        accept_lengths: of each verification.
        sampling: the configuration used, with the seed that was chosen.
        tree: what was verified; None when decoding plainly.
        step_nodes: how many nodes at each verification, the root included.
        ttft_seconds: from the call to the first token.
        step_seconds: of each verification.
        warnings: what the user should know.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    accept_lengths: tuple[int, ...]
    sampling: SamplingConfig
    tree: AnyTree | None
    step_nodes: tuple[int, ...]
    ttft_seconds: float
    step_seconds: tuple[float, ...]
    warnings: tuple[str, ...]

    @property
    def mean_accept_length(self) -> float:
        """Sum of accept lengths over the number of steps; 0 without steps."""
        return fmean(self.accept_lengths) if self.accept_lengths else 0.0

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes of a verification, the root included; 0 without steps."""
        return fmean(self.step_nodes) if self.step_nodes else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """How many steps had which accept length."""
        return dict(sorted(Counter(self.accept_lengths).items()))

    @property
    def decode_seconds(self) -> float:
        """Time of all verifications."""
        return sum(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted behind the first one, over the time of their steps."""
        seconds = self.decode_seconds
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else 0.0


Event = Started | Step | Result


def step_milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 95th percentile (nearest rank) in ms; zeros without steps."""
    ordered = sorted(seconds) or [0.0]

    def percentile(share: float) -> float:
        return round(1000 * ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)

    mean = round(1000 * fmean(ordered), 3)
    return {"mean": mean, "p50": percentile(0.5), "p95": percentile(0.95)}


def text_steps(
    decoding: Iterable[DecodeStep],
    detokenizer: Detokenizer,
    stops: StopFilter,
    should_stop: Callable[[], bool],
) -> Iterator[Step]:
    """Turns token steps into text steps, up to EOS, a stop string, a limit or an interruption.

    The pieces of all steps add up to the answer's text: the last step flushes what was held back.
    """
    for decoded in decoding:
        pieces: list[Piece] = []
        for token, depth in zip(decoded.token_ids, decoded.depths, strict=True):
            pieces.append(Piece(stops.push(detokenizer.push(token)), depth))
            if stops.stopped:
                break
        finish = FinishReason.STOP if stops.stopped else decoded.finish
        if finish is None and should_stop():
            finish = FinishReason.INTERRUPTED
        kept = decoded.token_ids[: len(pieces)]
        if finish is not None and not stops.stopped:
            # The last bytes may still complete a stop string, and then end the answer there.
            rest = stops.push(detokenizer.flush()) + stops.flush()
            pieces[-1] = Piece(pieces[-1].text + rest, pieces[-1].depth)
        yield Step(
            kept, tuple(pieces), decoded.accept_length, decoded.nodes, decoded.seconds, finish
        )
        if finish is not None:
            return
