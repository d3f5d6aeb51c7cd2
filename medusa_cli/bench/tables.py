"""Tables as data: what a terminal, Markdown and CSV show alike."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a report.

    Attributes:
        title: what it shows.
        columns: headings, with units.
        rows: cells as text, as many in each row as there are columns.
        notes: lines below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def to_text(tables: Sequence[Table]) -> str:
    """Aligned columns, the first one to the left, however wide; the notes below."""
    parts = []
    for table in tables:
        rows = [table.columns, *table.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
        lines = [table.title, ""]
        for first, *others in rows:
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        parts.append("\n".join([*lines, *([""] if table.notes else []), *table.notes]))
    return "\n\n".join(parts) + "\n"


def to_markdown(tables: Sequence[Table]) -> str:
    """Markdown with a heading for each table."""
    parts = []
    for table in tables:
        lines = [f"### {table.title}", "", _markdown_row(table.columns)]
        lines.append(_markdown_row([":--", *["--:"] * (len(table.columns) - 1)]))
        lines += [_markdown_row(row) for row in table.rows]
        if table.notes:
            lines += ["", *(f"- {note}" for note in table.notes)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def to_csv(tables: Sequence[Table]) -> str:
    """CSV; each row starts with its table's title, each table with its headings."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for table in tables:
        writer.writerow(["table", *table.columns])
        writer.writerows([table.title, *row] for row in table.rows)
    return out.getvalue()


def number(value: float | None, digits: int = 2) -> str:
    """A figure with a fixed number of decimals, or the sign for what was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
