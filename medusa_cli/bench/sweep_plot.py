"""Draws the sweeps: with matplotlib to a file, with characters for a terminal."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medusa_cli.bench.sweep_nodes import NodeSweep, SweepPoint, TreeShape
from medusa_cli.bench.sweep_temperature import TemperaturePoint, TemperatureSweep
from medusa_cli.config import Acceptance

_COLORS = {
    "built": "#1f77b4", "dense": "#d95f02", "adaptive": "#1b9e77",
    "lossless": "#1f77b4", "typical": "#d95f02",
}  # fmt: skip
_ART_WIDTH, _ART_HEIGHT = 76, 14


def plot_nodes(sweep: NodeSweep, path: Path) -> None:
    """Step time, tokens per step and speed against the number of nodes, in three panels."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    cost, gain, speed = figure.subplots(1, 3)
    curves: list[tuple[Axes, str, Callable[[SweepPoint], float]]] = [
        (cost, "step time (ms)", lambda p: 1000 * p.step_seconds),
        (gain, "acceleration rate (tokens per step)", lambda p: p.accept_length),
        (speed, "speed (tokens per second)", lambda p: p.tokens_per_second),
    ]
    for axes, label, value in curves:
        for shape in _shapes(sweep):
            points = _drawn(sweep, shape)
            axes.plot(
                [p.nodes for p in points],
                [value(p) for p in points],
                marker="o",
                markersize=4,
                color=_COLORS[shape],
                label=f"{shape} trees",
            )
        counts = sorted({p.nodes for p in sweep.of(TreeShape.BUILT)})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{n:g}" for n in counts])
        axes.minorticks_off()
        axes.set_xlabel("tree nodes, the root included")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    plain = 1 / sweep.plain_seconds
    speed.axhline(plain, color="grey", linestyle="--", label="plain decoding")
    best = sweep.best
    speed.plot(
        best.nodes, best.tokens_per_second, marker="*", markersize=14, color="black",
        linestyle="none", label=f"best: nodes {best.nodes:g}, {sweep.speedup(best):.2f}x plain",
    )  # fmt: skip
    for axes, corner in ((cost, "upper left"), (gain, "lower right"), (speed, "lower left")):
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.legend(loc=corner, fontsize="small")
    figure.suptitle(f"{sweep.model}: cost and gain of tree nodes ({sweep.where})")
    figure.savefig(path, dpi=150)


def plot_temperatures(sweep: TemperatureSweep, path: Path) -> None:
    """Accept length, speedup and divergence against temperature, in three panels."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    length, speed, divergence = figure.subplots(1, 3)
    for rule in Acceptance:
        points = sweep.of(rule)
        temperatures = [p.temperature for p in points]
        look = {"marker": "o", "markersize": 4.0, "color": _COLORS[rule], "label": rule.value}
        length.plot(temperatures, [p.arm.mean_accept_length or 0 for p in points], **look)
        divergence.plot(temperatures, [p.divergence for p in points], **look)
        timed = [(p.temperature, p.arm.speedup) for p in points if p.arm.speedup is not None]
        low = [s.value - (s.value if s.low is None else s.low) for _, s in timed]
        high = [(s.value if s.high is None else s.high) - s.value for _, s in timed]
        speed.errorbar(
            [t for t, _ in timed], [s.value for _, s in timed], yerr=[low, high], capsize=3, **look
        )
    speed.axhline(1, color="grey", linestyle="--", label="plain decoding")
    for axes, label in (
        (length, "mean accept length (tokens per step)"),
        (speed, "speedup over plain, 95% interval"),
        (divergence, "KL to the base model (nats per token)"),
    ):
        axes.set_xlabel("temperature")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    figure.suptitle(f"{sweep.model}, tree {sweep.tree}: acceptance rules ({sweep.where})")
    figure.savefig(path, dpi=150)


def draw_nodes(sweep: NodeSweep) -> str:
    """Tokens per step and speed against the number of nodes, for a terminal."""
    panels: list[tuple[str, Callable[[SweepPoint], float]]] = [
        ("tokens per step", lambda p: p.accept_length),
        ("tokens per second", lambda p: p.tokens_per_second),
    ]
    return "\n".join(
        _art(
            f"{title} against tree nodes",
            "nodes (log scale)",
            {
                shape.value: [(p.nodes, value(p)) for p in _drawn(sweep, shape)]
                for shape in _shapes(sweep)
            },
            log=True,
        )
        for title, value in panels
    )


def draw_temperatures(sweep: TemperatureSweep) -> str:
    """Accept length against temperature, for a terminal."""

    def curve(points: Sequence[TemperaturePoint]) -> list[tuple[float, float]]:
        return [(p.temperature, p.arm.mean_accept_length or 0) for p in points]

    curves = {rule.value: curve(sweep.of(rule)) for rule in Acceptance}
    return _art("mean accept length against temperature", "temperature", curves, log=False)


def _shapes(sweep: NodeSweep) -> list[TreeShape]:
    return [shape for shape in TreeShape if sweep.of(shape)]


def _drawn(sweep: NodeSweep, shape: TreeShape) -> list[SweepPoint]:
    """The points of one shape, with the root alone, which all shapes begin with."""
    root = [p for p in sweep.points if p.nodes == 1]
    return root + [p for p in sweep.of(shape) if p.nodes > 1]


def _art(
    title: str, x_label: str, curves: dict[str, list[tuple[float, float]]], *, log: bool
) -> str:
    import plotext

    figure = plotext.figure
    figure.clear()  # plotext draws on one figure of its own
    figure.plot_size(_ART_WIDTH, _ART_HEIGHT)
    for marker, (label, points) in zip(("●", "x"), curves.items(), strict=False):
        if points:
            signal = figure.signal(*map(list, zip(*points, strict=True)), marker=marker)
            signal.label(label)
            figure.draw(signal)
    figure.title(title)
    figure.label(x_label, "x")
    if log:
        figure.ruler("x").scale("log")
    return str(plotext.uncolorize(str(figure.build()))) + "\n"
