"""Traces: at each position of a text written greedily, which rank of each head was right.

A trace replays the decoding of its text with any tree, step by step, without the model. This module
is pure: it knows neither tensors nor where files lie.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from medusa_cli.decoding.tree import Choice, Tree
from medusa_cli.errors import CheckpointError, TreeError

MAX_RANKS = 64
MISS = -1
FORMAT = "medusa-traces/1"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which heads were measured, and on what.

    Attributes:
        heads, base: names of the heads and of their base model.
        heads_digest: of the heads' tensors; '' for heads that were not read from files.
        prompts: name of the set of prompts.
        prompts_digest: of that set.
        max_new_tokens: most tokens of an answer.
        complete: whether every prompt was measured.
        skipped: prompts that did not fit the context, as `question/turn`.
    """

    heads: str
    base: str
    heads_digest: str
    prompts: str
    prompts_digest: str
    max_new_tokens: int
    complete: bool = True
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextTrace:
    """The ranks along one greedy answer.

    Attributes:
        id, category: of the question.
        turn: of the question, from 0.
        ended: whether its last token ends the answer; otherwise the limit does.
        limit: most tokens that it could have had.
        ranks: a row for each token x_t but the last. Entry k is the rank of x_{t+1+k} in head k's
            logits when x_t is pending, or MISS: not among the first MAX_RANKS. A row reaches to
            the end of the text; in a text that ended, on to what the model would have written
            behind it, for a verification accepts that too before it is cut.
    """

    id: str
    category: str
    turn: int
    ended: bool
    limit: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """How many tokens the answer has."""
        return len(self.ranks) + 1

    def rows(self) -> Iterator[tuple[int, ...]]:
        """The rows of ranks, each at least one long, without what stands behind the end."""
        for t, row in enumerate(self.ranks):
            yield row[: len(self.ranks) - t]


@dataclass(frozen=True, slots=True)
class Traces:
    """Traces of many answers with one set of heads."""

    provenance: Provenance
    num_heads: int
    texts: tuple[TextTrace, ...]

    @property
    def positions(self) -> int:
        """At how many positions the heads were tried."""
        return sum(len(text.ranks) for text in self.texts)


def replay(tree: Tree, text: TextTrace, max_new_tokens: int | None = None) -> tuple[int, ...]:
    """The accept lengths that greedy decoding of the text with `tree` has.

    Args:
        max_new_tokens: a smaller limit than the text was written under.

    Raises:
        TreeError: the tree asks for ranks that traces do not hold.
    """
    if tree.candidates > MAX_RANKS:
        raise TreeError(
            f"tree '{tree.name}' asks for rank {tree.candidates - 1}, but traces hold the first "
            f"{MAX_RANKS}: replay a narrower tree"
        )
    choices = frozenset(tree.choices)
    limit = text.limit if max_new_tokens is None else min(max_new_tokens, text.limit)
    lengths: list[int] = []
    emitted = 1  # the prefill's token
    while emitted < min(limit, text.tokens):
        # The tree is cut to what may still be emitted behind the base token.
        drafts = _drafts(choices, text.ranks[emitted - 1][: limit - emitted - 1])
        lengths.append(drafts + 1)
        emitted += drafts + 1
    return tuple(lengths)


def mean_accept_length(tree: Tree, traces: Traces, max_new_tokens: int | None = None) -> float:
    """Replayed accept lengths' sum over their number, pooled over all texts; 0 without steps.

    Raises:
        TreeError: the tree asks for ranks that traces do not hold.
    """
    lengths = [n for text in traces.texts for n in replay(tree, text, max_new_tokens)]
    return sum(lengths) / len(lengths) if lengths else 0.0


def _drafts(choices: frozenset[Choice], ranks: tuple[int, ...]) -> int:
    """Length of the longest path of the tree that `ranks` begins with."""
    return next((n for n in range(len(ranks)) if ranks[: n + 1] not in choices), len(ranks))


def to_json(traces: Traces) -> str:
    """JSON of the format `medusa-traces/1`, a line for each text."""
    head = {
        "format": FORMAT,
        "provenance": asdict(traces.provenance),
        "num_heads": traces.num_heads,
        "texts": [],
    }
    texts = [json.dumps(asdict(text), separators=(",", ":")) for text in traces.texts]
    return json.dumps(head).removesuffix("]}") + "\n" + ",\n".join(texts) + "\n]}\n"


def from_json(content: str, where: str) -> Traces:
    """Reads what `to_json` wrote.

    Raises:
        CheckpointError: it is damaged, or something else.
    """
    data = parse(content, FORMAT, where)
    num_heads, texts = data.get("num_heads"), data.get("texts")
    if type(num_heads) is not int or num_heads < 1 or not isinstance(texts, list):
        raise damaged(where, "it has no number of heads or no texts")
    traced = (_text(text, num_heads, f"text {n}", where) for n, text in enumerate(texts, start=1))
    return Traces(provenance_of(data, where), num_heads, tuple(traced))


def parse(content: str, format_: str, where: str) -> dict[str, Any]:
    """A JSON object that says it is of a format.

    Raises:
        CheckpointError: it is not.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(where, str(error)) from None
    if not isinstance(data, dict) or data.get("format") != format_:
        raise damaged(where, f"it is not of the format {format_}")
    return data


def provenance_of(data: dict[str, Any], where: str) -> Provenance:
    """The provenance in a file of results.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    found = data.get("provenance")
    names = [field.name for field in fields(Provenance)]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise damaged(where, "its provenance is not whole")
    kinds = {"max_new_tokens": int, "complete": bool, "skipped": list}
    wrong = next((n for n in names if type(found[n]) is not kinds.get(n, str)), None)
    if wrong is not None or not all(isinstance(name, str) for name in found["skipped"]):
        raise damaged(where, f"its provenance has a bad '{wrong or 'skipped'}'")
    return Provenance(**found | {"skipped": tuple(found["skipped"])})


def damaged(where: str, reason: str) -> CheckpointError:
    """The error for a file of results that cannot be read."""
    return CheckpointError(
        f"{where} is damaged: {reason}.\nRemove it, or measure again with `medusa accuracy`."
    )


def _text(data: Any, num_heads: int, which: str, where: str) -> TextTrace:
    kinds = {"id": str, "category": str, "turn": int, "ended": bool, "limit": int, "ranks": list}
    if not isinstance(data, dict) or {n: type(value) for n, value in data.items()} != kinds:
        raise damaged(where, f"{which} is not a trace")
    ranks = data["ranks"]
    tokens, limit = len(ranks) + 1, data["limit"]
    if tokens > limit or (tokens < limit and not data["ended"]):
        raise damaged(where, f"{which} has {tokens} tokens under a limit of {limit}")
    for t, row in enumerate(ranks):
        least = min(num_heads, tokens - 1 - t)
        most = num_heads if data["ended"] else least
        if not isinstance(row, list) or not least <= len(row) <= most:
            raise damaged(where, f"{which}, row {t + 1} has not {least} ranks")
        if any(type(rank) is not int or not MISS <= rank < MAX_RANKS for rank in row):
            raise damaged(where, f"{which}, row {t + 1} holds what is not a rank")
    return TextTrace(**data | {"ranks": tuple(tuple(row) for row in ranks)})
