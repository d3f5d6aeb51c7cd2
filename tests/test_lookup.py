"""Prompt lookup: the latest place of the longest match, and how much it is trusted."""

import random

from medusa_cli.decoding.lookup import (
    CONTINUATION,
    LONGEST_MATCH,
    MATCHES,
    PRIOR_SHARES,
    Lookup,
    Match,
    NgramIndex,
)


def slow_find(text: list[int], tokens: int) -> Match | None:
    """The same by looking at every earlier place."""
    for n in reversed(MATCHES):
        ends = [e for e in range(n - 1, len(text) - 1) if text[e + 1 - n : e + 1] == text[-n:]]
        if len(text) > n and ends:
            end, length = ends[-1], n
            while (
                length < LONGEST_MATCH
                and length <= end
                and (text[end - length] == text[len(text) - 1 - length])
            ):
                length += 1
            copied = list(text)
            for i in range(tokens):  # the copy may reach into itself
                copied.append(copied[end + 1 + i])
            return Match(length, tuple(copied[len(text) :]))
    return None


def test_the_index_finds_what_a_scan_finds() -> None:
    generator = random.Random(0)
    found = 0
    for alphabet in (1, 2, 4, 12):
        for _ in range(20):
            index, text = NgramIndex(), [generator.randrange(alphabet) for _ in range(5)]
            while len(text) < 60:
                match = index.find(text, 6)
                assert match == slow_find(text, 6)
                found += match is not None
                text += [generator.randrange(alphabet) for _ in range(generator.randrange(1, 4))]
    assert found > 100


def test_the_text_is_read_once() -> None:
    """The work of a step does not grow with the text."""

    class Watched(list[int]):
        reads = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Watched.reads += 1
            return super().__getitem__(key)

    text = Watched(range(5000))
    index = NgramIndex()
    index.find(text, 8)
    Watched.reads = 0
    text.append(7)
    index.find(text, 8)
    assert Watched.reads < 30


def test_a_short_text_has_no_match() -> None:
    for text in ([5], [5, 5], [5, 6, 5]):
        assert NgramIndex().find(text, 4) is None
    assert NgramIndex().find([5, 6, 9, 5, 6], 2) == Match(2, (9, 5))


def test_a_loop_goes_on_as_a_loop() -> None:
    match = NgramIndex().find([1, 2, 3, 1, 2, 3, 1, 2], 7)
    assert match is not None
    assert match.tokens == (3, 1, 2, 3, 1, 2, 3)


def test_a_branch_is_no_longer_than_there_is_room() -> None:
    text = list(range(100)) + [0, 1]
    assert len(Lookup().branch(text, 3)) == 3
    assert len(Lookup().branch(text, 1000)) == CONTINUATION
    assert Lookup().branch(text, 0) == []


def test_trust_follows_what_is_right() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    lookup = Lookup()
    before = lookup.branch(text, 4)
    assert [token for _, token in before] == [3, 4, 5, 6]
    assert [share for share, _ in before] == list(PRIOR_SHARES[:4]), (
        "longer matches are trusted more"
    )
    for _ in range(30):
        lookup.branch(text, 4)
        lookup.observe([3, 4, 99])
    right = [share for share, _ in lookup.branch(text, 4)]
    assert right[0] > 0.8
    assert right[1] > 0.8
    assert right[2] < 0.2, "the third was wrong"
    assert right[3] == before[3][0], "and nothing was learned of the fourth"
    for _ in range(60):
        lookup.branch(text, 4)
        lookup.observe([99])
    assert lookup.branch(text, 4)[0][0] < 0.3, "older steps fade"


def test_without_a_match_nothing_is_learned() -> None:
    lookup = Lookup()
    assert lookup.branch([1, 2, 3], 4) == []
    lookup.observe([9])
    assert lookup.branch([1, 2, 3, 1, 2], 1) == [(PRIOR_SHARES[0], 3)]
