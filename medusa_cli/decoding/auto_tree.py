"""Making an adaptive tree for loaded heads: their calibration, and what steps cost here."""

import time

from medusa_cli.decoding.adaptive import CANDIDATES, AutoTree
from medusa_cli.decoding.calibration import Calibration, uncalibrated
from medusa_cli.decoding.measured import Subject, load_calibration, subject
from medusa_cli.decoding.step_cost import StepCosts, cost_key, load_costs, save_costs
from medusa_cli.decoding.step_timing import measure_costs
from medusa_cli.decoding.tree import Tree
from medusa_cli.errors import CheckpointError, StorageError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.heads import Heads
from medusa_cli.models.progress import Report, Stage, silent


def heads_subject(model: str, heads: Heads) -> Subject | None:
    """What results of heads belong to; None for heads that do not lie in files.

    Args:
        model: name of the base model as the user gave it.
    """
    if heads.info.files is None:
        return None
    return subject(heads.info.name, model, heads.info.files)


def kept_calibration(model: str, heads: Heads, report: Report = silent) -> Calibration | None:
    """The calibration that was measured for heads on a base model, or None.

    Raises:
        CheckpointError: it is damaged.
    """
    of = heads_subject(model, heads)
    found = None if of is None else load_calibration(of, report)
    fits = found is not None and len(found.points[0].temperatures) == heads.info.num_heads
    return found if fits else None


def auto_tree(
    base: BaseModel,
    heads: Heads,
    calibration: Calibration | None,
    static: Tree,
    report: Report = silent,
) -> AutoTree:
    """The adaptive tree; step costs that nobody has measured yet are measured now.

    Args:
        calibration: None takes the heads at their word, until decoding shows better.
        static: the fixed tree in whose place it stands.
    """
    if calibration is None:
        report(
            Stage(
                f"heads {heads.info.name} are not calibrated: `medusa accuracy` measures what "
                "their probabilities are worth"
            )
        )
    return AutoTree(
        calibration or uncalibrated(heads.info.num_heads),
        step_costs(base, heads, report),
        heads.info.num_heads,
        static,
    )


def step_costs(base: BaseModel, heads: Heads, report: Report = silent) -> StepCosts:
    """The kept step costs of heads on this machine; measured and kept where there are none."""
    try:
        kept = load_costs(cost_key(base, heads.info))
    except CheckpointError:
        kept = None  # it is replaced
    return refresh_costs(base, heads, report) if kept is None else kept


def refresh_costs(base: BaseModel, heads: Heads, report: Report = silent) -> StepCosts:
    """Measures step costs and keeps them."""
    started = time.perf_counter()
    report(Stage("measuring what steps cost on this machine, once, for a few seconds"))
    candidates = min(CANDIDATES, heads.info.vocabulary)
    key = cost_key(base, heads.info)
    costs = measure_costs(base, heads, heads.info.num_heads, candidates, key)
    try:
        path = save_costs(costs)
        report(Stage(f"step costs kept in {path} after {time.perf_counter() - started:.1f} s"))
    except StorageError as error:
        report(Stage(f"step costs are not kept: {error}"))
    return costs
