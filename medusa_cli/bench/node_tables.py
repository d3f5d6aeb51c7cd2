"""Tables of the tree sizes that arms chose: as answers go on, and by category."""

from collections.abc import Sequence

from medusa_cli.bench.node_counts import WINDOW
from medusa_cli.bench.summary import ArmSummary
from medusa_cli.bench.tables import MISSING, Table, number
from medusa_cli.decoding.adaptive import AutoTree

WINDOWS = 8  # that are shown


def nodes_tables(arms: Sequence[ArmSummary]) -> list[Table]:
    """Nothing where every arm's tree has one size."""
    changing = [arm for arm in arms if _changes(arm)]
    if not changing:
        return []
    found = [_over_time(changing)]
    if any(row.category for arm in changing for row in arm.categories):
        found.append(_by_category(changing))
    return found


def _changes(arm: ArmSummary) -> bool:
    """Whether the arm's tree changes from step to step: it is chosen, or lookup branches join."""
    tree, nodes = arm.info.tree, arm.nodes
    if tree is None or nodes is None:
        return False
    return isinstance(tree, AutoTree) or nodes.most > tree.nodes


def _over_time(arms: Sequence[ArmSummary]) -> Table:
    windows = min(WINDOWS, max(len(arm.nodes.over_time) for arm in arms if arm.nodes is not None))
    rows = []
    for arm in arms:
        assert arm.nodes is not None, "the tree changes"
        means = [number(mean, 1) for mean in arm.nodes.over_time[:windows]]
        means += [MISSING] * (windows - len(means))
        alone = 1 - arm.nodes.drafted / arm.steps if arm.steps else 0.0
        rows.append(
            (arm.info.name, number(arm.nodes.mean, 1), str(arm.nodes.most), f"{alone:.0%}", *means)
        )
    spans = (f"{i * WINDOW + 1}-{(i + 1) * WINDOW}" for i in range(windows))
    columns = ("arm", "mean", "most", "root alone", *spans)
    note = f"the root counts; mean of each {WINDOW} steps of an answer; root alone: plain steps"
    return Table("Tree nodes of a step, as answers go on", columns, tuple(rows), (note,))


def _by_category(arms: Sequence[ArmSummary]) -> Table:
    categories = dict.fromkeys(row.category for arm in arms for row in arm.categories)
    rows = []
    for category in categories:
        found = [next((r for r in arm.categories if r.category == category), None) for arm in arms]
        means = [None if row is None else row.mean_nodes for row in found]
        rows.append((category or MISSING, *(number(mean, 1) for mean in means)))
    columns = ("category", *(arm.info.name for arm in arms))
    return Table("Mean tree nodes of a step, by category", columns, tuple(rows))
