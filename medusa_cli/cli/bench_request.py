"""What one call of `bench` asks for, apart from the model, and its values checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from medusa_cli.cli.options import ModelOptions
from medusa_cli.config import Acceptance
from medusa_cli.errors import UsageError

MAX_SWEPT_NODES = 1024


class BenchFormat(StrEnum):
    """How results are printed."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


EXPORT_FORMATS = {".md": BenchFormat.MD, ".csv": BenchFormat.CSV, ".json": BenchFormat.JSON}
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What is measured.

    Attributes:
        trees: names or files; empty for the model's own.
        acceptance: rules to compare; empty for the default one.
        against: other decoders.
        baseline: whether plain decoding runs.
        prompts: file or `builtin`.
        limit: most questions, None for all.
        max_new_tokens: of an answer.
        own_texts: whether the three above were given, not left at their defaults.
        ignore_eos: go on after end tokens.
        warmup, repeats: runs of each arm.
        given: fields of `SamplingConfig` that were given.
        plot: file to draw to.
        loading: how the model was loaded; assistant models are loaded alike.
    """

    trees: tuple[str, ...]
    acceptance: tuple[Acceptance, ...]
    against: tuple[str, ...]
    baseline: bool
    prompts: str
    limit: int | None
    max_new_tokens: int
    own_texts: bool
    ignore_eos: bool
    warmup: int
    repeats: int
    given: dict[str, Any]
    plot: Path | None
    loading: ModelOptions


def check_files(export: Path | None, plot: Path | None) -> None:
    """Raises `UsageError` when a file's suffix names no format, or its folder is not there."""
    for flag, file, suffixes in (
        ("--export", export, tuple(EXPORT_FORMATS)),
        ("--plot", plot, PLOT_SUFFIXES),
    ):
        if file is None:
            continue
        if file.suffix not in suffixes:
            raise UsageError(f"{flag} takes a file that ends in {', '.join(suffixes)}: '{file}'")
        if not file.parent.is_dir():
            raise UsageError(f"{flag} {file}: there is no folder {file.parent}")


def parse_nodes(text: str) -> list[int]:
    """Node counts of `1,2,4,...,128`; dots go on as the two numbers before them do.

    Raises:
        UsageError: not whole numbers from 1 on, or dots that lead nowhere.
    """
    parts = [part.strip() for part in text.split(",")]
    nodes: list[int] = []
    for i, part in enumerate(parts):
        if part in ("...", "…"):
            if i < 2 or i + 2 != len(parts) or not parts[-1].isdigit():
                raise UsageError("--sweep-nodes: dots need two numbers before and one behind them")
            nodes += _between(nodes[-2], nodes[-1], int(parts[-1]))
        elif not part.isdigit() or not 1 <= int(part) <= MAX_SWEPT_NODES:
            raise UsageError(
                f"--sweep-nodes takes whole numbers from 1 to {MAX_SWEPT_NODES}, not '{part}'"
            )
        else:
            nodes.append(int(part))
    return sorted(set(nodes))


def parse_temperatures(text: str) -> list[float]:
    """Temperatures of `0,0.3,0.7`.

    Raises:
        UsageError: not numbers from 0 on.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value < float("inf") for value in values):
        raise UsageError(f"--sweep-temperature takes numbers from 0 on, not '{text}'")
    return sorted(set(values))


def _between(a: int, b: int, last: int) -> Sequence[int]:
    """What lies between `b` and `last` when the step from `a` to `b` goes on."""
    if not a < b < last:
        raise UsageError("--sweep-nodes: the numbers around dots must rise")
    if b % a > 0 or b // a == 1:
        return range(2 * b - a, last, b - a)
    found = []
    value = b * (b // a)
    while value < last:
        found.append(value)
        value *= b // a
    return found
