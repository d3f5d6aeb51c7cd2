"""Draws a roofline: the parts of a decode step, and attention's matrix product, under the roof."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import atan2, degrees
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import Bbox

from medusa_cli.bench.roofline_report import Part, Point, Roof, Roofline

GIGA = 1e9
MARKERS = {Part.LINEARS: "o", Part.ATTENTION: "s", Part.HEADS: "*", Part.PRODUCT: "o"}
COLOURS = {
    Part.LINEARS: ("#0b3c6f", "#2a7fc1", "#85bde6"),
    Part.ATTENTION: ("#7a2600", "#c8501b", "#e88a3a", "#c9a227"),
    Part.HEADS: ("#1c7c3c", "#56b870", "#a5dcb0"),
    Part.PRODUCT: ("#2c115f", "#8c2981", "#de4968", "#fe9f6d"),
}
# Where a label may stand, in points from its marker: below, above, right, left.
PLACES = (
    ((0, -7), "center", "top"),
    ((0, 7), "center", "bottom"),
    ((8, 0), "left", "center"),
    ((-8, 0), "right", "center"),
)


@dataclass(frozen=True, slots=True)
class _Series:
    """Points that differ in their nodes alone."""

    name: str
    part: Part
    colour: str
    points: Sequence[Point]


def plot_roofline(roofline: Roofline, path: Path) -> None:
    """Writes the figure; the suffix says the format: `.png`, `.svg`, or another of matplotlib's.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the suffix.
    """
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"Roofline of a decode step: {roofline.device}, {roofline.dtype}")
    product = roofline.attention_product
    panels = (
        (left, "Parts of a decode step (numbers: nodes)", _series(roofline.points)),
        (right, _product_title(product), _series(product)),
    )
    for axes, title, series in panels:
        _draw(axes, title, series, roofline.roof)
    figure.draw_without_rendering()  # settles the layout: from here on pixels are known
    for axes, _, series in panels:
        _name_roof(axes, roofline.roof)
        _label_nodes(axes, series)
    figure.savefig(path, dpi=150)


def _product_title(product: Sequence[Point]) -> str:
    context = f", context {product[0].context:,}" if product else ""
    return f"{Part.PRODUCT.value.capitalize()}{context}"


def _series(points: Sequence[Point]) -> list[_Series]:
    found: list[_Series] = []
    for part in Part:
        own = [point for point in points if point.part is part]
        runs = [list(run) for _, run in groupby(own, lambda p: (p.context, p.batch))]
        for i, run in enumerate(runs):
            colours = COLOURS[part]
            context = run[0].context if part is Part.ATTENTION else None
            name = "" if part is Part.PRODUCT else f"{part.value}, "
            name += "" if context is None else f"context {context:,}, "
            name += f"batch {run[0].batch}"
            found.append(_Series(name, part, colours[i % len(colours)], run))
    return found


def _draw(axes: Axes, title: str, series: Sequence[_Series], roof: Roof) -> None:
    intensities = [point.work.intensity for one in series for point in one.points]
    low = min([roof.ridge, *intensities]) / 2
    high = max([roof.ridge, *intensities]) * 3
    corners = [low, roof.ridge, high]
    axes.plot(corners, [roof.attainable(x) / GIGA for x in corners], color="black", linewidth=1.8)
    axes.axvline(roof.ridge, color="grey", linestyle=":", linewidth=1)
    for one in series:
        axes.plot(
            [point.work.intensity for point in one.points],
            [point.achieved / GIGA for point in one.points],
            color=one.colour,
            marker=MARKERS[one.part],
            markersize=13 if one.part is Part.HEADS else 6,
            linewidth=1,
            label=one.name,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), title=title)
    axes.set_xlabel("operational intensity, FLOP/byte")
    axes.set_ylabel("achieved, GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", alpha=0.3)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / 1.6, max(top, roof.flops / GIGA) * 2)
    if series:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=9
        )


def _name_roof(axes: Axes, roof: Roof) -> None:
    """The figures of the roof, along its lines and above the ridge."""
    low, high = axes.get_xlim()
    start, end = _pixels(axes, roof, low), _pixels(axes, roof, roof.ridge)
    axes.annotate(
        f"{roof.bandwidth / GIGA:,.1f} GB/s",
        (low * 1.1, roof.attainable(low * 1.1) / GIGA),
        xytext=(0, 5),
        textcoords="offset points",
        rotation=degrees(atan2(end[1] - start[1], end[0] - start[0])),
        rotation_mode="anchor",
    )
    axes.annotate(
        f"{roof.flops / GIGA:,.0f} GFLOP/s",
        (high / 1.1, roof.flops / GIGA),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
    )
    for side, text in (("right", "memory-bound"), ("left", "compute-bound")):
        axes.annotate(
            text,
            (roof.ridge, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(-8 if side == "right" else 8, 0),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=9,
            color="dimgrey",
        )
    axes.annotate(
        f"ridge {roof.ridge:,.1f} FLOP/byte",
        (roof.ridge, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        fontsize=9,
        color="dimgrey",
    )


def _pixels(axes: Axes, roof: Roof, intensity: float) -> tuple[float, float]:
    x, y = axes.transData.transform((intensity, roof.attainable(intensity) / GIGA))
    return float(x), float(y)


def _label_nodes(axes: Axes, series: Sequence[_Series]) -> None:
    """Writes node counts beside the markers, wherever nothing stands yet."""
    taken = [text.get_window_extent() for text in axes.texts]
    for line in axes.get_lines():
        corners = line.get_transform().transform(line.get_xydata()).tolist()
        taken += _boxes(corners, str(line.get_marker()))
    for one in series:
        for point in one.points:
            if point.nodes is not None:
                _label(axes, point, one.colour, taken)


def _label(axes: Axes, point: Point, colour: str, taken: list[Bbox]) -> None:
    for offset, horizontal, vertical in PLACES:
        label = axes.annotate(
            f"{point.nodes}",
            (point.work.intensity, point.achieved / GIGA),
            xytext=offset,
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            fontsize=8,
            color=colour,
        )
        box = label.get_window_extent()
        if not any(box.overlaps(other) for other in taken):
            taken.append(box)
            return
        label.remove()


def _boxes(corners: Sequence[tuple[float, float]], marker: str) -> list[Bbox]:
    """Small boxes, in pixels, along a line and around its markers."""
    size = 1 if marker == "None" else 6
    found = [Bbox.from_bounds(x - size, y - size, 2 * size, 2 * size) for x, y in corners]
    for (x, y), (to_x, to_y) in pairwise(corners):
        steps = max(1, int(max(abs(to_x - x), abs(to_y - y)) // 4))
        found += [
            Bbox.from_bounds(x + (to_x - x) * i / steps, y + (to_y - y) * i / steps, 1, 1)
            for i in range(steps)
        ]
    return found
