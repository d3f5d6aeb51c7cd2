"""A tree as a picture: depth from left to right, a row for each leaf."""

from pathlib import Path

from matplotlib.figure import Figure

from medusa_cli.decoding.tree import Choice, Tree
from medusa_cli.errors import StorageError

LEAF_INCHES = 0.21
DEPTH_INCHES = 1.35
MARGIN_INCHES = 1.3  # title and axis
MOST_INCHES = 320.0  # a taller picture is more than a raster image can hold
DEPTH_COLOURS = ("#444444", "#1b7f4b", "#1f6fb2", "#8e44ad", "#b7791f", "#b03a2e")


def tree_figure(tree: Tree) -> Figure:
    """Draws the tree; each node is labelled with its rank among its head's candidates."""
    rows = node_rows(tree)
    leaves = 1 + int(max(rows.values()))
    height = min(leaves * LEAF_INCHES, MOST_INCHES)
    width = max((tree.depth + 1) * DEPTH_INCHES, 4.0)
    scale = height / (leaves * LEAF_INCHES)
    figure = Figure(figsize=(width, height + MARGIN_INCHES), layout="constrained")
    axes = figure.add_subplot()
    for choice, row in rows.items():
        if choice:
            parent = choice[:-1]
            ends = ([len(parent), len(choice)], [rows[parent], row])
            axes.plot(*ends, color="#b5b5b5", linewidth=0.8 * scale, zorder=1)
    for choice, row in rows.items():
        label = str(choice[-1]) if choice else "root"
        axes.text(
            len(choice), row, label,
            ha="center", va="center", fontsize=8 * scale, color="white", zorder=2,
            bbox={
                "boxstyle": "round,pad=0.25",
                "facecolor": DEPTH_COLOURS[len(choice) % len(DEPTH_COLOURS)],
                "edgecolor": "white",
                "linewidth": 0.6 * scale,
            },
        )  # fmt: skip
    title = f"{tree.name}: {tree.nodes} nodes, {tree.depth} deep"
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.set_xlabel("depth, also the head's number; labels: rank, 0 the head's best", fontsize=8)
    axes.set_xticks(range(tree.depth + 1))
    axes.tick_params(labelsize=8)
    axes.set_yticks([])
    axes.set_xlim(-0.4, tree.depth + 0.4)
    axes.set_ylim(leaves - 0.4, -0.6)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    return figure


def node_rows(tree: Tree) -> dict[Choice, float]:
    """Where each node stands: leaves at 0, 1, 2, ... in order, others amid their children."""
    children: dict[Choice, list[Choice]] = {(): [], **{choice: [] for choice in tree.choices}}
    for choice in tree.choices:
        children[choice[:-1]].append(choice)
    rows: dict[Choice, float] = {}
    depth_first = sorted(children)
    leaves = (choice for choice in depth_first if not children[choice])
    rows |= {choice: float(row) for row, choice in enumerate(leaves)}
    for choice in reversed(depth_first):
        below = children[choice]
        if below:
            rows[choice] = (rows[below[0]] + rows[below[-1]]) / 2
    return rows


def save_plot(tree: Tree, path: Path) -> None:
    """Writes the picture; the kind of file follows the name's end.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        tree_figure(tree).savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from None
