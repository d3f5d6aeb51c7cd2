"""Prompt lookup: where the last tokens stood earlier in the text, what followed them there.

It costs no forward. How far it can be trusted shows while decoding: every step tells whether the
continuation was right, drafted or not. Pure Python on token ids.

Source: Saxena 2023, "Prompt lookup decoding"; Fu et al. 2024, arXiv 2402.02057 (n-gram pools).
"""

from collections.abc import Sequence
from dataclasses import dataclass

MATCHES = (2, 3, 4)  # tokens that are looked up, the pending one last
LONGEST_MATCH = 8  # from here on matches count as equally long
CONTINUATION = 16  # most tokens that a branch has
DECAY = 0.98  # of what older steps have shown, a step

# How often a token behind a match of 2, 3, ..., LONGEST_MATCH tokens is right, before anything was
# seen, and how many observations that is worth.
PRIOR_SHARES = (0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
PRIOR_WEIGHT = 4.0

Guess = tuple[float, int]
"""A token with the probability that it is right if all before it are."""


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place that reads like the end of the text.

    Attributes:
        length: how many tokens are the same, up to LONGEST_MATCH.
        tokens: what followed them.
    """

    length: int
    tokens: tuple[int, ...]


class NgramIndex:
    """The latest place of every short run of tokens in a text that only grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = 0

    def find(self, text: Sequence[int], tokens: int) -> Match | None:
        """The latest place that the longest possible end of `text` stood at before.

        Args:
            text: the text of the last call with more tokens at its end.
            tokens: how many to continue by. A continuation that reaches the end of the text goes
                on as a copy of itself, as text in a loop does.
        """
        last = len(text) - 1
        for end in range(self._read, last):  # runs that end at the last token have no continuation
            for n in MATCHES:
                self._ends[tuple(text[max(0, end + 1 - n) : end + 1])] = end
        self._read = max(self._read, last)
        for n in reversed(MATCHES):
            found = self._ends.get(tuple(text[-n:])) if n <= len(text) else None
            if found is None:
                continue
            length = n
            while (
                length < LONGEST_MATCH
                and length <= found
                and text[found - length] == text[last - length]
            ):
                length += 1
            period = last - found
            return Match(length, tuple(text[found + 1 + i % period] for i in range(tokens)))
        return None


class Lookup:
    """The lookup branch of one generation, and how often it was right so far."""

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._match: Match | None = None
        self._right = [share * PRIOR_WEIGHT for share in PRIOR_SHARES]
        self._tried = [PRIOR_WEIGHT] * len(PRIOR_SHARES)

    def branch(self, text: Sequence[int], room: int) -> list[Guess]:
        """The continuation that `text`, pending token included, had earlier; empty without one.

        Args:
            room: most tokens that it may have.
        """
        self._match = self._index.find(text, min(room, CONTINUATION)) if room > 0 else None
        if self._match is None:
            return []
        rows = map(self._row, range(len(self._match.tokens)))
        return [
            (self._right[row] / self._tried[row], token)
            for row, token in zip(rows, self._match.tokens, strict=True)
        ]

    def observe(self, new: Sequence[int]) -> None:
        """Learns from the tokens that truly followed the text of the last `branch`."""
        if self._match is None:
            return
        for i, (guessed, true) in enumerate(zip(self._match.tokens, new, strict=False)):
            row = self._row(i)
            self._right[row] = DECAY * self._right[row] + (guessed == true)
            self._tried[row] = DECAY * self._tried[row] + 1
            if guessed != true:
                break

    def _row(self, i: int) -> int:
        """Where the i-th token counts: if those before it are right, the match is longer by i."""
        assert self._match is not None
        return min(self._match.length + i, LONGEST_MATCH) - MATCHES[0]
