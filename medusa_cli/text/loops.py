"""Telling whether an answer runs in circles, as greedy answers of small models do."""

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_ROUNDS = 3
MIN_TOKENS = 24


def loop_period(token_ids: Sequence[int]) -> int | None:
    """Length of the cycle that an answer ends in, in tokens; None when it does not.

    The end must repeat at least `MIN_ROUNDS` times and for at least `MIN_TOKENS` tokens.
    """
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_ROUNDS * period, MIN_TOKENS)
        if length > len(token_ids):
            break  # longer cycles need at least as many tokens
        tail = token_ids[len(token_ids) - length :]
        if tail[period:] == tail[:-period]:
            return period
    return None
