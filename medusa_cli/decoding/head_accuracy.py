"""How often each head was right, as hits over counts, read off traces."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from medusa_cli.decoding.traces import (
    MAX_RANKS,
    MISS,
    Provenance,
    TextTrace,
    Traces,
    damaged,
    parse,
    provenance_of,
)

FORMAT = "medusa-accuracy/1"
TOP = 10


@dataclass(frozen=True, slots=True)
class HeadAccuracy:
    """How often which rank of each head was right.

    Attributes:
        hits: [K][MAX_RANKS], positions at which rank r of head k was the true token.
        counts: [K], positions at which head k was tried.
    """

    hits: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]

    def top(self, head: int, n: int) -> float | None:
        """Share of positions with the true token among the first n; None without positions."""
        count = self.counts[head]
        return sum(self.hits[head][:n]) / count if count else None

    def ranks(self) -> tuple[tuple[float, ...], ...]:
        """[K][MAX_RANKS], share of positions at which rank r of head k was right."""
        pairs = zip(self.hits, self.counts, strict=True)
        return tuple(tuple(hit / max(count, 1) for hit in hits) for hits, count in pairs)


@dataclass(frozen=True, slots=True)
class AccuracyTable:
    """The accuracy of a set of heads, over all prompts and by category."""

    provenance: Provenance
    overall: HeadAccuracy
    categories: Mapping[str, HeadAccuracy]

    @property
    def positions(self) -> int:
        """At how many positions the heads were tried."""
        return self.overall.counts[0]


def accuracy_table(traces: Traces) -> AccuracyTable:
    """The accuracy that traces show; categories in the order of their first text."""
    categories = dict.fromkeys(text.category for text in traces.texts)
    return AccuracyTable(
        traces.provenance,
        head_accuracy(traces.texts, traces.num_heads),
        {
            category: head_accuracy(
                (text for text in traces.texts if text.category == category), traces.num_heads
            )
            for category in categories
        },
    )


def head_accuracy(texts: Iterable[TextTrace], num_heads: int) -> HeadAccuracy:
    """The accuracy of `num_heads` heads over some texts; a position without a token is not one."""
    hits = [[0] * MAX_RANKS for _ in range(num_heads)]
    counts = [0] * num_heads
    for text in texts:
        for row in text.rows():
            for k, rank in enumerate(row):
                counts[k] += 1
                if rank != MISS:
                    hits[k][rank] += 1
    return HeadAccuracy(tuple(map(tuple, hits)), tuple(counts))


def to_data(table: AccuracyTable) -> dict[str, Any]:
    """JSON data of the format `medusa-accuracy/1`; `top` repeats hits over counts for readers."""
    return {
        "format": FORMAT,
        "provenance": asdict(table.provenance),
        "overall": _data(table.overall),
        "categories": {name: _data(accuracy) for name, accuracy in table.categories.items()},
    }


def to_json(table: AccuracyTable) -> str:
    """JSON text of `to_data`."""
    return json.dumps(to_data(table), ensure_ascii=False) + "\n"


def from_json(content: str, where: str) -> AccuracyTable:
    """Reads what `to_json` wrote.

    Raises:
        CheckpointError: it is damaged, or something else.
    """
    data = parse(content, FORMAT, where)
    categories = data.get("categories")
    if not isinstance(categories, dict):
        raise damaged(where, "it has no categories")
    return AccuracyTable(
        provenance_of(data, where),
        _accuracy(data.get("overall"), where),
        {name: _accuracy(value, where) for name, value in categories.items()},
    )


def _data(accuracy: HeadAccuracy) -> dict[str, Any]:
    top = [
        [accuracy.top(head, n) for n in range(1, TOP + 1)] for head in range(len(accuracy.counts))
    ]
    return asdict(accuracy) | {
        "top": [[None if share is None else round(share, 4) for share in row] for row in top]
    }


def _accuracy(data: Any, where: str) -> HeadAccuracy:
    counts, hits = (data.get(key) if isinstance(data, dict) else None for key in ("counts", "hits"))
    if not _whole(counts) or not counts or not isinstance(hits, list) or len(hits) != len(counts):
        raise damaged(where, "its counts are missing")
    for row, count in zip(hits, counts, strict=True):
        if not _whole(row) or len(row) != MAX_RANKS or sum(row) > count:
            raise damaged(where, "its hits do not fit its counts")
    return HeadAccuracy(tuple(map(tuple, hits)), tuple(counts))


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
