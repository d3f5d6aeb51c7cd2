"""Prints what a benchmark found: a table on a terminal, Markdown, CSV or JSON, and to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from medusa_cli.bench.tables import Table, to_csv, to_markdown, to_text
from medusa_cli.cli.bench_request import EXPORT_FORMATS, BenchFormat
from medusa_cli.cli.report import to_json
from medusa_cli.cli.streams import Streams
from medusa_cli.models.storage import write_atomic

_ANY = 1000  # columns: what a table asks for when nothing limits it


@dataclass(frozen=True, slots=True)
class Findings:
    """What there is to print.

    Attributes:
        tables: for people.
        data: for programs.
        art: a plot drawn with characters, for a terminal.
        complete: False when what there is was cut short by an interrupt.
    """

    tables: Sequence[Table]
    data: dict[str, Any]
    art: str = ""
    complete: bool = True


def show(findings: Findings, format_: BenchFormat, streams: Streams) -> None:
    """Prints findings to standard output."""
    if format_ is not BenchFormat.TABLE:
        streams.write(_text(findings, format_, indent=streams.stdout.isatty()))
        return
    if streams.stdout.isatty():
        console = Console(file=streams.stdout, highlight=False)
        for table in findings.tables:
            _print(table, console)
    else:
        streams.write(to_text(findings.tables))
    if findings.art:
        streams.write(f"\n{findings.art}")


def write(findings: Findings, file: Path) -> None:
    """Writes findings to a file in the format that its suffix names.

    Raises:
        StorageError: the file cannot be written.
    """
    write_atomic(file, _text(findings, EXPORT_FORMATS[file.suffix], indent=True))


def _text(findings: Findings, format_: BenchFormat, *, indent: bool) -> str:
    match format_:
        case BenchFormat.MD:
            return to_markdown(findings.tables)
        case BenchFormat.CSV:
            return to_csv(findings.tables)
        case _:
            return to_json(findings.data, indent=1 if indent else None)


def _print(table: Table, console: Console) -> None:
    """Title, columns where the terminal is wide enough, else a block for each row; notes."""
    console.print(Text(table.title, style="bold"))
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="left" if i == 0 else "right")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    wanted = console.measure(drawn, options=console.options.update(width=_ANY)).maximum
    console.print(drawn if wanted <= console.width else Text(_records(table)))
    for note in table.notes:
        console.print(Text(note, style="dim"))
    console.print()


def _records(table: Table) -> str:
    """A table that is wider than the terminal: a block for each row, a line for each cell."""
    width = max(map(len, table.columns[1:]))
    lines = []
    for first, *cells in table.rows:
        lines.append(f" {first}")
        pairs = zip(table.columns[1:], cells, strict=True)
        lines += [f"   {column.ljust(width)}  {cell}" for column, cell in pairs]
    return "\n".join(lines) + "\n"
