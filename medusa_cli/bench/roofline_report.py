"""What a roofline says: roof and points as data, as JSON and as tables. It measures nothing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from medusa_cli.bench.counts import Work
from medusa_cli.bench.tables import MISSING, Table, number

FREE_COST = 1.25  # verification is free while its linear layers cost at most this many single rows

SCHEMA = "medusa.roofline/1"


class Part(StrEnum):
    """What is counted and measured."""

    LINEARS = "linear layers"
    ATTENTION = "attention"
    HEADS = "Medusa heads"
    PRODUCT = "attention matrix product"


class Limit(StrEnum):
    """Which roof lies over an operation."""

    MEMORY = "memory"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Roof:
    """What the machine can do at most.

    Attributes:
        bandwidth: byte/s of a streaming read.
        flops: FLOP/s of a matrix product.
    """

    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOP/byte from which on the matrix rate is the limit, not the memory."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s under the roof at an operational intensity."""
        return min(self.flops, self.bandwidth * intensity)

    def limit(self, intensity: float) -> Limit:
        """The roof over an operational intensity."""
        return Limit.MEMORY if intensity < self.ridge else Limit.COMPUTE


@dataclass(frozen=True, slots=True)
class Point:
    """One part at one size.

    Attributes:
        nodes, context: None where the part does not depend on them.
        work: what it computes and moves.
        seconds: what it took.
        roof: what it runs under.
    """

    part: Part
    nodes: int | None
    context: int | None
    batch: int
    work: Work
    seconds: float
    roof: Roof

    @property
    def achieved(self) -> float:
        """FLOP/s."""
        return self.work.flops / self.seconds

    @property
    def limit(self) -> Limit:
        """The roof that limits it."""
        return self.roof.limit(self.work.intensity)

    @property
    def share(self) -> float:
        """Achieved over attainable FLOP/s; above 1 where caches save what the count has moved."""
        return self.achieved / self.roof.attainable(self.work.intensity)


@dataclass(frozen=True, slots=True)
class FreeNodes:
    """Up to how many nodes verification is free, for each of `batch` sequences.

    Attributes:
        counted: where the linear layers' intensity meets the ridge; None: it never does.
        measured: the largest node count tried whose linear layers cost at most `FREE_COST` times
            one node's; None when one node was not measured.
    """

    batch: int
    counted: int | None
    measured: int | None


@dataclass(frozen=True, slots=True)
class Roofline:
    """A machine's roof, the parts of a decode step, and attention's matrix product alone.

    Attributes:
        complete: False when it was interrupted before every size was measured.
    """

    device: str
    dtype: str
    roof: Roof
    points: tuple[Point, ...]
    attention_product: tuple[Point, ...]
    free: tuple[FreeNodes, ...]
    warnings: tuple[str, ...]
    complete: bool = True


def to_data(roofline: Roofline) -> dict[str, Any]:
    """The roofline for JSON: SI units, and what follows from the measurements beside them."""
    roof = roofline.roof
    return {
        "schema": SCHEMA,
        "complete": roofline.complete,
        "device": roofline.device,
        "dtype": roofline.dtype,
        "bandwidth_bytes_per_second": roof.bandwidth,
        "matrix_flops_per_second": roof.flops,
        "ridge_flops_per_byte": roof.ridge,
        "points": [_point_data(point) for point in roofline.points],
        "attention_product": [_point_data(point) for point in roofline.attention_product],
        "free_nodes": [asdict(free) for free in roofline.free],
        "warnings": list(roofline.warnings),
    }


def tables(roofline: Roofline) -> list[Table]:
    """The roof, a table for each part, and the grid of attention's matrix product."""
    roof = roofline.roof
    limits = (number(roof.bandwidth / 1e9, 1), number(roof.flops / 1e9, 1), number(roof.ridge, 1))
    parts = [(part, [p for p in roofline.points if p.part is part]) for part in Part]
    found = [
        Table("Roof", ("device", "dtype", "GB/s", "GFLOP/s", "ridge, FLOP/byte"),
              ((roofline.device, roofline.dtype, *limits),), roofline.warnings),
        *(_part_table(part, points, roofline.free) for part, points in parts if points),
    ]  # fmt: skip
    if roofline.attention_product:
        found.append(_product_table(roofline.attention_product))
    return found


def _point_data(point: Point) -> dict[str, Any]:
    return {
        "part": point.part.value,
        "nodes": point.nodes,
        "context": point.context,
        "batch": point.batch,
        "flops": point.work.flops,
        "bytes": point.work.bytes,
        "intensity": point.work.intensity,
        "seconds": point.seconds,
        "achieved_flops_per_second": point.achieved,
        "share_of_roof": point.share,
        "limit": point.limit.value,
    }


def _part_table(part: Part, points: Sequence[Point], free: Sequence[FreeNodes]) -> Table:
    sizes = ("batch", "context", "nodes")
    used = [name for name in sizes if getattr(points[0], name) is not None]
    figures = ("GFLOP", "MB", "FLOP/byte", "ms", "GFLOP/s", "% of roof", "limited by")
    rows = tuple(
        (*(str(getattr(point, name)) for name in used), *_figures(point)) for point in points
    )
    notes = tuple(map(_free_note, free)) if part is Part.LINEARS else ()
    return Table(part.value.capitalize(), (*used, *figures), rows, notes)


def _figures(point: Point) -> tuple[str, ...]:
    work = point.work
    return (
        number(work.flops / 1e9, 3),
        number(work.bytes / 1e6, 1),
        number(work.intensity, 1),
        number(point.seconds * 1e3, 2),
        number(point.achieved / 1e9, 1),
        number(point.share * 100, 0),
        point.limit.value,
    )


def _free_note(free: FreeNodes) -> str:
    counted = "any number of" if free.counted is None else f"about {free.counted}"
    measured = MISSING if free.measured is None else free.measured
    return (
        f"batch {free.batch}: verification is free up to {counted} nodes by the count (intensity "
        f"below the ridge), up to {measured} as measured (at most {FREE_COST} x one node's time)"
    )


def _product_table(points: Sequence[Point]) -> Table:
    """Achieved GFLOP/s, nodes down, batch sizes across; the intensity depends on nodes alone."""
    batches = sorted({point.batch for point in points})
    at = {(point.nodes, point.batch): point for point in points}
    rows = []
    for nodes in sorted({point.nodes or 0 for point in points}):
        found = [at.get((nodes, batch)) for batch in batches]
        one = next(point for point in found if point is not None)
        achieved = [None if point is None else point.achieved / 1e9 for point in found]
        rows.append(
            (str(nodes), number(one.work.intensity, 1), *(number(rate, 1) for rate in achieved),
             number(one.roof.attainable(one.work.intensity) / 1e9, 1), one.limit.value)
        )  # fmt: skip
    columns = (
        "nodes",
        "FLOP/byte",
        *(f"batch {batch}, GFLOP/s" for batch in batches),
        "roof, GFLOP/s",
        "limited by",
    )
    title = f"{Part.PRODUCT.value.capitalize()}, context {points[0].context}"
    return Table(title, columns, tuple(rows))
